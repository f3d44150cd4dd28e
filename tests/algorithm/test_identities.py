"""What must hold exactly on the real learner: ratios, advantages, boundaries, microbatches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.update import Batch, minibatch_loss
from tailguard.data.bars import Bars
from tailguard.envs.tasks import RecallEnv
from tailguard.envs.trading import TradingEnv

MEMORIES = [("separate", 1), ("separate", 2), ("shared", 1), ("shared", 2), ("none", 1)]


def largest_log_ratio(learner: DistributionalPPO, witness: Any) -> list[float]:
    """Of the first minibatch of every iteration, before any step on it."""
    head = learner.policy.action_head
    return [
        float(
            (head.log_prob(output.dist_params.detach(), batch.actions) - batch.log_probs)[batch.weights > 0].abs().max()
        )
        for output, batch in witness.first
    ]


# --- acting and learning agree ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead_rows", [False, True])
@pytest.mark.parametrize(("memory", "layers"), MEMORIES)
def test_the_ratio_is_one_before_the_first_step(
    make_learner: Any, make_witness: Any, scripted_env: Any, memory: str, layers: int, dead_rows: bool
) -> None:
    witness = make_witness()
    env = scripted_env(end_probability=0.1, dead_rows=dead_rows)
    learner = make_learner(env, memory=memory, lstm_layers=layers, learning_rate=1e-2, extensions=(witness,))
    for _ in range(5):
        learner.iterate()
    assert witness.rollout.episode_start[1:].any()
    if memory != "none":
        # Some segments start in the middle of an episode, with a memory of it.
        inherited = witness.batch.state[0][0][:, ~witness.batch.episode_start[0]]
        assert inherited.abs().max() > 0.05
    ratios = largest_log_ratio(learner, witness)
    assert len(ratios) == 5
    assert max(ratios) < 1e-5
    # The policy does move in between: at the end of an iteration the ratio is far from one.
    batch = witness.batch if learner.policy.is_recurrent else witness.batch.rows_as_sequences()
    assert minibatch_loss(learner.policy, batch, learner.set_hyper(), learner.config).log_ratio.abs().max() > 1e-2


@pytest.mark.parametrize("squash", [True, False])
def test_the_ratio_is_one_on_bars(make_learner: Any, make_witness: Any, bars: Bars, squash: bool) -> None:
    """Accounts at different ages, so that episodes end in every segment."""
    witness = make_witness()
    env = TradingEnv(bars, num_envs=6, episode_length=20, stagger=3)
    learner = make_learner(env, squash=squash, learning_rate=1e-2, extensions=(witness,))
    for _ in range(4):
        learner.iterate()
    assert witness.rollout.inner_resets
    assert max(largest_log_ratio(learner, witness)) < 1e-5


def test_the_ratio_is_one_with_whole_episodes_in_one_fused_call(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(RecallEnv(6, delay=11), learning_rate=1e-2, extensions=(witness,))
    for _ in range(4):
        learner.iterate()
    assert not witness.rollout.inner_resets
    assert witness.rollout.episode_start[0].all()
    assert max(largest_log_ratio(learner, witness)) < 1e-5


@pytest.mark.parametrize("critic", ["quantile", "categorical", "scalar"])
@pytest.mark.parametrize("twin_trunk", ["shared", "own"])
def test_every_critic_repeats_its_old_outputs_before_the_first_step(
    make_learner: Any, make_witness: Any, scripted_env: Any, critic: str, twin_trunk: str
) -> None:
    """Same memory, same units and the critic's own output, although the return's scale has moved in between."""
    witness = make_witness()
    env = scripted_env(end_probability=0.1)
    env.reward[24:] *= 40
    env.reward[24:] += 30
    learner = make_learner(env, critic=critic, twin_critics=True, twin_trunk=twin_trunk, extensions=(witness,))
    scales, relaid = [], 0.0
    for _ in range(4):
        metrics = learner.iterate()
        scales.append(float(learner.return_moments.std))
        assert ("critic/supports_relaid" in metrics) == (critic == "categorical")  # others have no support
        relaid += metrics.get("critic/supports_relaid", 0.0)
    assert max(scales) > 10 * min(scales)
    assert (relaid > 0) == (critic == "categorical")
    for output, batch in witness.first:
        assert not torch.equal(output.critics[0].value, output.critics[1].value)
        for found, value, distribution in zip(output.critics, batch.old_values, batch.old_distributions, strict=True):
            torch.testing.assert_close(found.value, value, atol=1e-5, rtol=1e-5)
            assert (distribution is None) == (critic == "scalar")
            if distribution is not None:
                torch.testing.assert_close(found.distribution, distribution, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inner_resets", [None, True])
def test_fused_and_stepwise_learning_have_the_same_gradient(
    make_learner: Any, make_witness: Any, scripted_env: Any, inner_resets: bool | None
) -> None:
    """Resets at random places; and one fused call for the segment where there are none."""
    witness = make_witness()
    without_ends = inner_resets is None
    env = scripted_env(end_probability=0.0 if without_ends else 0.12)
    learner = make_learner(env, lstm_layers=2, extensions=(witness,))
    learner.iterate()
    learner.iterate()
    gradients = []
    for choice in (False if without_ends else None, True):
        learner.optimizer.zero_grad()
        loss = minibatch_loss(learner.policy, witness.batch, learner.set_hyper(), learner.config, inner_resets=choice)
        loss.total.backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in learner.policy.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


# --- rows in which nothing happened -----------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["separate", "none"])
def test_a_dead_row_carries_no_loss(make_learner: Any, everything_in: Any, scripted_env: Any, memory: str) -> None:
    """Poison in the observation and reward of rows in which nothing happened changes no number at all."""
    learners = []
    for poisoned in (False, True):
        env = scripted_env(end_probability=0.2, dead_rows=True)
        if poisoned:
            env.obs[~env.valid] = 1e6
            env.reward[~env.valid] = float("nan")
            env.last_obs[~env.valid] = float("nan")
        learner = make_learner(env, memory=memory, learning_rate=1e-2, minibatch_size=4, microbatches=2)
        for _ in range(4):
            learner.iterate()
        learners.append(learner)
    assert (~env.valid).sum() > 20
    plain, poisoned_numbers = (everything_in(learner) for learner in learners)
    for name, value in plain.items():
        torch.testing.assert_close(poisoned_numbers[name], value, atol=0, rtol=0, msg=name)


def test_a_minibatch_of_dead_rows_alone_has_a_loss_of_zero(
    make_learner: Any, make_witness: Any, scripted_env: Any
) -> None:
    witness = make_witness()
    learner = make_learner(scripted_env(dead_rows=True), memory="none", extensions=(witness,))
    learner.iterate()
    batch = witness.batch.rows_as_sequences()
    dead = (batch.weights[0] == 0).nonzero().flatten()
    assert len(dead) > 1
    loss = minibatch_loss(learner.policy, batch.select(dead), learner.set_hyper(), learner.config)
    assert float(loss.total.detach()) == 0.0


# --- the group is one, however it is split ---------------------------------------------------------------------------


def in_float64(learner: DistributionalPPO, batch: Batch) -> Batch:
    learner.policy.double()

    def wide(rows: Tensor) -> Tensor:
        return rows.double() if rows.is_floating_point() else rows

    return batch._map(wide, tuple(tuple(part.double() for part in trunk) for trunk in batch.state))


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("memory", ["separate", "none"])
@pytest.mark.parametrize("microbatches", [2, 4, 7, 50])
def test_microbatches_have_the_gradient_of_the_whole(
    make_learner: Any, make_witness: Any, scripted_env: Any, microbatches: int, memory: str, precise: bool
) -> None:
    """Uneven parts, dead rows spread unevenly over them, more parts than sequences."""
    witness = make_witness()
    options: dict[str, Any] = {"memory": memory, "max_grad_norm": 0.0, "twin_critics": True, "entropy_coef": 0.01}
    learner = make_learner(scripted_env(dead_rows=True), value_clip="mean_only", extensions=(witness,), **options)
    learner.iterate()
    learner.iterate()
    batch = witness.batch if memory != "none" else witness.batch.rows_as_sequences()
    if precise:
        batch = in_float64(learner, batch)
    index = torch.randperm(batch.log_probs.shape[1], generator=torch.Generator().manual_seed(1))[
        : 5 if memory != "none" else 41
    ]
    gradients, metrics = [], []
    for parts in (1, microbatches):
        learner.updates.config = dataclasses.replace(learner.config, microbatches=parts)
        seen = witness.minibatches
        metrics.append(learner.updates.accumulate(batch, index, True))
        assert witness.minibatches - seen == min(parts, len(index))
        gradients.append([parameter.grad.clone() for parameter in learner.policy.parameters()])
    tolerance = 1e-10 if precise else 1e-6
    for whole, summed in zip(*gradients, strict=True):
        torch.testing.assert_close(summed, whole, atol=tolerance, rtol=tolerance if precise else 1e-4)
    for name, value in metrics[0].items():
        torch.testing.assert_close(metrics[1][name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_training_in_microbatches_is_training(make_learner: Any, scripted_env: Any) -> None:
    """Two learners, one of them with microbatches, stay together over several iterations."""
    learners = [
        make_learner(scripted_env(dead_rows=True), microbatches=parts, minibatch_size=48, learning_rate=1e-3)
        for parts in (1, 3)
    ]
    for learner in learners:
        for _ in range(3):
            learner.iterate()
    for one, other in zip(*(learner.policy.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["global", "per_env", "off"])
def test_advantages_are_normalised_once_for_the_rollout(
    make_learner: Any, make_witness: Any, scripted_env: Any, mode: str
) -> None:
    """With a learning rate of 0 every ratio is 1, and the policy term of any minibatch is minus its mean advantage."""
    witness = make_witness()
    env = scripted_env(dead_rows=True)
    env.reward[:, 0] *= 20
    learner = make_learner(env, normalise_advantages=mode, learning_rate=0.0, extensions=(witness,))
    learner.iterate()
    raw, valid = witness.estimates.advantages.double(), witness.rollout.valid
    batch = witness.batch
    expected = torch.zeros_like(raw)
    if mode == "global":
        expected[valid] = (raw[valid] - raw[valid].mean()) / raw[valid].std()
    elif mode == "per_env":
        for n in range(raw.shape[1]):
            own = raw[valid[:, n], n]
            expected[valid[:, n], n] = (own - own.mean()) / own.std()
    else:
        expected[valid] = raw[valid]
    torch.testing.assert_close(batch.advantages.double(), expected, atol=1e-5, rtol=1e-5)
    for chosen in ([0], [1, 2], [5, 3, 0, 4]):
        part = batch.select(torch.tensor(chosen))
        loss = minibatch_loss(learner.policy, part, learner.set_hyper(), learner.config)
        counted = expected[:, chosen][valid[:, chosen]]
        assert float(loss.terms["policy"].detach()) == pytest.approx(-float(counted.mean()), abs=1e-5)


def test_constant_advantages_become_zeros_and_are_counted(
    make_learner: Any, make_witness: Any, scripted_env: Any
) -> None:
    witness = make_witness()
    env = scripted_env()
    env.reward[:] = 0.1
    env.terminated[:] = True
    learner = make_learner(env, memory="none", extensions=(witness,))
    # Untrained critics of equal opinion everywhere: the advantage is one constant, up to float32 rounding.
    with torch.no_grad():
        learner.policy.each_critic()[0].value.layer.weight.zero_()
    metrics = learner.iterate()
    assert not witness.batch.advantages.any()
    assert metrics["warn/constant_advantages"] == 1
