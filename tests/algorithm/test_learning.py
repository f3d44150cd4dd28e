"""That it learns: values with a known ceiling, a known tail, a cue over 32 steps, and classic control."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from scipy.stats import norm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.envs.protocol import Box, Step
from tailguard.envs.tasks import RecallEnv
from tailguard.monitor.callbacks import EveryIteration


class _Process:
    """N copies of a reward process that no action influences."""

    observation_size = 1

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.action_space = Box(torch.tensor([-1.0]), torch.tensor([1.0]))
        self.draw = torch.Generator()

    def noise(self) -> Tensor:
        return torch.randn(self.num_envs, generator=self.draw)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


# --- values ----------------------------------------------------------------------------------------------------------


class Echo(_Process):
    """Shows white noise and pays what it showed one step ago, for ever.

    With γ = ½ the value is x₋₁ + ½ x. The return adds ¼ x₁ + ⅛ x₂ + …, so its variance is 4/3, of which the value
    explains 5/4: the best explained variance is 15/16. Without memory of x₋₁ only ½ x is left, which explains 3/16.
    """

    def reset(self, seed: int | None = None) -> Tensor:
        self.draw.manual_seed(seed or 0)
        self.before, self.now = torch.zeros(self.num_envs), self.noise()
        return self.now.unsqueeze(-1)

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        reward, self.before, self.now = self.before, self.now, self.noise()
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return Step(self.now.unsqueeze(-1), reward, never, never, self.now.unsqueeze(-1), ~never)


ECHO: dict[str, Any] = {
    "n_steps": 16,
    "minibatch_size": 128,
    "learning_rate": 5e-3,
    "gamma": 0.5,
    "hidden": (16,),
    "lstm_size": 16,
    "quantiles": 8,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"twin_critics": True},
        {"twin_critics": True, "twin_trunk": "own"},
        {"twin_critics": True, "memory": "shared"},
        {"twin_critics": True, "critic": "scalar", "value_clip": "mean_only", "value_clip_limit": 0.5},
        {"baseline": "distribution"},
        {"baseline": "distribution", "critic": "categorical", "learning_rate": 1e-2},
    ],
    ids=["single", "twin", "own trunks", "shared", "clipped", "quantile baseline", "categorical baseline"],
)
def test_critics_explain_what_can_be_explained(options: dict[str, Any], make_witness: Any) -> None:
    """Also by each of two critics alone: neither trunk, memory nor head is left behind."""
    witness = make_witness()
    learner = DistributionalPPO(Echo(32), extensions=(witness,), **(ECHO | options))
    explained = [learner.iterate()["train/explained_variance"] for _ in range(14)]
    assert explained[0] < 0.05
    assert np.mean(explained[-3:]) == pytest.approx(15 / 16, abs=0.05)
    x = witness.rollout.obs.squeeze(-1)
    truth = x[:-1] + 0.5 * x[1:]
    for view in witness.estimates.views:
        error = (view.baseline[1:] - truth).var() / truth.var()
        assert float(error) < 0.08


def test_without_memory_the_past_stays_unexplained() -> None:
    learner = DistributionalPPO(Echo(32), **ECHO, memory="none")
    explained = [learner.iterate()["train/explained_variance"] for _ in range(20)]
    assert np.mean(explained[-4:]) == pytest.approx(3 / 16, abs=0.07)


# --- the tail --------------------------------------------------------------------------------------------------------

STEPS = 20
TRUE_CVAR = -math.sqrt(STEPS) * norm.pdf(norm.ppf(0.05)) / 0.05
"""Mean of the worst 5 % of a sum of 20 standard normals: −2.0627 · √20 = −9.22."""


class Walk(_Process):
    """Twenty rewards from N(0, 1), then the end. Shows the time left, as a one-hot row or as one number."""

    def __init__(self, num_envs: int, one_hot: bool = True) -> None:
        super().__init__(num_envs)
        self.observation_size = STEPS if one_hot else 1

    def show(self, time: int) -> Tensor:
        if self.observation_size == 1:
            return torch.full((self.num_envs, 1), 1 - time / STEPS)
        return torch.eye(STEPS + 1)[time, :STEPS].expand(self.num_envs, -1)

    def reset(self, seed: int | None = None) -> Tensor:
        self.draw.manual_seed(seed or 0)
        self.time = 0
        return self.show(0)

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        final = self.show(self.time + 1)
        self.time = (self.time + 1) % STEPS
        ended = torch.full((self.num_envs,), self.time == 0)
        return Step(self.show(self.time), self.noise(), ended, torch.zeros_like(ended), final, torch.ones_like(ended))


def cvar(quantiles: np.ndarray, share: float = 0.05) -> float:
    """Mean of the worst `share` of a distribution known by its midpoint quantiles, interpolated linearly in the probit.

    On a piece q = c + b z the integral of q dτ is c Δτ − b Δφ(z); the outermost pieces go on to infinity.
    """
    q = np.sort(quantiles)
    z = norm.ppf((np.arange(len(q)) + 0.5) / len(q))
    edges = np.concatenate(([-np.inf], z[1:-1], [np.inf]))
    total = 0.0
    for k in range(len(q) - 1):
        low, high = edges[k], min(edges[k + 1], norm.ppf(share))
        if low >= high:
            break
        slope = (q[k + 1] - q[k]) / (z[k + 1] - z[k])
        level = q[k] - slope * z[k]
        total += level * (norm.cdf(high) - norm.cdf(low)) - slope * (norm.pdf(high) - norm.pdf(low))
    return total / share


def test_the_estimator_used_here_is_exact_for_a_normal() -> None:
    for count in (8, 32):
        assert cvar(norm.ppf((np.arange(count) + 0.5) / count)) == pytest.approx(-2.062713, abs=1e-6)


def learned_cvar(env: Walk, iterations: int, **options: Any) -> float:
    """CVaR of the return at the start of an episode as the learner's critic sees it after training."""
    settings: dict[str, Any] = {
        "n_steps": STEPS,
        "minibatch_size": env.num_envs * STEPS // 4,
        "gamma": 1.0,
        "learning_rate": "linear:0.05:0",
        "max_grad_norm": 0.0,
        "quantiles": 32,
        "hidden": (),
        "memory": "none",
        "normalise_observations": False,
    }
    learner = DistributionalPPO(env, **(settings | options))
    learner.learn(iterations * STEPS * env.num_envs)
    start = torch.ones(1, env.num_envs, dtype=torch.bool)
    with torch.no_grad():
        obs = learner.observation_scale()(env.show(0))
        (found,) = learner.policy(obs.unsqueeze(0), learner.policy.initial_state(env.num_envs), start).critics
    head = learner.policy.each_critic()[0].distribution
    assert head is not None
    assert found.distribution is not None
    quantiles = learner.return_moments.denormalise(head.quantiles(found.distribution, 32))
    return cvar(quantiles[0, 0].double().numpy())


