"""The regulariser on real learners: what it is worth, whom its gradient reaches, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tailguard as tg
from tailguard.algorithm.saving import capture, restore
from tailguard.algorithm.update import Batch, minibatch_loss
from tailguard.evaluate.held_out import episodes_on
from tailguard.robust.attacks import attackable
from tailguard.robust.config import RobustConfig
from tailguard.robust.smoothness import Smoothness

FULL = RobustConfig(coef=2.0, epsilon=0.3, schedule="constant", steps=4)
Make = Callable[..., Any]


class Witness:
    """Keeps the batch that the terms before it have prepared."""

    name = "witness"
    batch: Batch

    def __init__(self) -> None:
        self.log_ratios: list[Tensor] = []

    def prepare(self, rollout: Any, estimates: Any, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        self.batch = batch
        return batch

    def loss(self, policy: Any, output: Any, batch: Batch) -> Tensor:
        log_prob = policy.action_head.log_prob(output.dist_params, batch.actions)
        self.log_ratios.append((log_prob - batch.log_probs).detach())
        return torch.zeros_like(batch.log_probs)


def prepared(learner: Any) -> Batch:
    """The batch of one rollout, attacked, before any update on it."""
    witness = Witness()
    learner.terms = (*learner.terms, witness)
    learner.updates.extensions = learner.terms
    learner.updates.run = lambda batch, inner_resets: learner.updates.begin()  # noqa: ARG005
    learner.iterate()
    return witness.batch


def robust_terms(learner: Any, batch: Batch) -> Tensor:
    output = learner.policy(batch.obs, batch.state, batch.episode_start)
    return learner.smoothness.loss(learner.policy, output, batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("through_time", [False, True])
@pytest.mark.parametrize("memory", ["separate", "shared", "none"])
def test_the_term_is_zero_without_a_perturbation_and_positive_with_one(
    make_ppo: Make, memory: str, through_time: bool
) -> None:
    learner = make_ppo(memory=memory, robust=dataclasses.replace(FULL, through_time=through_time, critic_coef=1.0))
    batch = prepared(learner)
    terms = robust_terms(learner, batch)
    assert terms.shape == batch.log_probs.shape
    assert (terms > 0).float().mean() > 0.99
    same = dataclasses.replace(batch, extra=batch.extra | {"robust/obs": batch.obs})
    assert torch.equal(robust_terms(learner, same), torch.zeros_like(terms))
    delta = batch.extra["robust/obs"] - batch.obs
    mask = attackable(learner.env).bool()
    assert delta[..., mask].abs().max() <= 0.3 + 1e-6
    assert delta[..., ~mask].abs().max() == 0


def test_the_term_is_what_stepping_by_hand_says(make_ppo: Make) -> None:
    """κ·KL of the two Gaussians of one row, each read with the memory that the clean rows before it leave."""
    learner = make_ppo(robust=FULL)
    batch = prepared(learner)
    terms = robust_terms(learner, batch).detach()
    policy, memory = learner.policy, batch.state[0]
    for row in range(len(batch.obs)):
        start = batch.episode_start[row]
        with torch.no_grad():
            clean, after = policy.act(batch.obs[row], memory, start)
            moved, _ = policy.act(batch.extra["robust/obs"][row], memory, start)
        (mean, log_std), (other, _) = clean.chunk(2, -1), moved.chunk(2, -1)
        kl = ((other - mean) / log_std.exp()).square().sum(-1) / 2
        torch.testing.assert_close(terms[row], 2.0 * kl, atol=1e-6, rtol=1e-3)
        memory = after


@pytest.mark.parametrize("refresh", ["rollout", "minibatch"])
@pytest.mark.parametrize("critic", [0.0, 1.0])
def test_the_gradient_reaches_the_policy_and_the_critics_only_if_they_are_smoothed(
    make_ppo: Make, critic: float, refresh: Any
) -> None:
    """Encoder, memory and last layer of the actor; not the deviation, which no observation can change."""
    learner = make_ppo(robust=dataclasses.replace(FULL, critic_coef=critic, refresh=refresh))
    batch = prepared(learner)
    learner.optimizer.zero_grad()
    robust_terms(learner, batch).sum().backward()
    reached = {
        name
        for name, parameter in learner.policy.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().max() > 0
    }
    actor = {name for name, _ in learner.policy.named_parameters() if name.startswith("trunks.0")}
    expected = actor | {"action_head.linear.weight", "action_head.linear.bias"}
    if critic:
        expected |= {name for name, _ in learner.policy.named_parameters() if name.startswith("trunks.1")}
        expected |= {name for name, _ in learner.policy.named_parameters() if name.startswith("critics.0.value")}
    # A shift of both means by the last layer's bias cancels in their difference, except through the squashing.
    assert reached | {"action_head.linear.bias", "critics.0.value.layer.bias"} == expected | {
        "action_head.linear.bias",
        "critics.0.value.layer.bias",
    }


def test_descending_the_term_makes_the_policy_smoother(make_ppo: Make) -> None:
    learner = make_ppo(robust=FULL)
    batch = prepared(learner)
    before = robust_terms(learner, batch).mean()
    gradients = torch.autograd.grad(before, [learner.policy.action_head.linear.weight])
    with torch.no_grad():
        learner.policy.action_head.linear.weight -= 1e-2 * gradients[0]
    assert robust_terms(learner, batch).mean() < before


def test_attacked_observations_never_enter_the_ratio(make_ppo: Make) -> None:
    """Observations, old probabilities and PPO's own terms are those of a plain learner; ratios start at 1."""
    plain, robust = make_ppo(), make_ppo(robust=FULL)
    first, second = Witness(), Witness()
    for learner, witness in ((plain, first), (robust, second)):
        learner.terms = (*learner.terms, witness)
        learner.updates.extensions = learner.terms
        learner.iterate()
    assert torch.equal(first.batch.obs, second.batch.obs)
    assert torch.equal(first.batch.log_probs, second.batch.log_probs)
    assert second.log_ratios[0].abs().max() < 1e-5
    assert torch.equal(first.log_ratios[0], second.log_ratios[0])
    fresh = make_ppo(robust=FULL)
    batch = prepared(fresh)
    with_term = minibatch_loss(fresh.policy, batch, fresh.hyper, fresh.config, fresh.terms[:1])
    without = minibatch_loss(fresh.policy, batch, fresh.hyper, fresh.config, ())
    for name, term in without.terms.items():
        assert torch.equal(with_term.terms[name], term)
    assert set(with_term.terms) == {*without.terms, "robust"}


