"""A trunk: the part of the network that turns observations into features, with an encoder and a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from tailguard.models.encoder import Encoder
from tailguard.models.memory import LSTMMemory, Memory, MemoryState, NoMemory
from tailguard.models.precision import Precision, autocast

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig


class Trunk(nn.Module):
    """Encoder, then memory."""

    def __init__(self, observation_size: int, config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(observation_size, config.hidden, config.activation)
        width = self.encoder.output_size
        self.memory: Memory = (
            NoMemory(width) if config.memory == "none" else LSTMMemory(width, config.lstm_size, config.lstm_layers)
        )
        self.output_size = self.memory.output_size
        self.precision: Precision = config.precision

    @property
    def is_recurrent(self) -> bool:
        return not isinstance(self.memory, NoMemory)

    def step(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """One row: obs [N, O] -> features [N, H] and the state after it.

        `mask`: factors on the encoder's outputs, [N, E], for dropout; None: 1.
        """
        with autocast(self.precision, obs.device):
            encoded = self.encoder(obs)
            return self.memory.step(encoded if mask is None else encoded * mask, state, episode_start)

    def sequence(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> tuple[Tensor, MemoryState]:
        """T rows: obs [T, N, O] -> features [T, N, H] and the state after the last one."""
        with autocast(self.precision, obs.device):
            return self.memory.sequence(self.encoder(obs), state, episode_start, inner_resets)

    def every_state(self, obs: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        """As `sequence`, with the state after each row, [L, T, N, H] its parts."""
        with autocast(self.precision, obs.device):
            return self.memory.every_state(self.encoder(obs), state, episode_start)
