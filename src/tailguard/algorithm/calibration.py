"""Calibration: realised returns compared with the prediction at the start of the episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailguard.algorithm.rollout import Rollout
from tailguard.risk.constraint import OutcomeWindow

if TYPE_CHECKING:
    from tailguard.algorithm.estimate import Estimates


class PredictedReturns:
    """Stores the return distribution predicted at each episode's start, and ranks the realised return in it at the end.

    The rank (the probability integral transform) is uniform if the distribution is right. The return is the one that
    the critic predicts: discounted rewards, and where the episode was cut off by time, the value of its last
    observation.
    """

    def __init__(self, num_envs: int, quantiles: int, gamma: float, window: int, device: torch.device) -> None:
        self.gamma = gamma
        self.quantiles = torch.zeros(num_envs, quantiles, device=device)
        """Quantiles of the return, predicted at the episode's start, [N, Q]."""
        self.earned = torch.zeros(num_envs, device=device)
        """Discounted rewards since then, [N]."""
        self.discount = torch.ones(num_envs, device=device)
        """γ to the number of steps since then, [N]."""
        self.known = torch.zeros(num_envs, dtype=torch.bool, device=device)
        """Whether the episode's start was seen, [N]."""
        self.ranks = OutcomeWindow(window, device)
        """Ranks of the last realised returns, in [0, 1]."""

    @torch.no_grad()
    def follow(self, rollout: Rollout, estimates: Estimates) -> None:
        """Add a rollout."""
        views = [view.quantiles for view in estimates.views if view.quantiles is not None]
        predicted = torch.stack(views).mean(0)
        tails = torch.stack([view.next_baseline for view in estimates.views]).mean(0)
        ended = rollout.ended & rollout.valid
        ranks, counted = [], []
        quantiles, earned, discount, known = self.quantiles, self.earned, self.discount, self.known
        for row in range(len(predicted)):
            start = rollout.episode_start[row]
            quantiles = torch.where(start.unsqueeze(-1), predicted[row], quantiles)
            earned = torch.where(start, 0.0, earned)
            discount = torch.where(start, 1.0, discount)
            known = known | start
            earned = earned + discount * rollout.rewards[row]
            discount = discount * self.gamma
            rest = torch.where(rollout.terminated[row], 0.0, tails[row])
            realised = earned + discount * rest
            ranks.append((quantiles < realised.unsqueeze(-1)).float().mean(-1))
            counted.append(ended[row] & known)
        self.quantiles.copy_(quantiles)
        self.earned.copy_(earned)
        self.discount.copy_(discount)
        self.known.copy_(known)
        self.ranks.add(torch.stack(ranks), torch.stack(counted))

    def metrics(self, alpha: float) -> dict[str, Tensor]:
        """How far ranks are from uniform (Kolmogorov–Smirnov distance), and the share below α, which should be α."""
        ordered = torch.where(self.ranks.weights > 0, self.ranks.losses[:-1], torch.inf).sort().values
        count = self.ranks.filled.clamp(min=1)
        places = torch.arange(1, len(ordered) + 1, dtype=ordered.dtype, device=ordered.device) / count
        gaps = torch.maximum((places - ordered).abs(), (places - 1 / count - ordered).abs())
        distance = torch.where(ordered.isfinite(), gaps, 0.0).max()
        below = (ordered < alpha).sum() / count
        nothing = self.ranks.filled == 0
        return {
            "risk/calibration": torch.where(nothing, torch.nan, distance),
            "risk/tail_share": torch.where(nothing, torch.nan, below),
        }

    def _state(self) -> dict[str, Tensor]:
        return {
            "quantiles": self.quantiles,
            "earned": self.earned,
            "discount": self.discount,
            "known": self.known,
            "ranks": self.ranks.losses,
            "count": self.ranks.count,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of everything."""
        return {name: value.clone() for name, value in self._state().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state."""
        for name, value in self._state().items():
            value.copy_(state[name])
