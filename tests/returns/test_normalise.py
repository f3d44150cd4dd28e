"""Running statistics against NumPy on all data at once; advantages free of rounding noise; PopArt keeps raw outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.returns import RunningMoments, normalise_advantages, popart_rescale, rescale_moments


def double(values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Running moments
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_batches_add_up_to_the_moments_of_all_data(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    batches = [random.normal(random.normal(scale=5), random.uniform(0.1, 3), (size, 3)) for size in sizes]
    moments = RunningMoments((3,))
    for batch in batches:
        moments.update(torch.as_tensor(batch))
    data = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean.numpy(), data.mean(0), rtol=1e-12, atol=1e-12)
    if len(data) > 1:
        np.testing.assert_allclose(moments.std.numpy(), data.std(0), rtol=1e-12)
    assert moments.count.item() == len(data)


def test_the_order_of_batches_does_not_matter_and_leading_dimensions_are_rows() -> None:
    batches = [torch.randn(7, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    forward, backward = RunningMoments((2,)), RunningMoments((2,))
    for batch in batches:
        forward.update(batch)
    for batch in reversed(batches):
        backward.update(batch.flatten(0, 1))
    torch.testing.assert_close(forward.mean, backward.mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(forward.std, backward.std, rtol=1e-12, atol=0)


@pytest.mark.parametrize("poison", [1e30, math.nan, math.inf])
def test_masked_rows_do_not_count(poison: float) -> None:
    random = np.random.default_rng(0)
    data, mask = random.normal(size=(6, 5, 2)), random.random((6, 5)) < 0.6
    moments = RunningMoments((2,))
    moments.update(torch.as_tensor(np.where(mask[..., None], data, poison)), torch.as_tensor(mask))
    np.testing.assert_allclose(moments.mean.numpy(), data[mask].mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std.numpy(), data[mask].std(0), rtol=1e-12)
    assert moments.count.item() == mask.sum()


def test_a_wholly_masked_batch_changes_nothing() -> None:
    moments = RunningMoments()
    nothing = torch.full((4,), math.nan), torch.zeros(4, dtype=torch.bool)
    moments.update(*nothing)
    assert (moments.count.item(), moments.mean.item(), moments.std.item()) == (0.0, 0.0, 1.0)
    moments.update(torch.tensor([1.0, 3.0]))
    moments.update(*nothing)
    assert (moments.count.item(), moments.mean.item(), moments.std.item()) == (2.0, 2.0, 1.0)


def test_a_huge_offset_costs_no_accuracy() -> None:
    """1e8 plus noise of sd 100, in many small batches; E[x²] − E[x]² would keep four digits of the variance."""
    data = 1e8 + 100 * np.random.default_rng(1).standard_normal(20_000)
    moments = RunningMoments()
    for batch in np.split(data, 200):
        moments.update(torch.as_tensor(batch))
    deviations = data - 1e8  # exact in float64
    assert moments.mean.item() - 1e8 == pytest.approx(deviations.mean(), abs=1e-7)
    assert moments.std.item() == pytest.approx(deviations.std(), rel=1e-9)
    scaled = moments.normalise(torch.as_tensor(data)).numpy()
    np.testing.assert_allclose(scaled, (deviations - deviations.mean()) / deviations.std(), atol=1e-8)


def test_decay_weights_batches_by_their_age_without_start_up_bias() -> None:
    decay, random = 0.9, np.random.default_rng(2)
    batches = [random.normal(i, 1 + i, size) for i, size in enumerate((5, 9, 3, 7))]
    moments = RunningMoments(decay=decay)
    for seen, batch in enumerate(batches, start=1):
        moments.update(torch.as_tensor(batch))
        data = np.concatenate(batches[:seen])
        weights = np.concatenate([np.full(len(b), decay ** (seen - 1 - i)) for i, b in enumerate(batches[:seen])])
        mean = np.average(data, weights=weights)
        assert moments.mean.item() == pytest.approx(mean, rel=1e-12)
        assert moments.std.item() == pytest.approx(
            math.sqrt(np.average((data - mean) ** 2, weights=weights)), rel=1e-12
        )


def test_decay_follows_a_level_change_where_the_cumulative_mean_does_not() -> None:
    """500 batches at 0, then 10 at 1: the cumulative mean is 10/510, the decayed one (1 − d^10)/(1 − d^510)."""
    cumulative, decayed = RunningMoments(), RunningMoments(decay=0.9)
    for level in [0.0] * 500 + [1.0] * 10:
        cumulative.update(torch.full((8,), level))
        decayed.update(torch.full((8,), level))
    assert cumulative.mean.item() == pytest.approx(10 / 510, rel=1e-12)
    assert decayed.mean.item() == pytest.approx((1 - 0.9**10) / (1 - 0.9**510), rel=1e-12)


def test_normalise_clips_denormalise_inverts_and_the_dtype_stays() -> None:
    moments = RunningMoments((2,))
    moments.update(torch.tensor([[0.0, 10.0], [4.0, 30.0]]))  # means 2, 20; standard deviations 2, 10
    x = torch.tensor([[6.0, 15.0], [-100.0, 20.0]])
    assert moments.normalise(x).tolist() == [[2.0, -0.5], [-51.0, 0.0]]
    assert moments.normalise(x, clip=1.5).tolist() == [[1.5, -0.5], [-1.5, 0.0]]
    assert moments.normalise(x).dtype == torch.float32
    torch.testing.assert_close(moments.denormalise(moments.normalise(x)), x)


def test_normalise_is_the_identity_before_the_first_update() -> None:
    x = torch.tensor([-3.0, 0.25, 1e6])
    assert torch.equal(RunningMoments().normalise(x), x)


def test_a_constant_feature_is_centred_not_amplified() -> None:
    """float32 rounding around 0.1 is no signal: with a floor of 1e-8 it would come out of order one."""
    moments = RunningMoments()
    wobble = torch.tensor([0.1, 0.1 + 2**-27]).repeat(1000)
    moments.update(wobble)
    assert moments.std.item() == 1.0
    assert moments.normalise(wobble).abs().max().item() < 1e-8


def test_change_reports_the_old_and_new_statistics_and_the_drift() -> None:
    moments = RunningMoments()
    first = moments.update(torch.tensor([0.0, 4.0]))  # mean 2, standard deviation 2
    assert (first.mean_shift.item(), first.std_ratio.item()) == (0.0, 1.0)
    assert (first.old_mean.item(), first.old_std.item(), first.new_mean.item(), first.new_std.item()) == (0, 1, 2, 2)
    second = moments.update(torch.tensor([0.0, 0.0, 12.0, 12.0]))  # all six: mean 14/3, mean square 304/6
    std = math.sqrt(304 / 6 - (14 / 3) ** 2)
    assert second.mean_shift.item() == pytest.approx((14 / 3 - 2) / 2)
    assert second.std_ratio.item() == pytest.approx(std / 2)
    moments.update(torch.tensor([100.0]))
    assert second.new_mean.item() == pytest.approx(14 / 3)


def test_a_saved_state_goes_on_exactly_and_keeps_the_storage() -> None:
    batches = [torch.randn(9, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    original, restored = RunningMoments((3,), decay=0.8), RunningMoments((3,), decay=0.8)
    for batch in batches[:2]:
        original.update(batch)
    addresses = [tensor.data_ptr() for tensor in (restored.mean, restored.std)]
    state = original.state_dict()
    original.update(batches[2])
    restored.load_state_dict(state)
    restored.update(batches[2])
    assert [tensor.data_ptr() for tensor in (restored.mean, restored.std)] == addresses
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, restored.state_dict()[name])
    assert torch.equal(original.std, restored.std)


def test_unusable_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"decay 1\.5 .* outside \(0, 1\]"):
        RunningMoments(decay=1.5)
    with pytest.raises(ConfigError, match=r"saved mean has shape \(2,\), this agent needs \(3,\)"):
        RunningMoments((3,)).load_state_dict(RunningMoments((2,)).state_dict())
    with pytest.raises(ConfigError, match="'pear' is unknown"):
        normalise_advantages(torch.zeros(3), mode="pear")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match=r"needs advantages \[T, N\], got shape \(3,\)"):
        normalise_advantages(torch.zeros(3), mode="per_env")


# ---------------------------------------------------------------------------------------------------------------------
# Advantages
# ---------------------------------------------------------------------------------------------------------------------


def random_advantages(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_global_mode_standardises_with_the_sample_standard_deviation() -> None:
    advantages = 3 + 2 * random_advantages(16, 8)
    normalised, degenerate = normalise_advantages(advantages)
    expected = (advantages.numpy() - advantages.numpy().mean()) / advantages.numpy().std(ddof=1)
    np.testing.assert_allclose(normalised.numpy(), expected, rtol=0, atol=1e-12)
    assert degenerate.shape == ()
    assert not degenerate


@pytest.mark.parametrize("mode", ["global", "per_env"])
def test_constant_advantages_become_exact_zeros_with_a_flag(mode: str) -> None:
    normalised, degenerate = normalise_advantages(torch.full((2048, 1), 0.1), mode=mode)
    assert torch.equal(normalised, torch.zeros(2048, 1))
    assert degenerate.all()


@pytest.mark.parametrize(("scale", "shift"), [(1e-5, 0.0), (1e-5, 3e-4), (1e6, -2e7), (1e-9, 0.0)])
def test_the_scale_and_offset_of_rewards_do_not_matter(scale: float, shift: float) -> None:
    advantages = random_advantages(64, 4)
    plain, _ = normalise_advantages(advantages)
    moved, degenerate = normalise_advantages(scale * advantages + shift)
    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-9)
    assert not degenerate


def test_per_env_equalises_environments_and_global_keeps_their_ratio() -> None:
    shape = random_advantages(64, 1)
    advantages = torch.cat([shape, 10 * shape], dim=1)
    whole, _ = normalise_advantages(advantages, mode="global")
    single, degenerate = normalise_advantages(advantages, mode="per_env")
    assert (whole.std(0)[1] / whole.std(0)[0]).item() == pytest.approx(10.0, rel=1e-12)
    np.testing.assert_allclose(single.std(0).numpy(), [1.0, 1.0], rtol=1e-12)
    assert degenerate.tolist() == [False, False]


def test_per_env_flags_only_the_environment_without_signal() -> None:
    advantages = random_advantages(32, 3)
    advantages[:, 1] = 7.0
    normalised, degenerate = normalise_advantages(advantages, mode="per_env")
    assert degenerate.tolist() == [False, True, False]
    assert torch.equal(normalised[:, 1], torch.zeros(32, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["global", "per_env", "off"])
@pytest.mark.parametrize("poison", [1e30, math.nan, math.inf])
def test_invalid_entries_influence_nothing_and_come_back_as_zeros(mode: str, poison: float) -> None:
    advantages = random_advantages(20, 3)
    valid = torch.ones(20, 3, dtype=torch.bool)
    valid[15:] = False
    expected, _ = normalise_advantages(advantages[:15], mode=mode)
    normalised, _ = normalise_advantages(torch.where(valid, advantages, poison), valid, mode)
    torch.testing.assert_close(normalised[:15], expected, rtol=0, atol=1e-14)
    assert torch.equal(normalised[15:], torch.zeros(5, 3, dtype=torch.float64))


def test_a_single_valid_entry_is_returned_as_it_is() -> None:
    advantages = torch.tensor([[4.0, 5.0], [math.nan, 6.0]])
    valid = torch.tensor([[True, False], [False, False]])
    for mode in ("global", "per_env"):
        normalised, degenerate = normalise_advantages(advantages, valid, mode)
        assert normalised.tolist() == [[4.0, 0.0], [0.0, 0.0]]
        assert not degenerate.any()


def test_a_nan_among_valid_advantages_is_not_hidden() -> None:
    advantages = torch.tensor([1.0, math.nan, 2.0])
    normalised, _ = normalise_advantages(advantages)
    assert normalised.isnan().all()


def test_off_leaves_advantages_alone() -> None:
    advantages = random_advantages(5, 2)
    normalised, degenerate = normalise_advantages(advantages, mode="off")
    assert torch.equal(normalised, advantages)
    assert not degenerate


def test_inputs_stay_untouched() -> None:
    data, valid = random_advantages(6, 2), torch.rand(6, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    copy = data.clone()
    for mode in ("global", "per_env", "off"):
        normalise_advantages(data, valid, mode)
    RunningMoments().update(data, valid)
    assert torch.equal(data, copy)


def test_no_value_is_read_on_the_host() -> None:
    """Meta tensors have no data: any branch on a value would raise."""
    for mode in ("global", "per_env", "off"):
        normalise_advantages(torch.zeros(4, 2, device="meta"), torch.ones(4, 2, device="meta") > 0, mode)
    moments = RunningMoments((2,), device="meta")
    change = moments.update(torch.zeros(4, 3, 2, device="meta"), torch.ones(4, 3, device="meta") > 0)
    moments.normalise(torch.zeros(4, 2, device="meta"), clip=10.0)
    weight, bias = torch.zeros(5, 3, device="meta"), torch.zeros(5, device="meta")
    scale = change.old_std[0], change.new_std[0]
    popart_rescale(weight, bias, change.old_mean[0], scale[0], change.new_mean[0], scale[1])
    rescale_moments({"exp_avg": weight}, *scale, loss_degree=2)


# ---------------------------------------------------------------------------------------------------------------------
# PopArt
# ---------------------------------------------------------------------------------------------------------------------

OLD_MEAN, OLD_STD, NEW_MEAN, NEW_STD = double(0.4), double(1.3), double(-2.0), double(5.2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_raw_predictions_survive_a_change_of_statistics(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 51, dtype=dtype)
    features = torch.randn(32, 16, dtype=dtype)
    old_output = head(features)
    before = old_output.double() * OLD_STD + OLD_MEAN
    popart_rescale(head.weight, head.bias, OLD_MEAN, OLD_STD, NEW_MEAN, NEW_STD)
    after = head(features).double() * NEW_STD + NEW_MEAN
    assert (after - before).abs().max().item() <= tolerance * before.abs().max().item()
    # Without the rescale the same head would say something else altogether.
    assert (old_output * NEW_STD + NEW_MEAN - before).abs().max().item() > 1.0


def test_statistics_fed_by_returns_keep_predictions_through_many_updates() -> None:
    torch.manual_seed(1)
    head, features, returns = nn.Linear(8, 5), torch.randn(10, 8), RunningMoments(decay=0.7)
    before = returns.denormalise(head(features))
    for rollout in range(20):
        change = returns.update(torch.randn(256) * 2.0 ** (rollout % 5) + rollout)
        popart_rescale(head.weight, head.bias, change.old_mean, change.old_std, change.new_mean, change.new_std)
    assert returns.std.item() > 2.0
    torch.testing.assert_close(returns.denormalise(head(features)), before, rtol=0, atol=2e-5)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target[:, None]).square().mean()


def pinball(output: Tensor, target: Tensor) -> Tensor:
    levels = (torch.arange(output.shape[1], dtype=output.dtype) + 0.5) / output.shape[1]
    residual = target[:, None] - output
    return (residual * (levels - (residual < 0).to(output.dtype))).mean()


@pytest.mark.parametrize(("loss", "degree"), [(squared_error, 2), (pinball, 1)])
def test_rescaled_moments_are_those_of_a_past_spent_in_the_new_units(loss: object, degree: int) -> None:
    """A head is trained with Adam in old units; its twin lives through the same raw predictions in new units.

    After the change of units the first head must hold the twin's moments and take the twin's next step.
    """
    assert callable(loss)
    torch.manual_seed(2)
    head = nn.Linear(6, 4, dtype=torch.float64)
    twin = nn.Linear(6, 4, dtype=torch.float64)
    units = OLD_MEAN, OLD_STD, NEW_MEAN, NEW_STD
    optimiser, twin_optimiser = (torch.optim.Adam(module.parameters(), lr=0.05) for module in (head, twin))

    def learn(module: nn.Linear, adam: torch.optim.Adam, mean: Tensor, std: Tensor, step: int) -> None:
        random = torch.Generator().manual_seed(step)
        features = torch.randn(32, 6, dtype=torch.float64, generator=random)
        raw_returns = 1.0 + 2.0 * torch.randn(32, dtype=torch.float64, generator=random)
        adam.zero_grad()
        loss(module(features), (raw_returns - mean) / std).backward()
        adam.step()

    for step in range(12):
        twin.load_state_dict(head.state_dict())
        popart_rescale(twin.weight, twin.bias, *units)
        learn(twin, twin_optimiser, NEW_MEAN, NEW_STD, step)
        learn(head, optimiser, OLD_MEAN, OLD_STD, step)

    popart_rescale(head.weight, head.bias, *units)
    for parameter in head.parameters():
        rescale_moments(optimiser.state[parameter], OLD_STD, NEW_STD, degree)
    for mine, its in zip(head.parameters(), twin.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimiser.state[mine][name], twin_optimiser.state[its][name], rtol=1e-11, atol=0)
    twin.load_state_dict(head.state_dict())
    learn(twin, twin_optimiser, NEW_MEAN, NEW_STD, 12)
    learn(head, optimiser, NEW_MEAN, NEW_STD, 12)
    for mine, its in zip(head.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-12)


# --- numbers that are not finite, and state that is not known --------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_do_not_count(bad: float) -> None:
    rows = torch.tensor([[1.0, 2.0], [bad, 7.0], [3.0, 6.0]])
    moments, expected = RunningMoments((2,)), RunningMoments((2,))
    moments.update(rows)
    expected.update(rows[[0, 2]])
    for name, value in expected.state_dict().items():
        assert torch.equal(moments.state_dict()[name], value)
    single = RunningMoments(())
    single.update(torch.tensor([1.0, bad, 3.0]), torch.tensor([True, True, True]))
    assert (float(single.mean), float(single.std), float(single.count)) == (2.0, 1.0, 2.0)


def test_momentum_of_sgd_follows_the_scale() -> None:
    """Two steps of SGD with momentum on a squared error: the second is the one it would take in new units all along."""
    old, new = torch.tensor(1.0, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    weights = []
    for start in (old, new):
        weight = torch.nn.Parameter(torch.tensor([[1.0]], dtype=torch.float64) / start)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        for step in range(2):
            if step == 1 and start is old:
                with torch.no_grad():
                    weight.mul_(old / new)
                rescale_moments(optimizer.state[weight], old, new, 2)
            optimizer.zero_grad()
            scale = new if step == 1 else start
            (0.5 * (weight - 3.0 / scale).square()).sum().backward()
            optimizer.step()
        weights.append(float(weight))
    assert weights[0] == pytest.approx(weights[1])


def test_optimiser_state_that_is_not_known_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.RMSprop([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    with pytest.raises(ConfigError, match=r"optimiser state square_avg: .*exp_avg.*as Adam or UPGD"):
        rescale_moments(optimizer.state[weight], one, two, 2)
