from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.models.memory import FUSED_STEP_SIZE, LSTMMemory, MemoryState, NoMemory

INPUT, HIDDEN = 5, 6


def _random_memory(seed: int, layers: int = 1, dtype: torch.dtype = torch.float64) -> LSTMMemory:
    """Weights of order one, so that states and gradients of every path are far from zero."""
    torch.manual_seed(seed)
    memory = LSTMMemory(INPUT, HIDDEN, layers)
    for parameter in memory.parameters():
        nn.init.uniform_(parameter, -0.8, 0.8)
    return memory.to(dtype)


def _random_state(memory: LSTMMemory, n: int) -> MemoryState:
    return tuple(torch.randn_like(part) for part in memory.initial_state(n))


def _stepwise(memory: LSTMMemory, x: Tensor, state: MemoryState, start: Tensor) -> tuple[Tensor, MemoryState]:
    outputs = []
    for t in range(x.shape[0]):
        y, state = memory.step(x[t], state, start[t])
        outputs.append(y)
    return torch.stack(outputs), state


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _numpy_lstm(memory: LSTMMemory, x: Tensor, state: MemoryState, start: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The textbook recurrence, one environment, one layer and one row at a time -> (outputs, last cells)."""
    steps, envs, _ = x.shape
    h, c = (part.numpy().copy() for part in state)
    output = np.empty((steps, envs, memory.output_size))
    for t in range(steps):
        for n in range(envs):
            if start[t, n]:
                h[:, n], c[:, n] = 0.0, 0.0
            signal = x[t, n].numpy()
            for layer, cell in enumerate(memory.cells):
                w_ih, w_hh, b_ih, b_hh = (weight.detach().numpy() for weight in cell.parameters())
                i, f, g, o = np.split(w_ih @ signal + b_ih + w_hh @ h[layer, n] + b_hh, 4)
                c[layer, n] = _sigmoid(f) * c[layer, n] + _sigmoid(i) * np.tanh(g)
                h[layer, n] = signal = _sigmoid(o) * np.tanh(c[layer, n])
            output[t, n] = signal
    return output, c


def _scattered_starts(steps: int, envs: int, probability: float) -> Tensor:
    return torch.rand(steps, envs) < probability


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 12),
    envs=st.integers(1, 4),
    layers=st.sampled_from([1, 2]),
    probability=st.sampled_from([0.0, 0.03, 0.1, 0.5, 1.0]),
)
def test_every_path_equals_the_textbook_recurrence(
    seed: int, steps: int, envs: int, layers: int, probability: float
) -> None:
    memory = _random_memory(seed, layers)
    x, state = torch.randn(steps, envs, INPUT, dtype=torch.float64), _random_state(memory, envs)
    start = _scattered_starts(steps, envs, probability)
    expected, expected_c = _numpy_lstm(memory, x, state, start)

    with torch.no_grad():
        paths = [_stepwise(memory, x, state, start), memory.sequence(x, state, start)]
        paths.append(memory.sequence(x, state, start, inner_resets=True))
        if not start[1:].any():
            paths.append(memory.sequence(x, state, start, inner_resets=False))
    for y, (h, c) in paths:
        np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(c.numpy(), expected_c, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(h[-1].numpy(), y[-1].numpy())


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("envs", [1, 64, 300])
def test_acting_and_learning_agree_in_float32(envs: int, layers: int) -> None:
    torch.manual_seed(envs)
    memory = LSTMMemory(64, 64, layers)
    x, state = torch.randn(64, envs, 64), _random_state(memory, envs)
    start = torch.zeros(64, envs, dtype=torch.bool)
    start[0, ::2] = True
    start[20, envs // 2] = True
    with torch.no_grad():
        y_step, (h_step, c_step) = _stepwise(memory, x, state, start)
        y, (h, c) = memory.sequence(x, state, start)
    assert (y - y_step).abs().max() < 2e-6
    assert (h - h_step).abs().max() < 2e-6
    assert (c - c_step).abs().max() < 5e-6  # cells are several units wide


@pytest.mark.parametrize("envs", [7, FUSED_STEP_SIZE])
def test_a_start_clears_its_own_environment_and_leaves_the_others_bitwise_alone(envs: int) -> None:
    memory = _random_memory(0, layers=2, dtype=torch.float32)
    x, state = torch.randn(envs, INPUT), _random_state(memory, envs)
    nobody = torch.zeros(envs, dtype=torch.bool)
    some = nobody.clone()
    some[[1, 4]] = True
    with torch.no_grad():
        y_kept, kept = memory.step(x, state, nobody)
        y, after = memory.step(x, state, some)
        y_fresh, fresh = memory.step(x, memory.initial_state(envs), nobody)
    assert torch.equal(y[~some], y_kept[~some])
    assert torch.equal(y[some], y_fresh[some])
    for part, part_kept, part_fresh in zip(after, kept, fresh, strict=True):
        assert torch.equal(part[:, ~some], part_kept[:, ~some])
        assert torch.equal(part[:, some], part_fresh[:, some])
    assert (y - y_kept)[some].abs().min() > 1e-4


def test_the_given_state_is_not_written_to() -> None:
    memory = _random_memory(0)
    x, state, start = torch.randn(4, 3, INPUT).double(), _random_state(memory, 3), torch.ones(4, 3, dtype=torch.bool)
    before = tuple(part.clone() for part in state)
    for inner_resets in (None, True, False):
        memory.sequence(x, state, start, inner_resets)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("envs", [3, FUSED_STEP_SIZE])
def test_a_step_from_a_given_state_is_the_step_and_its_slope_in_the_input(envs: int, layers: int) -> None:
    """Also where episodes start; the state itself gets no gradient."""
    memory = _random_memory(6, layers)
    x, start = torch.randn(envs, INPUT, dtype=torch.float64), torch.arange(envs) % 3 == 0
    state = _random_state(memory, envs)
    prepared = memory.given(state, start)
    found = []
    for before in (state, prepared):
        seen = x.clone().requires_grad_()
        y, after = memory.step(seen, before, start)
        with torch.no_grad():
            plain, _ = memory.step(x, before, start)
        (slope,) = torch.autograd.grad(y.square().sum(), seen)
        found.append((y, *after, slope, plain))
    assert found[0][-2].abs().max() > 1e-3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-10)
    assert not prepared[-1].requires_grad


def test_a_nan_does_not_outlive_its_episode() -> None:
    memory = _random_memory(0)
    state = _random_state(memory, 2)
    for part in state:
        part[:, 1] = torch.nan
    start = torch.tensor([[False, True], [False, False]])
    for inner_resets in (None, True, False):
        y, after = memory.sequence(torch.randn(2, 2, INPUT).double(), state, start, inner_resets)
        assert torch.isfinite(y).all()
        assert all(torch.isfinite(part).all() for part in after)


@pytest.mark.parametrize("layers", [1, 2])
def test_gradients_agree_between_all_paths(layers: int) -> None:
    memory = _random_memory(3, layers)
    x, state = torch.randn(9, 4, INPUT).double(), _random_state(memory, 4)
    start = torch.zeros(9, 4, dtype=torch.bool)
    start[0, 1] = start[3, 0] = start[6, 2] = start[6, 3] = True
    direction = torch.randn(9, 4, HIDDEN).double()

    def gradients(inner_resets: bool | None) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), *(part.clone().requires_grad_() for part in state)]
        y, (_, c) = memory.sequence(leaves[0], tuple(leaves[1:]), start, inner_resets)
        return list(torch.autograd.grad((y * direction).sum() + c.sum(), [*leaves, *memory.parameters()]))

    for chunked, stepped in zip(gradients(None), gradients(True), strict=True):
        torch.testing.assert_close(chunked, stepped, rtol=0, atol=1e-10)
        assert chunked.abs().max() > 1e-3


@pytest.mark.parametrize("inner_resets", [None, True])
def test_gradient_never_crosses_a_start_and_always_flows_within_an_episode(inner_resets: bool | None) -> None:
    memory = _random_memory(4)
    steps, reset = 6, 3
    x = torch.randn(steps, 2, INPUT).double().requires_grad_()
    state = tuple(part.requires_grad_() for part in _random_state(memory, 2))
    start = torch.zeros(steps, 2, dtype=torch.bool)
    start[reset, 0] = True  # environment 1 goes on

    y, _ = memory.sequence(x, state, start, inner_resets)
    for t in range(steps):
        for env in range(2):
            dx, dh, dc = torch.autograd.grad(y[t, env].sum(), [x, *state], retain_graph=True)
            for s in range(steps):
                reaches = s <= t and not (env == 0 and s < reset <= t)
                assert (dx[s, env].abs().max() > 0) == reaches, (t, s, env)
            for d in (dh, dc):
                assert (d[:, env].abs().max() > 0) == (not (env == 0 and t >= reset))
            assert not dx[:, 1 - env].any()


def test_an_environment_alone_equals_the_same_among_many() -> None:
    memory = _random_memory(5, layers=2)
    x, state = torch.randn(10, 8, INPUT).double(), _random_state(memory, 8)
    start = _scattered_starts(10, 8, 0.1)
    y, (h, c) = memory.sequence(x, state, start)
    for n in range(8):
        one = slice(n, n + 1)
        y_one, (h_one, c_one) = memory.sequence(x[:, one], tuple(part[:, one] for part in state), start[:, one])
        torch.testing.assert_close(y_one, y[:, one], rtol=0, atol=1e-13)
        torch.testing.assert_close(h_one, h[:, one], rtol=0, atol=1e-13)
        torch.testing.assert_close(c_one, c[:, one], rtol=0, atol=1e-13)


def test_a_step_of_one_equals_a_step_of_many() -> None:
    memory = _random_memory(5, layers=2)
    x, state = torch.randn(FUSED_STEP_SIZE, INPUT).double(), _random_state(memory, FUSED_STEP_SIZE)
    start = _scattered_starts(1, FUSED_STEP_SIZE, 0.3)[0]
    y, after = memory.step(x, state, start)
    for n in range(0, FUSED_STEP_SIZE, 17):
        one = slice(n, n + 1)
        y_one, after_one = memory.step(x[one], tuple(part[:, one] for part in state), start[one])
        torch.testing.assert_close(y_one, y[one], rtol=0, atol=1e-13)
        for part_one, part in zip(after_one, after, strict=True):
            torch.testing.assert_close(part_one, part[:, one], rtol=0, atol=1e-13)


def test_a_segment_in_two_halves_equals_the_whole() -> None:
    memory = _random_memory(6)
    x, state, start = torch.randn(8, 3, INPUT).double(), _random_state(memory, 3), _scattered_starts(8, 3, 0.2)
    y, last = memory.sequence(x, state, start)
    y_a, middle = memory.sequence(x[:5], state, start[:5])
    y_b, last_b = memory.sequence(x[5:], middle, start[5:])
    torch.testing.assert_close(torch.cat((y_a, y_b)), y, rtol=0, atol=1e-13)
    torch.testing.assert_close(last_b, last, rtol=0, atol=1e-13)


def _running_sum(scale: float) -> LSTMMemory:
    """All gates open and a nearly linear candidate: the cell adds up scale·x, and the output is scale·sum."""
    memory = LSTMMemory(1, 1).double()
    w_ih, w_hh, b_ih, b_hh = memory.cells[0].parameters()
    with torch.no_grad():
        for parameter in (w_ih, w_hh, b_ih, b_hh):
            parameter.zero_()
        b_ih.copy_(torch.tensor([50.0, 50.0, 0.0, 50.0]))
        w_ih[2, 0] = scale
    return memory


def test_a_running_sum_bootstraps_with_15_then_starts_afresh() -> None:
    """Observations 1, 2, 4 and final observation 8, fed once from the state after the last step, make 15; a state
    from before that step makes 11, feeding the final observation twice 23, a cleared state 8."""
    scale = 1e-4
    memory = _running_sum(scale)
    no, yes = torch.tensor([False]), torch.tensor([True])

    def feed(value: float, state: MemoryState, start: Tensor) -> tuple[float, MemoryState]:
        y, after = memory.step(torch.tensor([[value]], dtype=torch.float64), state, start)
        return y.item() / scale, after

    state = memory.initial_state(1)
    for value, total in ((1.0, 1.0), (2.0, 3.0), (4.0, 7.0)):
        v, state = feed(value, state, no)
        assert v == pytest.approx(total, abs=1e-4)
    bootstrap, _ = feed(8.0, state, no)
    assert bootstrap == pytest.approx(15.0, abs=1e-4)
    v, _ = feed(5.0, state, yes)
    assert v == pytest.approx(5.0, abs=1e-4)

    x = torch.tensor([1.0, 2.0, 4.0, 5.0, 6.0], dtype=torch.float64).view(5, 1, 1)
    start = torch.tensor([True, False, False, True, False]).view(5, 1)
    y, _ = memory.sequence(x, memory.initial_state(1), start)
    np.testing.assert_allclose(y.flatten().detach().numpy() / scale, [1, 3, 7, 5, 11], atol=1e-4)


def test_gates_start_orthogonal_and_the_forget_gate_open() -> None:
    torch.manual_seed(0)
    memory = LSTMMemory(4, 8, layers=2, forget_bias=1.0)
    for layer, cell in enumerate(memory.cells):
        w_ih, w_hh, b_ih, b_hh = cell.parameters()
        for gate in w_hh.chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8), rtol=0, atol=1e-5)
        for gate in w_ih.chunk(4):
            torch.testing.assert_close(gate.T @ gate, torch.eye(4 if layer == 0 else 8), rtol=0, atol=1e-5)
        assert (b_ih + b_hh).tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16


def test_autocast_changes_little_and_acting_still_agrees_with_learning() -> None:
    torch.manual_seed(0)
    memory = LSTMMemory(INPUT, HIDDEN, layers=2)
    x, state, start = torch.randn(6, 2, INPUT), memory.initial_state(2), _scattered_starts(6, 2, 0.2)
    with torch.no_grad():
        y_exact, _ = memory.sequence(x, state, start)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_step, after_step = _stepwise(memory, x, state, start)
            y, after = memory.sequence(x, state, start)
    assert torch.equal(y, y_step)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(after, after_step, strict=True))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), y_exact, rtol=0, atol=0.02)
    assert (y.float() - y_exact).abs().max() > 1e-4  # it did compute in bfloat16


def test_autocast_does_not_round_away_what_the_cell_adds_up() -> None:
    """600 times 0.01 is 6; a bfloat16 cell stops growing where its last digit is worth more than twice the addend."""
    memory = _running_sum(1.0).float()
    x, start = torch.full((600, 1, 1), 0.01), torch.zeros(600, 1, dtype=torch.bool)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, (_, c) = memory.sequence(x, memory.initial_state(1), start)
    assert c.item() == pytest.approx(6.0, rel=2e-3)


def test_autocast_does_not_round_a_slow_forgetting() -> None:
    """A forget gate of 0.998 keeps 0.998^500 = 0.37 after 500 steps; bfloat16 has nothing between 0.996 and 1."""
    memory = _running_sum(0.0).float()
    with torch.no_grad():
        memory.cells[0].bias_ih[1] = math.log(0.998 / 0.002)
    x, start = torch.zeros(500, 1, 1), torch.zeros(500, 1, dtype=torch.bool)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, (_, c) = memory.sequence(x, tuple(torch.ones_like(part) for part in memory.initial_state(1)), start)
    assert c.item() == pytest.approx(0.998**500, rel=0.02)


def test_a_step_and_a_segment_with_resets_are_traced_as_one_graph() -> None:
    memory = _random_memory(0, layers=2)
    x, state, start = torch.randn(3, 2, INPUT).double(), _random_state(memory, 2), _scattered_starts(3, 2, 0.5)
    step = torch.compile(memory.step, backend="eager", fullgraph=True)
    segment = torch.compile(lambda *inputs: memory.sequence(*inputs, True), backend="eager", fullgraph=True)
    assert torch.equal(step(x[0], state, start[0])[0], memory.step(x[0], state, start[0])[0])
    assert torch.equal(segment(x, state, start)[0], memory.sequence(x, state, start, True)[0])


def test_no_memory_gives_back_what_it_gets() -> None:
    memory = NoMemory(INPUT)
    x, start = torch.randn(4, 3, INPUT), torch.ones(4, 3, dtype=torch.bool)
    assert memory.output_size == INPUT
    assert memory.initial_state(3) == ()
    y, state = memory.sequence(x, (), start)
    assert torch.equal(y, x)
    assert state == ()
    y, state = memory.step(x[0], (), start[0])
    assert torch.equal(y, x[0])
    assert state == ()
    assert not list(memory.parameters())


@pytest.mark.parametrize(("hidden_size", "layers"), [(0, 1), (8, 0)])
def test_an_impossible_size_is_refused(hidden_size: int, layers: int) -> None:
    with pytest.raises(ConfigError, match=f"{layers} layers of {hidden_size} units"):
        LSTMMemory(4, hidden_size, layers)
