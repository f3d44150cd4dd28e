"""The registry of features and the decorator that registers one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from tailguard.data.bars import OPTIONAL, REQUIRED
from tailguard.data.session_columns import SESSION_COLUMNS
from tailguard.errors import ConfigError, TailguardError

Build = Callable[[], pl.Expr]


class FeatureError(TailguardError):
    """A feature violates its declaration; the message names the feature, the fault and the remedy."""


@dataclass(frozen=True)
class Feature:
    """One registered feature."""

    name: str
    build: Build
    """Makes the expression over the columns of one gap-free stretch of one symbol's bars."""
    warmup: int
    """Number of leading bars of a stretch that have no value."""
    needs: tuple[str, ...]
    """Further columns it reads, beside open, high, low, close, volume and time."""
    market_wide: bool
    """The same for every symbol: reads the time only, and appears once in a portfolio."""

    def expression(self) -> pl.Expr:
        """The expression, after checking that it reads only declared columns."""
        expression = self.build()
        if not isinstance(expression, pl.Expr):
            raise FeatureError(f"feature {self.name!r} returned {type(expression).__name__}; it must return a pl.Expr")
        shared = {"time", *(name for name in self.needs if name in SESSION_COLUMNS)}
        readable = shared if self.market_wide else {"time", *REQUIRED, *self.needs}
        for column in sorted(set(expression.meta.root_names()) - readable):
            if self.market_wide:
                hint = "a market-wide feature reads the time only, and the columns of sessions"
            elif column in OPTIONAL:
                hint = f"declare it: needs=({column!r},)"
            else:
                usual = ", ".join(("time", *REQUIRED, *OPTIONAL))
                hint = f"bars have {usual}; if yours have this one too, declare it: needs=({column!r},)"
            raise FeatureError(f"feature {self.name!r} reads the column {column!r}; {hint}")
        return expression


FEATURES: dict[str, Feature] = {}
"""Every registered feature, in the order of registration."""


def feature(
    name: str,
    *,
    warmup: int = 0,
    needs: Sequence[str] = (),
    market_wide: bool = False,
    replace: bool = False,
) -> Callable[[Build], Build]:
    """Register a function that returns a Polars expression as the feature `name`.

    The expression is evaluated separately on each gap-free stretch of each symbol, so it needs no `.over(...)`, and no
    window of it reaches across a gap. Bar t is known when it has closed: all of its columns may be read, nothing later.

    Args:
        name: lower case letters, digits and underscores.
        warmup: how many leading bars of a stretch have no value yet: 24 for `close.diff(24)`, 23 for a mean of 24 bars.
        needs: further columns the expression reads: optional ones (`taker_buy_base`, `trades`, `funding_rate`, …), or
            any numeric column of the file or frame that the bars were loaded from, such as `sentiment`.
        market_wide: the value is the same for every symbol; such a feature reads `time` only.
        replace: allow a name that is already registered, as when a notebook cell runs twice.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(
            f"feature name {name!r}: use lower case letters, digits and underscores, starting with a letter"
        )
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"feature {name!r}: warmup={warmup!r} must be a whole number of bars, 0 or more")
    if isinstance(needs, str):
        raise ConfigError(f"feature {name!r}: needs={needs!r} must be a tuple of columns: needs=({needs!r},)")
    for column in needs:
        near = difflib.get_close_matches(column, OPTIONAL, n=1, cutoff=0.8) if column not in OPTIONAL else []
        if near:
            raise ConfigError(f"feature {name!r} needs {column!r}; did you mean {near[0]!r}? Or rename the column")
    if name in FEATURES and not replace:
        raise ConfigError(f"feature {name!r} is registered already; choose another name, or pass replace=True")

    def register(build: Build) -> Build:
        FEATURES[name] = Feature(name, build, warmup, tuple(needs), market_wide)
        return build

    return register


def find_features(names: Iterable[str]) -> tuple[Feature, ...]:
    """The features of these names, in their order; an unknown or repeated name is an error."""
    names = tuple(names)
    chosen: dict[str, Feature] = {}
    for name in names:
        if name not in FEATURES:
            nearest = difflib.get_close_matches(name, FEATURES, n=1, cutoff=0.5)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"There are {', '.join(FEATURES)}."
            raise ConfigError(
                f"feature {name!r}: no such feature. {hint} Register your own with @tailguard.feature; for the command "
                "line, in a file that the setting plugins names"
            )
        if name in chosen:
            raise ConfigError(f"feature {name!r} is requested twice")
        chosen[name] = FEATURES[name]
    if not chosen:
        raise ConfigError("no feature is requested; name at least one, or pass None for all that the bars allow")
    return tuple(chosen.values())