@pytest.mark.parametrize("refresh", ["rollout", "minibatch"])
@pytest.mark.parametrize("through_time", [False, True])
def test_microbatches_give_the_same_gradient(make_ppo: Make, refresh: Any, through_time: bool) -> None:
    found = []
    for microbatches in (1, 3):
        robust = dataclasses.replace(FULL, refresh=refresh, through_time=through_time)
        learner = make_ppo(robust=robust, microbatches=microbatches, minibatch_size=64)
        batch = prepared(learner)
        learner.updates.accumulate(batch, torch.arange(8), True)
        found.append(
            [parameter.grad.clone() for parameter in learner.policy.parameters() if parameter.grad is not None]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def state_of(learner: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.policy.state_dict().items()}


@pytest.mark.parametrize(
    "options", [{}, {"critic_coef": 1.0}, {"adversary": "alternate", "adversary_every": 1, "adversary_rollouts": 1}]
)
def test_a_resumed_learner_goes_on_bit_for_bit(make_ppo: Make, make_pathwise: Make, options: Any) -> None:
    config = dataclasses.replace(FULL, attack="sgld", schedule="linear", **options)
    for make in (make_ppo, make_pathwise):
        more = {"critic_epochs": 1} if make is make_pathwise and config.critic_coef else {}
        whole, first, second = (make(robust=config, **more) for _ in range(3))
        for iteration in range(6):
            for learner in (whole, first if iteration < 3 else second):
                learner.state.progress = iteration / 6
                learner.iterate()
            if iteration == 2:
                restore(second, capture(first), "checkpoint", episodes=True)
        for name, value in state_of(whole).items():
            assert torch.equal(value, state_of(second)[name]), name


def test_off_is_not_there(make_ppo: Make, make_pathwise: Make) -> None:
    for make in (make_ppo, make_pathwise):
        plain, off = make(), make(robust=RobustConfig(coef=0.0, epsilon=0.3))
        reports = [learner.iterate() for learner in (plain, off)]
        assert off.smoothness is None
        assert not [name for name in reports[1] if "robust" in name]
        assert "robust" not in off.parts()
        for name, value in state_of(plain).items():
            assert torch.equal(value, state_of(off)[name])


def test_the_penalty_of_gradients_through_the_market_is_the_squared_change_of_the_action(make_pathwise: Make) -> None:
    learner = make_pathwise(robust=FULL)
    smoothness: Smoothness = learner.smoothness
    obs = torch.randn(5, 4, learner.env.observation_size, generator=torch.Generator().manual_seed(0))
    start = torch.zeros(5, 4, dtype=torch.bool)
    valid = torch.ones(5, 4, dtype=torch.bool)
    valid[2, 1] = False
    state = learner.policy.initial_state(4)
    smoothness.set_progress(0.0)
    attacked: list[Tensor] = []
    inner = smoothness._perturb
    smoothness._perturb = lambda *args: attacked.append(inner(*args)) or attacked[-1]  # type: ignore[func-returns-value, assignment, method-assign]
    penalty, metrics = smoothness.penalty(learner.policy, obs, state, start, valid)
    memory, squares = state[0], []
    for row in range(5):
        with torch.no_grad():
            clean, after = learner.policy.act(obs[row], memory, start[row])
            moved, _ = learner.policy.act(attacked[0][row], memory, start[row])
        squares.append((torch.tanh(moved[:, 0]) - torch.tanh(clean[:, 0])).square())
        memory = after
    expected = 2.0 * torch.stack(squares)[valid].mean()
    torch.testing.assert_close(penalty.detach(), expected, atol=1e-7, rtol=1e-4)
    assert metrics["robust/action_shift"] > 2 * metrics["robust/noise_shift"] > 0
    penalty.backward()
    grads = {name for name, parameter in learner.policy.named_parameters() if parameter.grad is not None}
    assert {name for name, _ in learner.policy.named_parameters() if name.startswith("trunks.0")} <= grads


@pytest.mark.parametrize("memory", ["separate", "shared", "none"])
@pytest.mark.parametrize("through_time", [False, True])
def test_critics_of_gradients_through_the_market_are_smoothed_where_the_policy_is_attacked(
    make_pathwise: Make, memory: str, through_time: bool
) -> None:
    """The term is the weighted squared change of the value by the policy's own attack, and it reaches the critics."""
    robust = dataclasses.replace(FULL, critic_coef=3.0, through_time=through_time)
    learner = make_pathwise(robust=robust, critic_epochs=1, memory=memory)
    batches: list[Batch] = []
    learner.updates.run = lambda batch, inner_resets: batches.append(batch)  # noqa: ARG005
    learner.iterate()
    (batch,), policy = batches, learner.policy
    loss = learner.updates.loss(batch, batch.weights.sum(), None)
    moved = batch.extra["robust/obs"]
    delta = (moved - batch.obs).abs()
    assert 0 < delta.max() <= 0.3 + 1e-6
    with torch.no_grad():
        if through_time or memory == "none":
            values = [
                torch.stack([c.value.squeeze(-1) for c in policy(obs, batch.state, batch.episode_start).critics]).mean(
                    0
                )
                for obs in (batch.obs, moved)
            ]
        else:
            values = stepped_values(policy, batch, moved)
    expected = 3.0 * (values[1] - values[0]).square()[batch.weights > 0].mean()
    assert expected > 0
    # By row the memory is that of the policy that acted, one step of the optimiser before this one.
    tolerance = 1e-4 if through_time or memory != "shared" else 0.2
    torch.testing.assert_close(loss.terms["robust"].detach(), expected, rtol=tolerance, atol=1e-7)
    torch.testing.assert_close(loss.total, torch.stack(list(loss.terms.values())).sum())
    learner.optimizer.zero_grad()
    loss.terms["robust"].backward()
    reached = {
        name for name, value in policy.named_parameters() if value.grad is not None and value.grad.abs().max() > 0
    }
    assert any(name.startswith("critics.0.value") for name in reached)
    assert not any(name.startswith("action_head") for name in reached)
    same = dataclasses.replace(batch, extra=batch.extra | {"robust/obs": batch.obs})
    assert learner.updates.loss(same, batch.weights.sum(), None).terms["robust"] == 0


def stepped_values(policy: Any, batch: Batch, moved: Tensor) -> list[Tensor]:
    """Values of the true and of the attacked rows, each given the memory that the true rows before it leave."""
    memory, found = list(batch.state), []
    for row, other, start in zip(batch.obs, moved, batch.episode_start, strict=True):
        pair = []
        for obs in (row, other):
            features = {
                index: policy.each_trunk()[index].step(obs, memory[index], start)[0] for index in policy.critic_trunks
            }
            pair.append(torch.stack([c.value.squeeze(-1) for c in policy.critic_heads(features)]).mean(0))
        found.append(torch.stack(pair))
        memory = [trunk.step(row, state, start)[1] for trunk, state in zip(policy.each_trunk(), memory, strict=True)]
    return list(torch.stack(found, dim=1))


def test_smoothed_critics_change_less_under_attack(make_pathwise: Make) -> None:
    """After as many steps the same attack moves their value by less than half."""
    losses = {}
    for weight in (1e-6, 100.0):
        robust = dataclasses.replace(FULL, coef=1e-9, critic_coef=weight)
        learner = make_pathwise(robust=robust, critic_epochs=4, critic_learning_rate=3e-3)
        for _ in range(40):
            report = learner.iterate()
        losses[weight] = report["train/robust_critic_loss"] / weight
    assert losses[100.0] < 0.25 * losses[1e-6]


def test_metrics_say_how_large_the_attack_is_and_what_it_does(make_ppo: Make, make_pathwise: Make) -> None:
    config = RobustConfig(coef=1.0, epsilon=0.2, warmup=0.5)
    for make in (make_ppo, make_pathwise):
        learner = make(robust=config)
        sizes = []
        for progress in (0.0, 0.25, 0.5, 1.0):
            learner.state.progress = progress
            report = learner.iterate()
            sizes.append(report["robust/epsilon"])
            if progress == 1.0:
                assert report["robust/action_shift"] > 2 * report["robust/noise_shift"] > 0
                assert report["train/robust_loss"] > 0
        assert sizes == pytest.approx([0.0, 0.1, 0.2, 0.2])


@pytest.mark.parametrize("risk", [None, tg.RiskConfig(limit=-0.001, alpha=0.5)])
def test_training_against_attacks_makes_decisions_smoother(make_pathwise: Make, risk: Any) -> None:
    """With a budget and without: the same attack moves the regularised agent less than half as far, and it trades on.

    An agent that does nothing is smooth, too: on all bars of the market it must earn most of what the plain one does.
    """
    shifts, growth = {}, {}
    for coef in (1e-9, 30.0):
        learner = make_pathwise(robust=dataclasses.replace(FULL, coef=coef), risk=risk)
        for _ in range(60):
            report = learner.iterate()
        shifts[coef] = report["robust/action_shift"]
        (episodes,) = episodes_on(learner.spec, tg.make_market(1_200, seed=3, signal=20.0).bars)
        growth[coef] = float(episodes.trade(learner).growth.mean())
    assert shifts[30.0] < 0.5 * shifts[1e-9]
    assert growth[30.0] > 0.6 * growth[1e-9] > 0.01


@pytest.mark.slow
def test_a_compiled_learner_learns_the_same(make_ppo: Make) -> None:
    for refresh in ("rollout", "minibatch"):
        reports = []
        for runtime in ("eager", "compile"):
            learner = make_ppo(robust=dataclasses.replace(FULL, refresh=refresh), runtime=runtime)
            for _ in range(2):
                report = learner.iterate()
            reports.append({name: report[name] for name in ("train/robust_loss", "robust/distance", "train/loss")})
        assert reports[0] == pytest.approx(reports[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adversary", ["none", "alternate"])
def test_compiled_gradients_through_the_market_learn_the_same(make_pathwise: Make, adversary: Any) -> None:
    """Policy and critics, on true observations and in turns with an adversary."""
    reports = []
    robust = dataclasses.replace(FULL, critic_coef=1.0, adversary=adversary, adversary_every=1, adversary_rollouts=1)
    for runtime in ("eager", "compile"):
        learner = make_pathwise(robust=robust, critic_epochs=1, runtime=runtime)
        for _ in range(2):
            report = learner.iterate()
        names = ("train/robust_loss", "train/robust_critic_loss", "robust/distance", "pathwise/earned")
        reports.append({name: report[name] for name in names})
    assert reports[0] == pytest.approx(reports[1], rel=1e-3)


def test_a_saved_agent_goes_on_against_the_same_attacks(make_ppo: Make, tmp_path: Path) -> None:
    learner = make_ppo(robust=FULL)
    learner.iterate()
    learner.save(tmp_path / "agent")
    again = tg.DistributionalPPO.load(tmp_path / "agent", learner.env)
    assert again.robust == FULL
    assert again.smoothness is not None
    assert torch.equal(again.smoothness.generator.get_state(), learner.smoothness.generator.get_state())
    again.set_env(learner.env)
    assert again.robust == FULL
    assert len(again.terms) == 1
