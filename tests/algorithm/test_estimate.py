"""Advantages and targets through the real rollout and critics, against their definitions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scipy.stats import norm
from torch import Tensor

from tailguard.algorithm.estimate import estimate, evaluate_critics
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import Rollout, collect
from tailguard.models.policy import Trunk

MEMORIES = [("separate", 1), ("separate", 2), ("shared", 1), ("shared", 2), ("none", 1)]

# --- advantages ------------------------------------------------------------------------------------------------------


class ReferenceCritic:
    """One environment's critic, one row at a time in float64, from the equations of encoder, LSTM and head."""

    def __init__(self, learner: DistributionalPPO, index: int) -> None:
        agent = learner.policy
        trunk = agent.trunks[agent.critic_trunks[index]]
        assert isinstance(trunk, Trunk)
        self.encoder = [
            (layer.weight.detach().double(), layer.bias.detach().double())
            for layer in trunk.encoder.layers
            if isinstance(layer, torch.nn.Linear)
        ]
        self.cells = [
            tuple(getattr(cell, name).detach().double() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
            for cell in getattr(trunk.memory, "cells", [])
        ]
        head = agent.each_critic()[index].value.layer
        self.weight, self.bias = head.weight.detach().double(), head.bias.detach().double()
        self.mean, self.std = float(learner.return_moments.mean), float(learner.return_moments.std)

    def nothing(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(cell[1].shape[1]).double(), torch.zeros(cell[1].shape[1]).double()) for cell in self.cells]

    def read(self, obs: Tensor, state: list[tuple[Tensor, Tensor]]) -> tuple[float, list[tuple[Tensor, Tensor]]]:
        """The raw value of what is seen after reading it once, and the memory then."""
        x = obs.double()
        for weight, bias in self.encoder:
            x = torch.tanh(weight @ x + bias)
        after = []
        for (w_ih, w_hh, b_ih, b_hh), (h, c) in zip(self.cells, state, strict=True):
            i, f, g, o = (w_ih @ x + b_ih + w_hh @ h + b_hh).chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            x = torch.sigmoid(o) * torch.tanh(c)
            after.append((x, c))
        return float(self.weight @ x + self.bias) * self.std + self.mean, after


def reference_values(learner: DistributionalPPO, rollout: Rollout, critic: int) -> tuple[Tensor, Tensor]:
    """Values of the rows and of their true successors, [T, N], environment by environment and step by step."""
    reference = ReferenceCritic(learner, critic)
    rows, count = rollout.rewards.shape
    scale = rollout.scale

    def scaled(obs: Tensor) -> Tensor:
        return ((obs - scale.mean) / scale.std).clamp(-scale.clip, scale.clip)

    values, successors = torch.zeros(rows, count).double(), torch.zeros(rows, count).double()
    trunk = learner.policy.critic_trunks[critic]
    for n in range(count):
        state = [
            (rollout.start_state[trunk][0][layer, n].double(), rollout.start_state[trunk][1][layer, n].double())
            for layer in range(len(reference.cells))
        ]
        for t in range(rows):
            if rollout.episode_start[t, n]:
                state = reference.nothing()
            values[t, n], state = reference.read(scaled(rollout.obs[t, n]), state)
            last = rollout.ended[t, n] or t == rows - 1
            following = rollout.final_obs[rollout.final_rows.index(t), n] if last else rollout.obs[t + 1, n]
            successors[t, n], _ = reference.read(scaled(following), state)
    return values, successors


