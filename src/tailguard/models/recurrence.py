"""An LSTM layer over whole segments, with a custom backward pass.

Automatic differentiation of a loop over cells gives every step its own product for the gradient of the weights. Here
the loop returns the gradients of all steps' gates, and the products for all steps are computed at once: one for the
recurrent weights, and outside, one for the input weights and one for the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tailguard.member_axis import is_logical, on_stacked


def _load_kernels() -> ModuleType | None:
    """The Triton kernels, where there is a GPU and the Triton that comes with PyTorch for it."""
    if not torch.cuda.is_available():
        return None
    try:
        from tailguard.models import recurrence_kernels
    except ImportError:
        return None
    return recurrence_kernels


KERNELS = _load_kernels()
_Three = tuple[Tensor, Tensor, Tensor]


def recurrence(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and cells after every row, [T, N, H] each, of an LSTM layer.

    The cells and the arithmetic on them are in the precision of `c`, at least float32; products and hidden states in
    that of `gates`: a cell is a running sum, which 8 bits would lose.

    gates:          [T, N, 4H], what the inputs and the biases give each gate, in the order i, f, g, o
    weight:         [4H, H], recurrent
    h, c:           [N, H], before the first row
    episode_start:  [T, N] bool: the state is cleared before the row is read

    For the members of a population all have a leading axis [P], and the members' weights are their own.
    """
    if is_logical(gates) or is_logical(weight):
        first, second = on_stacked(recurrence, gates, weight, h, c, episode_start)
        return first, second
    if not torch.is_grad_enabled():
        return cast(tuple[Tensor, Tensor], _without_gradient(gates, weight, h, c, episode_start))
    output: tuple[Tensor, Tensor] = _Recurrence.apply(gates, weight, h, c, episode_start)  # type: ignore[no-untyped-call]
    return output


@torch.library.custom_op("tailguard::recurrence", mutates_args=())
def _without_gradient(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, episode_start: Tensor
) -> tuple[Tensor, Tensor]:
    """A custom operator: a compiler would unroll the loop over rows."""
    hidden, cells, _ = _forward(gates, weight.to(gates.dtype), h.to(gates.dtype), c, episode_start, keep=False)
    return hidden, cells


