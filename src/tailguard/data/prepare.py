"""Prepare bars for an environment: arrays, features and their scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard.data.panel import Panel
from tailguard.data.scaling import Scaler
from tailguard.data.stored_features import FeaturePrecision, stored
from tailguard.errors import BarsError, ConfigError
from tailguard.memory_limits import format_bytes, free_memory

if TYPE_CHECKING:
    from tailguard.data.bars import Accounts, Bars


@dataclass(frozen=True)
class PreparedBars:
    """Bars with scaled features: all an environment needs, in plain arrays."""

    panel: Panel
    features: NDArray[np.float32] | NDArray[np.uint16]
    """Scaled features known at each bar's close, [R, F]; 16 bits are those of a bfloat16, as `in_precision` rounds."""
    names: tuple[str, ...]
    usable: NDArray[np.bool_]
    """Rows on which every feature is defined, [R]."""
    scaler: Scaler
    """The scaling that was applied; give it to the environment of a later split."""
    available: NDArray[np.bool_] | None = field(default=None, kw_only=True)
    """Assets that may be held, [R, A]: listed, with all features defined. `features` then end with a mask of them.
    None: all assets, on every usable row."""
    seen_close: NDArray[np.float64] | None = field(default=None, kw_only=True)
    """Closes as a feed with faults shows them, [R, A]: what volatility scaling reads; None: those of the panel."""
    rescaled_from: int | None = field(default=None, kw_only=True)
    """First row of copies of the bars with another volatility, which only training uses; None: there are none."""

    @property
    def seen_panel(self) -> Panel:
        """The bars that decisions are made from; fills are at the prices of `panel`."""
        return self.panel if self.seen_close is None else replace(self.panel, close=self.seen_close)

    @property
    def own_rows(self) -> int:
        """Number of rows that are the bars themselves."""
        return self.panel.rows if self.rescaled_from is None else self.rescaled_from


def prepare(
    bars: Bars,
    features: Sequence[str] | None = None,
    scaler: Scaler | None = None,
    accounts: Accounts = "portfolio",
    *,
    shared_scaling: bool = False,
) -> PreparedBars:
    """Compute features and scale them.

    Without a `scaler`, one is fitted on the tradeable rows of these bars: correct for training bars. For validation,
    test and live bars pass the scaler of the training bars; it also determines the features.

    `shared_scaling`: scale each feature alike for all symbols, so that the scaler fits symbols that it never saw.
    """
    # Polars is needed to compute features, not to run on prepared ones.
    from tailguard.data.features import available_features, compute_features, longest_warmup

    if scaler is not None and features is None:
        features = tuple(dict.fromkeys(name.split(":")[0] for name in scaler.names))
    _check_memory(len(bars), len(available_features(bars) if features is None else features), bars.source)
    table = compute_features(bars, features, accounts)
    panel = bars.panel(accounts)
    if scaler is None:
        if not (table.valid & panel.tradeable).any():
            raise _nothing_defined(bars.source, panel, longest_warmup(bars, features))
        scaler = Scaler.fit(table, panel.tradeable, shared=shared_scaling)
    features_, names, available = scaler.transform(table), table.names, table.available
    if available is not None or scaler.market_wide is not None:
        # The agent sees which assets are there; what is not known of the others is 0, as on average.
        present = np.ones((panel.rows, panel.assets), bool) if available is None else available
        known = features_ if available is None else np.nan_to_num(features_)
        features_ = np.hstack([known, present.astype(np.float32)])
        listed = panel.symbols if len(panel.symbols) == panel.assets else ("each",)  # one account for each symbol
        names = (*names, *(f"listed:{symbol}" for symbol in listed))
    return PreparedBars(panel, features_, names, table.valid, scaler, available=available)


def in_precision(prepared: PreparedBars, precision: FeaturePrecision) -> PreparedBars:
    """The bars with features in this precision; see `tailguard.data.stored_features.stored`."""
    if precision == "float32":
        return prepared
    return replace(prepared, features=stored(prepared.features.astype(np.float32, copy=False), precision))


def with_rescaled_copies(
    prepared: PreparedBars, bars: Bars, factors: Sequence[float], accounts: Accounts = "portfolio"
) -> PreparedBars:
    """The bars followed by a copy for each factor, whose volatility is multiplied by it, in segments of their own.

    The copies' features are computed from their own prices and scaled as those of the bars. Their times are those of
    the bars, so that what is left out of training by time is left out of every copy.
    """
    from tailguard.data.rescaled import rescale_returns

    panel, usable = prepared.panel, [prepared.usable]
    features: list[NDArray[Any]] = [prepared.features]
    available = [prepared.available]
    for factor in factors:
        copy = prepare(rescale_returns(bars, factor), scaler=prepared.scaler, accounts=accounts)
        first_segment = int(panel.segment[-1]) + 1
        panel = panel.followed_by(replace(copy.panel, segment=copy.panel.segment + np.int32(first_segment)))
        features.append(copy.features)
        usable.append(copy.usable)
        available.append(copy.available)
    return replace(
        prepared,
        panel=panel,
        features=np.concatenate(features),
        usable=np.concatenate(usable),
        available=join_available(available),
        rescaled_from=prepared.own_rows if factors else None,
    )


def join_available(copies: Sequence[NDArray[np.bool_] | None]) -> NDArray[np.bool_] | None:
    """The rows of several copies of the same bars one after the other; None where all assets are always there."""
    known = [copy for copy in copies if copy is not None]
    return np.concatenate(known) if known else None


def _nothing_defined(source: str, panel: Panel, warmup: int) -> ConfigError:
    """Error for bars without a usable row: features warm up again after every gap."""
    lengths = np.bincount(panel.segment)
    return ConfigError(
        f"{source}: none of the {int(panel.tradeable.sum()):,} training bars has all features: they need {warmup:,} "
        f"bars of history after every gap, and the longest stretch without a gap has {int(lengths.max()):,} of "
        f"{panel.rows:,} bars. Provide more bars or bars with fewer gaps, or choose features that warm up faster "
        "(data.features); tailguard data check FILE shows what is left"
    )


def _check_memory(rows: int, features: int, source: str) -> None:
    """Refuse features that cannot fit: each is held as computed, as an array and scaled, 8 + 8 + 4 bytes per bar."""
    needed, free = 20.0 * rows * features, free_memory()
    if needed > free:
        raise BarsError(
            f"{source}: {features} features of {rows:,} bars take at least {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are free. Prepare the bars once and train from disk: tailguard data prepare"
        )
