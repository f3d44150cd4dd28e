"""Limits on portfolios as a projection in closed form: weights in, the nearest ones on their ray or side out.

What exceeds a limit is scaled down together, as leverage is, so that the bets keep their proportions:

    asset      w_i within ± its cap, at or above 0 where shorts are not allowed
    group      the weights of a group, to a gross of its cap
    gross      all weights, to the gross limit
    net        longs where Σw is above its limit, shorts where it is below; where it is still below a limit above 0, the
               weights move on the straight line to the fullest portfolio u, which is the projection of all caps

Each step only reduces magnitudes, or moves to a point of the same convex set, so no step breaks what an earlier one
established. Weights that keep all limits are returned as they are.

The turnover cap comes last. With held weights h, wanted weights p = P(w) and q = P(h), which is h unless a limit is
broken (prices move weights):

    w = q + s·(p − q),    s ≤ 1 the largest with ‖q − h‖₁ + s·‖p − q‖₁ ≤ cap

p and q keep the limits, and so does every point between them. The turnover ‖w − h‖₁ is at most the cap, or what the
limits themselves ask to sell.

All is differentiable in the wanted and in the held weights, piecewise; a weight beyond its own cap has slope 0, as has
|w| at 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """Limits on the weights of `A` assets, as tensors of one dtype and device; None: no such limit."""

    long_only: bool
    asset: Tensor | None
    """Largest absolute weight of each asset, [A]; there is one where `invested`."""
    members: tuple[Tensor, ...]
    """Numbers of the assets in each group that has a cap; an asset is in one of them at most."""
    group_of: Tensor | None
    """Number of each asset's group, [A]; that of the last one plus 1 where it has none."""
    group: Tensor | None
    """Largest gross weight of each group, [G]."""
    gross: Tensor | None
    """Largest Σ|w|, []."""
    net_low: Tensor | None
    """Smallest Σw, []."""
    net_high: Tensor | None
    """Largest Σw, at least 0, []."""
    invested: bool
    """Whether `net_low` is above 0, so that cash alone does not keep the limits."""
    turnover: Tensor | None
    """Largest Σ|change of weight| of one decision, []."""

    def to(self, dtype: torch.dtype, device: torch.device) -> Limits:
        """The same limits in another precision or on another device."""
        moved: dict[str, Any] = {
            name: value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, members=tuple(each.to(device) for each in self.members), **moved)


def constrain(wanted: Tensor, held: Tensor, limits: Limits, present: Tensor | None = None) -> Tensor:
    """Target weights within the limits and the turnover cap, [N, A].

    `wanted`, `held`: weights that a decision asks for and present ones, [N, A]; `present`: assets that may be held,
    [N, A] bool, None: all.
    """
    target = project(wanted, limits, present)
    if limits.turnover is None:
        return target
    kept = project(held, limits, present)
    room = (limits.turnover - _gross(kept - held)).clamp(min=0)
    change = target - kept
    # At the target itself where it is within reach: kept + change would round.
    return torch.where(_gross(change) <= room, target, kept + change * _at_most(_gross(change), room))


def project(weights: Tensor, limits: Limits, present: Tensor | None = None) -> Tensor:
    """Weights within the limits, but for turnover, [N, A]."""
    if present is not None:
        weights = weights.masked_fill(~present, 0)
    weights = _reduced(weights, limits)
    if limits.net_low is None:
        return weights
    longs = weights.clamp(min=0)
    shorts = longs - weights
    least_short = (_total(longs) - limits.net_low).clamp(min=0)
    weights = longs - shorts * _at_most(_total(shorts), least_short)
    return _raised(weights, limits, present) if limits.invested else weights


def _reduced(weights: Tensor, limits: Limits) -> Tensor:
    """Weights within every limit from above: of assets, groups, gross and net."""
    if limits.long_only:
        weights = weights.clamp(min=0)
    if limits.asset is not None:
        weights = torch.clamp(weights, -limits.asset, limits.asset)
    if limits.group is not None and limits.group_of is not None:
        amounts = torch.cat([_gross(weights.index_select(-1, members)) for members in limits.members], dim=-1)
        scales = _at_most(amounts, limits.group)
        of_others = torch.ones_like(scales[..., :1])
        weights = weights * torch.cat((scales, of_others), dim=-1).index_select(-1, limits.group_of)
    if limits.gross is not None:
        weights = weights * _at_most(_gross(weights), limits.gross)
    if limits.net_high is not None:
        longs = weights.clamp(min=0)
        shorts = longs - weights
        weights = longs * _at_most(_total(longs), limits.net_high + _total(shorts)) - shorts
    return weights


def _raised(weights: Tensor, limits: Limits, present: Tensor | None) -> Tensor:
    """Weights moved towards the fullest portfolio until their sum is the lower limit, or the most that there is."""
    assert limits.net_low is not None
    assert limits.asset is not None
    caps = limits.asset.expand_as(weights)
    fullest = _reduced(caps if present is None else caps.masked_fill(~present, 0), limits)
    net = _total(weights)
    gap, most = (limits.net_low - net).clamp(min=0), (_total(fullest) - net).clamp(min=0)
    share = torch.where(gap < most, gap / torch.where(gap < most, most, 1.0), (gap > 0).to(gap.dtype))
    return weights + share * (fullest - weights)


def _at_most(amount: Tensor, limit: Tensor) -> Tensor:
    """The factor that brings an amount ≥ 0 to its limit where it is above it; else exactly 1."""
    above = amount > limit
    # Divide only where the limit binds: at an amount of 0 the slope is not finite.
    return torch.where(above, limit / torch.where(above, amount, 1.0), 1.0)


def _total(weights: Tensor) -> Tensor:
    return weights.sum(-1, keepdim=True)


def _gross(weights: Tensor) -> Tensor:
    return weights.abs().sum(-1, keepdim=True)
