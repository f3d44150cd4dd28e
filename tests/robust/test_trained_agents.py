"""What attacks do to agents that have learned to trade a planted signal."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import tailguard as tg
from tailguard.algorithm.adversary_training import train_adversary
from tailguard.data.bars import Bars
from tailguard.evaluate.held_out import episodes_on
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack

SMALL: dict[str, Any] = {"n_steps": 32, "hidden": (16,), "lstm_size": 8, "critic": "scalar"}
STEPS = 64 * 32 * 40
pytestmark = pytest.mark.slow


@cache
def bars() -> Bars:
    return tg.make_market(6_000, seed=1, signal=20.0).bars


def env() -> tg.TradingEnv:
    return tg.TradingEnv(bars(), num_envs=64, episode_length=64)


@cache
def trained(learner: str, seed: int) -> Any:
    if learner == "ppo":
        return tg.DistributionalPPO(env(), seed=seed, minibatch_size=512, learning_rate=3e-3, **SMALL).learn(STEPS)
    return tg.PathwiseLearner(env(), seed=seed, **SMALL).learn(STEPS)


def growth(agent: Any) -> float:
    """Mean log-growth of overlapping episodes."""
    (episodes,) = episodes_on(agent.spec, bars())
    return float(episodes.trade(agent).growth.mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("learner", ["pathwise", "ppo"])
def test_pgd_at_least_doubles_the_change_of_position_by_noise_of_the_same_size(learner: str, seed: int) -> None:
    """Noise at the corners of the ball, as large as the attack in every feature."""
    agent, shift = trained(learner, seed), {}
    for kind in ("random", "pgd", "sgld"):
        attacked = AttackedPolicy(agent, Attack(kind, 0.1))  # type: ignore[arg-type]
        growth(attacked)
        shift[kind] = attacked.mean_shift
    assert min(shift["pgd"], shift["sgld"]) > 2 * shift["random"] > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_learned_adversary_leaves_less_than_pgd(seed: int) -> None:
    """Less than two thirds of what PGD of the same size leaves."""
    agent, attack = trained("pathwise", seed), Attack(epsilon=0.5)
    pgd = growth(AttackedPolicy(agent, attack))
    options: dict[str, Any] = {"minibatch_size": 512, "learning_rate": 3e-3}
    adversary = train_adversary(agent, env(), attack, timesteps=64 * 32 * 30, seed=seed, **options, **SMALL)
    assert pgd < growth(agent)
    assert growth(adversary) < 2 / 3 * pgd
