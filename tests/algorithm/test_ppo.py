"""The learner's verbs, its randomness, and the hyper-parameters that move while it learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import collect
from tailguard.algorithm.update import Batch, minibatch_loss
from tailguard.data.bars import Bars
from tailguard.envs.tasks import RecallEnv
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.monitor.callbacks import EveryIteration


def actor_weights(learner: DistributionalPPO) -> list[Tensor]:
    """Of the parameters that no change of the return's scale touches."""
    return [
        parameter.detach().clone()
        for name, parameter in learner.policy.named_parameters()
        if name.startswith(("action_head", "trunks.0"))
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- randomness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["scripted", "recall", "trading", "gymnasium"])
def test_same_seed_same_weights(
    make_learner: Any, scripted_env: Any, everything_in: Any, bars: Bars, which: str
) -> None:
    environments: dict[str, Callable[[], Any]] = {
        "scripted": scripted_env,
        "recall": lambda: RecallEnv(6, delay=5),
        "trading": lambda: TradingEnv(bars, num_envs=6, episode_length=20),
        "gymnasium": lambda: gymnasium.make("CartPole-v1"),
    }

    def train(seed: int) -> dict[str, Tensor]:
        learner = make_learner(environments[which](), seed=seed, twin_critics=True)
        learner.learn(3 * 12 * learner.env.num_envs)
        return everything_in(learner)

    first = train(5)
    torch.manual_seed(99)  # the surroundings' random stream plays no part ...
    stream = torch.get_rng_state()
    again, other = train(5), train(6)
    assert torch.equal(torch.get_rng_state(), stream)  # ... and is not played with
    assert all(torch.equal(again[name], value) for name, value in first.items())
    moved = [name for name in first if name.startswith("agent.") and not torch.equal(first[name], other[name])]
    assert any("trunks.0" in name for name in moved)
    assert any("critics.1" in name for name in moved)


def test_asking_for_actions_does_not_change_the_training(
    make_learner: Any, scripted_env: Any, everything_in: Any
) -> None:
    """Evaluation on poisoned observations, sampled and not, between the iterations of one of two learners."""
    quiet, asked = (make_learner(scripted_env()) for _ in range(2))
    poison = np.full((5, 3), 1e6, np.float32)
    poison[1], poison[2] = np.nan, np.inf
    for _ in range(3):
        quiet.iterate()
        asked.iterate()
        before = everything_in(asked)
        state = None
        for deterministic in (True, False):
            for _ in range(4):
                _, state = asked.predict(poison, state, episode_start=np.zeros(5, bool), deterministic=deterministic)
        after = everything_in(asked)
        assert all(torch.equal(after[name], value) for name, value in before.items())
    ours, theirs = everything_in(quiet), everything_in(asked)
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())