@_without_gradient.register_fake
def _(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    shape = (*gates.shape[:-1], weight.shape[-1])
    return gates.new_empty(shape), c.new_empty(shape)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        gates, weight, h, c, episode_start = inputs
        # Cast once, not per row: the product of every row reads the same narrow weights.
        narrow, first = weight.to(gates.dtype), h.to(gates.dtype)
        hidden, cells, active = _forward(gates, narrow, first, c, episode_start, keep=True)
        # Learners rarely differentiate the cells; None then saves a tensor of zeros of their size.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(narrow, first, c, episode_start, hidden, cells, active)
        ctx.dtypes = gates.dtype, weight.dtype, h.dtype, c.dtype
        return hidden, cells

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, h, c, episode_start, hidden, cells, active = ctx.saved_tensors
        grad_hidden, grad_cells = gradients
        if grad_hidden is None:
            grad_hidden = torch.zeros_like(hidden)
        grad_gates, grad_h, grad_c = _backward(grad_hidden, grad_cells, weight, c, episode_start, cells, active)
        # dL/dW = Σ_t grad_gates_tᵀ·h_{t−1}, with h_{t−1} cleared where an episode starts: one product over all T·N
        # rows.
        time = hidden.dim() - 3
        earlier = hidden.narrow(time, 0, hidden.shape[time] - 1)
        before = torch.cat((h.unsqueeze(time), earlier), time).masked_fill_(episode_start.unsqueeze(-1), 0.0)
        grad_weight = grad_gates.flatten(time, time + 1).mT @ before.flatten(time, time + 1)
        made = grad_gates, grad_weight, grad_h, grad_c
        return (*(value.to(dtype) for value, dtype in zip(made, ctx.dtypes, strict=True)), None)


def cell_step(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden state and cell after one row, [N, H] each: `recurrence` for a row at a time, with gradient.

    A policy that is differentiated through the market takes its rows one by one, because each observation depends on
    the action before it. Plain operations, so that a compiler merges them with those around them; on a CPU the backward
    pass takes a third of the time of oneDNN's for one row.

    All may have a leading dimension of members, each with weights of its own.

    gates:   [N, 4H], what the inputs and the biases give each gate, in the order i, f, g, o
    weight:  [4H, H], recurrent; [4H, 0], with h [N, 0], where the gates have the recurrent product already
    h, c:    [N, H], before the row
    """
    if is_logical(gates) or is_logical(weight):
        shown, after = on_stacked(cell_step, gates, weight, h, c)
        return shown, after
    output: tuple[Tensor, Tensor] = _CellStep.apply(gates, weight, h, c)  # type: ignore[no-untyped-call]
    return output


class CellTrace(NamedTuple):
    """What the backward pass of a cell needs, [N, H] each: its gates, and the tanh of the cell after the row."""

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    shown: Tensor


def cell_values(
    gates: Tensor, c: Tensor, tanh: Callable[[Tensor], Tensor] = torch.tanh
) -> tuple[Tensor, Tensor, CellTrace]:
    """Hidden state and cell after a row from the gates before their non-linearities, [N, 4H], and the cell before."""
    i, f, g, o = gates.chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), tanh(g), o.sigmoid()
    after = f * c + i * g
    shown = tanh(after)
    return o * shown, after, CellTrace(i, f, g, o, shown)


def cell_slopes(grad_h: Tensor, grad_c: Tensor | None, c: Tensor, trace: CellTrace) -> tuple[Tensor, Tensor]:
    """Slopes in the gates before their non-linearities, [N, 4H], and in the cell before the row, [N, H].

    grad_h, grad_c: slopes in the hidden state and in the cell after the row; None: 0.
    """
    i, f, g, o, shown = trace
    through_sigmoid, through_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward
    through_output = through_tanh(grad_h * o, shown)
    grad_c = through_output if grad_c is None else grad_c + through_output
    parts = (
        through_sigmoid(grad_c * g, i),
        through_sigmoid(grad_c * c, f),
        through_tanh(grad_c * i, g),
        through_sigmoid(grad_h * shown, o),
    )
    return torch.cat(parts, dim=-1), grad_c * f


class _CellStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        gates, weight, h, c = inputs
        sums = gates
        if h.shape[-1] > 0:
            add_product = torch.addmm if weight.dim() == 2 else torch.baddbmm
            sums = add_product(gates, h.to(gates.dtype), weight.to(gates.dtype).mT)
        shown, after, trace = cell_values(sums.to(c.dtype), c)
        ctx.save_for_backward(weight, h, c, *trace)
        ctx.dtype = gates.dtype
        return shown.to(gates.dtype), after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, h, c, *trace = ctx.saved_tensors
        _, wants_weight, wants_h, _ = ctx.needs_input_grad
        of_gates, of_c = cell_slopes(gradients[0].to(c.dtype), gradients[1], c, CellTrace(*trace))
        narrow = of_gates.to(ctx.dtype)
        to_weight = (narrow.mT @ h.to(ctx.dtype)).to(weight.dtype) if wants_weight else None
        to_h = (narrow @ weight.to(ctx.dtype)).to(h.dtype) if wants_h else None
        return narrow, to_weight, to_h, of_c


def _forward(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, episode_start: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, cells, and, if requested (else empty), the gates after their non-linearities, [T, N, 4H]."""
    if KERNELS is not None and gates.is_cuda and KERNELS.supports(gates, weight):
        return cast(_Three, KERNELS.forward(gates, weight, h, c, episode_start, keep))
    time = gates.dim() - 3
    product = torch.addmm if time == 0 else torch.baddbmm
    hidden, cells, active = [], [], []
    for row, start in zip(gates.unbind(time), episode_start.unbind(time), strict=True):
        # Filled, not multiplied by 0: a NaN left over from an ended episode must not survive the reset.
        h, c = (part.masked_fill(start.unsqueeze(-1), 0.0) for part in (h, c))
        # The products may be bfloat16; everything on the cell is in its own, wider precision.
        i, f, g, o = product(row, h, weight.mT).to(c.dtype).chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = (o * c.tanh()).to(gates.dtype)
        hidden.append(h)
        cells.append(c)
        if keep:
            active.append(torch.cat((i, f, g, o), dim=-1).to(gates.dtype))
    kept = torch.stack(active, time) if keep else gates.new_empty(0)
    return torch.stack(hidden, time), torch.stack(cells, time), kept


def _backward(
    grad_hidden: Tensor,
    grad_cells: Tensor | None,
    weight: Tensor,
    c: Tensor,
    episode_start: Tensor,
    cells: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates' inputs, [T, N, 4H], and of the state before the first row, [N, H] each."""
    if KERNELS is not None and active.is_cuda and KERNELS.supports(active, weight):
        return cast(_Three, KERNELS.backward(grad_hidden, grad_cells, weight, c, episode_start, cells, active))
    time = active.dim() - 3
    if time:
        made = _backward_rows(
            grad_hidden.movedim(time, 0),
            None if grad_cells is None else grad_cells.movedim(time, 0),
            weight,
            c,
            episode_start.movedim(time, 0),
            cells.movedim(time, 0),
            active.movedim(time, 0),
        )
        return made[0].movedim(0, time), made[1], made[2]
    return _backward_rows(grad_hidden, grad_cells, weight, c, episode_start, cells, active)


def _backward_rows(
    grad_hidden: Tensor,
    grad_cells: Tensor | None,
    weight: Tensor,
    c: Tensor,
    episode_start: Tensor,
    cells: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by plain operations, with the rows of time first."""
    grad_gates = torch.empty_like(active, memory_format=torch.contiguous_format)
    grad_h, grad_c = torch.zeros_like(c), torch.zeros_like(c)
    for t in reversed(range(len(active))):
        start = episode_start[t].unsqueeze(-1)
        before = (cells[t - 1] if t else c).masked_fill(start, 0.0)
        i, f, g, o = active[t].to(c.dtype).chunk(4, dim=-1)
        # A state reaches the loss by its own output and through the next row; the latter is already in grad_h and
        # grad_c.
        grad_h = grad_h + grad_hidden[t]
        if grad_cells is not None:
            grad_c = grad_c + grad_cells[t]
        # Recomputed, to save the memory of one more value per row.
        tanh_c = cells[t].tanh()
        grad_c = grad_c + grad_h * o * (1 - tanh_c * tanh_c)
        # Gradients before the non-linearities, from their outputs: σ' = σ(1 − σ), tanh' = 1 − tanh².
        parts = (
            grad_c * g * i * (1 - i),
            grad_c * before * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * tanh_c * o * (1 - o),
        )
        grad_gates[t] = torch.cat(parts, dim=-1)
        # No gradient crosses the start of an episode, as no state did on the way forward.
        grad_h = (grad_gates[t] @ weight).to(c.dtype).masked_fill(start, 0.0)
        grad_c = (grad_c * f).masked_fill(start, 0.0)
    return grad_gates, grad_h, grad_c
