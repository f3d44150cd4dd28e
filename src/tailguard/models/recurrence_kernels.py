"""GPU kernels of the LSTM recurrence, in Triton.

In bfloat16 and up to `FUSED_SIZE` units a whole segment is one kernel: a block of environments stays on one
multiprocessor from the first row to the last, its state in registers, and only inputs and results are transferred.
Otherwise every row is a product and one pointwise kernel.
"""

# Triton's language is not typed; what crosses into Python is.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, name-defined, index, operator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSED_SIZE = 128
"""Most units that the fused kernels support: larger recurrent weights do not fit on a multiprocessor."""
FORWARD = {"BLOCK": 64, "num_warps": 16, "num_stages": 1}
BACKWARD = {"BLOCK": 32, "num_warps": 8, "num_stages": 2}
"""Environments in a block, warps that work on it, and stages of loading the weights: the fastest on an H200."""
POINTWISE_BLOCK = 1024


def _fuses(dtype: torch.dtype, hidden: int) -> bool:
    # tl.dot needs blocks of powers of two, at least 16 wide; 128 units in float32 (256 KiB of weights) do not fit.
    return dtype == torch.bfloat16 and 16 <= hidden <= FUSED_SIZE and hidden & (hidden - 1) == 0


def supports(gates: Tensor, weight: Tensor) -> bool:
    """Whether there are kernels for these: for one learner always, for members of a population the fused ones."""
    return gates.dim() == 3 or _fuses(gates.dtype, weight.shape[-1])


