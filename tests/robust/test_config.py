"""Settings of training against attacks: their schedule, their faults, and their way from the command line."""

from __future__ import annotations

import dataclasses
import math

import pytest

import tailguard as tg
from tailguard.config import RunConfig, load_config, to_dict
from tailguard.errors import ConfigError
from tailguard.experiment.build import build_learner
from tailguard.field_docs import field_docs
from tailguard.robust.config import RobustConfig


def test_epsilon_grows_as_the_schedule_says_and_never_compounds() -> None:
    """A function of progress alone: asking twice, or in any order, gives the same."""
    at = {
        kind: RobustConfig(epsilon=0.2, schedule=kind, warmup=0.5).epsilon_at
        for kind in ("constant", "linear", "cosine")
    }
    for progress, linear, cosine in (
        (0.0, 0.0, 0.0),
        (0.125, 0.05, 0.1 * (1 - math.cos(math.pi / 4))),
        (0.25, 0.1, 0.1),
        (0.5, 0.2, 0.2),
        (1.0, 0.2, 0.2),
    ):
        for _ in range(3):
            assert at["constant"](progress) == 0.2
            assert at["linear"](progress) == pytest.approx(linear)
            assert at["cosine"](progress) == pytest.approx(cosine)


def test_the_section_is_reached_from_the_command_line() -> None:
    config = load_config(overrides=["robust.coef=0.5", "robust.epsilon=0.1", "learner=ppo", "env.num_envs=4"])
    assert (config.robust.coef, config.robust.epsilon) == (0.5, 0.1)
    assert to_dict(config)["robust"]["steps"] == 10
    assert set(field_docs(RobustConfig)) == {item.name for item in dataclasses.fields(RobustConfig)}
    with pytest.raises(
        ConfigError, match=r"robust\.eps: no such setting\. Did you mean robust\.epsilon\?|robust\.steps"
    ):
        load_config(overrides=["robust.eps=0.1"])


def test_a_run_builds_learners_with_it() -> None:
    bars = tg.make_market(1_000, seed=0).bars
    for learner in ("ppo", "pathwise"):
        overrides = [
            f"learner={learner}",
            "robust.coef=0.5",
            "env.num_envs=4",
            "env.episode_length=16",
            "ppo.n_steps=8",
        ]
        built = build_learner(load_config(overrides=overrides), bars, seed=0)
        assert built.smoothness is not None
        assert built.robust.coef == 0.5
    assert build_learner(RunConfig(env=dataclasses.replace(RunConfig().env, num_envs=4)), bars, 0).smoothness is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("robust.epsilon=0", "robust.epsilon"),
        ("robust.schedule=exponential", "robust.schedule"),
        ("robust.warmup=0", "robust.warmup"),
        ("robust.critic_coef=1", "robust.critic_coef"),
    ],
)
def test_faults_are_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


def test_critics_that_are_not_there_cannot_be_smoothed() -> None:
    env = tg.TradingEnv(tg.make_market(1_000, seed=0).bars, num_envs=4, episode_length=16)
    robust = RobustConfig(coef=1.0, critic_coef=1.0)
    with pytest.raises(ConfigError, match=r"robust\.critic_coef: 1 .*pathwise\.critic_epochs"):
        tg.PathwiseLearner(env, robust=robust)
    assert tg.PathwiseLearner(env, robust=robust, critic_epochs=1).updates.smoothness is not None