def test_the_critic_learns_the_tail_of_the_return() -> None:
    assert learned_cvar(Walk(256), 50) == pytest.approx(TRUE_CVAR, rel=0.06)


def test_the_lambda_return_has_too_mild_a_tail() -> None:
    """A third of the tail is missing: the quantiles of λ-returns must not be called a risk."""
    assert -learned_cvar(Walk(256), 30, distribution_target="lambda_return") < -0.75 * TRUE_CVAR


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["quantile", "categorical"])
def test_the_critic_learns_the_tail_to_three_per_cent(critic: str) -> None:
    assert learned_cvar(Walk(1024), 120, critic=critic) == pytest.approx(TRUE_CVAR, rel=0.03)


@pytest.mark.slow
def test_the_recurrent_critic_learns_the_tail_to_three_per_cent() -> None:
    """The usual network: an encoder, an LSTM, observations that are scaled, the time as a number."""
    options = {"hidden": (32,), "memory": "separate", "lstm_size": 16, "normalise_observations": True}
    learned = learned_cvar(Walk(256, one_hot=False), 300, learning_rate="linear:0.02:0", **options)
    assert learned == pytest.approx(TRUE_CVAR, rel=0.03)


# --- memory ----------------------------------------------------------------------------------------------------------


def recall(memory: str, steps: int, seed: int = 0) -> float:
    """Mean return of 256 episodes of the deterministic policy, by `predict` alone, after training."""
    learner = DistributionalPPO(
        RecallEnv(64, delay=32), n_steps=33, minibatch_size=528, learning_rate=3e-3, hidden=(16,), lstm_size=32,
        critic="scalar", memory=memory, seed=seed,
    )  # fmt: skip
    learner.learn(steps, callback=EveryIteration(lambda agent: agent.metrics["rollout/ep_rew_mean"] < 0.97))
    env = RecallEnv(256, delay=32)
    obs, state, start = env.reset(12), None, np.ones(256, bool)
    for _ in range(33):
        action, state = learner.predict(obs.numpy(), state, start, deterministic=True)
        step = env.step(torch.as_tensor(action).unsqueeze(-1))
        obs, start = step.obs, step.ended.numpy()
    return float(step.reward.mean())


