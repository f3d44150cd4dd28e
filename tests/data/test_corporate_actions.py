"""Dividends and splits: an owner's return, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from tailguard.data.sources import load_bars, read_source, with_adjusted
from tailguard.errors import BarsError, BarsWarning
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)
DAYS = pd.bdate_range("2021-01-04", periods=40)


def shares() -> pd.DataFrame:
    """Unadjusted bars: 2 of dividend on day 20, when the price opens 2 lower, and a split of 4:1 on day 30."""
    close = 100 * np.exp(0.01 * np.sin(np.arange(40)))
    close[20:] -= 2
    close[30:] /= 4
    opened = np.concatenate([[100.0], close[:-1]])
    opened[20] -= 2
    opened[30] /= 4
    table = {"open": opened, "high": np.maximum(opened, close), "low": np.minimum(opened, close), "close": close}
    volume = np.where(np.arange(40) < 30, 1e6, 4e6) + np.arange(40)
    frame = pd.DataFrame({**table, "volume": volume}, index=DAYS.rename("Date"))
    dividend, split = np.zeros(40), np.zeros(40)
    dividend[20], split[30] = 2.0, 4.0
    return frame.assign(Dividends=dividend, **{"Stock Splits": split})


def owner(frame: pd.DataFrame) -> float:
    """Wealth of one share bought at the second open: the dividend buys shares at its day's open, a split makes four."""
    opened, units = frame["open"].to_numpy(), 1.0
    for day in range(2, 40):
        units *= 4.0 if day == 30 else 1.0
        units += units * 2.0 / opened[day] if day == 20 else 0.0
    return units * float(frame["close"].iloc[-1]) / opened[1]


def test_an_owner_earns_dividends_and_keeps_his_wealth_in_a_split() -> None:
    frame = shares()
    bars = load_bars(frame, adjust="all")
    assert backtest(BuyAndHold(), bars, FREE).equity[-1] == pytest.approx(owner(frame), rel=1e-12)
    # The return over the day of the dividend: the open and the dividend over the close before.
    day = bars.frame.row(20, named=True)
    before = bars.frame["close"][19]
    assert day["open"] / before == pytest.approx((frame["open"].iloc[20] + 2) / frame["close"].iloc[19], rel=1e-12)
    # The last prices are those that were paid; the volume before the split counts new shares.
    assert bars.frame["close"][-1] == frame["close"].iloc[-1]
    assert bars.frame["volume"].to_list()[28:31] == pytest.approx([4 * (1e6 + 28), 4 * (1e6 + 29), 4e6 + 30])


def test_what_is_adjusted_is_chosen() -> None:
    frame = shares()
    split_only = load_bars(frame, adjust="splits").frame["close"]
    assert split_only[19] == pytest.approx(frame["close"].iloc[19] / 4, rel=1e-12)
    with pytest.warns(BarsWarning, match="probably a split of 4:1"):
        plain = load_bars(frame)
    assert plain.frame["close"][19] == frame["close"].iloc[19]


def test_events_may_come_as_a_table_of_their_own(tmp_path: Path) -> None:
    frame = shares().drop(columns=["Dividends", "Stock Splits"])
    dates = [DAYS[20].date(), DAYS[30].date()]
    events = pl.DataFrame({"ex_date": dates, "dividend": [2.0, None], "split": [None, 4.0]})
    path = tmp_path / "events.csv"
    events.write_csv(path)
    for given in (events, path):
        bars = load_bars(frame, adjust="all", events=given)
        assert backtest(BuyAndHold(), bars, FREE).equity[-1] == pytest.approx(owner(frame), rel=1e-12)
    other = events.with_columns(symbol=pl.lit("MSFT"))
    two = pd.concat([frame.assign(symbol="AAPL"), frame.assign(symbol="MSFT")])
    with pytest.warns(BarsWarning):
        bars = load_bars(two, adjust="all", events=other)
    assert bars.select("AAPL").frame["close"][0] == frame["close"].iloc[0]
    assert bars.select("MSFT").frame["close"][0] < frame["close"].iloc[0] / 4
    # An event on a day without trading belongs to the next bar.
    saturday = events.with_columns(ex_date=pl.Series([(DAYS[20] - pd.Timedelta(days=2)).date(), DAYS[30].date()]))
    assert DAYS[20].day_name() == "Monday"
    assert load_bars(frame, adjust="all", events=saturday).frame.equals(bars_of(frame, events))


