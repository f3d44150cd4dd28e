"""A feed that lies: faults on bars, before features are computed from them.

A fault changes what the agent *sees*; orders still fill at the market's true prices. `fee` and `funding` are the
exceptions: they change what the *market* charges. Because a fault acts on bars, all features that read a wrong number
are wrong together, as they would be live.

Faults are written `kind`, `kind:size` or `kind:size@rate` and joined by `+`, left to right: the second fault acts on
the feed that the first one left. The market's faults come first, since a feed can only report what has happened.

    parse_feed("late:2+bad_tick:0.05@0.01")

Everything here is a function of plain arrays. A row depends on earlier rows and on the seed alone, so that no fault
brings the future forward.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.validate import check_count

Float = NDArray[np.float64]
Rows = NDArray[np.int64]
Columns: TypeAlias = Mapping[str, Float]
"""The bars of one symbol by column, [R] each: prices and volume, and whatever else the source has."""

PRICES = ("open", "high", "low", "close")
VOLUMES = ("volume", "quote_volume", "trades", "taker_buy_base", "taker_buy_quote")
FUNDING = "funding_rate"

DRIFT_BARS = 720
"""Bars in which a drifting column swings up, down and back."""
SPIKE_BARS = 24
"""Bars that a spike of the funding rate lasts: three charges of hourly bars."""
MOST_LATE = 3
"""Most bars that a feed may be late: later than that it is a feed of the past."""


@dataclass(frozen=True)
class Fault:
    """One fault of a feed."""

    kind: str
    size: float
    """How bad it is; its unit depends on the kind."""
    rate: float
    """Probability that it begins at a bar; 1 where the kind acts at all bars."""

    def __str__(self) -> str:
        entry = KINDS[self.kind]
        return f"{self.kind}:{self.size:g}" + ("" if entry.rate is None else f"@{self.rate:g}")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its arithmetic, its size and what the size means."""

    apply: Callable[[dict[str, Float], Fault, Draws], dict[str, Float]] | None
    """The bars as the feed shows them; None where only the market's costs change."""
    means: str
    """What happens, with the unit of its size, in a line."""
    size: float
    """Default."""
    low: float
    high: float
    rate: float | None = None
    """Default probability that it begins at a bar; None: it acts at all bars."""
    whole: bool = False
    """Whether the size counts bars."""
    market: bool = False
    """Whether it changes the market and not only what the agent sees of it."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one fault on one symbol, row by row, and the first row of each row's segment."""

    uniform: Float
    """Between 0 and 1, [R, 2]."""
    constant: Float
    """Between 0 and 1, for what is drawn once: a phase for each column, [P]."""
    begin: Rows
    """[R]"""

    def events(self, fault: Fault) -> NDArray[np.bool_]:
        """Rows at which the fault begins; never the first of a segment, before which there is nothing to go by."""
        return (self.uniform[:, 0] < fault.rate) & (np.arange(len(self.begin)) > self.begin)

    def spells(self, fault: Fault, bars: int) -> NDArray[np.bool_]:
        """Rows that are within `bars` bars of an event, the event's own row included."""
        row = np.arange(len(self.begin))
        latest = np.maximum.accumulate(np.where(self.events(fault), row, -bars))
        return (row - latest < bars) & (latest > self.begin)

    def signs(self) -> Float:
        """Up or down with equal probability, [R]."""
        return np.where(self.uniform[:, 1] < 0.5, -1.0, 1.0)