def advantages_by_definition(rollout: Rollout, values: Tensor, successors: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k}, the sum written out for every t and ended where the episode ends."""
    rows, count = values.shape
    result = torch.zeros(rows, count).double()
    for n in range(count):
        for t in range(rows):
            for k in range(t, rows):
                bootstrap = 0.0 if rollout.terminated[k, n] else gamma * float(successors[k, n])
                delta = float(rollout.rewards[k, n]) + bootstrap - float(values[k, n])
                result[t, n] += (gamma * lam) ** (k - t) * delta
                if rollout.ended[k, n]:
                    break
    return result


@pytest.mark.parametrize("dead_rows", [False, True])
@pytest.mark.parametrize(("memory", "layers"), MEMORIES)
@pytest.mark.parametrize("twin_mode", [None, "min", "mean"])
def test_advantages_equal_their_definition(
    make_learner: Any,
    scripted_env: Any,
    memory: str,
    layers: int,
    twin_mode: str | None,
    dead_rows: bool,
) -> None:
    """Random terminations and truncations, inherited memories, a moved observation and return scale."""
    env = scripted_env(num_envs=4, end_probability=0.2, dead_rows=dead_rows, seed=3)
    env.reward *= 5
    twin = {"twin_critics": twin_mode is not None, "twin_mode": twin_mode or "min"}
    learner = make_learner(
        env, memory=memory, lstm_layers=layers, gamma=0.9, gae_lambda=0.8, learning_rate=0.03, **twin
    )
    learner.iterate()
    learner.iterate()
    draw = torch.Generator().manual_seed(0)
    for critic in learner.policy.each_critic():  # values that differ as much as after long training
        torch.nn.init.normal_(critic.value.layer.weight, generator=draw)
    rollout_state = learner.state.rollout_state
    rollout, _ = collect(learner.policy, env, rollout_state, learner.observation_scale(), 12, learner.generator)
    views, _ = evaluate_critics(learner.policy, rollout, learner.return_moments, learner.config.estimates)
    found = estimate(views, rollout, learner.config.estimates, learner.generator)
    assert rollout.terminated.any()
    assert rollout.truncated.any()
    assert rollout.valid.all() == (not dead_rows)

    readings = [reference_values(learner, rollout, critic) for critic in range(len(views))]
    if twin_mode is None:
        values, successors = readings[0]
    else:
        combine = torch.minimum if twin_mode == "min" else lambda one, other: (one + other) / 2
        values, successors = (combine(one, other) for one, other in zip(*readings, strict=True))
    assert values.std() > 0.3
    expected = advantages_by_definition(rollout, values, successors, 0.9, 0.8)
    valid = rollout.valid
    torch.testing.assert_close(found.advantages[valid].double(), expected[valid], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.value_targets[valid].double(), (expected + values)[valid], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("n_steps", [3, 5])
def test_a_time_limit_bootstraps_from_the_final_observation_fed_once(scripted_env: Any, n_steps: int) -> None:
    """A critic that sums what it sees: observations 1, 2, 4 and the final one 8 are worth 15.

    A stale memory would say 11, reading 8 twice 23, and an empty memory 8. The LSTM of one unit adds ε·obs to its cell
    with all gates open; ε is so small that tanh is the identity. The segment ends at the limit, or goes on beyond it.
    """
    env = scripted_env(num_envs=1, observation_size=1, rows=10, end_probability=0.0)
    env.obs[:, 0, 0] = torch.tensor([1.0, 2.0, 4.0, 16.0, 32.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    env.truncated[2], env.last_obs[2, 0, 0] = True, 8.0
    learner = DistributionalPPO(
        env, hidden=(), lstm_size=1, critic="scalar", n_steps=n_steps, gamma=0.5, gae_lambda=0.5,
        normalise_observations=False,
    )  # fmt: skip
    small = 1e-3
    cell = learner.policy.trunks[1].memory.cells[0]
    with torch.no_grad():
        for weight in cell.parameters():
            weight.zero_()
        cell.bias_ih[:] = torch.tensor([30.0, 30.0, 0.0, 30.0])  # input, forget and output gates are open
        cell.weight_ih[2] = small
        head = learner.policy.each_critic()[0].value.layer
        head.weight.fill_(1 / small)
        head.bias.zero_()
    rollout, rollout_state = collect(
        learner.policy, env, learner._begin(), learner.observation_scale(), n_steps, learner.generator
    )
    (view,), memory = evaluate_critics(learner.policy, rollout, learner.return_moments, learner.config.estimates)
    assert view.value[:3, 0].tolist() == pytest.approx([1, 3, 7], abs=2e-3)
    assert view.next_baseline[:3, 0].tolist() == pytest.approx([3, 7, 15], abs=2e-3)
    if n_steps == 5:  # the next episode begins with an empty memory
        assert view.value[3:, 0].tolist() == pytest.approx([16, 48], abs=0.1)
    else:
        assert rollout_state.episode_start.all()
    advantage = estimate((view,), rollout, learner.config.estimates, learner.generator).advantages[2, 0]
    assert float(advantage) == pytest.approx(float(env.reward[2, 0]) + 0.5 * 15 - 7, abs=3e-3)
    assert float(memory[1][1][0, 0, 0]) == pytest.approx(0.048 if n_steps == 5 else 0.007, rel=1e-3)


# --- boundaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["quantile", "categorical"])
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_nothing_that_follows_an_episode_changes_what_came_before(
    make_learner: Any, make_witness: Any, scripted_env: Any, kind: str, critic: str
) -> None:
    """A reward of 100 and other observations after the boundary; what is before it keeps every bit."""

    def targets(changed: bool) -> tuple[Tensor, Tensor, Tensor]:
        witness = make_witness()
        env = scripted_env(end_probability=0.0)
        getattr(env, kind)[6] = True
        if changed:
            env.reward[7:] = 100.0
            env.obs[7:] += 5.0
        learner = make_learner(env, critic=critic, extensions=(witness,), on_nonfinite="stop")
        # A scale of its own for the first returns would already carry the change.
        learner.return_moments.update(torch.tensor([-1.0, 1.0]))
        learner.iterate()
        estimates = witness.estimates
        assert estimates.distribution_targets is not None
        return estimates.advantages, estimates.value_targets, estimates.distribution_targets

    for plain, changed in zip(targets(False), targets(True), strict=True):
        assert torch.equal(plain[:7], changed[:7])
        assert not torch.isclose(plain[7:], changed[7:]).any()


class Counter(gymnasium.Env[Any, Any]):
    """Counts its steps, terminates or is truncated at step 5, pays its count."""

    observation_space = gymnasium.spaces.Box(-10, 10, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, terminates: bool) -> None:
        self.terminates, self.count = terminates, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        self.count = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
        self.count += 1
        over = self.count == 5
        return self._seen(), float(self.count), over and self.terminates, over and not self.terminates, {}

    def _seen(self) -> Any:
        return torch.full((1,), float(self.count)).numpy()


@pytest.mark.parametrize("terminates", [True, False])
def test_both_autoreset_modes_give_the_same_estimates(make_learner: Any, make_witness: Any, terminates: bool) -> None:
    """15 rows of SAME_STEP hold three episodes; with NEXT_STEP's dead rows they take 17."""
    kept = {}
    for mode, n_steps in ((AutoresetMode.SAME_STEP, 15), (AutoresetMode.NEXT_STEP, 17)):
        witness = make_witness()
        vector = SyncVectorEnv([lambda: Counter(terminates)] * 2, autoreset_mode=mode)
        learner = make_learner(vector, n_steps=n_steps, distribution_lambda=1.0, extensions=(witness,))
        learner.iterate()
        valid = witness.rollout.valid
        assert int((~valid).sum()) == 2 * (n_steps - 15)
        estimates = witness.estimates
        assert estimates.distribution_targets is not None
        shown = (estimates.advantages, estimates.value_targets, estimates.distribution_targets, witness.rollout.rewards)
        kept[mode] = [rows.transpose(0, 1)[valid.T] for rows in shown]
        kept[mode].append(learner.return_moments.mean)
    for same, following in zip(*kept.values(), strict=True):
        torch.testing.assert_close(same, following, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"twin_critics": True, "twin_trunk": "own", "lstm_layers": 2}, {"memory": "shared"}]
)
def test_critics_remember_from_rollout_to_rollout(
    make_learner: Any, make_witness: Any, scripted_env: Any, options: dict[str, Any]
) -> None:
    """Three rollouts at a learning rate of 0 are read like one sequence of three times the length."""
    witness = make_witness()
    env = scripted_env(end_probability=0.03)
    learner = make_learner(env, learning_rate=0.0, normalise_observations=False, extensions=(witness,), **options)
    rollouts, outputs = [], []
    for _ in range(3):
        learner.iterate()
        rollouts.append(witness.rollout)
        outputs.append([view.value for view in witness.estimates.views])
    obs, starts = (torch.cat([getattr(rollout, name) for rollout in rollouts]) for name in ("obs", "episode_start"))
    assert not starts[12].all()
    with torch.no_grad():
        whole = learner.policy(obs, rollouts[0].start_state, starts).critics
    for index, critic in enumerate(whole):
        read = torch.cat([output[index] for output in outputs])
        expected = learner.return_moments.denormalise(critic.value.squeeze(-1))
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-4)


