"""One minibatch of the real learner: every term by hand, and value clipping's gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.update import Batch, MinibatchLoss, minibatch_loss


def trained(make_learner: Any, make_witness: Any, env: Any = None, **options: Any) -> tuple[DistributionalPPO, Batch]:
    """A learner after two iterations, and the batch of the second, which it has since moved away from."""
    witness = make_witness()
    learner = make_learner(env, **({"learning_rate": 1e-2} | options), extensions=(witness,))
    learner.iterate()
    learner.iterate()
    return learner, witness.batch if learner.policy.is_recurrent else witness.batch.rows_as_sequences()


def loss_of(learner: DistributionalPPO, batch: Batch) -> MinibatchLoss:
    return minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config)


# --- every term, by hand ---------------------------------------------------------------------------------------------


def test_the_terms_are_the_papers_on_valid_rows(make_learner: Any, make_witness: Any, scripted_env: Any) -> None:
    """Discrete actions, dead rows: all terms and figures recomputed in NumPy from the network's outputs."""
    learner, batch = trained(
        make_learner,
        make_witness,
        scripted_env(discrete=True, dead_rows=True),
        entropy_coef=0.03,
        kl_penalty=0.7,
        target_kl=1.0,
        clip_range=0.1,
        value_coef=0.4,
        distribution_coef=0.6,
        learning_rate=0.05,
    )
    learner.state.kl_coef = 0.7
    found = loss_of(learner, batch)
    with torch.no_grad():
        output = learner.policy(batch.obs, batch.state, batch.episode_start)
    valid = batch.weights.numpy() > 0
    assert not valid.all()

    def log_probabilities(parameters: Tensor) -> list[np.ndarray]:
        wide = parameters.double().numpy()
        return [part - logsumexp(part, axis=-1, keepdims=True) for part in (wide[..., :3], wide[..., 3:])]

    new, old = log_probabilities(output.dist_params), log_probabilities(batch.dist_params)
    actions = batch.actions.numpy()
    log_ratio = sum(
        np.take_along_axis(ours - theirs, actions[..., [part]], axis=-1)[..., 0]
        for part, (ours, theirs) in enumerate(zip(new, old, strict=True))
    )
    ratio, advantages = np.exp(log_ratio), batch.advantages.double().numpy()
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
    entropy = sum(-(np.exp(part) * part).sum(-1) for part in new)
    kl = sum((np.exp(theirs) * (theirs - ours)).sum(-1) for ours, theirs in zip(new, old, strict=True))
    value = output.critics[0].value[..., 0].double().numpy()
    error = (value - batch.value_targets[..., 0].double().numpy()) ** 2
    quantiles = output.critics[0].distribution.double().numpy()[..., :, None]
    difference = batch.distribution_targets.double().numpy()[..., None, :] - quantiles
    levels = (np.arange(6) + 0.5)[:, None] / 6
    pinball = (difference * (levels - (difference < 0))).mean((-1, -2))
    expected = {
        "policy": -surrogate,
        "value": 0.4 * 0.5 * error,
        "distribution": 0.6 * pinball,
        "entropy": -0.03 * entropy,
        "kl": 0.7 * kl,
    }
    assert found.terms.keys() == expected.keys()
    for name, rows in expected.items():
        assert float(found.terms[name].detach()) == pytest.approx(rows[valid].mean(), rel=2e-4, abs=1e-7), name
    assert float(found.total.detach()) == pytest.approx(sum(rows[valid].mean() for rows in expected.values()), rel=1e-4)
    metrics = {
        "train/approx_kl": kl,
        "train/kl_k1": -log_ratio,
        "train/kl_k3": ratio - 1 - log_ratio,
        "train/clip_fraction": np.abs(ratio - 1) > 0.1,
    }
    for name, rows in metrics.items():
        assert float(found.metrics[name]) == pytest.approx(rows[valid].mean(), rel=1e-3, abs=1e-7), name
    assert 0.05 < float(found.metrics["train/clip_fraction"]) < 0.95


