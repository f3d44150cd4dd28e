"""What the paper exchange says, as JSON: names, numbers and fields as Binance's USD-M futures have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

from tailguard.data.frequency import frequency_label
from tailguard.errors import ConfigError
from tailguard.live.books import Books, Order
from tailguard.live.venue import Instrument, OrderKind

Json = dict[str, Any]
QUOTES = ("USDT", "USDC", "USD")
KINDS: Mapping[tuple[str, str], OrderKind] = {
    ("MARKET", ""): "market",
    ("LIMIT", "IOC"): "immediate",
    ("LIMIT", "GTC"): "resting",
}
"""Type and time in force of an order, and its kind."""
TYPES = {kind: names for names, kind in KINDS.items()}
FAR = 4_133_404_800_000
"""Delivery date of a perpetual."""


def number(value: float | Decimal) -> str:
    """Every digit, without an exponent."""
    return f"{value if isinstance(value, Decimal) else Decimal(repr(float(value))):f}"


def split_symbol(symbol: str) -> tuple[str, str]:
    """Base and quote: of BTC/USDT:USDT, BTC/USDT or BTCUSDT; a name without a quote is traded in USDT."""
    base, slash, rest = symbol.partition("/")
    if slash:
        return base, rest.partition(":")[0]
    quote = next((each for each in QUOTES if symbol.endswith(each) and symbol != each), "")
    return (symbol.removesuffix(quote), quote) if quote else (symbol, "USDT")


def market_ids(symbols: Sequence[str]) -> dict[str, str]:
    """The exchange's name of each symbol, by ours."""
    ids = {symbol: "".join(split_symbol(symbol)) for symbol in symbols}
    quotes = {split_symbol(symbol)[1] for symbol in symbols}
    if len(set(ids.values())) < len(ids) or len(quotes) > 1:
        raise ConfigError(f"{', '.join(symbols)}: one account needs different symbols with one quote currency")
    odd = [each for each in ids.values() if not (each.isascii() and each.isalnum())]
    if odd:
        raise ConfigError(f"{odd[0]}: a symbol of the paper exchange has letters and digits only; rename the bars")
    return ids


def unified(symbol: str) -> str:
    """The perpetual's name in ccxt."""
    base, quote = split_symbol(symbol)
    return f"{base}/{quote}:{quote}"


def interval_of(frequency_ms: int) -> str:
    """1m, 1h, 4h, 1d: the exchange's name of a bar length."""
    return frequency_label(timedelta(milliseconds=frequency_ms))


def market(symbol: str, market_id: str, rules: Instrument) -> Json:
    """A perpetual, with its filters."""
    base, quote = split_symbol(symbol)
    digits = {
        name: max(0, -int(step.normalize().as_tuple().exponent))
        for name, step in (("pricePrecision", rules.tick), ("quantityPrecision", rules.lot))
    }
    lots = {"minQty": number(rules.min_quantity), "maxQty": "1000000000000", "stepSize": number(rules.lot)}
    return {
        "symbol": market_id,
        "pair": market_id,
        "contractType": "PERPETUAL",
        "deliveryDate": FAR,
        "onboardDate": 0,
        "status": "TRADING",
        "baseAsset": base,
        "quoteAsset": quote,
        "marginAsset": quote,
        **digits,
        "baseAssetPrecision": 8,
        "quotePrecision": 8,
        "underlyingType": "COIN",
        "filters": [
            {"filterType": "PRICE_FILTER", "minPrice": number(rules.tick), "maxPrice": "1000000000000"}
            | {"tickSize": number(rules.tick)},
            {"filterType": "LOT_SIZE", **lots},
            {"filterType": "MARKET_LOT_SIZE", **lots},
            {"filterType": "MIN_NOTIONAL", "notional": number(rules.min_notional)},
        ],
        "orderTypes": ["LIMIT", "MARKET"],
        "timeInForce": ["GTC", "IOC"],
    }


def kline(open_ms: int, frequency_ms: int, values: Mapping[str, float]) -> list[Any]:
    """A bar: open time, open, high, low, close, volume, close time, and six fields that replayed bars do not have."""
    texts = [number(values[name]) for name in ("open", "high", "low", "close", "volume")]
    turnover = number(values["volume"] * values["close"])
    return [open_ms, *texts, open_ms + frequency_ms - 1, turnover, 0, "0", "0", "0"]


def kline_event(row: list[Any], market_id: str, interval: str, now: int, *, closed: bool) -> Json:
    """The same bar as an event of a stream."""
    names = ("t", "o", "h", "l", "c", "v", "T", "q", "n", "V", "Q", "B")
    content = dict(zip(names, row, strict=True)) | {"s": market_id, "i": interval, "x": closed, "f": 0, "L": 0}
    return {"e": "kline", "E": now, "s": market_id, "k": content}


