"""The common base of learners: `learn`, the shared steps of an iteration, and the state that a checkpoint holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from tailguard.algorithm.agent import Agent
from tailguard.algorithm.context import TrainingContext
from tailguard.algorithm.defences import alternation, regulariser
from tailguard.algorithm.learner_state import GeneratorState, Stateful
from tailguard.algorithm.loss_terms import weighted_terms
from tailguard.algorithm.recording import IterationRecorder
from tailguard.algorithm.risk_budget import RiskBudget
from tailguard.algorithm.rollout import RolloutState, act_and_step, collect
from tailguard.algorithm.runtime import detached
from tailguard.algorithm.targets import ReturnTargets
from tailguard.algorithm.training_loop import run_iterations
from tailguard.envs.protocol import BlockwiseEnv, FunctionalEnv
from tailguard.monitor.callbacks import CallbackLogger
from tailguard.monitor.object_repr import html_table, one_line

if TYPE_CHECKING:
    from tailguard.algorithm.config import LearnerConfig
    from tailguard.algorithm.iteration_metrics import Snapshot
    from tailguard.algorithm.rollout import Rollout
    from tailguard.algorithm.targets import Prepared
    from tailguard.algorithm.updates import Updates
    from tailguard.models.memory import MemoryState
    from tailguard.monitor.callbacks import CallbackLike
    from tailguard.monitor.device_metrics import DeviceMetrics
    from tailguard.risk.config import RiskConfig
    from tailguard.robust.config import RobustConfig


@dataclass(frozen=True)
class Iteration:
    """What one iteration made, before its metrics are read."""

    rollout: Rollout
    prepared: Prepared
    wanted: bool
    """No callback has ended the training in the middle of the rollout."""
    usable: bool
    """It was learned from."""
    metrics: DeviceMetrics


class Learner(Agent):
    """Base class of the learners. A subclass implements `_iterate`: one rollout and what it learns from it."""

    kind: ClassVar[str]
    """Name of the learner in a run's settings."""
    updates: Updates
    """Turns batches into optimiser steps."""
    smooths: ClassVar[Literal["kl", "action"]]
    """What training against attacks keeps from changing, where its settings leave the choice."""
    has_critics: bool = True
    """Whether critics learn. If not, they are not evaluated either."""

    def __init__(
        self,
        env: Any,
        config: LearnerConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        num_envs: int | None = None,
        risk: RiskConfig | None = None,
        robust: RobustConfig | None = None,
        verbose: int = 0,
        tensorboard_log: str | Path | None = None,
    ) -> None:
        super().__init__(env, config, seed, device, num_envs)
        self.robust, self.smoothness = regulariser(self, robust)
        self.verbose, self.tensorboard_log = verbose, tensorboard_log
        self.context = TrainingContext.build(self.policy, self._parameter_groups(), config, self.env, self.seed)
        self.state, self.runtime, self.generator = self.context.state, self.context.runtime, self.context.generator
        self.optimizer, self.scaler = self.context.optimizer, self.context.scaler
        self.learning_rate = self.context.learning_rate
        self.targets = ReturnTargets(self.context, config, has_critics=self.has_critics)
        self.return_moments = self.targets.moments
        self.risk: RiskBudget | None = None
        if risk is not None and risk.enabled:
            self.risk = RiskBudget(risk, config, self.env, self.policy, self.seed)
        self.weighted_terms = weighted_terms(config.loss_terms, self.device)
        self.recorder = IterationRecorder(self.context, config, self.env)
        self.collector: Callable[..., tuple[Rollout, RolloutState]] = collect
        """What collects rollouts; that of data parallel brings those of all processes together."""
        self.episodes, self.health, self.alarms = self.recorder.episodes, self.recorder.health, self.recorder.alarms
        self.snapshot: Snapshot | None = None
        """Data behind the last iteration's metrics, for callbacks that show more."""
        self.alternation = alternation(self)
        self.runtime.generators = self._generators()
        self.metrics: dict[str, float] = {}
        """Metrics of the last iteration, under SB3's names where it has them."""
        self.recorded: dict[str, float] = self.metrics
        """Where metrics recorded by callbacks go: to the current iteration, else to the last one."""

    def _parameter_groups(self) -> list[nn.Parameter] | list[dict[str, Any]]:
        """Parameters for the optimiser, in groups where learning rates differ."""
        return list(self.policy.parameters())

    def _generators(self) -> list[torch.Generator]:
        """Every random stream that an iteration draws from."""
        generators = self.context.generators()
        generators += [] if self.risk is None else [self.risk.generator]
        generators += [] if self.smoothness is None else [self.smoothness.generator]
        return [*generators, self.env.generator] if isinstance(self.env, FunctionalEnv) else generators

    def parts(self) -> dict[str, Stateful]:
        """All stateful parts by name: together with the environment's state, everything that a checkpoint needs."""
        parts = self.context.parts()
        parts |= {
            "observations": self.observation_moments,
            "returns": self.return_moments,
            "episodes": self.episodes,
            "health": self.health,
            "prediction_generator": GeneratorState(self.prediction_generator),
        }
        if self.risk is not None:
            parts |= {"risk": self.risk, **self.risk.episode_parts()}
        if self.smoothness is not None:
            parts["robust"] = self.smoothness
        if self.alternation is not None:
            parts["adversary"] = self.alternation
        return parts

    @property
    def num_timesteps(self) -> int:
        """Environment steps taken so far."""
        return self.state.num_timesteps

    # --- learning -----------------------------------------------------------------------------------------------

    def learn(
        self,
        total_timesteps: int,
        callback: CallbackLike = None,
        log_interval: int = 1,
        *,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for at least `total_timesteps` environment steps, in whole rollouts.

        `callback`: an SB3 callback or a `tailguard.monitor.callbacks.Callback`, a function of `(locals, globals)`, or
            a list of them. `on_step` is called for every step of the vector of environments, when the rollout is
            collected and before the updates on it. If it returns False the training ends there: the rollout is not
            learned from, and `num_timesteps` is that step's.
        `log_interval`: rollouts between two updates of the progress bar, and between two tables if `verbose` is 1.
        `tb_log_name`: name of the run's folder in `tensorboard_log`, the learner's by default; a number is added.
        `reset_num_timesteps`: count steps from 0, and with them read the schedules; if not, both go on, as in SB3.
            Episodes under way go on in any case.
        """
        run_iterations(
            self,
            total_timesteps,
            callback,
            log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
        return self

    def iterate(self, on_rollout: Callable[[Rollout], bool] | None = None) -> dict[str, float]:
        """One rollout and the updates on it; returns the iteration's metrics.

        `on_rollout`: called with the rollout before the updates; where it returns False there are none, and counting
            steps is left to it.
        """
        with self.context.matmul_precision():
            if self.state.rollout_state is None:
                self.state.rollout_state = self._begin()
                self.runtime.forget()
            if self.alternation is not None and self.alternation.due():
                self.alternation.take_turn()
            if isinstance(self.env, BlockwiseEnv):
                self.env.exchange(self.config.n_steps)
            self.set_hyper()
            if self.smoothness is not None:
                self.smoothness.set_progress(self.state.progress)
            return self._record(self._iterate(on_rollout))

    @abstractmethod
    def _iterate(self, on_rollout: Callable[[Rollout], bool] | None) -> Iteration:
        """One rollout and what is learned from it; see `iterate`. Nothing is read from the device for its metrics."""

    @abstractmethod
    def set_hyper(self) -> object:
        """Write the current hyper-parameters into the tensors that the optimiser and recorded graphs hold."""

    def set_coefficients(self) -> None:
        """The same for the terms of the loss that the settings name."""
        for term in self.weighted_terms:
            term.set_coefficient(self.state.progress)

    def _begin(self) -> RolloutState:
        """Fresh episodes and empty memories."""
        # An agent that goes on after it was loaded must not live through its first episodes again.
        obs = self.env.reset(self.seed + self.state.iteration)
        if self.config.normalise_observations and self.observation_moments.count == 0:
            self.observation_moments.update(obs, obs.isfinite().all(-1))
        start = torch.ones(self.env.num_envs, dtype=torch.bool, device=self.device)
        return RolloutState(obs, start, self.policy.initial_state(self.env.num_envs))

    def _collect(
        self, noise: Tensor | None = None, mask: Tensor | None = None, *, deterministic: bool = False
    ) -> Rollout:
        """Collect one rollout; episodes and recurrent states continue from the previous one, without gradient.

        `noise`, `mask`, `deterministic`: see `collect`.
        """
        before, env = self.state.rollout_state, self.env
        assert before is not None  # `iterate` began
        env_before = None
        if isinstance(env, FunctionalEnv):
            env_before = env.state
            env.state = self.runtime.kept_for_backward(env_before)
        rollout, after = self.collector(
            self.policy,
            env,
            self.runtime.kept_for_backward(before),
            self.observation_scale(),
            self.config.n_steps,
            self.generator,
            self.runtime.compiled(act_and_step),
            noise,
            self._observer(),
            observation_noise=self.config.observation_noise,
            mask=mask,
            deterministic=deterministic,
        )
        self.state.rollout_state = self.runtime.copy_in_place(before, detached(after))
        if isinstance(env, FunctionalEnv):
            env.state = self.runtime.copy_in_place(env_before, detached(env.state))
        return rollout

    def _observer(self) -> Callable[[Tensor, Tensor, MemoryState], Tensor] | None:
        """What changes the observations that the policy acts on; see `collect`."""
        return None if self.alternation is None else self.alternation.observe

    # --- the end of an iteration ------------------------------------------------------------------------------------

    def _iteration(self, rollout: Rollout, prepared: Prepared, *, wanted: bool, usable: bool) -> Iteration:
        """Finish an iteration on the device."""
        metrics = self.runtime.run(("finish", usable), lambda: self._finish(rollout, prepared, usable))
        return Iteration(rollout, prepared, wanted, usable, metrics)

    def _record(self, iteration: Iteration) -> dict[str, float]:
        """Read an iteration's metrics and count it."""
        read = self.recorder.read(iteration.metrics, iteration.rollout, self.kind)
        self.snapshot = self.recorder.snapshot(iteration.rollout, iteration.prepared.estimates)
        return self._settle(read, wanted=iteration.wanted, usable=iteration.usable)

    def _settle(self, report: dict[str, float], *, wanted: bool, usable: bool) -> dict[str, float]:
        """What the host does with an iteration's metrics."""
        report = self.targets.settle(report)
        self._count(wanted, usable)
        return self._report(report)

    @torch.no_grad()
    def _finish(self, rollout: Rollout, prepared: Prepared, usable: bool) -> DeviceMetrics:
        """Update the observation statistics and collect the iteration's metrics; nothing is read yet."""
        metrics: dict[str, Tensor] = prepared.metrics | {"data/memory_resets": rollout.memory_resets}
        if usable:
            metrics |= self.updates.metrics() | self._robust_metrics()
            if self.config.normalise_observations:
                # Between rollouts only: statistics that moved within one would break the ratio's identity.
                change = self.observation_moments.update(rollout.obs, rollout.valid)
                metrics["data/observation_drift"] = change.mean_shift.max()
        snapshot = self.recorder.snapshot(rollout, prepared.estimates)
        return self.recorder.collect(snapshot, metrics, self.updates.all_finite)

    def _robust_metrics(self) -> dict[str, Tensor]:
        """What the attacks of the iteration found."""
        metrics = {} if self.smoothness is None else self.smoothness.metrics()
        return metrics if self.alternation is None else metrics | self.alternation.metrics()

    def _count(self, wanted: bool, usable: bool) -> None:
        """Count an iteration; of a rollout that a callback ended in the middle, the callback counts the steps."""
        state = self.state
        state.skipped += wanted and not usable
        state.num_timesteps += self.config.n_steps * self.env.num_envs if wanted else 0
        state.iteration += 1
        self.runtime.iterations += 1

    def _report(self, report: dict[str, float]) -> dict[str, float]:
        """The iteration's metrics once they are read, with the alarms they raise."""
        return self.recorder.report(report)

    # --- for populations ----------------------------------------------------------------------------------------------

    def reseed(self, seed: int) -> None:
        """Seed every random stream anew: an agent that goes on from a copy of another must not repeat its draws."""
        for number, generator in enumerate([*self._generators(), self.prediction_generator]):
            generator.manual_seed(seed + number)

    def reset_optimizer(self) -> None:
        """Forget the moments of every optimiser, and what variance gradient scaling has measured."""
        self.optimizer.state.clear()
        if self.scaler is not None:
            for parameter in self.scaler.parameters:
                self.scaler.forget(parameter)
        if self.risk is not None:
            self.risk.critic.optimizer.state.clear()
        self.runtime.forget()

    # --- for people and for SB3's callbacks ---------------------------------------------------------------------------

    @property
    def logger(self) -> CallbackLogger:
        """For SB3's callbacks: what they record joins `metrics` when the iteration ends, or at once after that."""
        return CallbackLogger(self.recorded)

    def __repr__(self) -> str:
        return one_line(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        """Main properties and progress; `config` has every setting."""
        network = self.config.network
        memory = "none" if network.memory == "none" else f"LSTM {network.lstm_size} × {network.lstm_layers}"
        return {
            "observation": str(self.env.observation_size),
            "memory": memory,
            "critic": network.critic,
            "parameters": f"{sum(weight.numel() for weight in self.policy.parameters()):,}",
            "envs": f"{self.env.num_envs:,}",
            "device": str(self.device),
            "timesteps": f"{self.num_timesteps:,}",
            "risk budget": "none" if self.risk is None else "on",
        }

    # --- saving and loading -------------------------------------------------------------------------------------------

    def get_parameters(self) -> dict[str, Any]:
        """Copies of what SB3 calls parameters: `policy` (weights by name) and `policy.optimizer` (its moments).

        `observations` and `returns` come with them: the statistics without which the weights mean something else.
        """
        from tailguard.algorithm.saving import parameters_of

        return parameters_of(self)

    def set_parameters(self, parameters: Mapping[str, Any] | str | Path, exact_match: bool = True) -> None:
        """Load what `get_parameters` returned, or the parameters of a saved agent.

        `exact_match`: raise unless all of them are there; False takes some of them, and of `policy` some weights.
        """
        from tailguard.algorithm.saving import put_parameters, read_parameters

        given = read_parameters(Path(parameters)) if isinstance(parameters, str | Path) else parameters
        put_parameters(self, given, exact_match=exact_match)

    def save(self, path: str | Path) -> None:
        """Write the agent to the folder `path`: weights and statistics as safetensors, the rest as JSON."""
        from tailguard.algorithm.saving import save_agent

        save_agent(self, Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: Any = None,
        device: torch.device | str | None = None,
        *,
        verbose: int = 0,
        tensorboard_log: str | Path | None = None,
    ) -> Self:
        """Read an agent that `save` wrote. Without an `env` it can predict and be backtested; `set_env` lets it learn.

        An agent of another learner continues with this one: with its weights and statistics, this learner's own default
        settings where the two differ, and a fresh optimiser. `verbose` and `tensorboard_log` are not saved.
        """
        from tailguard.algorithm.saving import load_agent

        return load_agent(Path(path), env, device, cls, verbose=verbose, tensorboard_log=tensorboard_log)

    def set_env(self, env: Any) -> None:
        """Train on another environment from now on, with fresh episodes; observations and actions must be the same."""
        from tailguard.algorithm.saving import move_to

        move_to(self, env)