def test_large_log_ratios_are_clamped_and_counted(make_learner: Any, make_witness: Any) -> None:
    learner, batch = trained(make_learner, make_witness, log_ratio_limit=3.0)
    shifted = batch.log_probs.clone()
    shifted[:3] -= 100.0
    found = loss_of(learner, dataclasses.replace(batch, log_probs=shifted))
    assert bool(found.finite)
    assert float(found.metrics["train/log_ratio_clamped"]) == pytest.approx(3 / 12)
    assert bool(found.total.isfinite())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_log_ratio_that_is_not_finite_is_flagged_although_the_gradient_is_finite(
    make_learner: Any, make_witness: Any, scripted_env: Any, value: float
) -> None:
    learner, batch = trained(make_learner, make_witness, scripted_env(dead_rows=True))
    valid, dead = (batch.weights > 0).nonzero()[0], (batch.weights == 0).nonzero()[0]
    for place, harmful in ((valid, True), (dead, False)):
        log_probs = batch.log_probs.clone()
        log_probs[tuple(place)] = value
        found = loss_of(learner, dataclasses.replace(batch, log_probs=log_probs))
        assert bool(found.finite) == (not harmful)
        learner.optimizer.zero_grad()
        found.total.backward()  # type: ignore[no-untyped-call]
        # The gradient's norm could not have told.
        assert all(parameter.grad.isfinite().all() for parameter in learner.policy.parameters())
    assert bool(found.total.isfinite())
    assert bool(found.log_ratio.isfinite().all())


def test_entropy_is_not_computed_when_it_has_no_weight(make_learner: Any, make_witness: Any) -> None:
    learner, batch = trained(make_learner, make_witness)
    assert set(loss_of(learner, batch).terms) == {"policy", "value", "distribution"}


# --- value clipping --------------------------------------------------------------------------------------------------


def far_from_old(learner: DistributionalPPO, batch: Batch, distance: float, target: float) -> Batch:
    """Critics `distance` above their old outputs in every row, and a constant target, in standard deviations."""
    with torch.no_grad():
        for critic in learner.policy.each_critic():
            critic.value.layer.bias += distance
            critic.distribution.layer.bias += distance
        output = learner.policy(batch.obs, batch.state, batch.episode_start)
    return dataclasses.replace(
        batch,
        value_targets=torch.full_like(batch.value_targets, target),
        distribution_targets=torch.full_like(batch.distribution_targets, target),
        old_values=tuple(found.value - distance for found in output.critics),
        old_distributions=tuple(found.distribution - distance for found in output.critics),
    )


@pytest.mark.parametrize("twin_critics", [False, True])
@pytest.mark.parametrize("mode", ["mean_only", "mean_and_variance", "per_quantile"])
def test_a_critic_beyond_its_clip_stops_moving_on_and_may_always_come_back(
    make_learner: Any, make_witness: Any, mode: str, twin_critics: bool
) -> None:
    """At a target still further away the mean gets no gradient; at one behind, the unclipped gradient."""
    learner, batch = trained(make_learner, make_witness, value_clip=mode, twin_critics=twin_critics)
    plain = dataclasses.replace(learner.config, value_clip="off")
    away = far_from_old(learner, batch, distance=3.0, target=50.0)
    back = dataclasses.replace(
        away,
        value_targets=torch.full_like(away.value_targets, -50.0),
        distribution_targets=torch.full_like(away.distribution_targets, -50.0),
    )
    for critic in learner.policy.each_critic():
        parameters = [critic.value.layer.bias, critic.distribution.layer.bias]

        def gradients(config: Any, given: Batch) -> tuple[Tensor, ...]:
            loss = minibatch_loss(learner.policy, given, learner.set_hyper(), config)
            return torch.autograd.grad(loss.terms["value"] + loss.terms["distribution"], parameters)  # noqa: B023

        value, quantiles = gradients(learner.config, away)
        assert value.tolist() == [0.0]
        assert float(quantiles.sum()) == pytest.approx(0.0, abs=1e-6)
        # Bounding the mean leaves the shape free; bounding each quantile leaves nothing.
        assert bool(quantiles.any()) == (mode != "per_quantile")
        without_value, without_quantiles = gradients(plain, away)
        assert without_value.item() < 0
        assert float(without_quantiles.sum()) < 0
        for found, expected in zip(gradients(learner.config, back), gradients(plain, back), strict=True):
            torch.testing.assert_close(found, expected)
            assert expected.any()


