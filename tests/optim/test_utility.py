"""What the gated optimisers share: gates, perturbation, exact state, learning rates, gradients, figures."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tailguard.errors import ConfigError
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.utility import UtilityOptimizer

KINDS = [UPGD, AdaptiveUPGD, UPGDW]
BEST = 1 - 1 / (1 + math.exp(-1))  # 0.268941: the gate of the most useful weight
WORST = 1 / (1 + math.exp(-1))

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def tensor(values: Sequence[float]) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def gates(weights: Sequence[float], gradients: Sequence[Sequence[float]], **settings: Any) -> Tensor:
    """Gates of the last step, seen from outside: how much of a known perturbation reaches each weight."""
    parameter = tensor(weights)
    settings = {"lr": 1e-8, "weight_decay": 0.0, "sigma": 0.0, "step_factor": 1} | settings
    optimizer = UPGD([parameter], **settings)
    for gradient in gradients[:-1]:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    calm_weight, calm = copy.deepcopy((parameter, optimizer))
    parameter.grad, calm_weight.grad = (torch.tensor(gradients[-1], dtype=torch.float64) for _ in range(2))
    calm.step()
    optimizer.param_groups[0]["sigma"] = 1.0
    optimizer.step()
    noise = torch.randn(len(weights), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ((calm_weight - parameter) / (settings["lr"] * noise)).detach()


# Gates


def test_gates_of_the_hand_worked_step() -> None:
    found = gates([1.0, 2.0, -1.0, 0.5], [[-1.0, 0.5, -1.0, 0.0]], beta_utility=0.0)
    expected = torch.tensor([0.268941, 0.731059, 0.731059, 0.5], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_gates_for_useful_harmful_mixed_and_absent_utilities() -> None:
    def one_step(utilities: Sequence[float]) -> Tensor:
        return gates([1.0] * len(utilities), [[-utility for utility in utilities]])

    def sigmoid(*arguments: float) -> Tensor:
        return torch.tensor([1 / (1 + math.exp(-argument)) for argument in arguments], dtype=torch.float64)

    near = {"atol": 1e-6, "rtol": 0.0}
    torch.testing.assert_close(one_step([4.0, 2.0, 1.0]), sigmoid(-1, -0.5, -0.25), **near)
    torch.testing.assert_close(one_step([2.0, 0.0, -6.0]), sigmoid(-1, 0, 3), **near)
    for without in ([-1.0, -3.0, -2.0], [0.0, 0.0, 0.0], [0.0, -3.0, 0.0], [1e-12, -1.0, 0.0]):
        torch.testing.assert_close(one_step(without), sigmoid(0, 0, 0), **near)
    torch.testing.assert_close(one_step([1e-11, 0.0, -1e-11]), sigmoid(-1, 0, 1), **near)


def test_gates_do_not_depend_on_the_scale_of_the_loss() -> None:
    draw = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = [1.0, -2.0, 0.5, 3.0, -1.0, 0.1]
    for normalisation in ("max", "minmax"):
        found = [gates(weights, (scale * draw).tolist(), normalisation=normalisation) for scale in (1.0, 7.0)]
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)
        assert found[0].max() - found[0].min() > 0.2


@pytest.mark.parametrize("steps", [1, 2, 10, 300])
def test_best_weight_has_its_gate_from_the_first_step(steps: int) -> None:
    found = gates([1.0, 1.0, 1.0], [[-2.0, -1.0, 1.0]] * steps, beta_utility=0.999)
    expected = torch.tensor([BEST, 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-0.5))], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_utility_is_an_average_over_steps() -> None:
    # Two steps at β = 0.5 with utilities 4 then −2 for the first weight: (0.5·0.5·4 + 0.5·(−2)) / 0.75 = 0;
    # the second has 1 throughout.
    found = gates([1.0, 1.0], [[-4.0, -1.0], [2.0, -1.0]], beta_utility=0.5)
    torch.testing.assert_close(found, torch.tensor([0.5, BEST], dtype=torch.float64), atol=1e-5, rtol=0)


def test_minmax_spreads_the_gates_whatever_the_signs() -> None:
    near = {"atol": 1e-6, "rtol": 0.0}
    for shift in (0.0, -10.0, 10.0):
        utilities = [shift + 1.0, shift, shift - 1.0]
        found = gates([1.0] * 3, [[-utility for utility in utilities]], normalisation="minmax")
        torch.testing.assert_close(found, torch.tensor([BEST, 0.5, WORST], dtype=torch.float64), **near)
    outlier = gates([1.0] * 4, [[-0.01, 0.0, -0.02, 5.0]], normalisation="minmax")
    assert outlier[:3].max() - outlier[:3].min() < 0.002  # one weight at −5 leaves the others no spread
    torch.testing.assert_close(outlier[:3], torch.full((3,), BEST, dtype=torch.float64), atol=2e-3, rtol=0)
    equal = gates([1.0] * 3, [[-3.0] * 3], normalisation="minmax")
    torch.testing.assert_close(equal, torch.full((3,), 0.5, dtype=torch.float64), **near)


def test_largest_utility_is_that_of_all_groups() -> None:
    # Utilities 4 in one group and 2 in the other: the second's gate is that of ½, not of 1.
    small, large = tensor([1.0]), tensor([1.0])
    optimizer = UPGD(
        [{"params": [small], "lr": 0.1}, {"params": [large], "lr": 0.01}], sigma=0.0, weight_decay=0.0, step_factor=1
    )
    small.grad, large.grad = torch.tensor([-2.0]).double(), torch.tensor([-4.0]).double()
    optimizer.step()
    assert small.item() == pytest.approx(1 + 0.1 * 2 / (1 + math.exp(0.5)), abs=1e-12)
    assert large.item() == pytest.approx(1 + 0.01 * 4 * BEST, abs=1e-12)


def test_parameters_of_several_precisions_share_the_largest_utility() -> None:
    half, full = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = UPGD([half, full], lr=0.5, sigma=0.0, weight_decay=0.0, step_factor=1, beta_utility=0.5)
    for _ in range(3):
        with torch.no_grad():
            half.fill_(1.0), full.fill_(1.0)
        half.grad, full.grad = -torch.ones_like(half), -2 * torch.ones_like(full)
        optimizer.step()
    assert full.item() == pytest.approx(1 + 0.5 * 2 * BEST, abs=1e-12)
    assert half[0].item() == pytest.approx(1 + 0.5 / (1 + math.exp(0.5)), rel=2**-8)


# Perturbation


@EVERY_KIND
def test_perturbation_is_normal_with_sd_sigma_times_gate(kind: type[UtilityOptimizer]) -> None:
    # Utilities 1, 0 and −2 in three blocks.
    block, blocks = 50_000, torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    gradient = -blocks.repeat_interleave(block)
    weight, calm = (nn.Parameter(torch.ones(3 * block, dtype=torch.float64)) for _ in range(2))
    for parameter, sigma in ((weight, 0.7), (calm, 0.0)):
        parameter.grad = gradient.clone()
        kind([parameter], lr=0.1, sigma=sigma, weight_decay=0.0, seed=3).step()
    shaken = (weight - calm).detach().view(3, block) / (2 * 0.1 * 0.7)
    for row, utility in zip(shaken, blocks.tolist(), strict=True):
        gate = 1 / (1 + math.exp(utility))
        assert row.mean().item() == pytest.approx(0, abs=4 * gate / math.sqrt(block))
        assert row.std().item() == pytest.approx(gate, rel=4 / math.sqrt(2 * block))
        assert stats.kstest(row.numpy() / gate, "norm").pvalue > 1e-3
    assert abs(torch.corrcoef(shaken)[0, 1].item()) < 4 / math.sqrt(block)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> Tensor:
    """A few steps of regression on fresh data; the weights afterwards."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 5, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def small_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))


