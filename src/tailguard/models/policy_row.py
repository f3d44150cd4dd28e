"""The policy's rows in a window, one node of the graph each: encoder, LSTM and the action head's layer, slopes by hand.

A policy that is differentiated through the market takes its rows one by one. At a few hundred accounts the graph of
some forty operations a row takes longer than the arithmetic, and so does summing the slopes of every weight over the
rows. Here the rows' nodes add them up where they stand, and one node, which comes after all of them on the way back,
hands them to the weights. Values and slopes are those of the modules.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.device_ops import readable
from tailguard.models.actions import ActionHead
from tailguard.models.memory import MemoryState, clear
from tailguard.models.recurrence import CellTrace, cell_slopes, cell_values
from tailguard.models.trunk import Trunk


class RowPolicy(Protocol):
    """What acts row by row."""

    @property
    def action_head(self) -> ActionHead: ...

    def act_output(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Output of the action head's layer, [N, R], and the memory after the row; see `Trunk.step`."""
        ...


def takes_rows(trunk: Trunk, obs: Tensor, state: MemoryState) -> bool:
    """Whether `PolicyRows` can stand for this trunk: with a gradient on a CPU, an encoder of tanh layers, an LSTM."""
    return (
        torch.is_grad_enabled()
        and len(state) == 2
        and type(trunk) is Trunk
        and trunk.precision != "bfloat16"
        and not torch.is_autocast_enabled("cpu")
        and readable(obs)
        and all(isinstance(layer, nn.Linear | nn.Tanh) for layer in trunk.encoder.layers)
    )


class PolicyRows:
    """A policy for the rows of one window, after which its weights change."""

    def __init__(self, trunk: Trunk, action_head: ActionHead) -> None:
        self.action_head = action_head
        encoder = [layer for layer in trunk.encoder.layers if isinstance(layer, nn.Linear)]
        cells = trunk.memory.cell_weights()  # type: ignore[operator]
        weights = [weight for layer in encoder for weight in (layer.weight, layer.bias)]
        weights += [weight for cell in cells for weight in cell]
        weights += [action_head.linear.weight, action_head.linear.bias]
        self._layers = _Layers(encoder, cells, action_head.linear)
        # Every row depends on it, and it on every weight: on the way back it waits for all rows.
        self._weights = _Weights.apply(self._layers, *weights)  # type: ignore[no-untyped-call]

    def act_output(
        self, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        h, c = clear(state, episode_start)
        output, h, c = _Row.apply(self._weights, obs, h, c, mask, self._layers)  # type: ignore[no-untyped-call]
        return output, (h, c)


class _Layers:
    """Weights of the layers, without a graph, and the sums of their slopes over the rows so far."""

    def __init__(self, encoder: list[nn.Linear], cells: list[Any], head: nn.Linear) -> None:
        self.encoder = [(layer.weight.detach(), layer.bias.detach()) for layer in encoder]
        self.cells = [(w_ih.detach(), w_hh.detach(), b_ih.detach() + b_hh.detach()) for w_ih, w_hh, b_ih, b_hh in cells]
        self.head = head.weight.detach(), head.bias.detach()
        self.sums: list[Tensor] | None = None
        self.passing = -1
        """The backward pass they belong to."""

    def add(self, slopes: list[Tensor]) -> None:
        """Add a row's slopes: of weight and bias of the encoder's layers, of the cells, of the head."""
        passing = torch._C._current_graph_task_id()
        if self.sums is None or passing != self.passing:
            # What a pass that did not ask for the weights has left is not a part of this one.
            self.sums, self.passing = slopes, passing
        else:
            torch._foreach_add_(self.sums, slopes)

    def take(self) -> list[Tensor]:
        """The sums over the rows, weight by weight; afterwards there are none."""
        assert self.sums is not None
        slopes, self.sums = iter(self.sums), None
        taken: list[Tensor] = []
        for _ in self.encoder:
            taken += [next(slopes), next(slopes)]
        for _ in self.cells:
            w_ih, w_hh, bias = (next(slopes) for _ in range(3))
            taken += [w_ih, w_hh, bias, bias.clone()]  # the cell adds its two biases
        return [*taken, *slopes]


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.layers, *weights = inputs
        ctx.set_materialize_grads(False)
        return torch.zeros((), dtype=weights[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return None, *ctx.layers.take()


def tanh(values: Tensor) -> Tensor:
    """By NumPy, in a sixth of the time of PyTorch's on a CPU; they differ by less than a unit in the last place."""
    return torch.from_numpy(np.tanh(values.numpy()))


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        _, x, h, c, mask, layers = inputs
        # What each layer reads: the encoder's, the cells', the head's.
        read, traces, hidden, after = [x], [], [], []
        for weight, bias in layers.encoder:
            x = tanh(torch.addmm(bias, x, weight.mT))
            read.append(x)
        shown = x
        if mask is not None:
            x = read[-1] = x * mask
        for number, (w_ih, w_hh, bias) in enumerate(layers.cells):
            gates = torch.addmm(bias, x, w_ih.mT).addmm_(h[number], w_hh.mT)
            x, cell, trace = cell_values(gates, c[number], tanh)
            read.append(x)
            traces.append(trace)
            hidden.append(x)
            after.append(cell)
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.mask, ctx.read, ctx.shown, ctx.traces = layers, mask, read, shown, traces
        ctx.save_for_backward(h, c)
        weight, bias = layers.head
        return torch.addmm(bias, x, weight.mT), _stacked(hidden), _stacked(after)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_output, of_hidden, of_after = gradients
        h, c = ctx.saved_tensors
        layers, read, traces = ctx.layers, ctx.read, ctx.traces
        wants_weights, wants_obs, wants_h = ctx.needs_input_grad[:3]
        weight, _ = layers.head
        if of_output is None:
            of_output = torch.zeros_like(read[-1][:, : len(weight)])
        # From the last layer to the first; turned round at the end.
        slopes = [of_output.sum(0), of_output.mT @ read[-1]] if wants_weights else []
        of_x = of_output @ weight
        of_h: list[Tensor] = []
        of_c: list[Tensor] = []
        for number in reversed(range(len(traces))):
            if of_hidden is not None:
                of_x += of_hidden[number]
            of_cell = None if of_after is None else of_after[number]
            of_gates, of_cell = cell_slopes(of_x, of_cell, c[number], CellTrace(*traces[number]))
            w_ih, w_hh, _ = layers.cells[number]
            if wants_weights:
                turned = of_gates.mT
                slopes += [of_gates.sum(0), turned @ h[number], turned @ read[len(layers.encoder) + number]]
            if wants_h:
                of_h.insert(0, of_gates @ w_hh)
                of_c.insert(0, of_cell)
            of_x = of_gates @ w_ih
        if ctx.mask is not None:
            of_x *= ctx.mask
        for number in reversed(range(len(layers.encoder))):
            shown = ctx.shown if number == len(layers.encoder) - 1 else read[number + 1]
            of_sum = torch.ops.aten.tanh_backward(of_x, shown)
            if wants_weights:
                slopes += [of_sum.sum(0), of_sum.mT @ read[number]]
            if number or wants_obs:
                of_x = of_sum @ layers.encoder[number][0]
        if wants_weights:
            layers.add(slopes[::-1])
        state = (_stacked(of_h), _stacked(of_c)) if wants_h else (None, None)
        return None, of_x if wants_obs else None, *state, None, None


def _stacked(layers: list[Tensor]) -> Tensor:
    """L of [N, H] as [L, N, H]."""
    return layers[0].unsqueeze(0) if len(layers) == 1 else torch.stack(layers)
