"""Check that enough bars are left for training after the split, the features' warm-up and the episode length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import Accounts, Bars
from tailguard.data.features import common_times, longest_warmup
from tailguard.data.findings import Check, Report, Span
from tailguard.data.history import spans_of, uncommon_bars
from tailguard.data.panel import Panel
from tailguard.data.splits import split_bars
from tailguard.data.universe import Rows, carried_forward, describe_lives, survivorship_note
from tailguard.data.windows import Size
from tailguard.errors import ConfigError

FEW = 0.5
"""Share of usable training bars below which a warning is raised."""


@dataclass(frozen=True)
class Usable:
    """Usable bars in one part of the split."""

    bars: int
    """Rows that may be traded."""
    defined: int
    """Those on which every feature is defined."""
    starts: int
    """Those from which a whole episode can run."""
    stretches: int
    """Gap-free stretches; the features warm up in each."""
    longest: int
    """Rows of the longest of them."""


def usable_rows(
    bars: Bars, episode_length: int, features: Sequence[str] | None = None, accounts: Accounts = "portfolio"
) -> Usable:
    """Count the usable rows from the warm-up alone: no feature is computed."""
    panel = bars.panel(accounts)
    if accounts == "portfolio" and bars.universe is not None:
        return _usable_in_ragged(bars, panel, episode_length, features)
    warm = bars.frame.select("time", warm=pl.int_range(pl.len()).over("segment") >= longest_warmup(bars, features))
    if accounts == "portfolio" and len(bars.symbols) > 1:
        warm = warm.filter(pl.col("time").is_in(common_times(bars).implode()))
        warm = warm.group_by("time", maintain_order=True).agg(pl.col("warm").all())
    return _count(panel, warm["warm"].to_numpy(), episode_length)


def _usable_in_ragged(bars: Bars, panel: Panel, episode_length: int, features: Sequence[str] | None) -> Usable:
    """A row is usable while any symbol has warmed up."""
    rows = Rows.of(bars)
    position = bars.frame.select(pl.int_range(pl.len()).over("segment").cast(pl.Float64)).to_series().to_numpy()
    bars_seen = carried_forward(rows.spread(position, rows.counts))
    defined = (rows.listed & (np.nan_to_num(bars_seen) >= longest_warmup(bars, features))).any(axis=1)
    return _count(panel, np.asarray(defined), episode_length)


def _count(panel: Panel, defined: NDArray[np.bool_], episode_length: int) -> Usable:
    starts = sum(
        int(panel.tradeable[low : max(low, high - episode_length)].sum()) for low, high in _runs(panel.segment, defined)
    )
    lengths = np.bincount(panel.segment)
    return Usable(
        bars=int(panel.tradeable.sum()),
        defined=int((panel.tradeable & defined).sum()),
        starts=starts,
        stretches=len(lengths),
        longest=int(lengths.max()),
    )


def _runs(segment: NDArray[np.int32], defined: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First row and end of each stretch of one segment on which every feature is defined."""
    ends = np.flatnonzero((np.diff(segment) != 0) | (np.diff(defined.astype(np.int8)) != 0)) + 1
    for low, high in zip([0, *ends.tolist()], [*ends.tolist(), len(segment)], strict=True):
        if defined[low]:
            yield low, high


@dataclass(frozen=True)
class TrainingNeeds:
    """What the run that will use the bars asks of them; the defaults are those of perpetual futures in one account."""

    validation: Size
    test: Size
    embargo: Size
    episode_length: int
    features: Sequence[str] | None = None
    """None: all that the bars allow."""
    accounts: Accounts = "portfolio"
    funding_rate: float = 0.0
    uses_volume: bool = True
    """Whether orders are limited or priced by the bars' volume."""
    perpetual: bool = True
    """Whether the costs are those of perpetual futures."""


def ready_report(report: Report, bars: Bars, needs: TrainingNeeds) -> Report:
    """`report` with checks for training on these bars."""
    checks = [check_training(bars, needs)]
    if needs.uses_volume:
        checks.append(check_fills([name for name in bars.symbols if not (bars.select(name).frame["volume"] > 0).any()]))
    if len(bars.symbols) > 1 and bars.universe is None:
        checks.append(check_history(spans_of(bars), len(common_times(bars))))
    assumed = None if "funding_rate" in bars.frame.columns else needs.funding_rate
    notes = ready_notes(spans_of(bars), assumed, needs.perpetual)
    if bars.universe is not None:
        notes = (*describe_lives(bars.universe), *notes)
    return replace(report, checks=(*report.checks, *checks), notes=(*report.notes, *notes))