def test_each_twin_is_clipped_around_its_own_old_value(make_learner: Any, make_witness: Any) -> None:
    """Critics at 0 and 1 that have not moved, clip 0.2, target 1.5: the second still learns.

    ½ (V − 1.5)² has slope −0.5 at V = 1; times value_coef 0.5, and half of it as one of two critics. Clipped around the
    minimum of both, V = 1 would be beyond 0.2 and its gradient 0.
    """
    learner, batch = trained(
        make_learner, make_witness, twin_critics=True, critic="scalar", value_clip="mean_only", value_clip_limit=0.2
    )
    heads = [critic.value.layer for critic in learner.policy.each_critic()]
    with torch.no_grad():
        for head, level in zip(heads, (0.0, 1.0), strict=True):
            head.weight.zero_()
            head.bias.fill_(level)
    same = torch.ones_like(batch.value_targets)
    batch = dataclasses.replace(batch, value_targets=1.5 * same, old_values=(0.0 * same, same))
    gradients = torch.autograd.grad(loss_of(learner, batch).terms["value"], [head.bias for head in heads])
    assert [float(gradient) for gradient in gradients] == pytest.approx([-1.5 * 0.25, -0.5 * 0.25])
    shared_minimum = dataclasses.replace(batch, old_values=(0.0 * same, 0.0 * same))
    _, second = torch.autograd.grad(loss_of(learner, shared_minimum).terms["value"], [head.bias for head in heads])
    assert float(second) == 0.0


def test_a_categorical_critic_beyond_its_clip_is_not_pulled_further(make_learner: Any, make_witness: Any) -> None:
    """N(3, 1) with the old mean 1 and a target at 4: beyond the clip, so nothing moves its mean on to the target."""
    learner, batch = trained(make_learner, make_witness, critic="categorical", value_clip="mean_only", atoms=41)
    (critic,) = learner.policy.each_critic()
    atoms = critic.distribution.atoms
    with torch.no_grad():
        critic.distribution.layer.weight.zero_()
        critic.distribution.layer.bias.copy_(-0.5 * (atoms - 3.0).square())
    old = (-0.5 * (atoms - 1.0).square()).expand(*batch.log_probs.shape, -1)
    target = critic.distribution.encode(torch.full((*batch.log_probs.shape, 1), 4.0))
    batch = dataclasses.replace(batch, old_distributions=(old,), distribution_targets=target)
    plain = dataclasses.replace(learner.config, value_clip="off")
    pulls = []
    for config in (learner.config, plain):
        term = minibatch_loss(learner.policy, batch, learner.set_hyper(), config).terms["distribution"]
        (gradient,) = torch.autograd.grad(term, critic.distribution.layer.bias)
        # How the mean of the softmax would change along −gradient.
        weights = critic.distribution.layer.bias.softmax(-1).detach()
        pulls.append(float(-(weights * (atoms - weights @ atoms)) @ gradient))
    clipped, free = pulls
    assert clipped <= 0.0 < 0.02 < free


# --- sequences and rows ----------------------------------------------------------------------------------------------


def test_selecting_sequences_takes_all_of_them(make_learner: Any, make_witness: Any) -> None:
    _, batch = trained(make_learner, make_witness, twin_critics=True, twin_trunk="own", lstm_layers=2)
    index = torch.tensor([4, 1])
    part = batch.select(index)
    for field in dataclasses.fields(Batch):
        whole, chosen = getattr(batch, field.name), getattr(part, field.name)
        if isinstance(whole, Tensor):
            assert torch.equal(chosen, whole[:, index]), field.name
    for whole, chosen in zip(batch.old_distributions, part.old_distributions, strict=True):
        assert torch.equal(chosen, whole[:, index])
    for whole_state, chosen_state in zip(batch.state, part.state, strict=True):
        for whole, chosen in zip(whole_state, chosen_state, strict=True):
            assert whole.shape[0] == 2
            assert torch.equal(chosen, whole[:, index])


def test_rows_of_a_memoryless_batch_stand_for_themselves(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(memory="none", extensions=(witness,))
    learner.iterate()
    rows = witness.batch.rows_as_sequences()
    assert rows.log_probs.shape == (1, 72)
    for row, column in ((0, 3), (7, 0), (11, 5)):
        number = 6 * row + column
        assert torch.equal(rows.obs[0, number], witness.batch.obs[row, column])
        assert torch.equal(rows.actions[0, number], witness.batch.actions[row, column])
        assert torch.equal(rows.distribution_targets[0, number], witness.batch.distribution_targets[row, column])
    losses = [
        minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config).total
        for batch in (rows, witness.batch)
    ]
    torch.testing.assert_close(losses[0], losses[1])