@EVERY_KIND
def test_seed_fixes_the_course_and_leaves_torchs_stream_alone(kind: type[UtilityOptimizer]) -> None:
    before = torch.get_rng_state()
    ends = []
    for seed in (1, 1, 2):
        model = small_network()
        ends.append(train(model, kind(model.parameters(), sigma=0.1, seed=seed), 20))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    assert torch.equal(before, torch.get_rng_state())


# Saving


@EVERY_KIND
def test_saved_and_loaded_it_goes_on_bit_for_bit(kind: type[UtilityOptimizer]) -> None:
    settings = {"sigma": 0.1, "beta_utility": 0.9, "normalisation": "minmax"}
    model = small_network()
    optimizer = kind(model.parameters(), lr=0.01, seed=4, **settings)
    train(model, optimizer, 10)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    uninterrupted = train(model, optimizer, 10, seed=1)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model = small_network(seed=7)
    resumed = kind(resumed_model.parameters(), lr=0.5, seed=99)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(train(resumed_model, resumed, 10, seed=1), uninterrupted)


def test_loading_takes_a_copy() -> None:
    donor_model, receiver_model = small_network(), small_network()
    donor, receiver = (UPGD(model.parameters()) for model in (donor_model, receiver_model))
    train(donor_model, donor, 3)
    before = copy.deepcopy(donor.state_dict())
    receiver.load_state_dict(donor.state_dict())
    train(receiver_model, receiver, 3)
    after = donor.state_dict()
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][name], value) for name, value in state.items())
    assert torch.equal(before["generators"]["cpu"], after["generators"]["cpu"])


