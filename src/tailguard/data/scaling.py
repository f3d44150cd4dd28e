"""Scaling of features: statistics of the training rows, stored with the run and applied everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tailguard.data.panel import FeatureTable
from tailguard.errors import ConfigError

Float = NDArray[np.float64]

NORMAL_IQR = 1.3489795003921634
"""Interquartile range of a standard normal: divides it out, so that a normal feature gets unit deviation."""
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, eq=False)
class Scaler:
    """`(value − center) / scale`, clipped, for `F` features.

    Center and scale are the median and the interquartile range of the training rows: returns and volumes have tails so
    heavy that a few crash bars would dominate a standard deviation and shrink every ordinary value. Where more
    than half of the rows share one value (a funding rate at its default) the range is 0, and the standard deviation
    is used instead. A feature that is constant in training is always 0: its scale is unknown.
    """

    names: tuple[str, ...]
    definitions: tuple[str, ...]
    """Fingerprints of the features the statistics belong to (`FeatureTable.definitions`)."""
    center: Float
    scale: Float
    """0 where the feature was constant, [F]."""
    clip: float = 10.0
    """Bound of the scaled values, on both sides."""
    market_wide: int | None = None
    """None: one entry for each column. A number: each asset's features are scaled alike, by one entry for each feature,
    whatever the number of assets; this many of the last ones are market-wide."""

    def __post_init__(self) -> None:
        sizes = {len(self.names), len(self.definitions), *self.center.shape, *self.scale.shape}
        if len(sizes) != 1 or self.center.ndim != 1 or self.scale.ndim != 1:
            raise ConfigError(
                f"scaler: {len(self.names)} names, {len(self.definitions)} definitions, centers {self.center.shape} "
                f"and scales {self.scale.shape} must be of one length"
            )
        if not (np.isfinite(self.center).all() and np.isfinite(self.scale).all() and (self.scale >= 0).all()):
            raise ConfigError("scaler: centers and scales must be finite, scales 0 or more")
        if not self.clip > 0:
            raise ConfigError(f"scaler: clip={self.clip} must be more than 0")
        if self.market_wide is not None and not 0 <= self.market_wide <= len(self.names):
            raise ConfigError(f"scaler: {self.market_wide} of {len(self.names)} features are said to be market-wide")

    @classmethod
    def fit(cls, table: FeatureTable, rows: NDArray[np.bool_], clip: float = 10.0, *, shared: bool = False) -> Self:
        """Statistics of the valid ones among `rows`, a boolean mask of training rows, [R].

        `shared`: one scaling of each feature for all assets, also for those that are not in the table.
        """
        if rows.dtype != np.bool_ or rows.shape != table.valid.shape:
            raise ConfigError(
                f"scaler: rows must be a boolean mask of {len(table.valid):,} rows, got {rows.dtype} {rows.shape}"
            )
        values = table.values[rows & table.valid]
        if len(values) < 2:
            raise too_few_rows(len(values), int(rows.sum()))
        if shared:
            return cls._fit_over_assets(table, values, clip)
        if table.available is not None:
            return cls._fit_where_defined(table, values, clip)
        quartiles = np.quantile(values, QUARTILES, axis=0)
        constant = np.ptp(values, axis=0) == 0
        return cls.of_statistics(table.names, table.definitions, quartiles, values.std(axis=0), constant, clip)

    @classmethod
    def _fit_where_defined(cls, table: FeatureTable, values: Float, clip: float) -> Self:
        """Statistics of each feature over the rows on which its asset is listed; without any its scale is 0."""
        empty = ~np.isfinite(values).any(axis=0)
        values = np.where(empty, 0.0, values)
        quartiles = np.nanquantile(values, QUARTILES, axis=0)
        constant = np.nanmax(values, axis=0) == np.nanmin(values, axis=0)
        return cls.of_statistics(table.names, table.definitions, quartiles, np.nanstd(values, axis=0), constant, clip)

    @classmethod
    def _fit_over_assets(cls, table: FeatureTable, values: Float, clip: float) -> Self:
        """Statistics of each feature over all assets and the rows on which they are listed."""
        names = tuple(dict.fromkeys(_feature_of(name) for name in table.names))
        own = len(names) - table.market_wide
        columns = [*(range(place, values.shape[1] - table.market_wide, own) for place in range(own))]
        columns += [range(place, place + 1) for place in range(values.shape[1] - table.market_wide, values.shape[1])]
        pooled = []
        for which in columns:
            sample = values[:, which].ravel()
            sample = sample[np.isfinite(sample)]
            # A feature that is nowhere defined gets a scale of 0.
            pooled.append(sample if sample.size else np.zeros(1))
        quartiles = np.stack([np.quantile(sample, QUARTILES) for sample in pooled], axis=1)
        made = cls.of_statistics(
            names,
            tuple(table.definitions[which[0]] for which in columns),
            quartiles,
            np.array([sample.std() for sample in pooled]),
            np.array([np.ptp(sample) == 0 for sample in pooled]),
            clip,
        )
        return replace(made, market_wide=table.market_wide)

    @classmethod
    def of_statistics(
        cls,
        names: tuple[str, ...],
        definitions: tuple[str, ...],
        quartiles: Float,
        deviation: Float,
        constant: NDArray[np.bool_],
        clip: float = 10.0,
    ) -> Self:
        """From `QUARTILES` [3, F], standard deviations and which features never varied, [F] each."""
        low, center, high = quartiles
        scale = np.where(high > low, (high - low) / NORMAL_IQR, deviation)
        # A deviation this far below the level is the rounding of a mean, not movement.
        scale = np.where(constant | (scale <= 1e-12 * np.abs(center)), 0.0, scale)
        return cls(names, definitions, center, scale, clip)

    def transform(self, features: FeatureTable | Float) -> NDArray[np.float32]:
        """Scaled and clipped values, [..., F]; a missing value (NaN) stays missing."""
        return np.clip(self._scaled(features), -self.clip, self.clip).astype(np.float32)

    def clipped_share(self, features: FeatureTable | Float) -> Float:
        """Share of each feature's defined values that are clipped, [F]."""
        scaled = self._scaled(features).reshape(-1, len(self.names))
        defined = np.maximum(np.isfinite(scaled).sum(axis=0), 1)
        share: Float = (np.abs(scaled) > self.clip).sum(axis=0) / defined
        return share

    def over_columns(self, columns: int) -> list[int]:
        """The entry of each of these columns: assets side by side, market-wide features last."""
        if self.market_wide is None or columns == len(self.names):
            return list(range(len(self.names)))
        own = len(self.names) - self.market_wide
        assets, rest = divmod(columns - self.market_wide, own) if own else (0, columns)
        if rest or assets < 1:
            raise ConfigError(f"scaler: {columns} columns are not {own} features of each asset and {self.market_wide}")
        return [*range(own)] * assets + [*range(own, len(self.names))]

    def _scaled(self, features: FeatureTable | Float) -> Float:
        if isinstance(features, FeatureTable):
            self._check_features(features)
            values = features.values
        else:
            values = features
        entries = self.over_columns(values.shape[-1])
        if values.shape[-1:] != (len(entries),):
            raise ConfigError(f"scaler: values of shape {values.shape} do not hold {len(self.names)} features a row")
        center, scale = (
            (self.center, self.scale) if self.market_wide is None else (self.center[entries], self.scale[entries])
        )
        varies = scale > 0
        scaled: Float = (values - center) / np.where(varies, scale, 1.0)
        return np.where(varies | np.isnan(values), scaled, 0.0)

    def _check_features(self, table: FeatureTable) -> None:
        names, definitions = table.names, table.definitions
        if self.market_wide is not None:
            names = tuple(dict.fromkeys(_feature_of(name) for name in table.names))
            own = len(names) - table.market_wide
            definitions = (*definitions[:own], *definitions[len(definitions) - table.market_wide :])
        if names != self.names:
            fitted, given = ", ".join(self.names), ", ".join(names)
            raise ConfigError(f"scaler: fitted on the features {fitted}; it was given {given}")
        for name, ours, theirs in zip(self.names, self.definitions, definitions, strict=True):
            if ours != theirs:
                raise ConfigError(
                    f"scaler: feature {name!r} has another definition than when the scaler was fitted "
                    f"(fingerprint {theirs}, was {ours}). Restore its definition, or train again"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers; JSON keeps every bit of a float64."""
        shared = {} if self.market_wide is None else {"market_wide": self.market_wide}
        return shared | {
            "names": list(self.names),
            "definitions": list(self.definitions),
            "center": self.center.tolist(),
            "scale": self.scale.tolist(),
            "clip": self.clip,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`, exactly."""
        expected = {"names", "definitions", "center", "scale", "clip"}
        if set(data) - {"market_wide"} != expected:
            raise ConfigError(f"scaler: keys {sorted(data)} must be {sorted(expected)}")
        if not all(isinstance(text, str) for text in (*data["names"], *data["definitions"])):
            raise ConfigError("scaler: names and definitions must be texts")
        return cls(
            names=tuple(data["names"]),
            definitions=tuple(data["definitions"]),
            center=np.array(data["center"], dtype=np.float64),
            scale=np.array(data["scale"], dtype=np.float64),
            clip=float(data["clip"]),
            market_wide=data.get("market_wide"),
        )

    def digest(self) -> str:
        """SHA-256 over names, definitions and statistics: equal if and only if the scaled inputs are the same."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _feature_of(column: str) -> str:
    """`return_1` of `return_1:BTCUSDT`."""
    return column.partition(":")[0]


def too_few_rows(defined: int, rows: int) -> ConfigError:
    return ConfigError(
        f"scaler: {defined} of the {rows:,} training rows have all features defined; at least 2 are needed. Use more "
        "bars, a lead-in, or features with a shorter warm-up"
    )
