"""Symbols with different histories: one account trades only the times that all of them have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailguard.data.findings import Span, time_label
from tailguard.errors import BarsWarning

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

NAMED = 3
"""Most symbols listed with their loss; the rest are counted."""


@dataclass(frozen=True)
class Uncommon:
    """Bars at times that some symbol does not have."""

    bars: int
    text: str
    """Description of the cause."""


def spans_of(bars: Bars) -> tuple[Span, ...]:
    """First and last bar of each symbol."""
    spans = []
    for (symbol,), frame in bars.frame.group_by("symbol", maintain_order=True):
        spans.append(Span(str(symbol), frame["time"][0], frame["time"][-1], frame.height, 0))
    return tuple(spans)


def uncommon_bars(spans: Sequence[Span], common: int) -> Uncommon | None:
    """Bars outside the `common` times, and the symbol that causes the loss; None if no bar is lost."""
    lost = sum(span.bars - common for span in spans)
    if not lost:
        return None
    starts, ends = (
        [moment for moment in each if moment] for each in zip(*((s.first, s.last) for s in spans), strict=True)
    )
    reasons = []
    for span in spans:
        if span.first and span.first == max(starts) > min(starts):
            reasons.append(f"{span.symbol} begins only at {time_label(span.first)}")
        if span.last and span.last == min(ends) < max(ends):
            reasons.append(f"{span.symbol} ends at {time_label(span.last)}")
    if not reasons:
        shortest = min(spans, key=lambda span: span.bars)
        reasons.append(f"{shortest.symbol} has the most gaps")
    losers = sorted((span for span in spans if span.bars > common), key=lambda span: common - span.bars)
    losses = [f"{span.symbol} loses {span.bars - common:,} of {span.bars:,}" for span in losers[:NAMED]]
    if len(losers) > NAMED:
        losses.append(f"{len(losers) - NAMED:,} more symbols lose some")
    return Uncommon(
        lost,
        f"at times that not all symbols have, which a portfolio does not trade: {'; '.join(reasons)}. {common:,} times "
        f"are common; {', '.join(losses)}",
    )


def warn_of_uncommon_bars(source: str, spans: Sequence[Span], common: int, stacklevel: int = 3) -> None:
    """A `BarsWarning` where symbols have different histories."""
    lost = uncommon_bars(spans, common)
    if lost is not None:
        warnings.warn(
            f"{source}: {lost.bars:,} bars {lost.text}. Leave the short symbol out (data.symbols, or bars.select) to "
            "keep them",
            BarsWarning,
            stacklevel=stacklevel,
        )
