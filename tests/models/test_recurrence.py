"""The LSTM recurrence with its own backward pass, against automatic differentiation of PyTorch's cell."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailguard.models.recurrence import cell_step, recurrence

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""gates [T, N, 4H], weight [4H, H], h and c [N, H], episode_start [T, N]."""


def random_inputs(
    seed: int, steps: int = 5, envs: int = 3, hidden: int = 4, starts: float = 0.3, dtype: torch.dtype = torch.float64
) -> Inputs:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=dtype)

    inputs = normal(steps, envs, 4 * hidden), normal(4 * hidden, hidden), normal(envs, hidden), normal(envs, hidden)
    return *inputs, torch.rand(steps, envs, generator=draw) < starts


def cell_by_cell(gates: Tensor, weight: Tensor, h: Tensor, c: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.lstm_cell`, which computes its gates itself: an input weight of one lets it read them."""
    identity = torch.eye(gates.shape[-1], dtype=gates.dtype)
    hidden, cells = [], []
    for row, begins in zip(gates, start, strict=True):
        h, c = (torch.where(begins[:, None], 0.0, part) for part in (h, c))
        h, c = torch.lstm_cell(row, (h, c), identity, weight)
        hidden.append(h)
        cells.append(c)
    return torch.stack(hidden), torch.stack(cells)


def gradients(outputs: tuple[Tensor, Tensor], wanted: list[Tensor], which: str, seed: int = 1) -> tuple[Tensor, ...]:
    """Of a random linear function of the hidden states, of the cells, or of both."""
    draw = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for name, output in zip(("hidden", "cells"), outputs, strict=True):
        weights = torch.randn(output.shape, generator=draw, dtype=torch.float64)
        if which in (name, "both"):
            total = total + (weights * output).sum()
    return torch.autograd.grad(total, wanted)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 9),
    envs=st.integers(1, 5),
    hidden=st.integers(1, 7),
    starts=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    which=st.sampled_from(["hidden", "cells", "both"]),
)
def test_values_and_gradients_are_those_of_the_cell(
    seed: int, steps: int, envs: int, hidden: int, starts: float, which: str
) -> None:
    *values, start = random_inputs(seed, steps, envs, hidden, starts)
    wanted = [value.requires_grad_() for value in values]
    ours, theirs = recurrence(*values, start), cell_by_cell(*values, start)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    pairs = zip(gradients(ours, wanted, which), gradients(theirs, wanted, which), strict=True)
    for name, (found, expected) in zip(("gates", "weight", "h", "c"), pairs, strict=True):
        assert float((found - expected).abs().max()) <= 1e-11 * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize("starts", [0.0, 0.4])
def test_the_gradient_is_that_of_finite_differences(starts: float) -> None:
    *values, start = random_inputs(3, steps=4, envs=2, hidden=3, starts=starts)
    wanted = [value.requires_grad_() for value in values]
    assert torch.autograd.gradcheck(lambda *inputs: recurrence(*inputs, start), wanted)


@pytest.mark.parametrize("which", ["hidden", "cells", "both"])
def test_a_row_at_a_time_is_the_segment(which: str) -> None:
    """`cell_step`, row by row, has the values and the gradients of automatic differentiation of the cell."""
    gates, weight, h, c, start = random_inputs(11, steps=6, starts=0.0)
    wanted = [value.requires_grad_() for value in (gates, weight, h, c)]
    hidden, cells, state = [], [], (h, c)
    for row in gates:
        state = cell_step(row, weight, *state)
        hidden.append(state[0])
        cells.append(state[1])
    ours, theirs = (torch.stack(hidden), torch.stack(cells)), cell_by_cell(gates, weight, h, c, start)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for found, expected in zip(gradients(ours, wanted, which), gradients(theirs, wanted, which), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_the_gradient_of_a_row_is_that_of_finite_differences() -> None:
    gates, weight, h, c, _ = random_inputs(4, steps=1, envs=3, hidden=3)
    assert torch.autograd.gradcheck(cell_step, [part.requires_grad_() for part in (gates[0], weight, h, c)])


def test_a_row_of_bfloat16_gates_keeps_its_cell_in_float32() -> None:
    gates, weight, h, c, _ = random_inputs(4, steps=1, dtype=torch.float32)
    parts = gates[0].bfloat16().requires_grad_(), weight.requires_grad_(), h.requires_grad_(), c.requires_grad_()
    hidden, cell = cell_step(*parts)
    assert (hidden.dtype, cell.dtype) == (torch.bfloat16, torch.float32)
    found = torch.autograd.grad(hidden.float().sum() + cell.sum(), parts)
    assert [one.dtype for one in found] == [part.dtype for part in parts]


def test_rows_of_several_members_are_rows_of_each() -> None:
    """With a leading dimension every member has its own weights, forward and backward."""
    draw = torch.Generator().manual_seed(0)
    shapes = (3, 2, 16), (3, 16, 4), (3, 2, 4), (3, 2, 4)
    gates, weight, h, c = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    inputs = [part.requires_grad_() for part in (gates, weight, h, c)]
    together = cell_step(*inputs)
    slopes = torch.autograd.grad(sum(part.square().sum() for part in together), inputs)
    for member in range(3):
        own = [part[member].detach().requires_grad_() for part in inputs]
        alone = cell_step(*own)
        for found, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(found[member], expected, rtol=0, atol=1e-14)
        own_slopes = torch.autograd.grad(sum(part.square().sum() for part in alone), own)
        for found, expected in zip(slopes, own_slopes, strict=True):
            torch.testing.assert_close(found[member], expected, rtol=0, atol=1e-13)


def test_nothing_passes_a_start_in_either_direction() -> None:
    """What comes before has a gradient of exactly 0 from what comes after, and a NaN stays where it was."""
    gates, weight, h, c, start = random_inputs(0, steps=6, starts=0.0)
    start[3, 1] = True
    gates.requires_grad_()
    hidden, _ = recurrence(gates, weight, h, c, start)
    (found,) = torch.autograd.grad(hidden[3:].sum(), gates)
    assert not found[:3, 1].any()
    assert (found[:3, 0] != 0).any()
    spoiled = gates.detach().clone()
    spoiled[1, 1] = torch.nan
    again, cells = recurrence(spoiled, weight, h, c, start)
    bad = again.isnan().any(-1)
    assert bad[1:3, 1].all()
    bad[1:3, 1] = False
    assert not bad.any()
    assert torch.equal(again[3:], hidden[3:].detach())
    assert cells[3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_a_gradient_the_numbers_are_the_same(dtype: torch.dtype) -> None:
    gates, weight, h, c, start = random_inputs(5, steps=7, envs=4, hidden=6, dtype=torch.float32)
    inputs = gates.to(dtype), weight, h, c.double() if dtype == torch.float64 else c, start
    with_gradient = recurrence(inputs[0].clone().requires_grad_(), *inputs[1:])
    with torch.no_grad():
        without = recurrence(*inputs)
    assert with_gradient[0].requires_grad
    for found, expected in zip(without, with_gradient, strict=True):
        assert not found.requires_grad
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_bfloat16_gates_keep_cells_in_float32() -> None:
    """Products and hidden states have 8 bits, a relative 2⁻⁹ of rounding each; the cells add up in 24.

    Eight roundings of hidden states within ±1 pass through weights of length 1: the cells stay within 0.03, hidden
    states and gradients of order one within 0.05 of those in float64.
    """
    draw = torch.Generator().manual_seed(0)
    steps, envs, hidden = 16, 6, 32
    gates = torch.randn(steps, envs, 4 * hidden, generator=draw).bfloat16()
    weight = torch.randn(4 * hidden, hidden, generator=draw) / hidden**0.5
    h, c = (torch.randn(envs, hidden, generator=draw).clamp(-1, 1) for _ in range(2))
    start = torch.rand(steps, envs, generator=draw) < 0.1
    narrow = [value.clone().requires_grad_() for value in (gates, weight, h, c)]
    exact = [value.double().requires_grad_() for value in (gates, weight, h, c)]
    ours, theirs = recurrence(*narrow, start), recurrence(*exact, start)
    assert (ours[0].dtype, ours[1].dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=0, atol=0.02)
    torch.testing.assert_close(ours[1].double(), theirs[1], rtol=0, atol=0.03)
    assert (ours[1].detach() - ours[1].detach().bfloat16()).abs().max() > 1e-3  # they do hold more than 8 bits
    found, expected = gradients(ours, narrow, "both"), gradients(theirs, exact, "both")
    for mine, given_, true in zip(found, narrow, expected, strict=True):
        assert mine.dtype == given_.dtype
        assert float((mine.double() - true).norm() / true.norm()) < 0.02


def test_a_cell_adds_up_what_bfloat16_could_not() -> None:
    """600 times 0.01 with all gates open is 6; a sum of 8 bits stands still at 4, where its digits are 2⁻⁵ apart."""
    gates = torch.tensor([30.0, 30.0, 0.01, 30.0]).bfloat16().expand(600, 1, 4)
    nothing = torch.zeros(1, 1)
    _, cells = recurrence(gates, torch.zeros(4, 1), nothing, nothing, torch.zeros(600, 1, dtype=torch.bool))
    assert float(cells[-1]) == pytest.approx(6.0, rel=2e-3)


# --- Triton's kernels, in its interpreter ---------------------------------------------------------------------------

INTERPRETED = """
import sys
import torch
from tailguard.models import recurrence as module
from tailguard.models import recurrence_kernels as kernels

dtype, fused, steps, envs, hidden = getattr(torch, sys.argv[1]), sys.argv[2] == "fused", *map(int, sys.argv[3:6])
kernels._fuses = lambda dtype, hidden: fused

draw = torch.Generator().manual_seed(0)
gates = torch.randn(steps, envs, 4 * hidden, generator=draw).to(dtype)
weight = torch.randn(4 * hidden, hidden, generator=draw) / hidden**0.5
h, c = (torch.randn(envs, hidden, generator=draw) for _ in range(2))
start = torch.rand(steps, envs, generator=draw) < 0.2
narrow = weight.to(dtype), h.to(dtype)
of_hidden = torch.randn(steps, envs, hidden, generator=draw).to(dtype)
of_cells = torch.randn(steps, envs, hidden, generator=draw)

expected = module._forward(gates, *narrow, c, start, keep=True)
found = kernels.forward(gates, *narrow, c, start, True)
pairs = list(zip(("hidden", "cells", "active"), found, expected, strict=True))
bare = kernels.forward(gates, *narrow, c, start, False)
pairs += list(zip(("hidden alone", "cells alone"), bare[:2], expected[:2], strict=True))
for name, given in (("both", of_cells), ("hidden only", None)):
    mine = kernels.backward(of_hidden, given, narrow[0], c, start, expected[1], expected[2])
    true = module._backward(of_hidden, given, narrow[0], c, start, expected[1], expected[2])
    pairs += list(zip((f"gates, {name}", f"h, {name}", f"c, {name}"), mine, true, strict=True))
bound = 2e-6 if dtype == torch.float32 else 4e-3
for name, mine, true in pairs:
    assert mine.dtype == true.dtype, name
    gap = float((mine.double() - true.double()).abs().max() / true.double().abs().max())
    print(f"{name}: {gap:.1e}")
    assert gap < bound, (name, gap)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("dtype", "way", "steps", "envs", "hidden"),
    [
        ("float32", "pointwise", 5, 70, 32),  # 2,240 places in blocks of 1,024: the last one is not full
        ("float32", "pointwise", 1, 3, 5),
        ("float16", "fused", 5, 70, 32),  # two blocks of 64 environments; bfloat16 itself the interpreter cannot
        ("float16", "pointwise", 3, 9, 24),
    ],
)
def test_the_kernels_compute_what_the_loop_computes(dtype: str, way: str, steps: int, envs: int, hidden: int) -> None:
    """In Triton's interpreter, which needs no GPU: float32 to rounding, float16 within twice its 2⁻¹¹ a step."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERPRETED), dtype, way, str(steps), str(envs), str(hidden)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("starts", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "hidden", "bound"),
    [
        (torch.float32, 32, 1e-4),
        (torch.float32, 200, 1e-4),
        (torch.bfloat16, 16, 0.02),
        (torch.bfloat16, 128, 0.02),
        (torch.bfloat16, 200, 0.02),  # beyond the fused kernels
    ],
)
def test_a_gpu_computes_what_the_loop_computes_in_float64(
    dtype: torch.dtype, hidden: int, bound: float, starts: float
) -> None:
    """Values and gradients on the GPU, relative to their norms; 70 environments do not fill the last block."""
    gates, weight, h, c, start = random_inputs(0, steps=12, envs=70, hidden=hidden, starts=starts, dtype=torch.float32)
    values = gates.to(dtype), weight / hidden**0.5, h, c
    exact = [value.double().requires_grad_() for value in values]
    narrow = [value.cuda().requires_grad_() for value in values]
    expected = recurrence(*exact, start)
    found = recurrence(*narrow, start.cuda())
    pairs = list(zip(found, expected, strict=True))
    pairs += zip(
        gradients((found[0].cpu(), found[1].cpu()), narrow, "both"), gradients(expected, exact, "both"), strict=True
    )
    for mine, true in pairs:
        assert float((mine.cpu().double() - true).norm() / true.norm()) < bound
    with torch.no_grad():
        bare = recurrence(*narrow, start.cuda())
    assert all(torch.equal(one, other) for one, other in zip(bare, found, strict=True))
