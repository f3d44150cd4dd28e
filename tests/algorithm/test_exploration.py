"""A schedule for the noise of the actions: what is drawn, what is learned from it, what is saved (ppo.exploration)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.saving import PARTS
from tailguard.data.bars import Bars
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.models.actions import GaussianHead
from tailguard.monitor.callbacks import EveryIteration
from tailguard.sealed import flat_tensors, read_sealed

ROLLOUT = 6 * 12
"""Steps in a rollout of the small learner."""
SCHEDULES: dict[str, tuple[float | str, Callable[[float], float]]] = {
    "constant": (0.3, lambda progress: 0.3),  # noqa: ARG005
    "linear": ("linear:2:0.5", lambda progress: 2 - 1.5 * progress),
    "exponential": ("exponential:1:0.04", lambda progress: math.exp(progress * math.log(0.04))),
}


def rollouts(learner: DistributionalPPO) -> list[Rollout]:
    """At progress 0 and 1/2, where `learn` looks at the schedules, and at 1."""
    found: list[Rollout] = []

    def keep(agent: DistributionalPPO) -> None:
        assert agent.snapshot is not None
        found.append(agent.snapshot.rollout)

    learner.learn(2 * ROLLOUT, callback=EveryIteration(keep))
    learner.state.progress = 1.0
    learner.iterate()
    assert learner.snapshot is not None
    return [*found, learner.snapshot.rollout]


def deviations(rollout: Rollout) -> Tensor:
    return rollout.dist_params.double().chunk(2, dim=-1)[1].exp()


# --- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "factor"), SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("std", ["global", "state"])
def test_the_deviation_is_the_learned_one_times_the_schedule(
    make_learner: Any, std: str, schedule: float | str, factor: Callable[[float], float]
) -> None:
    """On a script, where another noise changes nothing that the policy sees; the learned deviations stand still."""
    with_schedule, without = (
        make_learner(std=std, learning_rate=0.0, log_std_init=-0.7, exploration=given) for given in (schedule, 1.0)
    )
    for learner in (with_schedule, without):
        with torch.no_grad():
            learner.policy.action_head.linear.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))
    for progress, found, plain in zip((0.0, 0.5, 1.0), rollouts(with_schedule), rollouts(without), strict=True):
        sigma, learned = deviations(found), deviations(plain)
        assert (float(learned.std()) > 0.01) == (std == "state")
        torch.testing.assert_close(sigma, learned * factor(progress), atol=0, rtol=1e-6)
        if std == "global":
            torch.testing.assert_close(sigma, torch.full_like(sigma, math.exp(-0.7) * factor(progress)))
        mean = found.dist_params.chunk(2, dim=-1)[0]
        assert torch.equal(mean, plain.dist_params.chunk(2, dim=-1)[0])
        # The same chance, further from the mean or nearer to it.
        noise = (plain.actions - mean).double() / learned
        torch.testing.assert_close((found.actions - mean).double(), sigma * noise, atol=1e-6, rtol=1e-5)
        expected = norm.logpdf(found.actions, mean, sigma).sum(-1)
        np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize("std", ["global", "state"])
def test_the_ratio_is_one_before_the_first_step(make_learner: Any, make_witness: Any, bars: Bars, std: str) -> None:
    witness = make_witness()
    env = TradingEnv(bars, num_envs=6, episode_length=20, stagger=4)
    learner = make_learner(env, std=std, learning_rate=1e-2, exploration="exponential:1:0.05", extensions=(witness,))
    learner.learn(5 * ROLLOUT)
    assert len(witness.first) == 5
    sigmas = []
    for output, batch in witness.first:
        log_prob = learner.policy.action_head.log_prob(output.dist_params.detach(), batch.actions)
        torch.testing.assert_close(log_prob, batch.log_probs, atol=1e-5, rtol=1e-5)
        sigmas.append(float(output.dist_params.detach()[..., 1].exp().mean()))
    # At the start of the fifth rollout, 4/5 of the way, a factor of 0.09.
    assert sigmas[-1] < 0.15 * sigmas[0]


# --- what is saved ---------------------------------------------------------------------------------------------------


def test_a_loaded_agent_draws_as_it_did_when_it_was_saved(make_learner: Any, scripted_env: Any, tmp_path: Path) -> None:
    """After two of two rollouts: at the schedule's middle, 0.6."""
    learner = make_learner(squash=False, log_std_init=-4.0, learning_rate=0.0, exploration="linear:1:0.2")
    learner.learn(2 * ROLLOUT)
    learner.save(tmp_path / "agent")
    rows = np.tile(scripted_env().obs[0, 0].numpy(), (20_000, 1))
    mean = learner.predict(rows, deterministic=True)[0]
    drawn = learner.predict(rows)[0]
    for env in (None, scripted_env()):
        loaded = DistributionalPPO.load(tmp_path / "agent", env=env)
        found = loaded.predict(rows)[0]
        assert np.array_equal(found, drawn)
        assert np.abs(mean).max() < 0.5  # far from the bounds, where actions are clipped
        # Four standard errors of a standard deviation, which is σ/√(2n).
        assert (found - mean).std(0) == pytest.approx(0.6 * math.exp(-4), rel=4 / math.sqrt(2 * 20_000))