def test_state_saved_before_the_first_step_carries_the_seed() -> None:
    ends = []
    for reload in (False, True):
        model = small_network()
        optimizer = UPGD(model.parameters(), sigma=0.1, seed=1)
        if reload:
            other = UPGD(model.parameters(), sigma=0.1, seed=2)
            other.load_state_dict(optimizer.state_dict())
            optimizer = other
        ends.append(train(model, optimizer, 3))
    assert torch.equal(ends[0], ends[1])


def test_foreign_states_are_refused_and_other_devices_announced() -> None:
    model = small_network()
    optimizer = UPGD(model.parameters(), seed=3)
    with pytest.raises(ConfigError, match="not saved by a UPGD"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    elsewhere = optimizer.state_dict()
    elsewhere["generators"] = {"cuda:0": elsewhere["generators"]["cpu"]}
    with pytest.warns(UserWarning, match=r"drawn on cuda:0 .* on cpu restart from seed 3"):
        optimizer.load_state_dict(elsewhere)


@EVERY_KIND
def test_a_deep_copy_goes_its_own_way(kind: type[UtilityOptimizer]) -> None:
    model = small_network()
    optimizer = kind(model.parameters(), sigma=0.1, seed=8)
    train(model, optimizer, 5)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert torch.equal(train(model, optimizer, 5, seed=1), train(twin, twin_optimizer, 5, seed=1))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    train(twin, twin_optimizer, 1)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


# Learning rates, gradients, closures


@EVERY_KIND
def test_tensor_learning_rate_can_be_refilled(kind: type[UtilityOptimizer]) -> None:
    plain_model, tensor_model = small_network().double(), small_network().double()
    rate = torch.tensor(0.1, dtype=torch.float64)
    plain, tensored = kind(plain_model.parameters(), lr=0.1), kind(tensor_model.parameters(), lr=rate)
    for value in (0.1, 0.03, 0.0, 0.2):
        plain.param_groups[0]["lr"] = value
        rate.fill_(value)
        for model, optimizer in ((plain_model, plain), (tensor_model, tensored)):
            for parameter in model.parameters():
                parameter.grad = torch.cos(7 * parameter.detach())
            optimizer.step()
    for ours, theirs in zip(tensor_model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_drive_the_learning_rate(as_tensor: bool) -> None:
    weight = tensor([1.0])
    optimizer = UPGD([weight], lr=torch.tensor(0.1) if as_tensor else 0.1, sigma=0.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    moves = []
    for _ in range(3):
        before = weight.item()
        weight.grad = torch.ones_like(weight)  # utility −w: the gate is 0.5
        optimizer.step()
        scheduler.step()
        moves.append(before - weight.item())
    assert moves == pytest.approx([0.1, 0.05, 0.025], rel=1e-6)


@EVERY_KIND
def test_a_parameter_without_gradient_is_left_alone(kind: type[UtilityOptimizer]) -> None:
    present, absent, empty = tensor([1.0]), tensor([5.0]), tensor([])
    optimizer = kind([present, absent, empty], lr=0.1, sigma=0.5, weight_decay=0.5)
    absent.grad = torch.tensor([-50.0]).double()
    optimizer.step()
    state = copy.deepcopy(optimizer.state[absent])
    value, moved = absent.item(), present.item()
    assert moved == 1.0
    assert not optimizer.state[present]
    absent.grad, present.grad, empty.grad = None, torch.tensor([-1.0]).double(), torch.zeros_like(empty)
    optimizer.param_groups[0] |= {"sigma": 0.0, "weight_decay": 0.0}
    optimizer.step()
    assert absent.item() == value
    assert all(torch.equal(optimizer.state[absent][name], kept) for name, kept in state.items())
    assert optimizer.state[present]["step"].item() == 1
    # Its utility of 250 does not hide that the other is the most useful of those that move.
    direction = 1 if kind is UPGD else 1 / (1 + optimizer.param_groups[0]["eps"])
    assert present.item() == pytest.approx(1 + 2 * 0.1 * BEST * direction, rel=1e-12)


@EVERY_KIND
def test_sparse_gradients_count_as_their_dense_form(kind: type[UtilityOptimizer]) -> None:
    ends = []
    for sparse in (False, True):
        table = nn.Embedding(6, 3, sparse=sparse, _weight=torch.arange(18.0).view(6, 3) / 10 - 0.7)
        optimizer = kind(table.parameters(), lr=0.1, sigma=0.01, seed=1)
        for rows in ([0, 2, 2], [5, 1, 0], [3, 3, 3]):
            optimizer.zero_grad()
            table(torch.tensor(rows)).square().sum().backward()
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse == sparse
            optimizer.step()
        ends.append(table.weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    weight = tensor([3.0])
    optimizer = UPGD([weight], lr=0.1, sigma=0.0, weight_decay=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert weight.item() == pytest.approx(3 - 0.1 * 6)
    assert optimizer.step() is None


def test_a_step_without_any_gradient_does_nothing() -> None:
    weight = tensor([3.0])
    optimizer = UPGD([weight])
    assert optimizer.step() is None
    assert weight.item() == 3.0
    assert optimizer.metrics() == {}


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (UPGD, {"lr": -1.0}, "lr: -1 is out of range"),
        (UPGD, {"lr": torch.zeros(2)}, r"lr: a torch.float32 tensor of shape \(2,\)"),
        (UPGD, {"weight_decay": -0.1}, "weight_decay: -0.1 is out of range"),
        (UPGD, {"sigma": -0.1}, "sigma: -0.1 is out of range"),
        (UPGD, {"beta_utility": 1.0}, "beta_utility: 1 is out of range"),
        (UPGD, {"normalisation": "softmax"}, "normalisation: 'softmax' is not one of max, minmax"),
        (UPGD, {"step_factor": 3}, "step_factor: 3 is neither 1 nor 2"),
        (UPGD, {"seed": -1}, "seed: -1 is out of range"),
        (AdaptiveUPGD, {"betas": (0.9, 1.0)}, r"betas\[1\]: 1 is out of range"),
        (UPGDW, {"eps": 0.0}, "eps: 0 is out of range"),
    ],
)
def test_impossible_settings_are_named(kind: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind([tensor([1.0])], **settings)


def test_settings_of_a_group_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="sigma: -1 is out of range"):
        UPGD([{"params": [tensor([1.0])], "sigma": -1.0}])
    with pytest.raises(ConfigError, match=r"a parameter is torch\.complex64"):
        UPGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


# On the device


class NoLooking(TorchDispatchMode):
    """Fails at any operation that brings a tensor's value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.equal.default,
            torch.ops.aten.nonzero.default,
        ), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@EVERY_KIND
@pytest.mark.parametrize("normalisation", ["max", "minmax"])
def test_a_step_and_its_figures_never_look_at_a_value(kind: type[UtilityOptimizer], normalisation: str) -> None:
    model = small_network()
    optimizer = kind(model.parameters(), lr=torch.tensor(0.01), normalisation=normalisation)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with NoLooking():
        optimizer.step()
        optimizer.step()
        metrics = optimizer.metrics()
    assert all(value.ndim == 0 for value in metrics.values())
    with pytest.raises(AssertionError, match="waits for the device"), NoLooking():
        float(metrics["upgd/gate_p50"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EVERY_KIND
def test_a_recorded_step_replays_as_eager_steps(kind: type[UtilityOptimizer]) -> None:
    def build() -> tuple[nn.Parameter, Tensor, UtilityOptimizer]:
        weight = nn.Parameter(torch.linspace(-1, 1, 4_000, device="cuda"))
        weight.grad = torch.sin(5 * weight.detach())
        rate = torch.tensor(0.1, device="cuda")
        return weight, rate, kind([weight], lr=rate, sigma=0.1, beta_utility=0.9)

    eager, eager_rate, eager_optimizer = build()
    recorded, rate, optimizer = build()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    for generator in optimizer.generators.values():
        graph.register_generator_state(generator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            optimizer.step()
        eager_optimizer.step()
        for value in (0.1, 0.03, 0.2):
            rate.fill_(value), eager_rate.fill_(value)
            graph.replay()
            eager_optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(recorded, eager, rtol=1e-6, atol=1e-7)


# Figures


def test_figures_of_the_hand_worked_step() -> None:
    weight = tensor([1.0, 2.0, -1.0, 0.5])
    optimizer = UPGD([weight], lr=0.1, sigma=0.25, beta_utility=0.0)
    weight.grad = torch.tensor([-1.0, 0.5, -1.0, 0.0], dtype=torch.float64)
    optimizer.step()
    optimizer.zero_grad()
    metrics = {name: value.item() for name, value in optimizer.metrics().items()}
    noise = 0.25 * math.sqrt(BEST**2 + 2 * WORST**2 + 0.25)
    signal = math.sqrt(BEST**2 + (0.5 * WORST) ** 2 + WORST**2)
    assert metrics == pytest.approx(
        {
            "upgd/gate_p05": BEST,
            "upgd/gate_p50": WORST,
            "upgd/gate_p95": WORST,
            "upgd/saturated_share": 0.0,
            "upgd/noise_to_step": noise / signal,
        },
        rel=1e-6,
    )


@EVERY_KIND
def test_figures_agree_with_numpy_over_groups(kind: type[UtilityOptimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (nn.Parameter(torch.randn(size, generator=generator)) for size in (301, 700))
    optimizer = kind([{"params": [first], "sigma": 0.5}, {"params": [second], "sigma": 0.1}], lr=0.0, weight_decay=0.0)
    utilities = torch.randn(1001, generator=generator) - 2.5
    first.grad, second.grad = (
        -part / weight.detach() for part, weight in zip(utilities.split([301, 700]), (first, second), strict=True)
    )
    optimizer.step()
    found = {name: value.item() for name, value in optimizer.metrics().items()}
    gate = torch.sigmoid(-utilities / utilities.max())
    for rank in (5, 50, 95):
        assert found[f"upgd/gate_p{rank:02d}"] == pytest.approx(
            torch.quantile(gate, rank / 100, interpolation="nearest").item(), rel=1e-4
        )
    share = ((gate < 0.05) | (gate > 0.95)).float().mean().item()
    assert share > 0.01
    assert found["upgd/saturated_share"] == pytest.approx(share, abs=0.0021)
    raw = torch.cat([first.grad, second.grad])
    direction = raw if kind is UPGD else raw / (raw.abs() + optimizer.param_groups[0]["eps"])
    sigma = torch.cat([torch.full((301,), 0.5), torch.full((700,), 0.1)])
    ratio = (sigma * gate).norm() / (direction * gate).norm()
    assert found["upgd/noise_to_step"] == pytest.approx(ratio.item(), rel=1e-4)


def test_figures_stay_defined_without_signal_or_noise() -> None:
    weight = tensor([1.0])
    optimizer = UPGD([weight], sigma=0.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.metrics()["upgd/noise_to_step"].item() == 0
    optimizer.param_groups[0]["sigma"] = 0.1
    assert optimizer.metrics()["upgd/noise_to_step"].item() > 1e6