def test_a_cue_is_recalled_over_32_steps_with_memory_and_not_without() -> None:
    assert recall("separate", 80_000) > 0.9
    assert abs(recall("none", 20_000)) < 0.3


# --- classic control -------------------------------------------------------------------------------------------------

CARTPOLE: dict[str, Any] = {
    "n_steps": 64,
    "minibatch_size": 128,
    "epochs": 6,
    "learning_rate": 3e-3,
    "gamma": 0.98,
    "gae_lambda": 0.9,
    "hidden": (32,),
    "lstm_size": 32,
    "quantiles": 16,
}


def test_cartpole_is_learned() -> None:
    """SB3's own evaluation, on our agent as it is."""
    learner = DistributionalPPO("CartPole-v1", num_envs=8, memory="none", **CARTPOLE)
    learner.learn(25_000)
    assert learner.metrics["rollout/ep_rew_mean"] > 150
    mean, _ = evaluate_policy(learner, gymnasium.make("CartPole-v1"), n_eval_episodes=5, warn=False)  # type: ignore[arg-type]
    assert mean > 150


@pytest.mark.parametrize("memory", ["separate", "none"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_evaluate_policy_runs_on_plain_and_vector_environments(env_id: str, memory: str) -> None:
    """Discrete and continuous actions, with and without memory."""
    learner = DistributionalPPO(
        env_id, num_envs=2, n_steps=16, minibatch_size=16, memory=memory, hidden=(8,), lstm_size=8
    )
    learner.learn(96)
    evaluated = []
    for env in (gymnasium.make(env_id), DummyVecEnv([lambda: gymnasium.make(env_id)] * 3)):
        returns, lengths = evaluate_policy(
            learner, env, n_eval_episodes=3, deterministic=True, return_episode_rewards=True, warn=False  # type: ignore[arg-type]
        )  # fmt: skip
        assert len(returns) == len(lengths) == 3  # type: ignore[arg-type]
        evaluated.append(returns)
    limit = (1, 500) if env_id == "CartPole-v1" else (-2000, 0)
    assert all(limit[0] <= value <= limit[1] for returns in evaluated for value in returns)  # type: ignore[union-attr]


class OnlyPositions(gymnasium.ObservationWrapper[Any, Any, Any]):
    """CartPole without its velocities."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    def observation(self, observation: Any) -> Any:
        return observation[[0, 2]]


@pytest.mark.slow
def test_cartpole_without_velocities_needs_memory() -> None:
    rewards = {}
    for memory in ("separate", "none"):
        learner = DistributionalPPO([OnlyPositions] * 8, memory=memory, **CARTPOLE)
        learner.learn(50_000)
        rewards[memory] = learner.metrics["rollout/ep_rew_mean"]
    assert rewards["separate"] > 150
    assert rewards["none"] < 70


@pytest.mark.slow
@pytest.mark.parametrize("squash", [True, False])
def test_pendulum_is_learned(squash: bool) -> None:
    learner = DistributionalPPO(
        "Pendulum-v1", num_envs=4, n_steps=256, minibatch_size=64, epochs=10, learning_rate="linear:1e-3:0", gamma=0.9,
        hidden=(64, 64), log_std_init=0.0, squash=squash, memory="none",
    )  # fmt: skip
    learner.learn(60_000)
    mean, _ = evaluate_policy(learner, gymnasium.make("Pendulum-v1"), n_eval_episodes=10, warn=False)  # type: ignore[arg-type]
    assert mean > -350
