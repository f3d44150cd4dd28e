"""What was traded, bar by bar and day by day: of a session's journal and of a backtest, by the same formulas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate.backtest import BacktestResult
from tailguard.live.session_state import DAY_MS

Float = NDArray[np.float64]
IN_PRICE = ("spread", "impact")
"""Costs of a backtest that a fill pays in its price: what a session sees as slippage."""
ACCOUNT = ("return", "turnover", "exposure", "slippage")
"""Statistics of a day, besides the features."""


@dataclass(frozen=True)
class TradedBars:
    """Bars over which a decision was held; shares are of the equity before the bar."""

    time: NDArray[np.int64]
    """Open times, [T]."""
    net: Float
    """Net returns, [T]."""
    turnover: Float
    """What the decision asked to trade: Σ |target − weight at the close before|, [T]."""
    exposure: Float
    """Σ |weight| at the close, [T]."""
    slipped: Float
    """Paid in the prices of fills, [T], in the unit of `filled`."""
    filled: Float
    """Absolute value filled, [T]; nothing in a shadow session."""
    features: Float
    """Scaled features at the close, [T, F]."""
    names: tuple[str, ...]
    frequency_ms: int

    @property
    def complete_days(self) -> NDArray[np.int64]:
        """Starts of the UTC days of which every bar was traded."""
        days, counts = np.unique(self.time // DAY_MS * DAY_MS, return_counts=True)
        complete: NDArray[np.int64] = days[counts == max(1, DAY_MS // self.frequency_ms)]
        return complete

    def of_day(self, day: int) -> dict[str, float]:
        """Statistics of a UTC day: `ACCOUNT`, and the mean of each feature. Slippage is NaN without a fill."""
        rows = self.time // DAY_MS * DAY_MS == day
        filled = float(self.filled[rows].sum())
        account = {
            "return": float(np.prod(1 + self.net[rows]) - 1),
            "turnover": float(self.turnover[rows].sum()),
            "exposure": float(self.exposure[rows].mean()),
            "slippage": float(self.slipped[rows].sum()) / filled if filled > 0 else float("nan"),
        }
        means = self.features[rows].mean(0)
        return account | {f"feature:{name}": float(mean) for name, mean in zip(self.names, means, strict=True)}

    def by_day(self) -> dict[str, Float]:
        """Each statistic over the complete days, [D]."""
        rows = [self.of_day(int(day)) for day in self.complete_days]
        names = [*ACCOUNT, *(f"feature:{name}" for name in self.names)]
        return {name: np.array([row[name] for row in rows]) for name in names}

    def windows(self, length: int) -> Float:
        """Returns of the stretches of so many bars, one after the other."""
        count = len(self.net) // length
        growth: Float = np.prod(1 + self.net[: count * length].reshape(count, length), axis=1) - 1
        return growth


def of_backtest(
    result: BacktestResult, rows_of: Mapping[int, int], features: Float, names: tuple[str, ...]
) -> TradedBars:
    """`rows_of`: the row in `features` of each open time."""
    held = np.vstack([np.zeros((1, result.weights.shape[1])), result.weights[:-1]])
    slipped = sum((result.costs[kind] for kind in IN_PRICE if kind in result.costs), np.zeros(len(result.net)))
    return TradedBars(
        result.time,
        result.equity[1:] / result.equity[:-1] - 1,
        np.nansum(np.abs(result.targets - held), axis=1),
        np.abs(result.weights).sum(1),
        slipped,
        result.turnover,
        features[[rows_of[int(time)] for time in result.time]],
        names,
        round(float(np.diff(result.time).min())) if len(result.time) > 1 else DAY_MS,
    )


def of_journal(
    records: Iterable[Mapping[str, Any]],
    rows_of: Mapping[int, int],
    features: Float,
    names: tuple[str, ...],
    frequency_ms: int,
) -> TradedBars:
    """Bars between two decisions of a journal, gaps left out."""
    decisions, slipped, filled = [], defaultdict[int, float](float), defaultdict[int, float](float)
    intents: dict[str, Mapping[str, Any]] = {}
    known: dict[str, float] = defaultdict(float)
    for record in records:
        if record["kind"] == "decision":
            decisions.append(record)
        elif record["kind"] == "intent":
            intents[record["id"]] = record
        elif record["kind"] == "order" and float(record["filled"]):
            intent, size = intents[record["id"]], float(record["filled"])
            # Reports are cumulative: the last one of an order replaces those before it.
            bar, moved = intent["bar"], size * (record["price"] - intent["price"])
            filled[bar] += abs(size) * intent["price"] - known[f"{record['id']} filled"]
            slipped[bar] += moved - known[f"{record['id']} moved"]
            known[f"{record['id']} filled"], known[f"{record['id']} moved"] = abs(size) * intent["price"], moved
    pairs = [
        (before, after)
        for before, after in pairwise(decisions)
        if not before["flat"] and after["bar"] - before["bar"] == frequency_ms
    ]
    weights = np.array(
        [[before["weights"], after["weights"], before["target"]] for before, after in pairs], dtype=float
    )
    held, closed, target = weights.reshape(len(pairs), 3, -1).swapaxes(0, 1)
    times = np.array([after["bar"] for _, after in pairs], dtype=np.int64)
    return TradedBars(
        times,
        np.array([after["equity"] / before["equity"] - 1 for before, after in pairs]),
        np.nansum(np.abs(target - held), axis=1),
        np.abs(closed).sum(1),
        np.array([slipped[before["bar"]] for before, _ in pairs]),
        np.array([filled[before["bar"]] for before, _ in pairs]),
        features[[rows_of[int(time)] for time in times]],
        names,
        frequency_ms,
    )
