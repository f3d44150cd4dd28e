"""Optimisers and the variance scaler inside the real learner: they change the step by what they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.optimizers import OptimizerState
from tailguard.errors import ConfigError
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.config import UPGDConfig, VGSConfig

KINDS = ("adam", "adamw", "upgd", "adaptive_upgd", "upgdw")
ONE_STEP = {"minibatch_size": 1000, "epochs": 1, "learning_rate": 0.01}
"""A single optimiser step an iteration."""


def weights(learner: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in learner.policy.parameters()])


def take_step(learner: Any) -> None:
    """One optimiser step with the gradient at hand."""
    learner.updates.step(torch.nn.utils.get_total_norm([parameter.grad for parameter in learner.policy.parameters()]))


def moved(learner: Any) -> Tensor:
    """How far one optimiser step goes, with the gradient of one and the same minibatch."""
    before = weights(learner)
    take_step(learner)
    return weights(learner) - before


def with_gradients(learner: Any, seed: int = 0) -> Any:
    """The learner with a known gradient: unit normal noise, the same for every optimiser."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in learner.policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    return learner


def test_the_config_names_the_optimiser(make_learner: Any) -> None:
    kinds = {kind: type(make_learner(optimizer=kind).optimizer) for kind in KINDS}
    assert kinds == {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "upgd": UPGD,
        "adaptive_upgd": AdaptiveUPGD,
        "upgdw": UPGDW,
    }