# --- distribution targets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["quantile", "categorical"])
@pytest.mark.parametrize("twin_critics", [False, True])
def test_distribution_targets_bootstrap_from_the_true_successors(
    make_learner: Any, make_witness: Any, scripted_env: Any, critic: str, twin_critics: bool
) -> None:
    """λ = 0: reward plus discounted quantiles of the successor. λ = 1: the rewards themselves up to the end."""
    for lam in (0.0, 1.0):
        witness = make_witness()
        learner = make_learner(
            scripted_env(end_probability=0.2),
            critic=critic,
            twin_critics=twin_critics,
            gamma=0.9,
            distribution_lambda=lam,
            learning_rate=0.01,
            extensions=(witness,),
        )
        learner.iterate()
        learner.iterate()
        rollout, estimates = witness.rollout, witness.estimates
        successors = torch.stack([view.next_quantiles for view in estimates.views]).mean(0)
        # At a time limit and at the rollout's end samples are spread as a Normal's, whose 6 midpoints have sd 0.9.
        mean = successors.mean(-1, keepdim=True)
        spread = mean + (successors - mean) / float(np.std(norm.ppf((np.arange(6) + 0.5) / 6)))
        last = torch.arange(12).unsqueeze(-1) == 11
        sampled = torch.where((rollout.truncated | last).unsqueeze(-1), spread, successors)
        assert estimates.distribution_targets.shape == (12, 6, 6)
        expected = torch.zeros(12, 6, 6)
        following = sampled[-1]
        for t in reversed(range(12)):
            ended, terminated = rollout.ended[t].unsqueeze(-1), rollout.terminated[t].unsqueeze(-1)
            bootstrap = sampled[t] if lam == 0 or t == 11 else torch.where(ended, sampled[t], following)
            expected[t] = rollout.rewards[t].unsqueeze(-1) + 0.9 * torch.where(terminated, 0.0, bootstrap)
            following = expected[t]
        torch.testing.assert_close(estimates.distribution_targets, expected, atol=1e-5, rtol=1e-5)
        # Where rollouts are cut but episodes are not, the next row's own quantiles are the successor's.
        inside = ~rollout.ended[:-1]
        own = torch.stack([view.quantiles for view in estimates.views]).mean(0)
        torch.testing.assert_close(successors[:-1][inside], own[1:][inside], atol=1e-5, rtol=1e-5)


