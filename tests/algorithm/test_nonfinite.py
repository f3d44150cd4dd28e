"""What is not finite stops the run by name, or is left out and counted; never silently."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.nonfinite import NonFiniteError
from tailguard.algorithm.update import Batch
from tailguard.envs.tasks import BetsEnv
from tailguard.errors import TailguardError
from tailguard.models.policy import ActorCritic, PolicyOutput
from tailguard.risk import RiskConfig


def spoil_log_prob(row: int, environment: int) -> Any:
    def change(batch: Batch) -> dict[str, Any]:
        log_probs = batch.log_probs.clone()
        log_probs[row, environment] = math.nan
        return {"log_probs": log_probs}

    return change


class BadGradient:
    """A term of value 0 whose gradient is 0 · ∞ at the weights of the action head."""

    name = "bad"

    def prepare(self, rollout: Any, estimates: Any, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        return batch

    def loss(self, agent: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:  # noqa: ARG002
        weight = agent.action_head.linear.weight
        return (0.0 * weight.sum()).sqrt() * torch.ones_like(batch.log_probs)


def weights(learner: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.policy.parameters()]


@pytest.mark.parametrize("memory", ["separate", "none"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_nan_log_prob_stops_and_names_row_and_environment(
    make_learner: Any, tamper: Any, memory: str, microbatches: int
) -> None:
    learner = make_learner(memory=memory, microbatches=microbatches, extensions=(tamper(spoil_log_prob(7, 4)),))
    message = "step 0: the loss .policy. is not finite. The log-ratio of environment 4 at row 7 of the rollout is nan"
    with pytest.raises(NonFiniteError, match=message):
        learner.iterate()
    assert issubclass(NonFiniteError, TailguardError)


@pytest.mark.parametrize("memory", ["separate", "none"])
def test_a_minibatch_that_is_not_finite_is_left_out_and_counted(make_learner: Any, tamper: Any, memory: str) -> None:
    """Three minibatches an epoch, two epochs: the one that holds the NaN is skipped in each, the others are learned."""
    learner = make_learner(memory=memory, on_nonfinite="skip", extensions=(tamper(spoil_log_prob(7, 4)),))
    before = weights(learner)
    metrics = learner.iterate()
    assert metrics["warn/skipped_nonfinite"] == 2
    assert metrics["train/n_updates"] == 4
    after = weights(learner)
    assert all(weight.isfinite().all() for weight in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    learner.terms = learner.updates.extensions = ()
    assert learner.iterate()["warn/skipped_nonfinite"] == 2


def test_where_every_minibatch_is_skipped_no_weight_moves(make_learner: Any, tamper: Any) -> None:
    learner = make_learner(minibatch_size=72, on_nonfinite="skip", extensions=(tamper(spoil_log_prob(0, 0)),))
    learner.return_moments.update(torch.tensor([-1.0, 1.0]))
    before = [parameter.detach().clone() for parameter in learner.policy.action_head.parameters()]
    metrics = learner.iterate()
    assert metrics["train/n_updates"] == 0
    assert metrics["warn/skipped_nonfinite"] == 2
    assert all(torch.equal(old, new) for old, new in zip(before, learner.policy.action_head.parameters(), strict=True))
    assert not learner.optimizer.state.get(learner.policy.action_head.linear.weight)


def test_where_every_minibatch_is_skipped_the_kl_penalty_stands_still(make_learner: Any, tamper: Any) -> None:
    """A policy that was not moved says nothing about the penalty that should hold it."""
    learner = make_learner(
        minibatch_size=72,
        on_nonfinite="skip",
        kl_penalty=0.5,
        target_kl=0.01,
        extensions=(tamper(spoil_log_prob(0, 0)),),
    )
    assert learner.iterate()["train/n_updates"] == 0
    assert learner.state.kl_coef == 0.5


def test_a_nan_gradient_under_a_finite_loss_is_caught(make_learner: Any) -> None:
    learner = make_learner(extensions=(BadGradient(),))
    with pytest.raises(NonFiniteError, match=r"gradient of action_head.linear.weight is not finite"):
        learner.iterate()
    learner = make_learner(extensions=(BadGradient(),), on_nonfinite="skip")
    before = weights(learner)
    metrics = learner.iterate()
    assert metrics["warn/skipped_nonfinite"] == 6
    actor = learner.policy.action_head.linear.weight
    assert any(torch.equal(actor, old) for old in before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("reward", "step 144: reward 0 of environment 3 is {} at row 5 of the rollout"),
        ("observation", "step 144: observation 1 of environment 3 is {} at row 5 of the rollout"),
        ("final observation", "step 144: final observation 1 of environment 3 is {} at row 5 of the rollout"),
    ],
)
def test_a_reward_or_observation_that_is_not_finite_stops_and_is_named(
    make_learner: Any, scripted_env: Any, what: str, message: str, value: float
) -> None:
    """Row 29 of the script is row 5 of the third rollout of 12."""
    env = scripted_env(end_probability=0.0)
    spoil(env, what, value)
    learner = make_learner(env)
    learner.iterate()
    learner.iterate()
    with pytest.raises(NonFiniteError, match=message.format(value)):
        learner.iterate()


def spoil(env: Any, what: str, value: float) -> None:
    if what == "reward":
        env.reward[29, 3] = value
    elif what == "observation":
        env.obs[29, 3, 1] = value
    else:
        env.truncated[29, 3] = True
        env.last_obs[29, 3, 1] = value


@pytest.mark.parametrize("what", ["reward", "observation", "final observation"])
def test_such_a_rollout_is_left_out_and_counted(make_learner: Any, scripted_env: Any, what: str) -> None:
    env = scripted_env(end_probability=0.2)
    spoil(env, what, math.nan)
    learner = make_learner(env, on_nonfinite="skip")
    learner.iterate()
    learner.iterate()
    before = weights(learner)
    statistics = learner.observation_moments.state_dict(), learner.return_moments.state_dict()
    metrics = learner.iterate()
    assert metrics["warn/skipped_nonfinite"] == 1
    assert "train/n_updates" not in metrics
    assert all(torch.equal(old, new) for old, new in zip(before, weights(learner), strict=True))
    now = learner.observation_moments.state_dict(), learner.return_moments.state_dict()
    for old, new in zip(statistics, now, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert learner.num_timesteps == 3 * 72
    # The next rollout is learned from again; a memory that has read a NaN is gone with its episode.
    env.obs[29, 3], env.reward[29, 3], env.last_obs[29, 3] = 0.0, 0.0, 0.0
    for _ in range(4):
        metrics = learner.iterate()
    assert metrics["train/n_updates"] == 6
    assert all(weight.isfinite().all() for weight in weights(learner))


def test_the_last_observation_of_a_terminated_episode_may_be_anything(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(end_probability=0.2)
    env.last_obs[env.terminated] = math.nan
    learner = make_learner(env)
    for _ in range(4):
        metrics = learner.iterate()
    assert env.terminated[:48].any()
    assert math.isfinite(metrics["train/loss"])


def test_a_first_observation_that_is_not_finite_does_not_enter_the_statistics(
    make_learner: Any, scripted_env: Any
) -> None:
    env = scripted_env()
    env.obs[0, 2, 0] = math.nan
    learner = make_learner(env)
    with pytest.raises(NonFiniteError, match="observation 0 of environment 2 is nan at row 0"):
        learner.iterate()
    assert learner.observation_moments.mean.isfinite().all()


# --- one bad observation, and an agent that goes on learning ---------------------------------------------------------


def glitch(scripted_env: Any, value: float = math.nan) -> Any:
    """Eight endless episodes, and a single observation of one of them that is not finite."""
    env = scripted_env(num_envs=8, rows=600, end_probability=0.0)
    env.obs[100, 3, 1] = value
    return env


@pytest.mark.parametrize("memory", ["separate", "shared"])
@pytest.mark.parametrize("runtime", ["eager", "compile"])
@pytest.mark.parametrize("normalise", [True, False])
def test_learning_goes_on_after_one_bad_observation(
    make_learner: Any, scripted_env: Any, memory: str, runtime: str, normalise: bool
) -> None:
    """The episodes never end, so nothing but the learner itself clears what it remembers of row 100."""
    env = glitch(scripted_env)
    learner = make_learner(
        env, memory=memory, runtime=runtime, on_nonfinite="skip", normalise_observations=normalise, twin_critics=True
    )
    with torch.compiler.set_stance("force_eager"):
        metrics = [learner.iterate() for _ in range(14)]
    assert [row for row, found in enumerate(metrics) if "train/n_updates" not in found] == [8]  # rows 96 to 107
    assert all(found["train/n_updates"] > 0 for row, found in enumerate(metrics) if row != 8)
    assert metrics[-1]["warn/skipped_nonfinite"] == 1
    assert all(weight.isfinite().all() for weight in weights(learner))
    for moments in (learner.observation_moments, learner.return_moments):
        assert all(value.isfinite().all() for value in moments.state_dict().values())
    assert torch.stack(env.actions).isfinite().all()
    assert learner.alarms == []


def test_a_bad_observation_stops_the_run_all_the_same(make_learner: Any, scripted_env: Any) -> None:
    learner = make_learner(glitch(scripted_env))
    for _ in range(8):
        learner.iterate()
    with pytest.raises(NonFiniteError, match="step 768: observation 1 of environment 3 is nan at row 4 of the rollout"):
        learner.iterate()


@pytest.mark.parametrize("trunk", [0, 1], ids=["actor", "critic"])
def test_a_memory_that_is_not_finite_is_cleared_for_its_environment_and_counted(
    make_learner: Any, scripted_env: Any, trunk: int
) -> None:
    learner = make_learner(scripted_env(end_probability=0.0), on_nonfinite="skip")
    assert learner.iterate()["data/memory_resets"] == 0
    before = [[part.clone() for part in memory] for memory in learner.state.rollout_state.state]
    learner.state.rollout_state.state[trunk][1][0, 2, 4] = math.nan
    metrics = learner.iterate()
    assert metrics["data/memory_resets"] == 1
    assert metrics["train/n_updates"] > 0
    start = learner.snapshot.rollout.start_state
    for number, parts in enumerate(start):
        for part, old in zip(parts, before[number], strict=True):
            assert torch.equal(part[:, [0, 1, 3, 4, 5]], old[:, [0, 1, 3, 4, 5]])
            assert torch.equal(part[:, 2], torch.zeros_like(part[:, 2]) if number == trunk else old[:, 2])
    assert learner.iterate()["data/memory_resets"] == 0


@pytest.mark.parametrize("on_nonfinite", ["skip", "stop"])
def test_estimates_that_are_not_finite_move_neither_statistics_nor_heads(
    make_learner: Any, scripted_env: Any, on_nonfinite: str
) -> None:
    """A critic whose weights overflow says NaN of observations that are fine."""
    learner = make_learner(scripted_env(), on_nonfinite=on_nonfinite)
    learner.iterate()
    critic = learner.policy.each_critic()[0]
    with torch.no_grad():
        critic.value.layer.bias.fill_(math.nan)
    statistics = learner.return_moments.state_dict()
    head = critic.distribution.layer.weight.clone()
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match="step 72: the value target of environment 0 is nan at row 0"):
            learner.iterate()
    else:
        metrics = learner.iterate()
        assert metrics["warn/skipped_nonfinite"] == 1
        assert "train/n_updates" not in metrics
    assert all(torch.equal(value, statistics[name]) for name, value in learner.return_moments.state_dict().items())
    assert torch.equal(critic.distribution.layer.weight, head)


def test_a_measured_outcome_that_is_not_finite_counts_as_a_bad_input(make_learner: Any) -> None:
    class Glitch(BetsEnv):
        def transition(self, before: Any, action: Tensor, noise: Tensor) -> Any:
            after, found = super().transition(before, action, noise)
            pnl = found.outcome["pnl"].clone()
            pnl[1] = math.nan
            return after, replace(found, outcome={"pnl": pnl})

    learner = make_learner(Glitch(8, steps=3), risk=RiskConfig(limit=-0.1, alpha=0.5))
    with pytest.raises(NonFiniteError, match="outcome pnl 0 of environment 1 is nan at row 0"):
        learner.iterate()
