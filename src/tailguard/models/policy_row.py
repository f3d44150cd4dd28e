"""One row of the policy as one node of the graph: encoder, LSTM and the action head's layer, with their slopes by hand.

A policy that is differentiated through the market takes its rows one by one. At a few hundred accounts the graph of
some forty operations a row takes longer than the arithmetic. The values and slopes are those of the modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tailguard.device_ops import readable
from tailguard.models.memory import LSTMMemory, MemoryState, clear
from tailguard.models.recurrence import cell_slopes, cell_values
from tailguard.models.trunk import Trunk


def takes_rows(trunk: Trunk, obs: Tensor, state: MemoryState) -> bool:
    """Whether `policy_row` can stand for this trunk: with a gradient on a CPU, an encoder of tanh layers, an LSTM."""
    return (
        torch.is_grad_enabled()
        and len(state) == 2
        and type(trunk) is Trunk
        and trunk.precision != "bfloat16"
        and not torch.is_autocast_enabled("cpu")
        and readable(obs)
        and all(isinstance(layer, nn.Linear | nn.Tanh) for layer in trunk.encoder.layers)
    )


def policy_row(
    trunk: Trunk, head: nn.Linear, obs: Tensor, state: MemoryState, episode_start: Tensor, mask: Tensor | None
) -> tuple[Tensor, MemoryState]:
    """Output of the head's layer, [N, R], and the memory after the row; the other arguments are `Trunk.step`'s."""
    assert isinstance(trunk.memory, LSTMMemory)
    h, c = clear(state, episode_start)
    encoder = [layer for layer in trunk.encoder.layers if isinstance(layer, nn.Linear)]
    weights = [weight for layer in encoder for weight in (layer.weight, layer.bias)]
    weights += [weight for cell in trunk.memory.cell_weights() for weight in cell]
    made = _PolicyRow.apply(len(encoder), mask, obs, h, c, *weights, head.weight, head.bias)  # type: ignore[no-untyped-call]
    output, h, c = made
    return output, (h, c)


class _PolicyRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        depth, mask, x, h, c, *weights = inputs
        (head, bias), encoder, cells = weights[-2:], weights[: 2 * depth], weights[2 * depth : -2]
        # What each layer reads: the encoder's, the cells', the head's.
        read, traces, hidden, after = [x], [], [], []
        for weight, offset in zip(encoder[::2], encoder[1::2], strict=True):
            x = torch.addmm(offset, x, weight.mT).tanh_()
            read.append(x)
        shown = x
        if mask is not None:
            x = read[-1] = x * mask
        for number, (w_ih, w_hh, b_ih, b_hh) in enumerate(zip(*(cells[part::4] for part in range(4)), strict=True)):
            gates = torch.addmm(b_ih + b_hh, x, w_ih.mT).addmm_(h[number], w_hh.mT)
            x, cell, trace = cell_values(gates, c[number])
            read.append(x)
            traces.append(trace)
            hidden.append(x)
            after.append(cell)
        ctx.set_materialize_grads(False)
        ctx.depth, ctx.mask, ctx.read, ctx.shown, ctx.traces = depth, mask, read, shown, traces
        ctx.save_for_backward(h, c, *weights)
        return torch.addmm(bias, x, head.mT), _of_layers(hidden), _of_layers(after)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_output, of_hidden, of_after = gradients
        h, c, *weights = ctx.saved_tensors
        _, _, wants_obs, wants_h, _, *wants_weights = ctx.needs_input_grad
        depth, read, wants = ctx.depth, ctx.read, any(wants_weights)
        of_weights: list[Tensor | None] = [None] * len(weights)
        of_h, of_c = [torch.zeros(())] * len(ctx.traces), [torch.zeros(())] * len(ctx.traces)
        of_x: Tensor | None = None
        if of_output is not None:
            if wants:
                of_weights[-2:] = of_output.mT @ read[-1], of_output.sum(0)
            of_x = of_output @ weights[-2]
        for number in reversed(range(len(ctx.traces))):
            if of_hidden is not None:
                of_x = of_hidden[number] if of_x is None else of_x + of_hidden[number]
            of_x = torch.zeros_like(c[number]) if of_x is None else of_x
            of_gates, of_c[number] = cell_slopes(
                of_x, None if of_after is None else of_after[number], c[number], ctx.traces[number]
            )
            first = 2 * depth + 4 * number
            if wants:
                of_bias = of_gates.sum(0)
                narrow = of_gates.mT
                of_weights[first : first + 4] = narrow @ read[depth + number], narrow @ h[number], of_bias, of_bias
            if wants_h:
                of_h[number] = of_gates @ weights[first + 1]
            of_x = of_gates @ weights[first]
        assert of_x is not None  # an LSTM has a layer
        if ctx.mask is not None:
            of_x = of_x * ctx.mask
        for number in reversed(range(depth)):
            shown = ctx.shown if number == depth - 1 else read[number + 1]
            of_sum = torch.ops.aten.tanh_backward(of_x, shown)
            if wants:
                of_weights[2 * number : 2 * number + 2] = of_sum.mT @ read[number], of_sum.sum(0)
            if number or wants_obs:
                of_x = of_sum @ weights[2 * number]
        of_state = _of_layers(of_h) if wants_h else None, _of_layers(of_c)
        return None, None, of_x if wants_obs else None, *of_state, *of_weights


def _of_layers(layers: list[Tensor]) -> Tensor:
    """L of [N, H] as [L, N, H]."""
    return layers[0].unsqueeze(0) if len(layers) == 1 else torch.stack(layers)
