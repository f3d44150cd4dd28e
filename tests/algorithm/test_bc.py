"""Behaviour cloning and advantage-weighted regression on the real learner."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.update import minibatch_loss
from tailguard.errors import ConfigError
from tailguard.monitor.callbacks import EveryIteration


def lean(obs: Tensor) -> Tensor:
    """An action that depends on what is seen, inside the box [±1, ±2] of the scripted environment."""
    return torch.tensor([0.8, 1.6]) * torch.tanh(obs[..., :1] - 1.0).expand(*obs.shape[:2], 2)


def test_the_policy_is_pulled_to_the_teachers_actions(make_learner: Any, scripted_env: Any) -> None:
    """The rewards know nothing of actions, so what the policy learns is the teacher's."""
    env = scripted_env(num_envs=32)
    cloning = BehaviourCloning(coefficient=1.0, teacher=lean)
    learner = make_learner(
        env, memory="none", hidden=(32,), learning_rate=1e-2, minibatch_size=96, extensions=(cloning,)
    )
    wanted = lean(env.obs[:5])

    def error() -> float:
        actions = torch.stack([torch.as_tensor(learner.predict(obs, deterministic=True)[0]) for obs in env.obs[:5]])
        return float((actions - wanted).square().mean().sqrt())

    first = error()
    for _ in range(16):
        metrics = learner.iterate()
    assert first > 0.5
    assert error() < 0.15
    assert "train/bc_loss" in metrics


def test_discrete_actions_are_cloned(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(num_envs=32, discrete=True)

    def teacher(obs: Tensor) -> Tensor:
        return torch.stack((2 * (obs[..., 0] > 1), obs[..., 1] > 1), dim=-1).long()

    cloning = BehaviourCloning(coefficient=1.0, teacher=teacher)
    learner = make_learner(
        env, memory="none", hidden=(32,), learning_rate=1e-2, minibatch_size=96, extensions=(cloning,)
    )
    for _ in range(12):
        learner.iterate()
    actions, _ = learner.predict(env.obs[0], deterministic=True)
    assert (torch.as_tensor(actions) == teacher(env.obs[:1])[0]).float().mean() > 0.9


def test_weights_are_clamped_before_the_exponential_and_carry_no_gradient(make_learner: Any, make_witness: Any) -> None:
    """A / β far beyond the range of exp: the largest weight is the cap, the loss and its gradient are finite."""
    witness = make_witness()
    cloning = BehaviourCloning(coefficient=0.5, beta=1e-6, max_weight=20.0)
    learner = make_learner(extensions=(cloning, witness), twin_critics=True)
    learner.iterate()
    found, advantages = witness.batch.extra["bc/weight"], witness.batch.advantages
    assert found[advantages > 0].unique().tolist() == pytest.approx([0.5 * 20.0])
    assert not found[advantages < -1e-3].any()
    assert not found.requires_grad
    term = minibatch_loss(learner.policy, witness.batch, learner.set_hyper(), learner.config, (cloning,)).terms["bc"]
    gradients = torch.autograd.grad(term, list(learner.policy.parameters()), allow_unused=True)
    for (name, _), gradient in zip(learner.policy.named_parameters(), gradients, strict=True):
        policy = name.startswith(("action_head", "trunks.0"))
        assert (gradient is not None) == policy, name
        assert gradient is None or bool(gradient.isfinite().all())


def test_weights_follow_the_advantage(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(extensions=(BehaviourCloning(coefficient=0.5, beta=2.0), witness))
    learner.iterate()
    expected = [0.5 * min(math.exp(value / 2.0), 20.0) for value in witness.batch.advantages.flatten().tolist()]
    assert witness.batch.extra["bc/weight"].flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_without_a_teacher_the_actions_taken_are_imitated(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    cloning = BehaviourCloning(coefficient=1.0, beta=1.0)
    learner = make_learner(extensions=(cloning, witness))
    learner.iterate()
    batch = witness.batch
    output = learner.policy(batch.obs, batch.state, batch.episode_start)
    mean, log_std = output.dist_params.detach().chunk(2, -1)
    log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch.actions).sum(-1)
    expected = -(batch.advantages.exp().clamp(max=20.0) * log_prob).mean()
    term = minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config, (cloning,)).terms["bc"]
    assert float(term.detach()) == pytest.approx(float(expected), rel=1e-4)


def test_the_coefficient_follows_its_schedule(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(extensions=(BehaviourCloning(coefficient="linear:1:0", teacher=lean), witness))
    seen = []
    note = EveryIteration(lambda _: seen.append(float(witness.batch.extra["bc/weight"].max())))
    learner.learn(4 * 72, callback=note)
    assert seen == pytest.approx([1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "bc: without a teacher"),
        ({"beta": 0.0}, "bc.beta: 0 is out of range"),
        ({"beta": 1.0, "max_weight": -1.0}, "bc.max_weight: -1 is out of range"),
        ({"beta": 1.0, "coefficient": "linear:1"}, "kind:start:end"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BehaviourCloning(**options)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_share_of_the_loss_does_not_grow_with_the_microbatches(make_learner: Any, parts: int) -> None:
    """|bc| over the sum of all terms' sizes, here of one whole minibatch: from the logged terms themselves."""
    learner = make_learner(
        extensions=(BehaviourCloning(coefficient=0.5, beta=1.0),), minibatch_size=1000, epochs=1, microbatches=parts
    )
    metrics = learner.iterate()
    terms = ("policy_gradient_loss", "value_loss", "distribution_loss", "bc_loss")
    sizes = [abs(metrics[f"train/{name}"]) for name in terms]
    assert 0 < metrics["train/bc_share"] <= 1
    assert metrics["train/bc_share"] == pytest.approx(sizes[-1] / sum(sizes), rel=1e-5 if parts == 1 else 0.2)
