"""Collecting experience: what is stored, when memory is cleared, and which statistics scale it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.rollout import ObservationScale, RolloutState, collect
from tailguard.envs.protocol import Step


def test_rows_are_what_the_environment_said(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(dead_rows=True)
    learner = make_learner(env)
    rollout, rollout_state = collect(
        learner.policy, env, learner._begin(), learner.observation_scale(), 12, learner.generator
    )
    following, after = collect(learner.policy, env, rollout_state, learner.observation_scale(), 12, learner.generator)
    obs = torch.cat((rollout.obs, following.obs))
    assert torch.equal(obs, env.obs[:24])
    assert torch.equal(torch.cat((rollout.rewards, following.rewards)), env.reward[:24])
    for name in ("terminated", "truncated", "valid"):
        assert torch.equal(torch.cat((getattr(rollout, name), getattr(following, name))), getattr(env, name)[:24])
    starts = torch.cat((rollout.episode_start, following.episode_start))
    assert starts[0].all()
    assert torch.equal(starts[1:], env.ended[:23])
    assert torch.equal(after.obs, env.obs[24])
    assert torch.equal(after.episode_start, env.ended[23])
    assert rollout.inner_resets
    for row, final in zip(rollout.final_rows, rollout.final_obs, strict=True):
        assert torch.equal(final, torch.where(env.ended[row].unsqueeze(-1), env.last_obs[row], env.obs[row + 1]))
    assert rollout.final_rows == tuple(sorted({*env.ended[:12].any(-1).nonzero().flatten().tolist(), 11}))


def test_actions_come_from_the_stored_distribution_and_reach_the_environment(
    make_learner: Any, scripted_env: Any
) -> None:
    env = scripted_env()
    learner = make_learner(env)
    rollout, _ = collect(learner.policy, env, learner._begin(), learner.observation_scale(), 12, learner.generator)
    mean, log_std = rollout.dist_params.chunk(2, -1)
    exact = torch.distributions.Normal(mean.double(), log_std.double().exp()).log_prob(rollout.actions.double()).sum(-1)
    torch.testing.assert_close(rollout.log_probs.double(), exact, atol=1e-5, rtol=1e-5)
    bounds = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(torch.stack(env.actions), bounds * rollout.actions.tanh())
    surprise = (rollout.actions - mean) / log_std.exp()
    assert surprise.std().item() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("layers", [1, 2])
def test_memory_is_cleared_for_finished_environments_only_and_stored_before_the_step(
    make_learner: Any, scripted_env: Any, layers: int
) -> None:
    """The state stored with a segment, run over its rows by hand, gives the state stored with the next one."""
    env = scripted_env(end_probability=0.15)
    learner = make_learner(env, lstm_layers=layers)
    agent, scale = learner.policy, learner.observation_scale()
    first, rollout_state = collect(agent, env, learner._begin(), scale, 12, learner.generator)
    second, _ = collect(agent, env, rollout_state, scale, 12, learner.generator)
    assert all(not part.any() for part in first.start_state[0])
    state = first.start_state[0]
    for t in range(12):
        # One environment at a time, and the reset written out: others' ends must not touch it.
        columns = []
        for n in range(env.num_envs):
            own = tuple(part[:, n : n + 1] for part in state)
            if first.episode_start[t, n]:
                own = tuple(torch.zeros_like(part) for part in own)
            never = torch.zeros(1, dtype=torch.bool)
            with torch.no_grad():
                parameters, own = agent.act(first.scaled_obs[t, n : n + 1], own, never)
            torch.testing.assert_close(parameters[0], first.dist_params[t, n], atol=1e-6, rtol=1e-5)
            columns.append(own)
        state = tuple(torch.cat(parts, dim=1) for parts in zip(*columns, strict=True))
    for stored, expected in zip(second.start_state[0], state, strict=True):
        torch.testing.assert_close(stored, expected, atol=1e-6, rtol=1e-5)
        assert stored.abs().max() > 0.01


def test_observations_are_scaled_by_the_statistics_of_the_rollouts_start(
    make_learner: Any, make_witness: Any, scripted_env: Any
) -> None:
    """The statistics stand still while a rollout runs, and then take in its valid rows alone."""
    watched: list[Tensor] = []

    class Watched(scripted_env):  # type: ignore[misc]
        def step(self, action: Tensor) -> Step:
            watched.append(torch.cat((learner.observation_moments.mean, learner.observation_moments.std)))
            return super().step(action)

    witness = make_witness()
    env = Watched(dead_rows=True)
    env.obs[12:24] += 10.0
    env.obs[~env.valid] = 1e6
    learner = make_learner(env, extensions=(witness,), observation_clip=3.0)
    seen = [env.obs[0].double()]
    for iteration in range(4):
        expected = torch.cat(seen)
        learner.iterate()
        rows = torch.stack(watched[12 * iteration :])
        assert (rows == rows[0]).all()
        mean, std = expected.mean(0), expected.std(0, correction=0)
        torch.testing.assert_close(rows[0], torch.cat((mean, std)), atol=1e-9, rtol=1e-9)
        scaled = ((witness.rollout.obs.double() - mean) / std).clamp(-3.0, 3.0)
        torch.testing.assert_close(witness.rollout.scaled_obs.double(), scaled, atol=1e-5, rtol=1e-5)
        seen.append(witness.rollout.obs[witness.rollout.valid].double())


def test_drift_of_the_observations_is_logged(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(num_envs=6, observation_size=2, end_probability=0.0)
    env.obs[12:, :, 1] += 30.0
    learner = make_learner(env)
    learner.iterate()
    before = learner.observation_moments.mean.clone(), learner.observation_moments.std.clone()
    metrics = learner.iterate()
    shift = ((learner.observation_moments.mean - before[0]) / before[1]).abs()
    assert metrics["data/observation_drift"] == pytest.approx(float(shift.max()))
    assert metrics["data/observation_drift"] > 5


def test_without_normalisation_observations_pass_as_they_are(
    make_learner: Any, make_witness: Any, scripted_env: Any
) -> None:
    witness = make_witness()
    env = scripted_env()
    env.obs *= 100
    learner = make_learner(env, normalise_observations=False, extensions=(witness,))
    learner.iterate()
    assert torch.equal(witness.rollout.scaled_obs, env.obs[:12])
    assert "data/observation_drift" not in learner.iterate()


def test_a_reward_in_a_dead_row_is_nothing(make_learner: Any, scripted_env: Any) -> None:
    env = scripted_env(dead_rows=True)
    env.reward[~env.valid] = math.nan
    learner = make_learner(env)
    rollout, _ = collect(learner.policy, env, learner._begin(), learner.observation_scale(), 12, learner.generator)
    assert (~rollout.valid).any()
    assert (rollout.rewards[~rollout.valid] == 0).all()
    assert torch.equal(rollout.rewards[rollout.valid], env.reward[:12][rollout.valid])


def test_the_scale_clips_and_keeps_a_nan() -> None:
    scale = ObservationScale(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 1.0]), 2.0)
    found = scale(torch.tensor([[2.0, -7.0], [math.nan, 0.5]]))
    assert found[0].tolist() == [0.5, -2.0]
    assert found[1, 0].isnan()


@pytest.mark.parametrize("clip", [2.0, math.inf])
def test_what_the_network_sees_is_finite_and_has_the_slopes_of_the_plain_formula(clip: float) -> None:
    scale = ObservationScale(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.3]), clip)
    obs = torch.tensor([[2.0, -7.0], [math.nan, 0.5], [-0.1, math.inf], [5.0, 0.6]])
    weights = torch.tensor([[0.7, -1.3], [2.0, 0.9], [-0.4, 1.1], [1.7, 0.2]])
    with_graph, plain = obs.clone().requires_grad_(), obs.clone().requires_grad_()
    found, expected = scale.finite(with_graph), scale(plain).nan_to_num(0.0, 0.0, 0.0)
    assert torch.equal(found, expected)
    assert torch.equal(scale.finite(obs), expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert with_graph.grad is not None
    assert plain.grad is not None
    usable = obs.isfinite()
    assert torch.equal(with_graph.grad[usable], plain.grad[usable])
    # Beyond the clip nothing moves.
    assert float(with_graph.grad[0, 1]) == pytest.approx(0.0 if clip == 2.0 else -1.3 / 0.3)
    assert with_graph.grad[1, 0] == 0.0


def test_a_carry_can_be_collected_from_twice_with_the_same_result(make_learner: Any, scripted_env: Any) -> None:
    """Collecting writes nothing into what it is given."""
    env = scripted_env()
    learner = make_learner(env)
    learner.iterate()
    rollout_state: RolloutState = learner.state.rollout_state
    row, stream = env.row, learner.generator.get_state()
    found = []
    for _ in range(2):
        env.row = row
        learner.generator.set_state(stream)
        found.append(collect(learner.policy, env, rollout_state, learner.observation_scale(), 12, learner.generator))
    (one, carry_one), (other, carry_other) = found
    assert torch.equal(one.actions, other.actions)
    for part, again in zip(carry_one.state[0], carry_other.state[0], strict=True):
        assert torch.equal(part, again)