def test_the_factor_is_not_among_the_weights(make_learner: Any, tmp_path: Path) -> None:
    found = []
    for name, options in (("with", {"exploration": "linear:1:0.2"}), ("without", {})):
        learner = make_learner(**options)
        learner.iterate()
        learner.save(tmp_path / name)
        found.append({key for key, _ in flat_tensors(read_sealed(tmp_path / name, PARTS)[1]["weights"])})
    assert found[0] == found[1] == {name for name, _ in learner.policy.named_parameters()}


def test_an_agent_that_has_not_learned_yet_draws_as_a_loaded_one(make_learner: Any, tmp_path: Path) -> None:
    learner = make_learner(exploration=0.1)
    learner.save(tmp_path / "agent")
    rows = np.zeros((10, 3), np.float32)
    loaded = DistributionalPPO.load(tmp_path / "agent")
    assert np.array_equal(learner.predict(rows)[0], loaded.predict(rows)[0])


# --- what is said of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("squash", [True, False])
def test_noise_that_was_taken_away_on_purpose_is_no_collapse(make_learner: Any, squash: bool) -> None:
    """The margin is that of the learned deviation over 1 % of half the range, at a noise of 1/1000 too."""
    learner = make_learner(squash=squash, learning_rate=0.0, log_std_init=-1.0, exploration="exponential:1:0.001")
    margins: list[float] = []
    note = EveryIteration(lambda agent: margins.append(agent.metrics["train/entropy_margin"]))
    learner.learn(10 * ROLLOUT, callback=note)
    # Half the range: 1 before squashing; without, 1 and 2 in the script's two dimensions.
    expected = -1.0 - math.log(0.01) - (0.0 if squash else 0.5 * math.log(2.0))
    assert margins == pytest.approx([expected] * 10, abs=1e-5)
    assert float(deviations(learner.snapshot.rollout).max()) < 0.01 * math.exp(-1.0)
    assert not any("entropy" in str(alarm) for alarm in learner.alarms)


def test_a_policy_that_has_lost_its_noise_by_itself_is_still_found_out(make_learner: Any) -> None:
    learner = make_learner(log_std_init=-4.9, learning_rate=0.0, exploration=2.0)
    assert learner.iterate()["train/entropy_margin"] == pytest.approx(-4.9 - math.log(0.01), abs=1e-5)


# --- where it is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [1.0, 1, "1", "linear:1:1", "exponential:1:1"])
def test_a_factor_of_one_changes_nothing(make_learner: Any, everything_in: Any, given: float | str) -> None:
    silent, spoken = make_learner(seed=2), make_learner(seed=2, exploration=given)
    for _ in range(3):
        assert silent.iterate() == spoken.iterate()
    expected, found = everything_in(silent), everything_in(spoken)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("given", [0, -1.0, "linear:1:0", "linear:-1:1", "exponential:1:0", math.nan, "wavy:1:2"])
def test_noise_must_stay_positive(make_learner: Any, given: float | str) -> None:
    with pytest.raises(ConfigError, match=r"^ppo\.exploration: "):
        make_learner(exploration=given)


@pytest.mark.parametrize("given", [0.5, "linear:1:0.5", "linear:2:1", "exponential:0.5:1"])
def test_choices_have_no_deviation_to_scale(make_learner: Any, scripted_env: Any, given: float | str) -> None:
    with pytest.raises(ConfigError, match=r"^ppo\.exploration: .*leave it at 1"):
        make_learner(scripted_env(discrete=True), exploration=given)


@pytest.mark.parametrize("given", [1, "linear:1:1"])
def test_choices_may_say_one(make_learner: Any, scripted_env: Any, given: float | str) -> None:
    learner = make_learner(scripted_env(discrete=True), exploration=given)
    assert not isinstance(learner.policy.action_head, GaussianHead)
    learner.iterate()