def ready_notes(spans: Sequence[Span], funding_rate: float | None, perpetual: bool) -> tuple[str, ...]:
    """Notes on the assumed funding rate (None: it is in the bars) and on survivorship."""
    notes = (funding_note(funding_rate, perpetual),) if funding_rate else ()
    survivors = survivorship_note({span.symbol: round(span.last.timestamp()) for span in spans if span.last})
    return notes if survivors is None else (*notes, survivors)


def check_training(bars: Bars, needs: TrainingNeeds) -> Check:
    """A whole episode with its features fits into the training part, and the test part can be traded."""
    try:
        split = split_bars(bars, validation=needs.validation, test=needs.test, embargo=needs.embargo, warn=False)
    except ConfigError as error:
        return cannot_be_split(error, len(bars))
    length = needs.episode_length
    train, tested = (usable_rows(part, length, needs.features, needs.accounts) for part in (split.train, split.test))
    return judge_training(train, tested, longest_warmup(bars, needs.features), length)


REMEDY = (
    "Provide more bars or bars with fewer gaps; or train with features that warm up faster and shorter episodes: "
    "--set data.features=[return_1,trend_24] --set env.episode_length=128."
)


def cannot_be_split(error: ConfigError, bars: int) -> Check:
    """The check of training where there are too few bars for three parts."""
    return Check("training", "error", "", "bar", f"cannot be split: {error}", bars, remedy=REMEDY)


def judge_training(train: Usable, tested: Usable, warmup: int, episode_length: int) -> Check:
    """The check of training by the usable rows of the training and the test part."""
    left = f"of {train.bars:,} in the training part can be used"
    why = (
        f"features need {warmup:,} bars of history after every gap ({train.stretches:,} gap-free "
        f"stretch{'' if train.stretches == 1 else 'es'}, the longest of {train.longest:,} bars)"
    )
    if train.starts == 0:
        fault = f"{left}, and no episode of {episode_length:,} bars fits: {why}"
        return Check("training", "error", "", "bar", fault, train.defined, remedy=REMEDY)
    if tested.defined < 2:
        fault = f"of {tested.bars:,} in the test part can be used: {why}"
        return Check("training", "error", "", "bar", fault, tested.defined, remedy=REMEDY)
    if train.defined < FEW * train.bars:
        return Check("training", "warning", "", "bar", f"{left}: {why}", train.defined, remedy=REMEDY)
    return Check("training", "ok", f"{train.defined:,} of {train.bars:,} bars left after warm-up")


def check_fills(empty: Sequence[str]) -> Check:
    """Every symbol has traded: orders are limited to a share of the bar's volume. `empty`: those without volume."""
    if not empty:
        return Check("fills", "ok", "every symbol has volume")
    return Check(
        "fills",
        "error",
        "every symbol has volume",
        "symbol",
        f"without volume in any bar, so no order would ever fill: {', '.join(empty)}",
        len(empty),
        remedy="Use bars with volume, or trade without it: --set market.participation=inf --set market.impact=0.",
    )


def check_history(spans: Sequence[Span], common: int) -> Check:
    """All symbols have the same times, so one account can trade all their bars. `common`: number of common times."""
    lost = uncommon_bars(spans, common)
    if lost is None:
        return Check("history", "ok", "all symbols have the same times")
    return Check("history", "warning", "", "bar", lost.text, lost.bars)


def funding_note(rate: float, perpetual: bool = True) -> str:
    """Note on the assumed funding cost where the bars have no funding rate."""
    yearly = 3 * 365.25 * rate
    text = (
        f"no funding rates in the bars: every position, long or short, is charged {rate:g} of its value every 8 hours, "
        f"{100 * yearly:.1f} % a year (market.funding_rate)"
    )
    return f"{text}. For spot: --set market.preset=crypto_spot" if perpetual else text
