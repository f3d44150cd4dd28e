"""The cost critic: expected remaining cost of an episode, a baseline that reduces the noise of the tail's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tailguard.device_ops import shuffled


class CostCritic(nn.Module):
    """A small separate network, on the reward critic's features and the observation.

    The features are detached, and the optimiser is separate: the reward critic, its memory and the gradient clipping
    are the same with and without it.
    """

    def __init__(
        self, input_size: int, hidden: Sequence[int], learning_rate: float, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(input_size, width), nn.SiLU()]
            input_size = width
        last = nn.Linear(input_size, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*layers, last)
        self.to(device)
        on_gpu = torch.device(device).type == "cuda"
        # `capturable`: steps that can be recorded in a CUDA graph; it requires existing parameters.
        self.optimizer = torch.optim.Adam(self.parameters(), lr=learning_rate, eps=1e-5, capturable=on_gpu, fused=True)

    def forward(self, features: Tensor, obs: Tensor) -> Tensor:
        """Features [..., H] and observations [..., O] to the expected remaining cost, [...]."""
        value: Tensor = self.network(torch.cat((features, obs), dim=-1))
        return value.squeeze(-1)

    @torch.enable_grad()
    def fit(
        self,
        features: Tensor,
        obs: Tensor,
        targets: Tensor,
        weights: Tensor,
        *,
        epochs: int,
        minibatch: int,
        generator: torch.Generator,
    ) -> Tensor:
        """Regress on targets [T, N] with weights [T, N] (0 leaves a row out); returns the mean loss, []."""
        rows = torch.cat((features, obs), dim=-1).flatten(0, 1)
        wanted, counts = targets.flatten(), weights.flatten()
        parts = max(1, round(len(rows) / minibatch))
        losses = []
        for _ in range(epochs):
            order = shuffled(len(rows), generator)
            for index in order.tensor_split(parts):
                error = self.network(rows.index_select(0, index)).squeeze(-1) - wanted.index_select(0, index)
                counted = counts.index_select(0, index)
                loss = (error.square() * counted).sum() / counted.sum().clamp(min=1)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).mean()