def test_every_sequence_is_used_once_an_epoch(make_learner: Any, tamper: Any) -> None:
    """Uneven minibatches: 6 sequences of 12 rows in minibatches of about 20 transitions are 4 parts of 1 or 2."""
    seen: list[list[int]] = []

    class Numbers(tamper):  # type: ignore[misc]
        def loss(self, agent: Any, output: Any, batch: Batch) -> Tensor:  # noqa: ARG002
            seen.append(batch.extra["number"][0].long().tolist())
            return torch.zeros_like(batch.log_probs)

    numbers = Numbers(lambda _: {"extra": {"number": torch.arange(6.0).expand(12, 6)}})
    learner = make_learner(minibatch_size=20, epochs=3, extensions=(numbers,))
    learner.iterate()
    assert [len(part) for part in seen] == [2, 2, 1, 1] * 3
    epochs = [[number for part in seen[first : first + 4] for number in part] for first in (0, 4, 8)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize(("memory", "size", "updates"), [("separate", 10**6, 1), ("separate", 2, 6), ("none", 2, 36)])
def test_minibatches_are_never_less_than_a_sequence_nor_more_than_the_rollout(
    make_learner: Any, memory: str, size: int, updates: int
) -> None:
    metrics = make_learner(memory=memory, minibatch_size=size, epochs=1).iterate()
    assert metrics["train/n_updates"] == updates


# --- learn -----------------------------------------------------------------------------------------------------------


def test_learn_takes_whole_rollouts_and_counts_steps(make_learner: Any) -> None:
    learner = make_learner()
    assert learner.num_timesteps == 0
    assert learner.learn(73).num_timesteps == 144
    assert learner.learn(72, reset_num_timesteps=False).num_timesteps == 216
    assert learner.learn(1).num_timesteps == 72
    assert learner.state.iteration == 4
    assert learner.env.seeds == [0]  # episodes go on from one call to the next


@pytest.mark.parametrize("steps", [0, -5, 2.5])
def test_learn_refuses_a_number_of_steps_that_is_none(make_learner: Any, steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"total_timesteps: "):
        make_learner().learn(steps)


def test_the_progress_bar_ends_where_the_training_does(make_learner: Any, capsys: pytest.CaptureFixture[str]) -> None:
    make_learner().learn(200, log_interval=100, progress_bar=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("training 216 / 216 steps")
    make_learner().learn(72)
    assert capsys.readouterr().out == ""


def test_the_figures_are_what_their_names_say(make_learner: Any, make_witness: Any, scripted_env: Any) -> None:
    witness = make_witness()
    env = scripted_env(dead_rows=True, end_probability=0.3)
    learner = make_learner(env, twin_critics=True, extensions=(witness,))
    learner.learn(3 * 72)
    metrics, estimates, valid = learner.metrics, witness.estimates, witness.rollout.valid
    returns, lengths = [], []
    total, length = np.zeros(6), np.zeros(6)
    for row in range(36):
        alive = env.valid[row].numpy()
        total += np.where(alive, env.reward[row].numpy(), 0.0)
        length += alive
        for n in np.flatnonzero(env.ended[row].numpy()):
            if alive[n]:
                returns.append(total[n])
                lengths.append(length[n])
            total[n] = length[n] = 0
    assert 20 < len(returns) < 100
    assert metrics["rollout/ep_rew_mean"] == pytest.approx(np.mean(returns), rel=1e-6)
    assert metrics["rollout/ep_len_mean"] == pytest.approx(np.mean(lengths), rel=1e-6)
    targets, values = estimates.value_targets[valid].double(), estimates.values[valid].double()
    explained = 1 - float((targets - values).var() / targets.var())
    assert metrics["train/explained_variance"] == pytest.approx(explained, rel=1e-4)
    entropy = learner.policy.action_head.entropy(witness.rollout.dist_params)[valid].mean()
    assert metrics["train/entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert metrics["time/total_timesteps"] == 216
    assert metrics["time/iterations"] == 3
    assert metrics["train/n_updates"] == 6
    assert metrics["warn/skipped_nonfinite"] == metrics["warn/constant_advantages"] == 0
    for name in ("approx_kl", "clip_fraction", "policy_gradient_loss", "value_loss", "loss", "learning_rate"):
        assert math.isfinite(metrics[f"train/{name}"]), name
    assert metrics["time/fps"] > 0


# --- hyper-parameters that move --------------------------------------------------------------------------------------


def series(learner: DistributionalPPO, name: str, iterations: int) -> list[float]:
    """A figure of every iteration of one call of `learn`."""
    found: list[float] = []
    learner.learn(iterations * 72, callback=EveryIteration(lambda _: found.append(learner.metrics[name])))
    return found


def test_the_learning_rate_schedule_sets_the_step(make_learner: Any) -> None:
    learner = make_learner(learning_rate="linear:0:0.04")
    before = actor_weights(learner)
    steps: list[float] = []
    rates: list[float] = []

    def measure(*_: Any) -> None:
        nonlocal before
        now = actor_weights(learner)
        steps.append(max(float((new - old).abs().max()) for old, new in zip(before, now, strict=True)))
        rates.append(learner.metrics["train/learning_rate"])
        before = now

    learner.learn(4 * 72, callback=EveryIteration(measure))
    assert rates == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert steps[0] == 0.0  # not one bit moves at a rate of 0
    # Adam moves a parameter by no more than about the rate in a step; there are 6 in an iteration.
    for step, rate in zip(steps[1:], rates[1:], strict=True):
        assert 0.5 * rate < step < 12 * rate
    assert learner.optimizer.param_groups[0]["lr"] is learner.hyper.learning_rate


def test_the_clip_range_schedule_reaches_the_surrogate(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(clip_range="linear:0.4:0", learning_rate=0.05, extensions=(witness,))
    assert series(learner, "train/clip_range", 4) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    loss = minibatch_loss(learner.policy, witness.batch, learner.set_hyper(), learner.config)
    outside = ((loss.log_ratio.exp() - 1).abs() > 0.1).float().mean()
    assert float(loss.metrics["train/clip_fraction"]) == pytest.approx(float(outside))
    assert float(outside) > 0.1


def test_entropy_decays_is_boosted_on_a_plateau_and_keeps_its_floor(make_learner: Any, scripted_env: Any) -> None:
    """Rewards of 0 are a plateau as soon as three iterations have been seen; the boost of 2 fades over three."""
    env = scripted_env(end_probability=0.3)
    env.reward[:] = 0.0
    options: dict[str, Any] = {"entropy_window": 3, "entropy_boost": 2.0}
    flat = series(make_learner(env, entropy_coef=0.01, **options), "train/entropy_coef", 8)
    assert flat == pytest.approx([0.01, 0.01, 0.01, 0.02, 0.05 / 3, 0.04 / 3, 0.02, 0.05 / 3])
    options["entropy_floor"] = 0.006
    falling = series(make_learner(env, entropy_coef="linear:0.01:0", **options), "train/entropy_coef", 8)
    decay = [0.01 * (1 - k / 8) for k in range(8)]
    boost = [1, 1, 1, 2, 5 / 3, 4 / 3, 2, 5 / 3]
    assert falling == pytest.approx([max(a * b, 0.006) for a, b in zip(decay, boost, strict=True)])
    assert falling[-1] == pytest.approx(0.006)


def test_the_entropy_bonus_widens_the_policy(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(discrete=True)
    env.reward[:] = 0.0
    learner = make_learner(env, entropy_coef=1.0, learning_rate=0.02)
    with torch.no_grad():
        learner.policy.action_head.linear.bias[:] = torch.tensor([2.0, 0.0, -2.0, 1.5, -1.5])
    entropy = series(learner, "train/entropy", 12)
    assert entropy[0] < 0.85
    assert entropy[-1] > 0.95 * (math.log(3) + math.log(2))


@pytest.mark.parametrize("limit", [{"target_kl": 1e-9}, {"kl_limit": 1e-9}])
def test_a_tiny_kl_target_stops_after_one_update(make_learner: Any, limit: dict[str, float]) -> None:
    """The first minibatch has a KL of 0, the second is already too far away."""
    learner = make_learner(epochs=5, **limit)
    metrics = learner.iterate()
    assert metrics["train/n_updates"] == 1
    assert metrics["train/early_stop"] == 1
    generous = make_learner(epochs=5, **dict.fromkeys(limit, 1e9))
    metrics = generous.iterate()
    assert (metrics["train/n_updates"], metrics["train/early_stop"]) == (15, 0)


def test_the_kl_stays_near_its_target(make_learner: Any) -> None:
    """Without a stop the same learner goes several times as far."""
    free, held = (make_learner(epochs=8, learning_rate=0.03, **stop) for stop in ({}, {"target_kl": 0.01}))
    free_kl, held_kl = (np.mean(series(learner, "train/approx_kl", 3)) for learner in (free, held))
    assert held_kl < 0.02
    assert free_kl > 4 * held_kl


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_kl_penalty_adapts_both_ways(make_learner: Any, epochs: int) -> None:
    """The KL counts as it is after the last step: with one update an iteration it would be 0 before it."""
    options: dict[str, Any] = {"epochs": epochs, "minibatch_size": 72, "kl_penalty": 0.5}
    rising = series(make_learner(target_kl=1e-7, **options), "train/kl_coef", 4)
    assert rising == [0.5, 1.0, 2.0, 4.0]
    falling = series(make_learner(target_kl=10.0, **options), "train/kl_coef", 4)
    assert falling == [0.5, 0.25, 0.125, 0.0625]


def test_a_large_kl_penalty_holds_the_policy(make_learner: Any) -> None:
    def moved(penalty: float) -> float:
        learner = make_learner(epochs=8, kl_penalty=penalty, target_kl=1e3, max_grad_norm=0.0)
        learner.state.kl_coef = penalty
        return float(learner.iterate()["train/final_kl"])

    assert moved(100.0) < 0.3 * moved(1e-9)


@pytest.mark.parametrize("limit", [0.5, 0.05, 0.0, -1.0])
def test_the_gradient_is_clipped_to_its_norm_or_not_at_all(make_learner: Any, make_witness: Any, limit: float) -> None:
    """The norm is the root of the sum of all squares, each parameter counted once, before the clip."""
    witness = make_witness()
    learner = make_learner(max_grad_norm=limit, value_coef=50.0, twin_critics=True, extensions=(witness,))
    learner.iterate()
    hyper, everything = learner.set_hyper(), torch.arange(6)
    learner.optimizer.zero_grad()
    minibatch_loss(learner.policy, witness.batch, hyper, learner.config).total.backward()  # type: ignore[no-untyped-call]
    free = torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()])
    metrics = learner.updates.accumulate(witness.batch, everything, True)
    norm = float(free.double().square().sum().sqrt())
    assert norm > 1
    assert float(metrics["train/grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["train/grad_norm_clipped"]) == pytest.approx(limit if limit > 0 else norm, rel=1e-5)
    learner.updates.step(metrics["train/grad_norm"])
    clipped = torch.cat([parameter.grad.flatten() for parameter in learner.policy.parameters()])
    torch.testing.assert_close(clipped, free * (limit / norm if limit > 0 else 1.0), atol=1e-7, rtol=1e-4)


def test_weight_decay_is_decoupled(make_learner: Any) -> None:
    """At a gradient of 0 a weight shrinks by rate · decay a step; 6 steps an iteration."""
    learner = make_learner(optimizer="adamw", weight_decay=0.1, learning_rate=0.01)
    with torch.no_grad():
        learner.policy.action_head.linear.weight.zero_()  # so the actor's trunk gets no gradient at first
        learner.policy.action_head.linear.bias.zero_()
    learner.config = dataclasses.replace(learner.config, normalise_advantages="off", minibatch_size=72, epochs=1)
    learner.updates.config = learner.config
    before = actor_weights(learner)[0]
    learner.iterate()
    torch.testing.assert_close(actor_weights(learner)[0], before * (1 - 0.01 * 0.1), atol=1e-7, rtol=1e-6)


# --- predict ---------------------------------------------------------------------------------------------------------


def test_predict_does_what_the_policy_did(make_learner: Any, scripted_env: Any) -> None:
    """Step by step over a rollout with resets: the same distributions, so the same best actions."""
    env = scripted_env(dead_rows=True)
    learner = make_learner(env, lstm_layers=2, learning_rate=0.02)
    for _ in range(3):
        learner.iterate()
    rollout_state, scale = learner.state.rollout_state, learner.observation_scale()
    rollout, _ = collect(learner.policy, env, rollout_state, scale, 12, learner.generator)
    head = learner.policy.action_head
    expected = head.to_env(head.mode(rollout.dist_params)).detach().numpy()
    state: Any = tuple(part.numpy() for part in rollout_state.state[0])
    for t in range(12):
        given = rollout.obs[t].numpy(), state, rollout.episode_start[t].numpy()
        action, state = learner.predict(*given, deterministic=True)
        np.testing.assert_allclose(action, expected[t], atol=1e-6)
    assert expected.std() > 0.01


@pytest.mark.parametrize("memory", ["separate", "shared", "none"])
def test_one_is_predicted_as_in_a_batch(make_learner: Any, memory: str) -> None:
    learner = make_learner(memory=memory, lstm_layers=2, learning_rate=0.02)
    for _ in range(3):
        learner.iterate()
    draw = np.random.default_rng(2)
    state: Any = None
    singles: list[Any] = [None] * 5
    for t in range(8):
        rows = draw.normal(size=(5, 3)).astype(np.float32)
        starts = draw.random(5) < (1.0 if t == 0 else 0.3)
        together, state = learner.predict(rows, state, starts, deterministic=True)
        assert together.shape == (5, 2)
        for n in range(5):
            alone, singles[n] = learner.predict(rows[n], singles[n], starts[n : n + 1], deterministic=True)
            assert alone.shape == (2,)
            np.testing.assert_allclose(alone, together[n], atol=1e-6)
    if memory == "none":
        assert state is None
    else:
        assert [part.shape for part in state] == [(2, 5, 5), (2, 5, 5)]


def test_memory_matters_to_predict_and_is_cleared_at_a_start(make_learner: Any) -> None:
    learner = make_learner(learning_rate=0.02)
    for _ in range(3):
        learner.iterate()
    row = np.ones((1, 3), np.float32)
    fresh, state = learner.predict(row, deterministic=True)
    for _ in range(4):
        _, state = learner.predict(-3 * row, state, deterministic=True)
    kept = tuple(part.copy() for part in state)
    remembered, _ = learner.predict(row, state, np.array([False]), deterministic=True)
    cleared, _ = learner.predict(row, state, np.array([True]), deterministic=True)
    assert np.array_equal(fresh, cleared)
    assert np.abs(remembered - fresh).max() > 1e-3
    assert all(
        np.array_equal(old, new) for old, new in zip(kept, state, strict=True)
    )  # what is given is not written to


def test_samples_follow_the_policy(make_learner: Any) -> None:
    learner = make_learner(memory="none", squash=False, log_std_init=-1.0)
    rows = np.tile(np.array([0.5, -0.5, 1.0], np.float32), (20_000, 1))
    actions, _ = learner.predict(rows, deterministic=False)
    centre, _ = learner.predict(rows[:1], deterministic=True)
    error = 4 * math.exp(-1.0) / math.sqrt(len(rows))
    np.testing.assert_allclose(actions.mean(0), centre[0], atol=error)
    np.testing.assert_allclose(actions.std(0), math.exp(-1.0), rtol=0.03)


@pytest.mark.parametrize(
    ("env_id", "batch_shape", "single_shape"), [("CartPole-v1", (4,), ()), ("Pendulum-v1", (4, 1), (1,))]
)
def test_actions_have_the_environments_form(env_id: str, batch_shape: tuple[int, ...], single_shape: Any) -> None:
    learner = DistributionalPPO(env_id, num_envs=2, n_steps=8, minibatch_size=8, hidden=(4,), lstm_size=4)
    learner.iterate()
    env = gymnasium.make(env_id)
    obs, _ = env.reset(seed=0)
    action, _ = learner.predict(obs)
    assert np.shape(action) == single_shape
    assert env.action_space.contains(action)
    env.step(action)
    batch, state = learner.predict(np.stack([obs] * 4))
    assert batch.shape == batch_shape
    assert len(state) == 2  # type: ignore[arg-type]


# --- making ----------------------------------------------------------------------------------------------------------


def test_an_environment_of_another_size_or_device_is_refused(scripted_env: Any) -> None:
    with pytest.raises(ConfigError, match="num_envs: 3 requested, but the environment has 6"):
        DistributionalPPO(scripted_env(), num_envs=3)
    with pytest.raises(ConfigError, match="device: cuda requested, but the environment is on cpu"):
        DistributionalPPO(scripted_env(), device="cuda")