def _bad_tick(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """The last print of a bar is off by the factor 1 ± size; high and low contain it, and the next bar is right."""
    close = np.where(draws.events(fault), bars["close"] * (1 + draws.signs() * fault.size), bars["close"])
    return bars | {
        "close": close,
        "high": np.maximum(bars["high"], close),
        "low": np.minimum(bars["low"], close),
    }


def _late(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """Every bar arrives late; a segment begins with its first bar until the second one arrives."""
    source = np.maximum(np.arange(len(draws.begin)) - int(fault.size), draws.begin)
    return {name: values[source] for name, values in bars.items()}


def _missing(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """Bars never arrive. The grid of bars is kept as data vendors keep it: flat at the last close, nothing traded."""
    gone = draws.spells(fault, int(fault.size))
    held = _hold(bars, gone)
    flat = {name: np.where(gone, held["close"], bars[name]) for name in PRICES}
    empty = {name: np.where(gone, 0.0, bars[name]) for name in VOLUMES if name in bars}
    return held | flat | empty


def _frozen(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """The feed repeats its last bar, prices and volume alike; the bars meanwhile are lost."""
    return _hold(bars, draws.spells(fault, int(fault.size)))


def _volume(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """Fake trades at the close multiply the volume; in a bar they are all bought or all sold by takers."""
    spoofed = draws.events(fault)
    fake = np.where(spoofed, (fault.size - 1) * bars["volume"], 0.0)
    bought = np.where(draws.signs() > 0, fake, 0.0)
    added = {
        "volume": fake,
        "quote_volume": fake * bars["close"],
        "taker_buy_base": bought,
        "taker_buy_quote": bought * bars["close"],
    }
    seen = bars | {name: bars[name] + more for name, more in added.items() if name in bars}
    if "trades" in bars:
        seen["trades"] = np.where(spoofed, fault.size * bars["trades"], bars["trades"])
    return seen


def _drift(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """Slow scales: prices, and every other column by itself, swing by the factor exp(± size) within 720 bars.

    Prices share one scale, so that a bar's high stays its highest price. Takers cannot buy more than was traded.
    """
    angle = 2 * np.pi * np.arange(len(draws.begin)) / DRIFT_BARS
    groups = {"price": PRICES} | {name: (name,) for name in bars if name not in PRICES}
    seen = dict(bars)
    for group, names in groups.items():
        # A phase by name: another column in the source must not move the phases of the others.
        phase = 2 * np.pi * draws.constant[zlib.crc32(group.encode()) % len(draws.constant)]
        scale = np.exp(fault.size * np.sin(angle + phase))
        seen |= {name: bars[name] * scale for name in names}
    for part, whole in (("taker_buy_base", "volume"), ("taker_buy_quote", "quote_volume")):
        if part in seen and whole in seen:
            seen[part] = np.minimum(seen[part], seen[whole])
    return seen


def _funding(bars: dict[str, Float], fault: Fault, draws: Draws) -> dict[str, Float]:
    """The funding rate spikes away from zero for 24 bars."""
    if FUNDING not in bars:
        return bars
    spikes = np.where(draws.spells(fault, SPIKE_BARS), np.copysign(fault.size, bars[FUNDING]), 0.0)
    return bars | {FUNDING: bars[FUNDING] + spikes}


KINDS: dict[str, Kind] = {
    "bad_tick": Kind(_bad_tick, "a bar's last price is off by this fraction, up or down", 0.05, 1e-6, 0.9, rate=0.01),
    "late": Kind(_late, "every bar arrives this many bars late", 1, 1, MOST_LATE, whole=True),
    "missing": Kind(_missing, "this many bars in a row never arrive", 1, 1, 1_000, rate=0.02, whole=True),
    "frozen": Kind(_frozen, "the feed repeats its last bar for this many bars", 12, 1, 1_000, rate=0.01, whole=True),
    "volume": Kind(_volume, "fake trades make a bar's volume this many times as large", 10, 1, 1e6, rate=0.05),
    "drift": Kind(_drift, "columns swing by the factor exp(± this) within 720 bars", 0.05, 1e-6, 5),
    "fee": Kind(None, "the fee is this many times as high", 3, 0, 100, market=True),
    "funding": Kind(
        _funding, "this rate per eight hours is added for 24 bars", 0.003, 1e-6, 0.1, rate=0.005, market=True
    ),
}
"""Every kind of fault by its name."""


@dataclass(frozen=True)
class Feed:
    """Faults of a feed in the order in which they act, and the seed of their random numbers."""

    faults: tuple[Fault, ...]
    seed: int = 0

    def __str__(self) -> str:
        return "+".join(map(str, self.faults))

    @property
    def fee_factor(self) -> float:
        """Factor on the market's fee."""
        return float(np.prod([fault.size for fault in self.faults if fault.kind == "fee"]))

    @property
    def is_random(self) -> bool:
        """Whether another seed gives other bars."""
        return any(KINDS[fault.kind].rate is not None or fault.kind == "drift" for fault in self.faults)

    @property
    def lies(self) -> bool:
        """Whether the agent sees other bars than the market trades."""
        return any(not KINDS[fault.kind].market for fault in self.faults)

    def true_bars(self, bars: Columns, segment: NDArray[np.integer], symbol: str) -> dict[str, Float]:
        """What happens in the market: the bars of one symbol under the market's faults, by column, [R] each."""
        return self._under(bars, segment, symbol, market=True)

    def seen_bars(self, bars: Columns, segment: NDArray[np.integer], symbol: str) -> dict[str, Float]:
        """What the agent sees of it, by column, [R] each.

        `bars`: the true bars of one symbol in the order of time. `segment`: number of each row's gap-free stretch, [R].
        """
        return self._under(self.true_bars(bars, segment, symbol), segment, symbol, market=False)

    def funding_spikes(self, segment: NDArray[np.integer], symbol: str) -> Float:
        """What is added to an assumed funding rate, which no bar carries, [R]."""
        assumed: Columns = {FUNDING: np.zeros(len(segment))}
        return self._under(assumed, segment, symbol, market=True)[FUNDING]

    def _under(self, bars: Columns, segment: NDArray[np.integer], symbol: str, *, market: bool) -> dict[str, Float]:
        shown = dict(bars)
        counted: dict[str, int] = {}
        for fault in self.faults:
            kind = KINDS[fault.kind]
            counted[fault.kind] = counted.get(fault.kind, 0) + 1
            if kind.market == market and kind.apply is not None:
                shown = kind.apply(shown, fault, self._draws(fault.kind, counted[fault.kind], segment, symbol))
        return shown

    def _draws(self, kind: str, occurrence: int, segment: NDArray[np.integer], symbol: str) -> Draws:
        """Random numbers by kind and symbol: a fault hits the same bars whatever it is combined with."""
        key = zlib.crc32(f"{kind} {occurrence} {symbol}".encode())
        generator = np.random.default_rng([self.seed, key])
        constant = generator.random(64)
        # Drawn row by row: later rows do not change earlier ones.
        uniform = generator.random((len(segment), 2))
        row = np.arange(len(segment))
        first = np.concatenate([[True], np.diff(segment) != 0]) if len(segment) else np.zeros(0, bool)
        return Draws(uniform, constant, np.maximum.accumulate(np.where(first, row, 0)))


def parse_feed(text: str, seed: int = 0) -> Feed:
    """The feed of a text such as `late:2+bad_tick:0.05@0.01`; what is left out has the kind's default."""
    check_count("feed: seed", seed, low=0)
    return Feed(tuple(_parse_fault(part.strip(), text) for part in text.split("+")), seed)


def describe_kinds() -> list[str]:
    """A line on each kind with its default, for messages and help."""
    return [f"{Fault(name, kind.size, kind.rate or 1.0)}  {kind.means}" for name, kind in KINDS.items()]


def _parse_fault(part: str, text: str) -> Fault:
    name, _, rest = part.partition(":")
    if name not in KINDS:
        near = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"feed: {text!r}: no fault {name!r}. {hint}There are {', '.join(KINDS)}, as in late:2 or "
            "late:2+bad_tick:0.05@0.01 (size, and probability that it begins at a bar)"
        )
    kind = KINDS[name]
    if ":" in part and not rest:
        raise ConfigError(f"feed: {text!r}: {name}: gives no size. {_usage(name)}")
    given, at, often = rest.partition("@")
    if at and kind.rate is None:
        raise ConfigError(f"feed: {text!r}: {name} acts at all bars, so it has no rate {often!r}. {_usage(name)}")
    size = _number(given, kind.low, kind.high, name, text) if given else kind.size
    if kind.whole and size != int(size):
        raise ConfigError(f"feed: {text!r}: {size:g} must be a whole number of bars. {_usage(name)}")
    rate = kind.rate or 1.0
    if at:
        rate = _number(often, 0.0, 1.0, name, text)
    return Fault(name, size, rate)


def _number(given: str, low: float, high: float, name: str, text: str) -> float:
    try:
        value = float(given)
    except ValueError:
        raise ConfigError(f"feed: {text!r}: {given!r} is not a number. {_usage(name)}") from None
    if not low <= value <= high:
        raise ConfigError(f"feed: {text!r}: {value:g} is out of range ({low:g} to {high:g}). {_usage(name)}")
    return value


def _usage(name: str) -> str:
    kind = KINDS[name]
    rate = "" if kind.rate is None else f"@{kind.rate:g}"
    return f"Write {name}:{kind.size:g}{rate}: {kind.means}"


def _hold(bars: Mapping[str, Float], held: NDArray[np.bool_]) -> dict[str, Float]:
    """Every column with the last row that is not held in place of those that are."""
    source = np.maximum.accumulate(np.where(held, 0, np.arange(len(held))))
    return {name: values[source] for name, values in bars.items()}


def price_error_bp(seen: Float, true: Float) -> float:
    """Mean distance of the prices that were seen from the true ones in basis points."""
    return 1e4 * float(np.mean(np.abs(seen / true - 1))) if len(true) else 0.0
