"""Settings of limits on portfolios: what a target weight, a group, the account and a rebalancing may be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tailguard.envs.projection import Limits
from tailguard.errors import ConfigError
from tailguard.market import Market
from tailguard.validate import check_range

LARGEST = 125.0
"""As the leverage."""


@dataclass(frozen=True)
class Constraints:
    """Limits on target weights, kept at every decision; nothing is limited by default."""

    long_only: bool = False
    """Weights at or above 0, whatever market.allow_short says."""
    asset_max: float | None = None
    """Largest absolute weight of an asset, above 0 to 125; null: no cap."""
    asset_caps: dict[str, float] = field(default_factory=dict, hash=False)
    """Caps of single assets in place of asset_max, as {BTCUSDT: 0.3}; 0: it is never held."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Groups of assets, as {banks: [JPM, BAC]}; an asset belongs to one of them at most. The report shows their
    exposure."""
    group_max: float | None = None
    """Largest sum of absolute weights of a group, above 0 to 125; null: no cap."""
    group_caps: dict[str, float] = field(default_factory=dict, hash=False)
    """Caps of single groups in place of group_max, as {banks: 0.25}."""
    gross_max: float | None = None
    """Largest sum of absolute weights, above 0 to 125; null: market.leverage."""
    net_min: float | None = None
    """Smallest sum of weights, -125 to 125; above 0 the account must be invested, and is as far as the listed assets
    allow. null: no bound."""
    net_max: float | None = None
    """Largest sum of weights, 0 to 125; null: no bound."""
    cash_min: float | None = None
    """Smallest share of cash, which is 1 minus the sum of weights, 0 to 1; null: no bound."""
    turnover_max: float | None = None
    """Largest sum of absolute changes of weights at a bar, above 0 to 250; what other limits ask to sell at once is
    sold. null: no cap."""

    def __post_init__(self) -> None:
        for name in ("asset_max", "group_max", "gross_max"):
            self._check(name, low=0, low_open=True, high=LARGEST)
        self._check("net_min", low=-LARGEST, high=LARGEST)
        self._check("net_max", low=0, high=LARGEST)
        self._check("cash_min", low=0, high=1)
        self._check("turnover_max", low=0, low_open=True, high=2 * LARGEST)
        for table in ("asset_caps", "group_caps"):
            for name, cap in getattr(self, table).items():
                check_range(f"env.constraints.{table}.{name}", cap, low=0, high=LARGEST)
        self._check_groups()
        if self.net_min is not None:
            self._check_net(self.net_min)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Constraints:
        """The constraints from the output of `dataclasses.asdict`, also after a JSON round trip."""
        return cls(**{**state, "groups": {name: tuple(members) for name, members in state["groups"].items()}})

    @property
    def active(self) -> bool:
        """Whether anything is limited; groups alone are for the report."""
        return self.long_only or bool(self.asset_caps) or bool(self._capped) or self._numbers != (None,) * 6

    @property
    def must_invest(self) -> bool:
        """Whether an account in cash would break a limit."""
        return self.net_min is not None and self.net_min > 0

    def limits(self, symbols: Sequence[str], assets: int, leverage: float) -> Limits | None:
        """The limits on these assets as tensors in float64; None where nothing is limited. Symbols that are not named
        have the common caps."""
        if not self.active:
            return None
        named = bool(self.asset_caps or self.groups)
        if named and len(symbols) != assets:
            raise ConfigError(
                "env.constraints: caps of single assets and groups need env.accounts=portfolio; with per_symbol each "
                "account trades one symbol"
            )
        gross = leverage if self.gross_max is None else min(self.gross_max, leverage)
        caps = [self._cap(symbol, gross) for symbol in symbols] if named else [self._cap("", gross)] * assets
        capped, place = self._capped, {symbol: number for number, symbol in enumerate(symbols)}
        members = [[place[symbol] for symbol in self.groups[name] if symbol in place] for name in capped]
        group_of = [len(capped)] * assets
        for number, group in enumerate(members):
            for asset in group:
                group_of[asset] = number
        limits = Limits(
            long_only=self.long_only,
            asset=_tensor(caps) if self.asset_max is not None or self.asset_caps or self.must_invest else None,
            members=tuple(torch.tensor(group, dtype=torch.int64) for group in members),
            group_of=torch.tensor(group_of) if capped else None,
            group=_tensor(list(capped.values())) if capped else None,
            gross=_tensor(gross) if self.gross_max is not None or self.must_invest else None,
            net_low=None if self.net_min is None else _tensor(self.net_min),
            net_high=None if self._net_high is None else _tensor(self._net_high),
            invested=self.must_invest,
            turnover=None if self.turnover_max is None else _tensor(self.turnover_max),
        )
        self._check_reachable(limits, members, gross)
        return limits

    def check_names(self, symbols: Iterable[str]) -> None:
        """Refuse names of assets that are not among the training symbols."""
        known = list(symbols)
        named = [("asset_caps", name) for name in self.asset_caps]
        named += [(f"groups.{group}", name) for group, members in self.groups.items() for name in members]
        for where, name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known[:20])}"
                raise ConfigError(f"env.constraints.{where}: no symbol {name!r} in these bars. {hint}")

    def check_fits(self, *, shielded: bool = False, flat_by_close: bool = False, throttled: bool = False) -> None:
        """Refuse what must be able to sell everything, where the account must be invested."""
        reducing = {"env.shield_shock": shielded, "env.flat_by_close": flat_by_close, "risk.throttle": throttled}
        for name, given in reducing.items():
            if given and self.must_invest:
                raise ConfigError(
                    f"env.constraints.net_min: {self.net_min:g} keeps the account invested, and {name} must be able to "
                    f"sell everything. Set net_min to 0 or below, or leave out {name}"
                )

    @property
    def _numbers(self) -> tuple[float | None, ...]:
        return self.asset_max, self.gross_max, self.net_min, self.net_max, self.cash_min, self.turnover_max

    @property
    def _net_high(self) -> float | None:
        """Largest sum of weights by net_max and cash_min."""
        bounds = [self.net_max, None if self.cash_min is None else 1 - self.cash_min]
        given = [bound for bound in bounds if bound is not None]
        return min(given) if given else None

    @property
    def _capped(self) -> dict[str, float]:
        """Caps of the groups that have one."""
        caps = {name: self.group_caps.get(name, self.group_max) for name in self.groups}
        return {name: cap for name, cap in caps.items() if cap is not None}

    def _cap(self, symbol: str, gross: float) -> float:
        cap = self.asset_caps.get(symbol, self.asset_max)
        return gross if cap is None else min(cap, gross)

    def _check(self, name: str, **bounds: Any) -> None:
        value = getattr(self, name)
        if value is not None:
            check_range(f"env.constraints.{name}", value, **bounds)

    def _check_groups(self) -> None:
        where: dict[str, str] = {}
        for group, members in self.groups.items():
            given: object = members
            if not isinstance(given, list | tuple) or not members:
                raise ConfigError(
                    f"env.constraints.groups.{group}: {members!r} must be a list of symbols, as [JPM, BAC]"
                )
            for symbol in members:
                if symbol in where:
                    raise ConfigError(
                        f"env.constraints.groups: {symbol} is in {where[symbol]} and in {group}; an asset belongs to "
                        "one group at most"
                    )
                where[symbol] = group
        for name in self.group_caps:
            if name not in self.groups:
                near = difflib.get_close_matches(name, list(self.groups), n=1)
                hint = f"Did you mean {near[0]!r}?" if near else "Name its assets in env.constraints.groups"
                raise ConfigError(f"env.constraints.group_caps: there is no group {name!r}. {hint}")
        if self.group_max is not None and not self.groups:
            raise ConfigError(
                "env.constraints.group_max: there are no groups, so it would have no effect; name their assets in "
                "env.constraints.groups, as {banks: [JPM, BAC]}"
            )

    def _check_net(self, low: float) -> None:
        """Refuse a lower bound of the net weight that another limit contradicts."""
        if self.net_max is not None and low > self.net_max:
            raise ConfigError(
                f"env.constraints.net_min: {low:g} is above env.constraints.net_max {self.net_max:g}; no weights keep "
                "both. Lower net_min or raise net_max"
            )
        if self.cash_min is not None and low > 1 - self.cash_min:
            raise ConfigError(
                f"env.constraints.net_min: {low:g} leaves {1 - low:g} in cash, and env.constraints.cash_min is "
                f"{self.cash_min:g}; no weights keep both. Lower one of them"
            )
        if self.gross_max is not None and low > self.gross_max:
            raise ConfigError(
                f"env.constraints.net_min: {low:g} is above env.constraints.gross_max {self.gross_max:g}; no weights "
                "keep both. Lower net_min or raise gross_max"
            )

    def _check_reachable(self, limits: Limits, members: Sequence[Sequence[int]], gross: float) -> None:
        """Refuse a lower bound of the net weight that all caps together do not reach."""
        if not self.must_invest:
            return
        assert self.net_min is not None
        assert limits.asset is not None
        caps = limits.asset.tolist()
        grouped = {asset for group in members for asset in group}
        free = sum(cap for asset, cap in enumerate(caps) if asset not in grouped)
        inside = [
            min(cap, sum(caps[asset] for asset in group))
            for cap, group in zip(self._capped.values(), members, strict=True)
        ]
        most = min(gross, free + sum(inside))
        if self.net_min > most * (1 + 1e-9):
            raise ConfigError(
                f"env.constraints.net_min: {self.net_min:g} cannot be reached: caps of {len(caps)} assets and their "
                f"groups, gross_max and market.leverage allow a sum of weights of {most:g}. Lower net_min or raise them"
            )


def limits_of(constraints: Constraints, market: Market, device: torch.device | None = None) -> Limits | None:
    """The limits on a market's assets, in its precision."""
    limits = constraints.limits(market.symbols, market.assets, market.config.leverage)
    return None if limits is None else limits.to(market.dtype, device or market.table.device)


def _tensor(value: float | Sequence[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
