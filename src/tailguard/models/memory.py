"""Memory of the policy and the critics: an LSTM, or none.

Acting uses `step`, one row of N environments at a time; learning uses `sequence`, a whole segment of T rows at once.
Both give the same numbers, so the probability ratio of PPO is one before the first update. `episode_start` marks the
rows whose observation is the first of an episode: there the state is cleared before the row is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tailguard.device_ops import may_hold_any
from tailguard.errors import ConfigError
from tailguard.member_axis import is_logical
from tailguard.models.recurrence import cell_step, recurrence

MemoryState = tuple[Tensor, ...]
"""(h, c), each [L, N, H], for an LSTM; () for no memory. `Memory.given` adds a third part."""

CellWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Input and recurrent weights, [4H, I] and [4H, H], then their biases, [4H] each; gates in the order i, f, g, o."""

FUSED_STEP_SIZE = 256
"""From this many environments on, a CPU takes one step faster with the fused LSTM (1.5x at 2,048) than with the cell
(1.4x at 64, 5x for one)."""


class Memory(nn.Module, ABC):
    """A map from features to features that may carry a state from row to row."""

    output_size: int

    @abstractmethod
    def initial_state(self, n: int) -> MemoryState:
        """The initial state of n environments."""

    @abstractmethod
    def step(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        """Read one row: x [N, I], episode_start [N] bool -> output [N, H] and the state after the row."""

    @abstractmethod
    def given(self, state: MemoryState, episode_start: Tensor) -> MemoryState:
        """The state for many calls of `step` with the same state and starts, of which the state gets no gradient."""

    @abstractmethod
    def every_state(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        """As `sequence`, but with the state after each row: its parts are [L, T, N, H]."""

    @abstractmethod
    def sequence(
        self, x: Tensor, state: MemoryState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Read T rows: x [T, N, I], episode_start [T, N] bool -> outputs [T, N, H] and the state after the last row.

        `state` is the one before the first row. `inner_resets` says whether an episode may start after row 0. None
        checks `episode_start`, on a CPU only; False asserts that none does; True takes the exact path without
        checking. On other devices every choice is exact, with static shapes and no wait for the device.
        """


class NoMemory(Memory):
    """Output is input; the state is empty."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.output_size = input_size

    def initial_state(self, n: int) -> MemoryState:  # noqa: ARG002
        return ()

    def step(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:  # noqa: ARG002
        return x, state

    def given(self, state: MemoryState, episode_start: Tensor) -> MemoryState:  # noqa: ARG002
        return state

    def every_state(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:  # noqa: ARG002
        return x, state

    def sequence(
        self,
        x: Tensor,
        state: MemoryState,
        episode_start: Tensor,  # noqa: ARG002
        inner_resets: bool | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, MemoryState]:
        return x, state


class LSTMMemory(Memory):
    """An LSTM of one or more layers (Hochreiter & Schmidhuber 1997; forget gate of Gers et al. 2000).

    Every gate's input and recurrent weights start orthogonal, which preserves the scale of signals.
    The forget gate's bias starts at `forget_bias`: at 0 half of the memory is lost each step, so an input 32
    steps ago has a weight of 2e-10 and gets no gradient; at 1 (Jozefowicz et al. 2015) it has 4e-5 and can be learned.

    A CPU in full precision reads segments with PyTorch's fused LSTM, several times faster than cell by cell. Elsewhere
    `tailguard.models.recurrence` does it. cuDNN's fused LSTM in float32 is slower beyond 4,096 environments; with
    PyTorch's default TF32 setting it differs between one step and many by 1e-3, so that the ratio would not start at
    one; and under bfloat16 autocast it computes in float16, where the gradients of a mean over many samples vanish.
    """

    def __init__(self, input_size: int, hidden_size: int, layers: int = 1, forget_bias: float = 1.0) -> None:
        super().__init__()
        if hidden_size < 1 or layers < 1:
            raise ConfigError(
                f"an LSTM of {layers} layers of {hidden_size} units cannot be built; both must be at least 1 "
                "(for a policy without memory choose none)"
            )
        self.output_size = hidden_size
        # Cells and not nn.LSTM, which torch.compile refuses to trace; the fused call takes the same weights.
        self.cells = nn.ModuleList(
            nn.LSTMCell(input_size if layer == 0 else hidden_size, hidden_size) for layer in range(layers)
        )
        with torch.no_grad():
            for input_weight, recurrent_weight, input_bias, recurrent_bias in self._weights():
                for gate in (*input_weight.chunk(4), *recurrent_weight.chunk(4)):
                    nn.init.orthogonal_(gate)
                input_bias.zero_()
                recurrent_bias.zero_()
                _, forget, _, _ = input_bias.chunk(4)
                forget.fill_(forget_bias)

    def initial_state(self, n: int) -> MemoryState:
        weight = next(self.parameters())
        h = torch.zeros(len(self.cells), n, self.output_size, dtype=weight.dtype, device=weight.device)
        return h, torch.zeros_like(h)

    def step(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        if torch.is_grad_enabled():
            return self._by_cells(x, clear(state, episode_start) if len(state) == 2 else state)
        state = state[:2]
        if not _can_fuse(x):
            y, state = self._by_layers(x.unsqueeze(0), state, episode_start.unsqueeze(0))
            return y.squeeze(0), state
        before_h, before_c = state = clear(state, episode_start)
        if x.shape[0] >= FUSED_STEP_SIZE:
            y, state = self._fused(x.unsqueeze(0), state)
            return y.squeeze(0), state
        hidden, cells = [], []
        for weights, h, c in zip(self._weights(), before_h, before_c, strict=True):
            x, c = torch.lstm_cell(x, (h, c), *weights)
            hidden.append(x)
            cells.append(c)
        return x, (torch.stack(hidden), torch.stack(cells))

    @torch.no_grad()
    def given(self, state: MemoryState, episode_start: Tensor) -> MemoryState:
        """The state, cleared, and what it and the biases give each gate, [L, N, 4H]: half of a step's work."""
        h, c = clear(state, episode_start)
        weights = zip(self._weights(), h, strict=True)
        return h, c, torch.stack([F.linear(own, w_hh, b_ih + b_hh) for (_, w_hh, b_ih, b_hh), own in weights])

    def _by_cells(self, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """One row with gradient; the state is cleared where an episode starts."""
        hidden, cells = [], []
        before_h, before_c, *given = map(_layers_of, state)
        for layer, ((w_ih, w_hh, b_ih, b_hh), h, c) in enumerate(zip(self._weights(), before_h, before_c, strict=True)):
            if given:
                # The recurrent product is in the gates already: what is left of it has no columns.
                x, c = cell_step(torch.addmm(given[0][layer], x, w_ih.mT), w_hh[:, :0], h[:, :0], c)
            else:
                x, c = cell_step(F.linear(x, w_ih, b_ih + b_hh), w_hh, h, c)
            hidden.append(x)
            cells.append(c)
        return x, (_of_layers(hidden).to(state[0].dtype), _of_layers(cells))

    def sequence(
        self, x: Tensor, state: MemoryState, episode_start: Tensor, inner_resets: bool | None = None
    ) -> tuple[Tensor, MemoryState]:
        if inner_resets or not _can_fuse(x):
            return self._by_layers(x, state, episode_start)
        if inner_resets is None:
            return self._by_chunks(x, state, episode_start)
        return self._fused(x, clear(state, episode_start[0]))

    def every_state(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        hidden, cells = self._layers(x, state, episode_start)
        return hidden[-1], (torch.stack(hidden).to(state[0].dtype), torch.stack(cells))

    def _by_layers(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        """Exact for every pattern of episode starts, without reading their values."""
        hidden, cells = self._layers(x, state, episode_start)
        h, c = (torch.stack([rows[-1] for rows in parts]) for parts in (hidden, cells))
        return hidden[-1], (h.to(state[0].dtype), c)

    def _layers(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states and cells after every row, [T, N, H], of each layer."""
        hidden, cells = [], []
        for (w_ih, w_hh, b_ih, b_hh), h, c in zip(self._weights(), *state, strict=True):
            x, c = recurrence(F.linear(x, w_ih, b_ih + b_hh), w_hh, h, c, episode_start)
            hidden.append(x)
            cells.append(c)
        return hidden, cells

    def _by_chunks(self, x: Tensor, state: MemoryState, episode_start: Tensor) -> tuple[Tensor, MemoryState]:
        """One fused call between any two rows at which some environment starts an episode."""
        starts = (episode_start[1:].any(dim=1).nonzero().flatten() + 1).tolist()
        if len(starts) > x.shape[0] // 2:  # chunks of less than two rows: cell by cell is faster
            return self._by_layers(x, state, episode_start)
        outputs = []
        for first, end in pairwise([0, *starts, x.shape[0]]):
            y, state = self._fused(x[first:end], clear(state, episode_start[first]))
            outputs.append(y)
        return torch.cat(outputs), state

    def _fused(self, x: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        weights = [weight for layer in self._weights() for weight in layer]
        y, h, c = torch.lstm(
            x,
            state,
            weights,
            has_biases=True,
            num_layers=len(self.cells),
            dropout=0.0,
            train=True,
            bidirectional=False,
            batch_first=False,
        )
        return y, (h, c)

    def cell_weights(self) -> list[CellWeights]:
        """The weights of each layer, for callers that step the cells one row at a time."""
        return self._weights()

    def _weights(self) -> list[CellWeights]:
        cells = cast(Iterable[nn.LSTMCell], self.cells)
        return [(cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh) for cell in cells]


def _can_fuse(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not is_logical(x)


def _layers_of(state: Tensor) -> Sequence[Tensor]:
    """[L, N, H] as L of [N, H]."""
    # One layer is the usual case, and a view's slope is a view.
    return (state.squeeze(0),) if state.shape[0] == 1 else state.unbind()


def _of_layers(layers: list[Tensor]) -> Tensor:
    """L of [N, H] as [L, N, H]."""
    return layers[0].unsqueeze(0) if len(layers) == 1 else torch.stack(layers)


def clear(state: MemoryState, episode_start: Tensor) -> MemoryState:
    """The state, with zeros for the environments that start.

    Filling, not multiplying: a NaN must not outlive its episode.
    """
    if not may_hold_any(episode_start):
        return state
    return tuple(part.masked_fill(episode_start[:, None], 0.0) for part in state)
