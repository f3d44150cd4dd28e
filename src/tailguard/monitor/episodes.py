"""Figures of finished episodes: their returns, lengths and what the environment said of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WINDOW = 100
"""Episodes that the running means cover, as in Stable-Baselines3."""


class EpisodeTracker:
    """Sums rewards to episode returns across rollouts and keeps the last `WINDOW` finished episodes."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.returns = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.finished: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self.count = 0
        """Episodes finished so far."""

    def add(self, rewards: Tensor, ended: Tensor, valid: Tensor, outcome: dict[str, Tensor]) -> None:
        """Take in a rollout, [T, N] each."""
        counted = torch.where(valid, rewards.double(), 0.0)
        last_rows = ended.any(dim=1).nonzero().flatten().tolist()
        first = 0
        for row in [*last_rows, None]:
            stretch = slice(first, None if row is None else row + 1)
            self.returns += counted[stretch].sum(0)
            self.lengths += valid[stretch].sum(0)
            if row is None:
                break
            self._finish(row, ended[row] & valid[row], outcome)
            self.returns.masked_fill_(ended[row], 0.0)
            self.lengths.masked_fill_(ended[row], 0)
            first = row + 1

    def _finish(self, row: int, finished: Tensor, outcome: dict[str, Tensor]) -> None:
        figures = {"return": self.returns, "length": self.lengths.double()}
        if "pnl" in outcome:
            figures["pnl"] = outcome["pnl"][row].double()
        for episode in torch.stack(list(figures.values()), dim=1)[finished].tolist():
            self.finished.append(dict(zip(figures, episode, strict=True)))
            self.count += 1

    def state_dict(self) -> dict[str, Any]:
        """Running sums, and the finished episodes the means still cover."""
        return {
            "returns": self.returns.clone(),
            "lengths": self.lengths.clone(),
            "finished": [dict(episode) for episode in self.finished],
            "count": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.returns.copy_(state["returns"])
        self.lengths.copy_(state["lengths"])
        self.finished = deque((dict(episode) for episode in state["finished"]), maxlen=WINDOW)
        self.count = state["count"]

    def mean(self, name: str) -> float:
        """Mean over the last finished episodes; NaN before the first one."""
        found = [episode[name] for episode in self.finished if name in episode]
        return sum(found) / len(found) if found else float("nan")
