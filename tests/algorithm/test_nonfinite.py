"""What is not finite stops the run by name, or is left out and counted; never silently."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.nonfinite import NonFiniteError
from tailguard.algorithm.update import Batch
from tailguard.errors import TailguardError
from tailguard.models.agent import ActorCritic, AgentOutput


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

    def loss(self, agent: ActorCritic, output: AgentOutput, batch: Batch) -> Tensor:  # noqa: ARG002
        weight = agent.action_head.linear.weight
        return (0.0 * weight.sum()).sqrt() * torch.ones_like(batch.log_probs)


def weights(learner: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.agent.parameters()]


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
    figures = learner.iterate()
    assert figures["warn/skipped_nonfinite"] == 2
    assert figures["train/n_updates"] == 4
    after = weights(learner)
    assert all(weight.isfinite().all() for weight in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    learner.extensions = ()
    assert learner.iterate()["warn/skipped_nonfinite"] == 2


def test_where_every_minibatch_is_skipped_no_weight_moves(make_learner: Any, tamper: Any) -> None:
    learner = make_learner(minibatch_size=72, on_nonfinite="skip", extensions=(tamper(spoil_log_prob(0, 0)),))
    learner.return_moments.update(torch.tensor([-1.0, 1.0]))
    before = [parameter.detach().clone() for parameter in learner.agent.action_head.parameters()]
    figures = learner.iterate()
    assert figures["train/n_updates"] == 0
    assert figures["warn/skipped_nonfinite"] == 2
    assert all(torch.equal(old, new) for old, new in zip(before, learner.agent.action_head.parameters(), strict=True))
    assert not learner.optimizer.state.get(learner.agent.action_head.linear.weight)


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
    figures = learner.iterate()
    assert figures["warn/skipped_nonfinite"] == 6
    actor = learner.agent.action_head.linear.weight
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
    figures = learner.iterate()
    assert figures["warn/skipped_nonfinite"] == 1
    assert "train/n_updates" not in figures
    assert all(torch.equal(old, new) for old, new in zip(before, weights(learner), strict=True))
    now = learner.observation_moments.state_dict(), learner.return_moments.state_dict()
    for old, new in zip(statistics, now, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert learner.num_timesteps == 3 * 72
    # The next rollout is learned from again; a memory that has read a NaN is gone with its episode.
    env.obs[29, 3], env.reward[29, 3], env.last_obs[29, 3] = 0.0, 0.0, 0.0
    for _ in range(4):
        figures = learner.iterate()
    assert figures["train/n_updates"] == 6
    assert all(weight.isfinite().all() for weight in weights(learner))


def test_the_last_observation_of_a_terminated_episode_may_be_anything(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(end_probability=0.2)
    env.last_obs[env.terminated] = math.nan
    learner = make_learner(env)
    for _ in range(4):
        figures = learner.iterate()
    assert env.terminated[:48].any()
    assert math.isfinite(figures["train/loss"])


def test_a_first_observation_that_is_not_finite_does_not_enter_the_statistics(
    make_learner: Any, scripted_env: Any
) -> None:
    env = scripted_env()
    env.obs[0, 2, 0] = math.nan
    learner = make_learner(env)
    with pytest.raises(NonFiniteError, match="observation 0 of environment 2 is nan at row 0"):
        learner.iterate()
    assert learner.observation_moments.mean.isfinite().all()
