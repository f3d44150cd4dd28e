"""Overlap with bars that an agent has seen in training or validation: results on them are no evidence of skill."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tailguard.config import RunConfig
from tailguard.envs.prepared_market import PreparedMarket
from tailguard.errors import TailguardError
from tailguard.evaluate.formatting import percent
from tailguard.experiment.build import load_market, split_market

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

SAME_NAME, OTHER_NAME = 0.5, 0.98
"""Smallest correlation of one-bar returns at which two series are the same market: for symbols with the same name,
possibly on another exchange, and for symbols with different names, possibly renamed."""
FEWEST_RETURNS = 20
"""Fewest common returns for the correlation to count; with fewer, the name decides."""


@dataclass(frozen=True)
class Overlap:
    """Overlap of the backtest's bars with a run's training and validation data."""

    share: float
    """Share of the traded bars that were in training or validation."""
    parts: tuple[str, ...] = ()
    """The parts they were in: training, validation or both."""
    first: datetime | None = None
    """Open time of the first seen bar …"""
    last: datetime | None = None
    """… and of the last."""
    strange: tuple[str, ...] = ()
    """Symbols that the run was not trained on."""
    trained: tuple[str, ...] = ()
    """Symbols that it was trained on."""
    unknown: str = ""
    """Why the overlap is unknown; empty if it is known."""

    @property
    def honest(self) -> bool:
        """Whether the run is known to have seen none of the bars."""
        return self.share == 0 and not self.unknown

    def lines(self) -> list[str]:
        """Warnings to print before the results."""
        lines = []
        if self.unknown:
            lines.append(
                f"WARNING  whether the agent was trained on these bars is unknown: {self.unknown}. "
                "The results are no evidence of skill"
            )
        if self.share > 0:
            lines.append(
                f"WARNING  IN-SAMPLE: {percent(self.share, sign=False)} of these bars, {self.first:%Y-%m-%d %H:%M} to "
                f"{self.last:%Y-%m-%d %H:%M}, were in the run's {' and '.join(self.parts)} data. "
                "The results are no evidence of skill. Use later bars"
            )
        if self.strange:
            lines.append(
                f"WARNING  the agent was trained on {', '.join(self.trained)}, never on {', '.join(self.strange)}"
            )
        return lines


def overlap_of(bars: Bars, training: Bars, validation: Bars) -> Overlap:
    """What is known of `bars`, as far as they are traded, from the training and the validation bars.

    A bar counts as seen if a bar of the same market was seen at the same time. The market is identified by the symbol
    and by its returns, so renamed symbols and other sources are found.
    """
    traded = _traded(bars)
    times = []
    parts = []
    for name, part in (("training", training), ("validation", validation)):
        seen = pl.concat([_seen(traded, _traded(part), symbol) for symbol in bars.symbols])
        if seen.height:
            parts.append(name)
        times.append(seen)
    overlapping = pl.concat(times).unique()
    first, last = (overlapping["time"].min(), overlapping["time"].max()) if overlapping.height else (None, None)
    return Overlap(
        share=overlapping.height / max(traded.height, 1),
        parts=tuple(parts),
        first=first if isinstance(first, datetime) else None,
        last=last if isinstance(last, datetime) else None,
        strange=tuple(symbol for symbol in bars.symbols if symbol not in training.symbols),
        trained=training.symbols,
    )


def overlap_with_run(config: RunConfig, bars: Bars) -> Overlap:
    """Overlap of other bars with the data of the run with these settings."""
    try:
        split = split_market(config, load_market(config).bars)
        training = split.bars("train") if isinstance(split, PreparedMarket) else split.train
        return overlap_of(bars, training, split.validation)
    except (TailguardError, OSError) as error:
        source = config.data.path or "its synthetic market"
        return Overlap(0.0, unknown=f"the run's own bars, {Path(source).name}, cannot be read ({error})")


def _traded(bars: Bars) -> pl.DataFrame:
    """Symbol, time and close of the bars that can be traded."""
    return bars.frame.filter(pl.col("time") >= bars.start).select("symbol", "time", "close")


def _seen(traded: pl.DataFrame, part: pl.DataFrame, symbol: str) -> pl.DataFrame:
    """The bars of this symbol's market in the part, under any name."""
    mine = traded.filter(pl.col("symbol") == symbol)
    overlapping = [mine.clear().select("symbol", "time")]
    for name in part["symbol"].unique(maintain_order=True):
        both = mine.join(part.filter(pl.col("symbol") == name), on="time", how="inner").sort("time")
        if both.height and _same_market(both, symbol == name):
            overlapping.append(both.select("symbol", "time"))
    return pl.concat(overlapping).unique()


def _same_market(both: pl.DataFrame, same_name: bool) -> bool:
    mine, theirs = (np.diff(np.log(both[name].to_numpy())) for name in ("close", "close_right"))
    if len(mine) < FEWEST_RETURNS or not (mine.std() > 0 and theirs.std() > 0):
        return same_name
    return bool(np.corrcoef(mine, theirs)[0, 1] >= (SAME_NAME if same_name else OTHER_NAME))