def forward(
    gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, episode_start: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `tailguard.models.recurrence._forward`; members have a leading axis, and are the grid's second."""
    members = gates.shape[0] if gates.dim() == 4 else 1
    steps, rows, width = gates.shape[-3:]
    size = width // 4
    gates, h, c, episode_start = (part.contiguous() for part in (gates, h, c, episode_start))
    hidden = gates.new_empty(*gates.shape[:-1], size)
    cells = c.new_empty(*gates.shape[:-1], size)
    active = torch.empty_like(gates) if keep else gates.new_empty(0)
    if _fuses(gates.dtype, size):
        _fused_forward[(triton.cdiv(rows, FORWARD["BLOCK"]), members)](
            gates, weight.mT.contiguous(), h, c, episode_start, hidden, cells, active, rows, steps,
            KEEP=keep, H=size, **FORWARD,
        )  # fmt: skip
        return hidden, cells, active
    grid = (triton.cdiv(rows * size, POINTWISE_BLOCK),)
    kept = active
    transposed = weight.t()
    for t in range(steps):
        before = h.masked_fill(episode_start[t, :, None], 0.0)
        pre = torch.addmm(gates[t], before, transposed)
        if keep:
            kept = active[t]
        _cell_forward[grid](
            pre, c, episode_start[t], hidden[t], cells[t], kept, rows * size,
            KEEP=keep, H=size, BLOCK=POINTWISE_BLOCK,
        )  # fmt: skip
        h, c = hidden[t], cells[t]
    return hidden, cells, active


def backward(
    grad_hidden: Tensor,
    grad_cells: Tensor | None,
    weight: Tensor,
    c: Tensor,
    episode_start: Tensor,
    cells: Tensor,
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `tailguard.models.recurrence._backward`; members as in `forward`."""
    members = active.shape[0] if active.dim() == 4 else 1
    steps, rows, width = active.shape[-3:]
    size = width // 4
    grad_hidden, c, episode_start, weight = (part.contiguous() for part in (grad_hidden, c, episode_start, weight))
    grad_gates = torch.empty_like(active)
    grad_h, grad_c = torch.zeros_like(c), torch.zeros_like(c)
    # Triton needs a pointer in any case; with HAS_CELLS false its loads are compiled away.
    seen = cells if grad_cells is None else grad_cells.contiguous()
    if _fuses(active.dtype, size):
        _fused_backward[(triton.cdiv(rows, BACKWARD["BLOCK"]), members)](
            grad_hidden, seen, weight, c, episode_start, cells, active, grad_gates, grad_h, grad_c, rows, steps,
            HAS_CELLS=grad_cells is not None, H=size, **BACKWARD,
        )  # fmt: skip
        return grad_gates, grad_h, grad_c
    grid = (triton.cdiv(rows * size, POINTWISE_BLOCK),)
    for t in reversed(range(steps)):
        _cell_backward[grid](
            grad_hidden[t], seen[t], cells[t - 1] if t else c, episode_start[t], cells[t], active[t], grad_gates[t],
            grad_h, grad_c, rows * size,
            HAS_CELLS=grad_cells is not None, H=size, BLOCK=POINTWISE_BLOCK,
        )  # fmt: skip
        grad_h = (grad_gates[t] @ weight).masked_fill_(episode_start[t, :, None], 0.0).to(c.dtype)
    return grad_gates, grad_h, grad_c


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _fused_forward(
    gates, weight, h0, c0, episode_start, hidden, cells, active, rows, steps,
    KEEP: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight: transposed, [H, 4H]. The grid: blocks of rows, members."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    member = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, BLOCK)
    inside = first + number < rows
    there = inside[:, None]
    unit = tl.arange(0, H)
    # Offsets inside a block fit 32 bits; the start of a block needs 64.
    state = number[:, None] * H + unit[None, :]
    gate = number[:, None] * (4 * H) + unit[None, :]
    w = weight + member * (4 * H * H) + unit[:, None] * (4 * H) + unit[None, :]
    narrow = h0.dtype.element_ty
    # h and c stay in registers over all steps: a row depends on no other row, so programs never wait for each other.
    own = (member * rows + first) * H + state
    h = tl.load(h0 + own, mask=there, other=0.0)
    c = tl.load(c0 + own, mask=there, other=0.0)
    for t in range(steps):
        at = (member * steps + t) * rows + first
        given = gates + at * (4 * H) + gate
        # The state is cleared before a row that starts an episode, as in eager mode.
        continues = tl.load(episode_start + at + number, mask=inside, other=1)[:, None] == 0
        h = tl.where(continues, h, 0.0).to(narrow)
        # PyTorch's order of gates in memory is i, f, g, o. Input and candidate come first, because their product frees
        # the registers of both before the other two gates are computed.
        i = tl.sigmoid(tl.dot(h, tl.load(w)) + tl.load(given, mask=there, other=0.0))
        g = _tanh(tl.dot(h, tl.load(w + 2 * H)) + tl.load(given + 2 * H, mask=there, other=0.0))
        if KEEP:
            kept = active + at * (4 * H) + gate
            tl.store(kept, i, mask=there)
            tl.store(kept + 2 * H, g, mask=there)
        fresh = i * g
        f = tl.sigmoid(tl.dot(h, tl.load(w + H)) + tl.load(given + H, mask=there, other=0.0))
        if KEEP:
            tl.store(kept + H, f, mask=there)
        c = f * tl.where(continues, c, 0.0) + fresh
        o = tl.sigmoid(tl.dot(h, tl.load(w + 3 * H)) + tl.load(given + 3 * H, mask=there, other=0.0))
        if KEEP:
            tl.store(kept + 3 * H, o, mask=there)
        h = (o * _tanh(c)).to(narrow)
        tl.store(hidden + at * H + state, h, mask=there)
        tl.store(cells + at * H + state, c, mask=there)


@triton.jit
def _fused_backward(
    grad_hidden, grad_cells, weight, c0, episode_start, cells, active, grad_gates, grad_h0, grad_c0, rows, steps,
    HAS_CELLS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight: as it is, [4H, H]. A gate's gradient goes into the product at once, because registers are scarce."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    member = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, BLOCK)
    inside = first + number < rows
    there = inside[:, None]
    unit = tl.arange(0, H)
    state = number[:, None] * H + unit[None, :]
    gate = number[:, None] * (4 * H) + unit[None, :]
    w = weight + member * (4 * H * H) + unit[:, None] * H + unit[None, :]
    own = (member * rows + first) * H + state
    narrow = active.dtype.element_ty
    grad_h = tl.zeros((BLOCK, H), tl.float32)
    grad_c = tl.zeros((BLOCK, H), tl.float32)
    for back in range(steps):
        t = steps - 1 - back
        at = (member * steps + t) * rows + first
        continues = tl.load(episode_start + at + number, mask=inside, other=1)[:, None] == 0
        kept = active + at * (4 * H) + gate
        made = grad_gates + at * (4 * H) + gate
        grad_h += tl.load(grad_hidden + at * H + state, mask=there, other=0.0).to(tl.float32)
        if HAS_CELLS:
            grad_c += tl.load(grad_cells + at * H + state, mask=there, other=0.0).to(tl.float32)

        # h = o·tanh(c): the output gate first, because its product begins the gradient of the state before.
        o = tl.load(kept + 3 * H, mask=there, other=0.0).to(tl.float32)
        tanh_c = _tanh(tl.load(cells + at * H + state, mask=there, other=0.0))
        grad_c += grad_h * o * (1 - tanh_c * tanh_c)
        part = (grad_h * tanh_c * o * (1 - o)).to(narrow)
        tl.store(made + 3 * H, part, mask=there)
        grad_h = tl.dot(part, tl.load(w + 3 * H * H))

        # c = f·c_before + i·g. Sigmoid and tanh give their slopes from their outputs: s(1 − s) and 1 − t².
        i = tl.load(kept, mask=there, other=0.0).to(tl.float32)
        g = tl.load(kept + 2 * H, mask=there, other=0.0).to(tl.float32)
        part = (grad_c * g * i * (1 - i)).to(narrow)
        tl.store(made, part, mask=there)
        grad_h = tl.dot(part, tl.load(w), acc=grad_h)
        part = (grad_c * i * (1 - g * g)).to(narrow)
        tl.store(made + 2 * H, part, mask=there)
        grad_h = tl.dot(part, tl.load(w + 2 * H * H), acc=grad_h)

        if t > 0:
            before = tl.load(cells + (at - rows) * H + state, mask=there, other=0.0)
        else:
            before = tl.load(c0 + own, mask=there, other=0.0)
        f = tl.load(kept + H, mask=there, other=0.0).to(tl.float32)
        part = (grad_c * tl.where(continues, before, 0.0) * f * (1 - f)).to(narrow)
        tl.store(made + H, part, mask=there)
        grad_h = tl.dot(part, tl.load(w + H * H), acc=grad_h)

        # Nothing goes back over an episode's start.
        grad_c = tl.where(continues, grad_c * f, 0.0)
        grad_h = tl.where(continues, grad_h, 0.0)
    tl.store(grad_h0 + own, grad_h, mask=there)
    tl.store(grad_c0 + own, grad_c, mask=there)


@triton.jit
def _cell_forward(
    pre, c, episode_start, hidden, cells, active, total, KEEP: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    """One row, pointwise: pre [N, 4H] holds the gates' inputs."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    row = place // H
    gate = row * (4 * H) + place % H
    continues = tl.load(episode_start + row, mask=there, other=1) == 0
    wide = c.dtype.element_ty
    i = tl.sigmoid(tl.load(pre + gate, mask=there, other=0.0).to(wide))
    f = tl.sigmoid(tl.load(pre + gate + H, mask=there, other=0.0).to(wide))
    g = _tanh(tl.load(pre + gate + 2 * H, mask=there, other=0.0).to(wide))
    o = tl.sigmoid(tl.load(pre + gate + 3 * H, mask=there, other=0.0).to(wide))
    before = tl.where(continues, tl.load(c + place, mask=there, other=0.0), 0.0)
    after = f * before + i * g
    tl.store(cells + place, after, mask=there)
    tl.store(hidden + place, o * _tanh(after), mask=there)
    if KEEP:
        tl.store(active + gate, i, mask=there)
        tl.store(active + gate + H, f, mask=there)
        tl.store(active + gate + 2 * H, g, mask=there)
        tl.store(active + gate + 3 * H, o, mask=there)


@triton.jit
def _cell_backward(
    grad_hidden, grad_cells, c, episode_start, cells, active, grad_gates, grad_h, grad_c, total,
    HAS_CELLS: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, pointwise; the running gradient of the cells, [N, H], is moved in place."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < total
    row = place // H
    gate = row * (4 * H) + place % H
    continues = tl.load(episode_start + row, mask=there, other=1) == 0
    wide = c.dtype.element_ty
    i = tl.load(active + gate, mask=there, other=0.0).to(wide)
    f = tl.load(active + gate + H, mask=there, other=0.0).to(wide)
    g = tl.load(active + gate + 2 * H, mask=there, other=0.0).to(wide)
    o = tl.load(active + gate + 3 * H, mask=there, other=0.0).to(wide)
    before = tl.where(continues, tl.load(c + place, mask=there, other=0.0), 0.0)
    tanh_c = _tanh(tl.load(cells + place, mask=there, other=0.0))
    from_h = tl.load(grad_h + place, mask=there, other=0.0)
    from_h += tl.load(grad_hidden + place, mask=there, other=0.0).to(wide)
    from_c = tl.load(grad_c + place, mask=there, other=0.0)
    if HAS_CELLS:
        from_c += tl.load(grad_cells + place, mask=there, other=0.0).to(wide)
    from_c += from_h * o * (1 - tanh_c * tanh_c)
    tl.store(grad_gates + gate, from_c * g * i * (1 - i), mask=there)
    tl.store(grad_gates + gate + H, from_c * before * f * (1 - f), mask=there)
    tl.store(grad_gates + gate + 2 * H, from_c * i * (1 - g * g), mask=there)
    tl.store(grad_gates + gate + 3 * H, from_h * tanh_c * o * (1 - o), mask=there)
    tl.store(grad_c + place, tl.where(continues, from_c * f, 0.0), mask=there)
