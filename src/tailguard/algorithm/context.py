"""Shared parts of training: the policy, its optimiser, the runtime, and the guard against non-finite numbers."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from tailguard.algorithm.learner_state import GeneratorState, LearnerState, Stateful
from tailguard.algorithm.nonfinite import FiniteGuard
from tailguard.algorithm.optimizers import OptimizerState, make_optimizer, make_scaler
from tailguard.algorithm.runtime import Runtime
from tailguard.algorithm.schedules import Schedule
from tailguard.models.policy import ActorCritic
from tailguard.models.precision import is_narrow, tensor_cores
from tailguard.optim import VarianceGradientScaler

if TYPE_CHECKING:
    from tailguard.algorithm.config import LearnerConfig
    from tailguard.envs.protocol import VectorEnv


@dataclass(frozen=True)
class TrainingContext:
    """The parts that collection, estimation and updates share. Their tensors keep their storage, so that CUDA graphs
    stay valid."""

    policy: ActorCritic
    learning_rate: Tensor
    """Current learning rate, in the tensor that the optimiser and recorded graphs hold."""
    optimizer: torch.optim.Optimizer
    scaler: VarianceGradientScaler | None
    generator: torch.Generator
    """Random stream of actions, targets and the order of minibatches."""
    state: LearnerState
    runtime: Runtime
    guard: FiniteGuard

    @classmethod
    def build(
        cls,
        policy: ActorCritic,
        groups: list[nn.Parameter] | list[dict[str, Any]],
        config: LearnerConfig,
        env: VectorEnv,
        seed: int,
    ) -> Self:
        """For a policy that is to learn by these settings. `groups`: see `make_optimizer`."""
        device = env.device
        learning_rate = torch.full((), Schedule.parse(config.learning_rate)(0.0), device=device)
        optimizer = make_optimizer(groups, config, learning_rate, seed)
        state = LearnerState()
        runtime = Runtime(config.runtime, env, device, config.on_nonfinite)
        if runtime.refusal is not None:
            warnings.warn(runtime.refusal, stacklevel=5)
        return cls(
            policy=policy,
            learning_rate=learning_rate,
            optimizer=optimizer,
            scaler=make_scaler(optimizer, config),
            generator=torch.Generator(device).manual_seed(seed),
            state=state,
            runtime=runtime,
            guard=FiniteGuard(config.on_nonfinite, policy, state, env.num_envs),
        )

    def matmul_precision(self) -> AbstractContextManager[None]:
        """Tensor cores for matrix products inside it, where the network computes in a narrow type."""
        return tensor_cores(is_narrow(self.policy.config.precision, self.learning_rate.device))

    def generators(self) -> list[torch.Generator]:
        """The random streams of the learner and its optimiser."""
        return [self.generator, *getattr(self.optimizer, "generators", {}).values()]

    def parts(self) -> dict[str, Stateful]:
        """Stateful parts, by their names in a checkpoint."""
        parts: dict[str, Stateful] = {
            "agent": self.policy,
            "optimizer": OptimizerState(self.policy, self.optimizer),
            "learner": self.state,
            "generator": GeneratorState(self.generator),
        }
        return parts if self.scaler is None else parts | {"vgs": self.scaler}
