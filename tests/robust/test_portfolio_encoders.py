"""Attacks, the regulariser and adversaries on agents that share weights over assets."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import tailguard as tg
from tailguard.algorithm.adversary_training import train_adversary
from tailguard.data.bars import Bars
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.config import RobustConfig

ROBUST = RobustConfig(coef=1.0, epsilon=0.3, schedule="constant", steps=4)
LEARNERS: dict[str, Any] = {"ppo": tg.DistributionalPPO, "pathwise": tg.PathwiseLearner}
both_learners = pytest.mark.parametrize("kind", LEARNERS)
both_encoders = pytest.mark.parametrize("encoder", ["shared", "attention"])


@cache
def bars() -> Bars:
    return tg.make_market(1_000, assets=2, seed=3, signal=20.0).bars


def env() -> tg.TradingEnv:
    features = ["trend_24", "taker_imbalance_6", "time_of_day_sin", "time_of_day_cos"]
    return tg.TradingEnv(bars(), num_envs=6, episode_length=16, features=features, shared_scaling=True)


def agent(kind: str, encoder: str, **options: Any) -> Any:
    own = {"minibatch_size": 24, "epochs": 2} if kind == "ppo" else {}
    learner = LEARNERS[kind](
        env(), n_steps=8, hidden=(8,), lstm_size=6, critic="scalar", encoder=encoder, **own, **options
    )
    with torch.no_grad():
        for name, value in learner.policy.action_head.named_parameters():
            if name.endswith("weight"):
                value.mul_(50.0)  # so that actions answer to observations
    return learner


@both_learners
@both_encoders
def test_an_attack_moves_both_positions_from_inside_its_ball(kind: str, encoder: str) -> None:
    """More than noise of the same size; listing, weights and clock stay true."""
    victim, shifts = agent(kind, encoder), {}
    mask = attackable(victim.env).bool()
    obs, start = env().reset(1), torch.ones(6, dtype=torch.bool)
    for name in ("random", "pgd"):
        attacked = AttackedPolicy(victim, Attack(name, 0.3))  # type: ignore[arg-type]
        decision = attacked.decide(obs, attacked.initial_memories(6), start)
        share = (decision.obs.double() - obs.double()).abs() / attacked.units.double()
        assert 0.29 < share[:, mask].max() <= 0.3
        assert (share[:, mask].amax(0) > 0.25).all()
        assert share[:, ~mask].max() == 0
        assert ((decision.action - decision.clean).abs() > 1e-6).all()
        shifts[name] = attacked.mean_shift
    assert shifts["pgd"] > shifts["random"]


@both_learners
@both_encoders
def test_the_regulariser_reaches_the_shared_weights(kind: str, encoder: str) -> None:
    """All of the actor's, and descending the term alone makes the policy smoother."""
    learner = agent(kind, encoder, robust=ROBUST)
    report = learner.iterate()
    assert report["train/robust_loss"] > 0
    assert report["robust/action_shift"] > report["robust/noise_shift"] > 0
    policy, optimizer = learner.policy, torch.optim.Adam(learner.policy.parameters(), 3e-3)
    obs = torch.stack([learner.env.reset(seed) for seed in range(8)])
    start, state = torch.zeros(8, 6, dtype=torch.bool), policy.initial_state(6)
    terms = []
    for _ in range(30):
        term, _ = learner.smoothness.penalty(policy, learner.scaled_networks()[0].scale(obs), state, start, ~start)
        optimizer.zero_grad()
        term.backward()
        if not terms:
            reached = {name for name, each in policy.named_parameters() if each.grad is not None and each.grad.any()}
            assert {name for name, _ in policy.named_parameters() if name.startswith("trunks.0.encoder")} <= reached
        terms.append(float(term))
        optimizer.step()
    assert terms[-1] < 0.5 * terms[0]


@both_learners
@both_encoders
def test_an_adversary_learns_in_turns_and_shows_perturbed_observations(kind: str, encoder: str) -> None:
    robust = RobustConfig(epsilon=0.4, schedule="constant", adversary="alternate", adversary_every=1)
    learner = agent(kind, encoder, robust=robust)
    adversary = learner.alternation.learner.policy
    before = {name: value.clone() for name, value in adversary.state_dict().items()}
    true, inner = [], learner.alternation.observe

    def observe(obs: Any, start: Any, memory: Any) -> Any:
        true.append((obs.detach(), inner(obs, start, memory)))
        return true[-1][1]

    learner.alternation.observe = observe
    for _ in range(3):
        learner.iterate()
    assert learner.alternation.turns == 2
    assert any(not torch.equal(value, before[name]) for name, value in adversary.state_dict().items())
    mask = attackable(learner.env).bool()
    delta = torch.stack([(seen - obs).detach() for obs, seen in true[-8:]]).abs()
    units = learner.scaled_networks()[0].units
    assert 0.1 < (delta / units)[..., mask].max() < 0.5  # in units of now
    assert delta[..., ~mask].max() == 0


@both_encoders
def test_an_adversary_is_trained_against_a_frozen_agent(encoder: str) -> None:
    options: dict[str, Any] = {"n_steps": 8, "hidden": (8,), "lstm_size": 6, "minibatch_size": 24}
    victim = agent("pathwise", encoder)
    worst = train_adversary(victim, env(), Attack(epsilon=0.3), timesteps=96, **options)
    result = tg.backtest(worst, bars(), warn_in_sample=False)
    assert worst.mean_shift > 0
    assert result.weights.shape[1] == 2