def bars_of(frame: pd.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    return load_bars(frame, adjust="all", events=events).frame


def test_prices_that_are_adjusted_already_are_refused() -> None:
    frame = shares()
    done = load_bars(frame, adjust="splits").frame
    # As Yahoo gives them: dividends before the split are per new share, too.
    again = done.drop("segment", "symbol").with_columns(
        pl.col("Dividends") / 4, split=pl.Series(frame["Stock Splits"].to_numpy())
    )
    with pytest.raises(BarsError, match=r"a split of 4:1 that is not in the prices .* Use adjust='dividends'"):
        load_bars(again.drop("Stock Splits"), adjust="all")


@pytest.mark.parametrize(
    ("adjust", "events", "message"),
    [
        ("all", None, "needs columns named dividend and split, or a table of events"),
        ("none", pl.DataFrame({"date": ["2021-01-04"], "split": [2.0]}), "events are given and adjust='none'"),
        ("all", pl.DataFrame({"day": ["2021-01-04"], "split": [2.0]}), "a table of events has a column date"),
        ("all", pl.DataFrame({"date": ["soon"], "split": [2.0]}), "'soon' in column 'date' is not a date"),
    ],
)
def test_what_cannot_be_adjusted_is_named(adjust: str, events: pl.DataFrame | None, message: str) -> None:
    frame = shares().drop(columns=["Dividends", "Stock Splits"])
    with pytest.raises(BarsError, match=message):
        load_bars(frame, adjust=adjust, events=events)  # type: ignore[arg-type]


def payer(seed: int = 0, years: int = 5) -> pd.DataFrame:
    """Unadjusted daily bars that move by 0.5 % overnight and pay 0.8 % a quarter, by which they open lower."""
    generator = np.random.default_rng(seed)
    count = 252 * years
    close, opened, dividend = np.empty(count), np.empty(count), np.zeros(count)
    dividend[50::63] = 1.0
    last = 100.0
    for day in range(count):
        opened[day] = last * math.exp(generator.normal(0, 0.005)) - (dividend[day] if day else 0.0)
        dividend[day] *= last / 125  # known at the close before
        opened[day] += 0.0 if dividend[day] == 0 else 1.0 - dividend[day]
        last = close[day] = opened[day] * math.exp(generator.normal(0.0003, 0.008))
    table = {"Open": opened, "High": np.maximum(opened, close), "Low": np.minimum(opened, close), "Close": close}
    days = pd.bdate_range("2015-01-05", periods=count, name="Date")
    frame = pd.DataFrame({**table, "Volume": generator.integers(1_000_000, 2_000_000, count)}, index=days)
    return frame.assign(Dividends=dividend, **{"Stock Splits": 0.0})


def as_yahoo_adjusts(frame: pd.DataFrame) -> pd.DataFrame:
    """The table that `yfinance` gives unless auto_adjust=False: prices without the dividends, which are still there."""
    prices = load_bars(frame, adjust="dividends").frame
    columns = {name: prices[name.lower()].to_numpy() for name in ("Open", "High", "Low", "Close")}
    return frame.assign(**columns)


@pytest.mark.parametrize("seed", range(5))
def test_dividends_that_the_prices_have_already_are_not_counted_twice(seed: int) -> None:
    frame = payer(seed)
    done = as_yahoo_adjusts(frame)
    with pytest.raises(BarsError, match=r"adjusted for the dividends already.*Use adjust='splits', or 'none'"):
        load_bars(done, adjust="all")
    with pytest.raises(BarsError, match=r"adjusted for the dividends already.*Use adjust='none'"):
        load_bars(done, adjust="dividends")
    paid = frame[frame["Dividends"] > 0]
    again = pl.DataFrame({"date": list(paid.index.date), "dividend": paid["Dividends"].to_numpy()})
    with pytest.raises(BarsError, match="adjusted for the dividends already"):
        load_bars(done.drop(columns=["Dividends", "Stock Splits"]), adjust="all", events=again)
    assert load_bars(done).frame["close"].to_list() == done["Close"].to_list()


def test_few_dividends_in_noise_are_doubtful_and_a_column_of_adjusted_closes_decides() -> None:
    frame = payer(years=1)
    small = frame.assign(Dividends=frame["Dividends"] / 20)
    with pytest.warns(BarsWarning, match="do not show whether they are adjusted for the dividends"):
        load_bars(small, adjust="all")
    load_bars(small.assign(**{"Adj Close": 0.99 * small["Close"]}), adjust="all")
    with pytest.raises(BarsError, match="adjusted for the dividends already"):
        load_bars(small.assign(**{"Adj Close": small["Close"]}), adjust="all")


def test_a_split_of_prices_that_have_splits_and_dividends_sends_to_neither() -> None:
    done = as_yahoo_adjusts(payer())
    done.iloc[400, done.columns.get_loc("Stock Splits")] = 4.0
    with pytest.raises(BarsError, match=r"a split of 4:1 that is not in the prices.*Use adjust='none'"):
        load_bars(done, adjust="all")


def notes(frame: pd.DataFrame, adjust: str = "none") -> str:
    return " ".join(with_adjusted(read_source(frame), adjust).notes)  # type: ignore[arg-type]


def test_dividends_that_are_not_in_the_returns_are_noted() -> None:
    frame = payer()
    assert "20 dividends in Dividends are not in the returns: data.adjust=dividends (or all) adds them" in notes(frame)
    assert "data.adjust=all adds them" in notes(frame, "splits")
    assert "adjusted for the 20 dividends in Dividends already" in notes(as_yahoo_adjusts(frame))
    assert notes(frame, "all") == notes(frame.assign(Dividends=0.0)) == ""
    bare = frame.drop(columns=["Dividends", "Stock Splits"])
    assert "Adj Close is not used" in notes(bare.assign(**{"Adj Close": 0.9 * bare["Close"]}))
    assert notes(bare.assign(**{"Adj Close": bare["Close"]})) == ""