def test_the_lambda_return_is_a_named_option(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(distribution_target="lambda_return", extensions=(witness,))
    learner.iterate()
    assert torch.equal(witness.estimates.distribution_targets, witness.estimates.value_targets.unsqueeze(-1))


@pytest.mark.parametrize("critic", ["quantile", "categorical"])
def test_the_mean_of_the_distribution_can_be_the_baseline(make_learner: Any, make_witness: Any, critic: str) -> None:
    witness = make_witness()
    learner = make_learner(critic=critic, baseline="distribution", learning_rate=0.01, extensions=(witness,))
    for _ in range(3):
        learner.iterate()
    (view,) = witness.estimates.views
    torch.testing.assert_close(witness.estimates.values, view.baseline)
    assert (view.baseline - view.value).abs().max() > 1e-3
    if critic == "quantile":
        torch.testing.assert_close(view.baseline, view.quantiles.mean(-1), atol=1e-5, rtol=1e-5)


def test_the_pessimism_of_min_is_the_distance_to_the_mean(make_learner: Any, make_witness: Any) -> None:
    witness = make_witness()
    learner = make_learner(twin_critics=True, twin_mode="min", learning_rate=0.01, extensions=(witness,))
    for _ in range(3):
        metrics = learner.iterate()
    first, second = (view.baseline for view in witness.estimates.views)
    assert (first > second).any()
    assert (first < second).any()
    gap = (first + second) / 2 - witness.estimates.values
    torch.testing.assert_close(witness.estimates.pessimism, gap, atol=1e-6, rtol=1e-5)
    assert metrics["critic/twin_pessimism"] == pytest.approx(float(gap.mean()), rel=1e-4)
    assert metrics["critic/twin_pessimism"] > 0