@pytest.mark.parametrize("kind", ["upgd", "adaptive_upgd", "upgdw"])
def test_every_upgd_setting_reaches_the_optimiser(make_learner: Any, kind: str) -> None:
    settings = UPGDConfig(beta_utility=0.9, sigma=0.5, step_factor=1, normalisation="minmax")
    (group,) = make_learner(optimizer=kind, weight_decay=0.25, upgd=settings).optimizer.param_groups
    assert (group["beta_utility"], group["sigma"], group["step_factor"]) == (0.9, 0.5, 1)
    assert (group["normalisation"], group["weight_decay"]) == ("minmax", 0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimiser_moves_by_the_scheduled_rate(make_learner: Any, kind: str) -> None:
    """The optimiser holds the learner's tensor: filling it changes the next step in proportion."""
    options = {"optimizer": kind} | ({} if kind in ("adam", "adamw") else {"upgd": UPGDConfig(sigma=0.0)})
    steps = []
    for rate in (0.01, 0.0025):
        learner = with_gradients(make_learner(**options))
        learner.hyper.learning_rate.fill_(rate)
        steps.append(moved(learner))
    assert float(steps[0].norm()) > 0
    torch.testing.assert_close(steps[0], 4 * steps[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scaler_shortens_the_step_by_its_factor(make_learner: Any, kind: str, granularity: str) -> None:
    """Two learners alike, one with VGS. After four gradients of pure noise its factor is well below 1.

    Also for UPGD, perturbation and decay included, and for Adam, which divides a scaled gradient out.
    """
    decay = {} if kind == "adam" else {"weight_decay": 0.01}
    vgs = VGSConfig(enabled=True, warmup_steps=1, min_scale=0.25, granularity=granularity)  # type: ignore[arg-type]
    plain, scaled = (
        make_learner(optimizer=kind, vgs=setting, max_grad_norm=0.0, **decay) for setting in (VGSConfig(), vgs)
    )
    for number in range(4):
        for learner in (plain, scaled):
            with_gradients(learner, number)
        if number < 3:
            # The same place again: only the optimisers' memories go on.
            for learner in (plain, scaled):
                kept = {name: value.clone() for name, value in learner.policy.state_dict().items()}
                take_step(learner)
                learner.policy.load_state_dict(kept)
    whole, short = moved(plain), moved(scaled)
    factor = scaled.scaler.get_scaling_factor()
    assert 0.25 <= float(factor.min()) < 0.6
    if granularity == "global":
        torch.testing.assert_close(short, float(factor) * whole, rtol=2e-3, atol=2e-6)
    else:
        sizes = [parameter.numel() for parameter in scaled.policy.parameters()]
        spread = torch.repeat_interleave(factor.float(), torch.tensor(sizes))
        torch.testing.assert_close(short, spread * whole, rtol=2e-3, atol=2e-6)


def test_statistics_are_those_of_raw_gradients(make_learner: Any) -> None:
    """Before scaling and clipping: with a gradient limit 1000 times below the norm the statistics are the same."""
    found = []
    for limit in (0.0, 1e-4):
        learner = make_learner(vgs=VGSConfig(enabled=True), max_grad_norm=limit, **ONE_STEP)
        metrics = learner.iterate()
        assert metrics["train/grad_norm"] > 1e-3
        found.append(metrics["vgs/signal"])
        assert metrics["vgs/signal"] == pytest.approx(metrics["train/grad_norm"] ** 2, rel=1e-4)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_vgs_changes_training_after_its_warm_up_and_not_before(make_learner: Any) -> None:
    def course(vgs: VGSConfig, iterations: int) -> Tensor:
        learner = make_learner(vgs=vgs, epochs=2)
        for _ in range(iterations):
            metrics = learner.iterate()
        assert ("vgs/scale" in metrics) == vgs.enabled
        return weights(learner)

    late = VGSConfig(enabled=True, warmup_steps=10_000)
    assert torch.equal(course(VGSConfig(), 2), course(late, 2))
    assert not torch.equal(course(VGSConfig(), 2), course(VGSConfig(enabled=True, warmup_steps=1), 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vgs", [False, True])
def test_a_saved_learner_goes_on_exactly(make_learner: Any, kind: str, vgs: bool, everything_in: Any) -> None:
    """Moments, gates, generators of the perturbation and variances: all parts together."""
    settings = {"optimizer": kind, "vgs": VGSConfig(enabled=vgs, warmup_steps=1)}
    original = make_learner(**settings)
    original.iterate()
    copy = make_learner(seed=5, **settings)
    for name, part in copy.parts().items():
        part.load_state_dict(original.parts()[name].state_dict())
    copy.env.load_state_dict(original.env.state_dict())
    copy.seed = original.seed
    for learner in (original, copy):
        learner.iterate()
    first, second = everything_in(original), everything_in(copy)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_loaded_moments_are_not_shared_with_their_giver(make_learner: Any) -> None:
    giver, taker = make_learner(), make_learner(seed=1)
    giver.iterate()
    OptimizerState(taker.policy, taker.optimizer).load_state_dict(
        OptimizerState(giver.policy, giver.optimizer).state_dict()
    )
    parameter = giver.policy.action_head.linear.weight
    kept = giver.optimizer.state[parameter]["exp_avg"].clone()
    taker.iterate()
    assert torch.equal(giver.optimizer.state[parameter]["exp_avg"], kept)


def test_moments_of_another_network_are_refused(make_learner: Any) -> None:
    giver, taker = make_learner(lstm_size=4), make_learner(lstm_size=5)
    giver.iterate()
    state = OptimizerState(giver.policy, giver.optimizer).state_dict()
    with pytest.raises(ConfigError, match=r"has shape .* where .* is needed"):
        OptimizerState(taker.policy, taker.optimizer).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd"}, "ppo.optimizer: 'sgd' is not one of adam, adamw, upgd"),
        ({"upgd": UPGDConfig(sigma=0.1)}, "ppo.upgd: adam has no gates"),
        ({"optimizer": "upgd", "vgs": VGSConfig(enabled=True, moments="optimizer")}, "ppo.vgs.moments"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "ppo.weight_decay"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make_learner: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_learner(**options)


def test_a_move_of_the_return_scale_carries_the_variances_along(make_learner: Any) -> None:
    """PopArt divides a head's gradients by s: noise and signal go by 1/s², their ratio stays."""
    learner = make_learner(vgs=VGSConfig(enabled=True, warmup_steps=1), critic="scalar")
    head = learner.policy.each_critic()[0].value.layer.weight
    for step in range(3):
        with_gradients(learner, step)
        learner.scaler.update_statistics()
    index = learner.scaler._index_of(head)
    before = learner.scaler.get_normalized_variance().per_tensor[index].clone()
    signal = learner.scaler._signal[index].clone()
    learner.scaler.rescale(head, torch.tensor(0.1, dtype=torch.float64))
    assert float(learner.scaler._signal[index]) == pytest.approx(0.01 * float(signal), rel=1e-9)
    assert float(learner.scaler.get_normalized_variance().per_tensor[index]) == pytest.approx(float(before), rel=1e-9)
    # And what comes next is what would have come had the gradients always been ten times smaller.
    twin = make_learner(vgs=VGSConfig(enabled=True, warmup_steps=1), critic="scalar")
    for step in range(4):
        for one in (learner, twin) if step == 3 else (twin,):
            with_gradients(one, step)
            parameter = one.policy.each_critic()[0].value.layer.weight
            parameter.grad.mul_(0.1)
            one.scaler.update_statistics()
    found, expected = (one.scaler.get_normalized_variance().per_tensor[index] for one in (learner, twin))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    learner.scaler.forget(head)
    assert float(learner.scaler._steps[index]) == 0
