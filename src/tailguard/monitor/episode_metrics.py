"""Metrics of finished episodes: returns, lengths and P&L."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WINDOW = 100
"""Episodes that the running means cover, as in Stable-Baselines3."""
FIELDS = ("return", "length", "pnl")
"""Fields stored for an episode; P&L is NaN where the environment does not report it."""


class EpisodeTracker:
    """Sums rewards to episode returns across rollouts and keeps the last `WINDOW` finished episodes.

    Everything stays on the device and is updated in place, without a host sync.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(num_envs, dtype=torch.float64, device=device)
        # One row more than the window: rows that are not kept are written there.
        self.kept = torch.full((WINDOW + 1, len(FIELDS)), torch.nan, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Episodes finished so far."""

    @torch.no_grad()
    def add(self, rewards: Tensor, ended: Tensor, valid: Tensor, outcome: Mapping[str, Tensor]) -> None:
        """Add a rollout, [T, N] each."""
        steps = torch.stack((torch.where(valid, rewards.double(), 0.0), valid.double()), dim=1)
        total, totals = torch.stack((self.returns, self.lengths)), []
        # Row by row: a difference of running sums would carry a NaN, and what rounding left, into other episodes.
        for step, end in zip(steps.unbind(), ended.unbind(), strict=True):
            total = total + step
            totals.append(total)
            total = total.masked_fill(end, 0.0)
        returns, lengths = torch.stack(totals, dim=1).unbind()
        self.returns.copy_(total[0])
        self.lengths.copy_(total[1])
        pnl = outcome["pnl"].double() if "pnl" in outcome else torch.full_like(returns, torch.nan)
        finished = (ended & valid).flatten()
        number = finished.cumsum(0)
        kept = finished & (number > number[-1] - WINDOW)
        place = torch.where(kept, (self.count + number - 1) % WINDOW, WINDOW)
        rows = torch.stack((returns, lengths, pnl), dim=-1).flatten(0, 1)
        self.kept.scatter_(0, place.unsqueeze(-1).expand_as(rows), rows)
        self.kept[-1].fill_(torch.nan)  # its content depends on the order of the scatter
        self.count += number[-1]

    def metrics(self) -> dict[str, Tensor]:
        """Means over the last finished episodes, by name; NaN before the first one."""
        held = torch.arange(WINDOW, device=self.kept.device) < self.count
        sums = torch.where(held.unsqueeze(-1), self.kept[:-1], 0.0).sum(0)
        return dict(zip(FIELDS, (sums / self.count.clamp(max=WINDOW)).unbind(), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Running sums, and the finished episodes the means still cover."""
        return {name: value.clone() for name, value in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in self._state().items():
            value.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        return {"returns": self.returns, "lengths": self.lengths, "kept": self.kept, "count": self.count}
