"""A scripted process and a small learner on it, for proofs on the real object."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.update import Batch
from tailguard.envs.protocol import ActionSpace, Box, Discrete, Step
from tailguard.models.policy import ActorCritic, PolicyOutput

SMALL: dict[str, Any] = {
    "n_steps": 12,
    "minibatch_size": 24,
    "epochs": 2,
    "learning_rate": 3e-3,
    "hidden": (7,),
    "lstm_size": 5,
    "quantiles": 6,
    "atoms": 11,
}
"""A network that learns in milliseconds."""


class ScriptedEnv:
    """N environments that replay `rows` rows of random numbers for ever, whatever the actions are.

    With `dead_rows` an episode's end is followed by a row in which nothing happens, as in Gymnasium's NEXT_STEP mode.
    Every tensor of the script is open to the test that wants it otherwise.
    """

    def __init__(
        self,
        num_envs: int = 6,
        observation_size: int = 3,
        rows: int = 60,
        *,
        discrete: bool = False,
        end_probability: float = 0.15,
        dead_rows: bool = False,
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.num_envs, self.observation_size, self.device = num_envs, observation_size, torch.device("cpu")
        low = torch.tensor([-1.0, -2.0])
        self.action_space: ActionSpace = Discrete((3, 2)) if discrete else Box(low, -low)
        self.obs = 1.0 + 2.0 * torch.randn(rows, num_envs, observation_size, generator=draw)
        self.last_obs = 1.0 + 2.0 * torch.randn(rows, num_envs, observation_size, generator=draw)
        self.reward = torch.randn(rows, num_envs, generator=draw)
        ends = torch.rand(rows, num_envs, generator=draw) < end_probability
        self.terminated = ends & (torch.rand(rows, num_envs, generator=draw) < 0.5)
        self.truncated = ends & ~self.terminated
        self.valid = torch.ones(rows, num_envs, dtype=torch.bool)
        if dead_rows:
            self._add_dead_rows()
        self.row = 0
        self.seeds: list[int | None] = []
        self.actions: list[Tensor] = []

    def _add_dead_rows(self) -> None:
        for row in range(1, len(self.reward)):
            dead = (self.terminated | self.truncated)[row - 1] & self.valid[row - 1]
            self.valid[row] = ~dead
            self.terminated[row] |= dead
            self.truncated[row] &= ~dead
            self.reward[row, dead] = 0.0
            self.obs[row, dead] = self.last_obs[row - 1, dead]
        self.terminated[-1], self.truncated[-1], self.valid[-1] = False, False, True

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    def reset(self, seed: int | None = None) -> Tensor:
        self.seeds.append(seed)
        self.row = 0
        return self.obs[0]

    def step(self, action: Tensor) -> Step:
        self.actions.append(action)
        row, self.row = self.row, (self.row + 1) % len(self.reward)
        obs = self.obs[self.row]
        return Step(
            obs=obs,
            reward=self.reward[row],
            terminated=self.terminated[row],
            truncated=self.truncated[row],
            final_obs=torch.where(self.ended[row].unsqueeze(-1), self.last_obs[row], obs),
            valid=self.valid[row],
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"row": torch.tensor(self.row)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.row = int(state["row"])

    def close(self) -> None:
        pass


class Witness:
    """A loss term that adds nothing and keeps what it is shown: each iteration's batch and each minibatch's outputs."""

    name = "witness"

    def __init__(self) -> None:
        self.rollout: Rollout
        self.estimates: Estimates
        self.batch: Batch
        self.first: list[tuple[PolicyOutput, Batch]] = []
        """The first minibatch of every iteration, before any step on it."""
        self.minibatches = 0
        self.fresh = False

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        self.rollout, self.estimates, self.batch, self.fresh = rollout, estimates, batch, True
        return batch

    def loss(self, agent: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:  # noqa: ARG002
        self.minibatches += 1
        if self.fresh:
            self.first.append((output, batch))
            self.fresh = False
        return torch.zeros_like(batch.log_probs)


class Tamper:
    """A loss term that changes the batch before the epochs; it adds nothing itself."""

    name = "tamper"

    def __init__(self, change: Callable[[Batch], dict[str, Any]]) -> None:
        self.change = change

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        return replace(batch, **self.change(batch))

    def loss(self, agent: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(batch.log_probs)


@pytest.fixture(scope="session")
def on_a_gpu() -> Callable[[pytest.MonkeyPatch], None]:
    """Lets all that looks at values, where that is free, take the branch that it takes on a GPU."""
    return _answer_as_on_a_gpu


def _answer_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("tailguard.") and name != "tailguard.device_ops":
            for function, answer in (("may_hold_any", True), ("readable", False)):
                if hasattr(module, function):
                    patch.setattr(module, function, lambda values, answer=answer: answer)  # noqa: ARG005


@pytest.fixture(scope="session")
def scripted_env() -> type[ScriptedEnv]:
    return ScriptedEnv


@pytest.fixture(scope="session")
def make_witness() -> type[Witness]:
    return Witness


@pytest.fixture(scope="session")
def tamper() -> type[Tamper]:
    return Tamper


@pytest.fixture(scope="session")
def make_learner() -> Callable[..., DistributionalPPO]:
    """A small learner on a given environment, a `ScriptedEnv` by default; options are the learner's own."""

    def make(env: Any = None, **options: Any) -> DistributionalPPO:
        return DistributionalPPO(ScriptedEnv() if env is None else env, **(SMALL | options))

    return make


@pytest.fixture(scope="session")
def everything_in() -> Callable[[DistributionalPPO], dict[str, Tensor]]:
    """Copies of every number that decides how a learner goes on, its environment apart."""

    def collect(learner: DistributionalPPO) -> dict[str, Tensor]:
        return dict(_numbers(learner))

    return collect


def _numbers(learner: DistributionalPPO) -> Iterator[tuple[str, Tensor]]:
    for name, value in learner.policy.state_dict().items():
        yield f"agent.{name}", value.clone()
    for name, parameter in learner.policy.named_parameters():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{key}", value.clone()
    for name, value in learner.observation_moments.state_dict().items():
        yield f"observations.{name}", value
    for name, value in learner.return_moments.state_dict().items():
        yield f"returns.{name}", value
    yield "generator", learner.generator.get_state()
    yield "num_timesteps", torch.tensor(learner.num_timesteps)
    yield "iteration", torch.tensor(learner.state.iteration)
    yield "kl_coef", torch.tensor(learner.state.kl_coef)
    rollout_state = learner.state.rollout_state
    if rollout_state is not None:
        yield "obs", rollout_state.obs.clone()
        for trunk, state in enumerate(rollout_state.state):
            for part, value in enumerate(state):
                # Where an episode starts the memory is cleared before it is read.
                yield f"memory.{trunk}.{part}", value.masked_fill(rollout_state.episode_start[:, None], 0.0)