def order(record: Order, market_id: str) -> Json:
    quantity, filled = Decimal(record["quantity"]), Decimal(record["filled"])
    kind, in_force = TYPES[record["kind"]]
    if record["open"]:
        status = "PARTIALLY_FILLED" if filled else "NEW"
    else:
        status = "FILLED" if filled == quantity else "CANCELED" if record["kind"] == "resting" else "EXPIRED"
    executed = number(abs(filled))
    return {
        "orderId": record["number"],
        "symbol": market_id,
        "status": status,
        "clientOrderId": record["id"],
        "price": "0" if kind == "MARKET" else number(Decimal(record["limit"])),
        "avgPrice": number(record["price"]),
        "origQty": number(abs(quantity)),
        "executedQty": executed,
        "cumQty": executed,
        "cumQuote": number(float(abs(filled)) * record["price"]),
        "timeInForce": in_force or "GTC",
        "type": kind,
        "origType": kind,
        "reduceOnly": record["reduce_only"],
        "closePosition": False,
        "side": "BUY" if quantity > 0 else "SELL",
        "positionSide": "BOTH",
        "stopPrice": "0",
        "workingType": "CONTRACT_PRICE",
        "priceProtect": False,
        "time": record["accepted"],
        "updateTime": record["updated"],
    }


def forced_order(entry: tuple[int, str, str, int], market_id: str) -> Json:
    """A liquidation, as an order of the exchange."""
    place, _, size, moment = entry
    quantity = Decimal(size)
    executed = number(abs(quantity))
    return {
        "orderId": 10**9 + place,
        "symbol": market_id,
        "status": "FILLED",
        "clientOrderId": f"autoclose-{moment}-{place}",
        "price": "0",
        "avgPrice": "0",
        "origQty": executed,
        "executedQty": executed,
        "cumQuote": "0",
        "timeInForce": "IOC",
        "type": "LIMIT",
        "reduceOnly": False,
        "side": "BUY" if quantity > 0 else "SELL",
        "positionSide": "BOTH",
        "time": moment,
        "updateTime": moment,
    }


def wallet(books: Books) -> float:
    """The balance without open profits: cash that the entry prices have not touched."""
    return books.cash + sum(float(size) * books.entries.get(name, 0.0) for name, size in books.positions.items())


def position(symbol: str, market_id: str, books: Books, price: float, now: int) -> Json:
    size, entry = books.positions[symbol], books.entries.get(symbol, 0.0)
    return {
        "symbol": market_id,
        "positionSide": "BOTH",
        "positionAmt": number(size),
        "entryPrice": number(entry),
        "breakEvenPrice": number(entry),
        "markPrice": number(price),
        "unRealizedProfit": number(float(size) * (price - entry)),
        "unrealizedProfit": number(float(size) * (price - entry)),
        "liquidationPrice": "0",
        "isolatedMargin": "0",
        "isolatedWallet": "0",
        "notional": number(float(size) * price),
        "marginAsset": split_symbol(symbol)[1],
        "initialMargin": number(abs(float(size)) * price),
        "maintMargin": "0",
        "positionInitialMargin": number(abs(float(size)) * price),
        "openOrderInitialMargin": "0",
        "adl": 0,
        "bidNotional": "0",
        "askNotional": "0",
        "updateTime": now,
    }


def account(quote: str, positions: list[Json], books: Books, equity: float, now: int) -> Json:
    balance, total = number(wallet(books)), number(equity)
    open_profit = number(equity - wallet(books))
    return {
        "totalWalletBalance": balance,
        "totalUnrealizedProfit": open_profit,
        "totalMarginBalance": total,
        "availableBalance": total,
        "assets": [
            {
                "asset": quote,
                "walletBalance": balance,
                "unrealizedProfit": open_profit,
                "marginBalance": total,
                "maintMargin": "0",
                "initialMargin": "0",
                "positionInitialMargin": "0",
                "openOrderInitialMargin": "0",
                "crossWalletBalance": balance,
                "crossUnPnl": open_profit,
                "availableBalance": total,
                "maxWithdrawAmount": total,
                "updateTime": now,
            }
        ],
        "positions": positions,
    }


def order_event(record: Order, market_id: str, now: int) -> Json:
    """What the user's stream says of an order."""
    said = order(record, market_id)
    names = {"s": "symbol", "c": "clientOrderId", "S": "side", "o": "type", "f": "timeInForce", "q": "origQty"}
    names |= {"p": "price", "ap": "avgPrice", "X": "status", "i": "orderId", "z": "executedQty", "T": "updateTime"}
    content = {short: said[name] for short, name in names.items()}
    kind = "TRADE" if Decimal(record["filled"]) else said["status"]
    last = {"x": kind, "l": said["executedQty"], "L": said["avgPrice"], "R": said["reduceOnly"], "ps": "BOTH"}
    more = {"sp": "0", "t": record["number"], "m": False, "n": "0", "N": None, "ot": said["type"], "rp": "0"}
    return {"e": "ORDER_TRADE_UPDATE", "E": now, "T": now, "o": content | last | more}


def account_event(quote: str, positions: list[Json], books: Books, now: int) -> Json:
    """What the user's stream says of balance and positions."""
    balance = number(wallet(books))
    held = [
        {"s": each["symbol"], "pa": each["positionAmt"], "ep": each["entryPrice"], "up": each["unRealizedProfit"]}
        | {"mt": "cross", "iw": "0", "ps": "BOTH"}
        for each in positions
    ]
    content = {"m": "ORDER", "B": [{"a": quote, "wb": balance, "cw": balance, "bc": "0"}], "P": held}
    return {"e": "ACCOUNT_UPDATE", "E": now, "T": now, "a": content}


def book_ticker(market_id: str, price: float, half_spread: float, now: int) -> Json:
    """Bid and offer around a price, so that their mean is the price."""
    spread = price * half_spread
    return {
        "symbol": market_id,
        "bidPrice": number(price - spread),
        "bidQty": "1",
        "askPrice": number(price + spread),
        "askQty": "1",
        "time": now,
    }
