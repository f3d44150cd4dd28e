"""What is audited: the installed code with chosen parts, and perhaps a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailguard.algorithm.pathwise import PathwiseLearner
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.envs.protocol import ActionSpace, Box, Discrete, Step

if TYPE_CHECKING:
    from tailguard.algorithm.estimate import Estimates
    from tailguard.algorithm.rollout import Rollout
    from tailguard.algorithm.update import Batch
    from tailguard.config import RunConfig
    from tailguard.experiment.trained_run import TrainedRun
    from tailguard.models.policy import ActorCritic, PolicyOutput
    from tailguard.risk.config import RiskConfig

SMALL: Mapping[str, Any] = {
    "n_steps": 12,
    "minibatch_size": 24,
    "epochs": 2,
    "learning_rate": 3e-3,
    "hidden": (7,),
    "lstm_size": 5,
    "quantiles": 6,
    "atoms": 11,
    "runtime": "eager",
}
"""Sizes of the learners that checks make: an iteration takes some ten milliseconds."""
PPO_ALONE = ("epochs",)
"""Those of them that a learner of gradients through the market does not have."""
PARTS = ("critic", "memory", "lstm_layers", "twin_critics", "twin_trunk", "std", "squash", "projection", "activation")
"""Settings of a run's network that its small stand-ins share."""
LEARNING = ("optimizer", "value_clip", "baseline", "twin_mode", "distribution_target", "huber_kappa", "upgd", "vgs")
"""Settings of a run's learner that they share."""


@dataclass(frozen=True)
class Subject:
    """What the checks measure: learners of these parts, and a run where one is given.

    Learners that checks make are small and real: the same classes, with few units and short rollouts.
    """

    parts: Mapping[str, Any] = field(default_factory=dict)
    """Options of `DistributionalPPO` that every learner made here has: critic, memory, twin critics, optimiser, …"""
    seed: int = 0
    run: TrainedRun | None = None

    @classmethod
    def of_run(cls, run: TrainedRun) -> Subject:
        """A run, and learners with its network's and its learner's parts."""
        learner, network = run.config.chosen, run.config.chosen.network
        parts = {name: getattr(network, name) for name in PARTS} | {name: getattr(learner, name) for name in LEARNING}
        return cls(parts, run.config.training.seed, run)

    @property
    def config(self) -> RunConfig:
        """The run's settings; the defaults where there is no run."""
        from tailguard.config import RunConfig

        return RunConfig() if self.run is None else self.run.config

    @property
    def trained(self) -> TrainedRun:
        """The run; only for checks that need one."""
        assert self.run is not None  # the auditor leaves such checks out where there is none
        return self.run

    @cached_property
    def bars(self) -> Any:
        """Bars of the planted synthetic market, for checks of the code alone."""
        from tailguard.data.synthetic import make_market

        return make_market(1_500, seed=self.seed).bars

    def learner(
        self, env: Any = None, *, risk: RiskConfig | None = None, extensions: Any = (), **options: Any
    ) -> DistributionalPPO:
        """A small learner with the subject's parts, on a scripted environment by default; `options` win."""
        env = ScriptedEnv(seed=self.seed) if env is None else env
        return DistributionalPPO(env, seed=self.seed, risk=risk, extensions=extensions, **self._options(options))

    def pathwise_learner(self, env: Any, *, risk: RiskConfig | None = None, **options: Any) -> PathwiseLearner:
        """The same for gradients through the market, with critics; `env`: one whose steps are differentiable."""
        chosen = self._options({"critic_epochs": 1, "critic_learning_rate": 3e-3} | options)
        for name in PPO_ALONE:
            del chosen[name]
        return PathwiseLearner(env, seed=self.seed, risk=risk, **chosen)

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {**SMALL, **self.parts, **options}
        if chosen.get("memory") == "shared" or not chosen.get("twin_critics", False):
            chosen["twin_trunk"] = "shared"
        return chosen


class ScriptedEnv:
    """N environments that replay rows of random numbers for ever, whatever the actions are.

    Episodes end at random rows, by a time limit or by termination. With `dead_rows` an end is followed by a row in
    which nothing happens, as in Gymnasium's NEXT_STEP mode. A check may write to any tensor of the script.
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

    def _add_dead_rows(self) -> None:
        for row in range(1, len(self.reward)):
            dead = (self.terminated | self.truncated)[row - 1] & self.valid[row - 1]
            self.valid[row] = ~dead
            self.terminated[row] |= dead
            self.truncated[row] &= ~dead
            self.reward[row, dead] = 0.0
            self.obs[row, dead] = self.last_obs[row - 1, dead]
        self.terminated[-1], self.truncated[-1], self.valid[-1] = False, False, True

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        """The first row."""
        self.row = 0
        return self.obs[0]

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        """The next row of the script."""
        row, self.row = self.row, (self.row + 1) % len(self.reward)
        obs, ended = self.obs[self.row], self.terminated[row] | self.truncated[row]
        return Step(
            obs=obs,
            reward=self.reward[row],
            terminated=self.terminated[row],
            truncated=self.truncated[row],
            final_obs=torch.where(ended.unsqueeze(-1), self.last_obs[row], obs),
            valid=self.valid[row],
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The next row's number."""
        return {"row": torch.tensor(self.row)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved row."""
        self.row = int(state["row"])

    def close(self) -> None:
        """Nothing to release."""


class Witness:
    """A term of the loss that adds nothing and keeps what it is shown: the batch and the first minibatch's output."""

    name = "witness"

    def __init__(self) -> None:
        self.rollout: Rollout
        self.estimates: Estimates
        self.batch: Batch
        self.first: list[tuple[PolicyOutput, Batch]] = []
        """Network output and data of the first minibatch of every iteration, before any step on it."""
        self.fresh = False

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        """Keep the whole batch."""
        self.rollout, self.estimates, self.batch, self.fresh = rollout, estimates, batch, True
        return batch

    def loss(self, policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:  # noqa: ARG002
        """Zeros."""
        if self.fresh:
            self.first.append((output, batch))
            self.fresh = False
        return torch.zeros_like(batch.log_probs)
