"""What every learner is: a network, its statistics, an environment, and the verbs to train, use and save it."""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.algorithm.callbacks import CallbackLike, CallbackLogger, make_callback, make_callbacks
from tailguard.algorithm.config import LearnerConfig
from tailguard.algorithm.estimate import CriticView, Estimates, estimate, first_returns, look
from tailguard.algorithm.nonfinite import check_estimates, check_rollout, finite_inputs, not_finite_in_graph
from tailguard.algorithm.optimizers import OptimizerState, make_optimizer, make_scaler
from tailguard.algorithm.risk import RiskBudget
from tailguard.algorithm.rollout import Carry, ObservationScale, Rollout
from tailguard.algorithm.runtime import Runtime
from tailguard.algorithm.sb3 import make_writers, whole_number
from tailguard.algorithm.scale import (
    SUPPORT_DRIFT_LIMIT,
    lay_supports,
    move_return_scale,
    return_spread,
    support_drift,
)
from tailguard.algorithm.schedules import Schedule
from tailguard.algorithm.state import GeneratorState, LearnerState, Stateful
from tailguard.algorithm.step_replay import StepReplay
from tailguard.algorithm.tally import Figures
from tailguard.algorithm.update import Batch
from tailguard.algorithm.updates import Updates
from tailguard.envs.adapt import as_vector_env, policy_inputs
from tailguard.envs.protocol import FunctionalEnv
from tailguard.errors import ConfigError
from tailguard.memory import keep_freed_memory
from tailguard.models.agent import ActorCritic
from tailguard.models.inference import InferencePolicy, PredictPolicy, StepPolicy
from tailguard.models.precision import is_narrow, tensor_cores
from tailguard.monitor.episodes import EpisodeTracker
from tailguard.monitor.health import Alarm, HealthMonitor
from tailguard.monitor.metrics import Snapshot, iteration_figures
from tailguard.monitor.progress import Progress
from tailguard.monitor.summary import html_table, learner_facts, one_line
from tailguard.returns import RunningMoments
from tailguard.risk.config import RiskConfig
from tailguard.validate import check_count, check_range

if TYPE_CHECKING:
    from tailguard.envs.protocol import VectorEnv
    from tailguard.envs.spec import TradingSpec

SUPPORT_DRIFT, ROLLOUT_FINITE, UPDATES_FINITE = "support_drift", "rollout_finite", "updates_finite"
RETURNS_VARY = "returns_vary"
"""Keys of what the learner itself reads among the figures."""


@dataclass(frozen=True)
class Prepared:
    """A rollout made ready for the updates."""

    estimates: Estimates
    batch: Batch | None
    """None if the rollout must not be used, and for a learner without critics that learns from the rollout alone."""
    figures: dict[str, Tensor]

    def snapshot(self, agent: ActorCritic, rollout: Rollout, carry: Carry) -> Snapshot:
        """The iteration as the figures see it."""
        return Snapshot(agent, rollout, self.estimates, carry.state)


class Learner(ABC):
    """The common part of all learners. What one does with a rollout is its `_iterate`."""

    kind: ClassVar[str]
    """Name of the learner in a run's settings."""
    config: LearnerConfig
    updates: Updates
    """Turns batches into optimiser steps."""

    def __init__(
        self,
        env: Any,
        config: LearnerConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        num_envs: int | None = None,
        risk: RiskConfig | None = None,
        verbose: int = 0,
        tensorboard_log: str | Path | None = None,
    ) -> None:
        given: object = seed
        seed = int(given) if isinstance(given, np.integer) else seed
        check_count("seed", seed, low=-(2**63))
        check_range("seed", seed, high=2**63, high_open=True)
        self.env: VectorEnv = as_vector_env(env, num_envs, device)
        self.config = config
        self.inputs = policy_inputs(self.env)
        self.device = self.env.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.seed = seed
        self.verbose, self.tensorboard_log = verbose, tensorboard_log
        self.generator = torch.Generator(self.device).manual_seed(seed)
        # Predictions draw from a stream of their own: asking a learning agent for actions must not change its course.
        self.prediction_generator = torch.Generator(self.device).manual_seed(seed)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            network = ActorCritic(self.env.observation_size, self.env.action_space, config.network)
        self.agent = network.to(self.device)
        self.observation_moments = RunningMoments((self.env.observation_size,), device=self.device)
        self.return_moments = RunningMoments((), decay=config.return_decay, device=self.device)
        self.learning_rate = torch.full((), Schedule.parse(config.learning_rate)(0.0), device=self.device)
        """Today's step size, in the tensor that the optimiser and recorded graphs hold."""
        self.optimizer = make_optimizer(self._parameter_groups(), config, self.learning_rate, seed)
        self.scaler = make_scaler(self.optimizer, config)
        self.risk: RiskBudget | None = None
        if risk is not None and risk.enabled:
            self.risk = RiskBudget(risk, config, self.env, self.agent, seed)
        self.episodes = EpisodeTracker(self.env.num_envs, self.device)
        self.health = HealthMonitor()
        self.alarms: list[Alarm] = []
        """What has gone wrong in this process, each kind once."""
        self.snapshot: Snapshot | None = None
        """What the last iteration's figures were made of, for callbacks that show more."""
        self.state = LearnerState()
        self.runtime = Runtime(config.runtime, self.env, self.device, config.on_nonfinite)
        if self.runtime.refusal is not None:
            warnings.warn(self.runtime.refusal, stacklevel=3)
        self.runtime.generators = self._generators()
        self.metrics: dict[str, float] = {}
        """Figures of the last iteration, under SB3's names where it has them."""
        self.recorded: dict[str, float] = self.metrics
        """Where figures that callbacks record go: to the iteration under way, else to the last one."""

    def _parameter_groups(self) -> list[nn.Parameter] | list[dict[str, Any]]:
        """What the optimiser moves, in groups where they have step sizes of their own."""
        return list(self.agent.parameters())

    def __repr__(self) -> str:
        return one_line(type(self).__name__, learner_facts(self))

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, learner_facts(self))

    @property
    def spec(self) -> TradingSpec | None:
        """What the agent must find again on new bars; None if it was not trained on bars."""
        return self.inputs.spec

    @property
    def num_timesteps(self) -> int:
        """Environment steps taken so far."""
        return self.state.num_timesteps

    def _generators(self) -> list[torch.Generator]:
        """Every random stream that an iteration draws from."""
        found = [self.generator, *getattr(self.optimizer, "generators", {}).values()]
        found += [] if self.risk is None else [self.risk.generator]
        return [*found, self.env.generator] if isinstance(self.env, FunctionalEnv) else found

    def parts(self) -> dict[str, Stateful]:
        """Everything that remembers, by name: together with the environment's state, all that a checkpoint needs."""
        parts: dict[str, Stateful] = {
            "agent": self.agent,
            "optimizer": OptimizerState(self.agent, self.optimizer),
            "observations": self.observation_moments,
            "returns": self.return_moments,
            "episodes": self.episodes,
            "health": self.health,
            "learner": self.state,
            "generator": GeneratorState(self.generator),
            "prediction_generator": GeneratorState(self.prediction_generator),
        }
        if self.scaler is not None:
            parts["vgs"] = self.scaler
        if self.risk is not None:
            parts |= {"risk": self.risk, **self.risk.episode_parts()}
        return parts

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

        `callback`: an SB3 callback or a `tailguard.algorithm.callbacks.Callback`, a function of `(locals, globals)`, or
            a list of them. `on_step` is called for every step of the vector of environments, when the rollout is
            collected and before the updates on it. If it returns False the training ends there: the rollout is not
            learned from, and `num_timesteps` is that step's.
        `log_interval`: rollouts between two updates of the progress bar, and between two tables if `verbose` is 1.
        `tb_log_name`: name of the run's folder in `tensorboard_log`, the learner's by default; a number is added.
        `reset_num_timesteps`: count steps from 0, and with them read the schedules; if not, both go on, as in SB3.
            Episodes under way go on in any case.
        """
        total_timesteps = whole_number("total_timesteps", total_timesteps)
        check_count("total_timesteps", total_timesteps)
        check_count("log_interval", log_interval)
        if reset_num_timesteps:
            self.state.num_timesteps = 0
        begun = self.state.num_timesteps
        goal = begun + total_timesteps
        rollout_size = self.config.n_steps * self.env.num_envs
        writers = make_writers(self, log_interval, tb_log_name or type(self).__name__, new_run=reset_num_timesteps)
        listener = make_callback([*make_callbacks(callback), *writers])
        listener.init_callback(self)
        listener.on_training_start(locals() | {"total_timesteps": goal}, globals())
        replay = StepReplay(self, listener)
        clock = time.perf_counter()
        with Progress(math.ceil(total_timesteps / rollout_size) * rollout_size, shown=progress_bar) as bar:
            while self.state.num_timesteps < goal:
                self.state.progress = self.state.num_timesteps / goal
                self.recorded = {}
                replay.begin()
                said = len(self.alarms)
                self.metrics = self.iterate(replay) | self.recorded
                self.recorded = self.metrics
                elapsed = time.perf_counter() - clock
                self.metrics["time/fps"] = (self.state.num_timesteps - begun) / elapsed
                self.metrics["time/total_timesteps"] = self.state.num_timesteps
                listener.on_iteration_end()
                if self.state.iteration % log_interval == 0 or self.state.num_timesteps >= goal:
                    bar.show(self.state.num_timesteps - begun, self.metrics)
                goes_on = listener.on_iteration_logged() and replay.goes_on
                # Evaluations run in callbacks, and their figures join the iteration's only then.
                self.alarms += self.health.evaluated(self.metrics, self.state.num_timesteps)
                for alarm in self.alarms[said:]:
                    bar.say(str(alarm))
                if not goes_on:
                    break
        listener.on_training_end()
        return self

    def iterate(self, on_rollout: Callable[[Rollout], bool] | None = None) -> dict[str, float]:
        """One rollout and the updates on it; returns the iteration's figures.

        `on_rollout`: called with the rollout before the updates; where it returns False there are none, and counting
            steps is left to it.
        """
        with tensor_cores(is_narrow(self.config.network.precision, self.device)):
            return self._iterate(on_rollout)

    @abstractmethod
    def _iterate(self, on_rollout: Callable[[Rollout], bool] | None) -> dict[str, float]:
        """One rollout and what is learned from it; see `iterate`."""

    @abstractmethod
    def set_hyper(self) -> object:
        """Write today's hyper-parameters into the tensors that the optimiser and recorded graphs hold."""

    # --- one iteration, step by step --------------------------------------------------------------------------------

    def _begin(self) -> Carry:
        """Fresh episodes and empty memories."""
        # An agent that goes on after it was loaded must not live through its first episodes again.
        obs = self.env.reset(self.seed + self.state.iteration)
        if self.config.normalise_observations and self.observation_moments.count == 0:
            self.observation_moments.update(obs, obs.isfinite().all(-1))
        start = torch.ones(self.env.num_envs, dtype=torch.bool, device=self.device)
        return Carry(obs, start, self.agent.initial_state(self.env.num_envs))

    def _observation_scale(self) -> ObservationScale:
        moments = self.observation_moments
        clip = self.config.observation_clip if self.config.normalise_observations else math.inf
        return ObservationScale(moments.mean.float(), moments.std.float(), clip)

    @torch.no_grad()
    def _estimate(
        self, rollout: Rollout, usable: bool, final_obs: Tensor | None = None
    ) -> tuple[tuple[CriticView, ...], Estimates, bool]:
        """What the critics say of a rollout, the estimates made of it, and whether both can be used.

        `final_obs`: see `look`.
        """
        config, moments = self.config, self.return_moments
        if usable and not moments.started:
            # Returns that never vary have no scale. The first that do set it, and not what an untrained critic said.
            moments.clear()
            moments.update(first_returns(rollout, config.gamma), rollout.valid)
        views = self._evaluate_critics(rollout, final_obs)
        estimates = estimate(views, rollout, config.estimates, self.generator)
        if usable and self.runtime.looks:
            usable = check_estimates(estimates, rollout.valid, self)
        return views, estimates, usable

    def _evaluate_critics(self, rollout: Rollout, final_obs: Tensor | None) -> tuple[CriticView, ...]:
        """What each critic says of a rollout; the critics' memories go on from here."""
        carry = self.state.carry
        assert carry is not None  # `iterate` began
        views, memory = look(self.agent, rollout, self.return_moments, self.config.estimates, final_obs)
        self.state.carry = self.runtime.keep(carry, replace(carry, state=(carry.state[0], *memory[1:])))
        return views

    @torch.no_grad()
    def _rescale_returns(self, rollout: Rollout, estimates: Estimates) -> dict[str, Tensor]:
        """Take the value targets into the return's scale and rewrite the critics for it; returns its figures."""
        moments = self.return_moments
        change = moments.update(estimates.value_targets, rollout.valid & moments.varies)
        move_return_scale(self.agent, self.optimizer, change, self.scaler)
        figures = {
            "critic/return_mean": moments.mean.clone(),
            "critic/return_std": moments.std.clone(),
            "critic/return_std_drift": change.std_ratio,
            RETURNS_VARY: moments.varies,
        }
        if estimates.distribution_targets is not None:
            spread = return_spread(estimates.distribution_targets, rollout.valid, moments)
            figures["critic/return_spread"] = spread
            drift = support_drift(self.agent, spread)
            if drift is not None:
                figures[SUPPORT_DRIFT] = drift
        return figures

    def _take_steps(self, wanted: bool, usable: bool) -> None:
        """Count an iteration; of a rollout that a callback ended in the middle, the callback counts the steps."""
        state = self.state
        state.skipped += wanted and not usable
        state.num_timesteps += self.config.n_steps * self.env.num_envs if wanted else 0
        state.iteration += 1
        self.runtime.iterations += 1

    @torch.no_grad()
    def _finish(self, rollout: Rollout, prepared: Prepared, usable: bool) -> Figures:
        """What remains to be done and to be said after the updates; nothing is read from the device yet."""
        carry, config = self.state.carry, self.config
        assert carry is not None
        figures = dict(prepared.figures)
        figures["data/memory_resets"] = rollout.memory_resets
        if usable:
            figures |= self.updates.figures()
            if config.normalise_observations:
                change = self.observation_moments.update(rollout.obs, rollout.valid)
                figures["data/observation_drift"] = change.mean_shift.max()
        self.episodes.add(rollout.rewards, rollout.ended, rollout.valid, rollout.outcome)
        episodes = self.episodes.figures()
        figures["rollout/ep_rew_mean"] = episodes["return"]
        figures["rollout/ep_len_mean"] = episodes["length"]
        if "pnl" in rollout.outcome:
            figures["rollout/ep_pnl_mean"] = episodes["pnl"]
        figures |= iteration_figures(prepared.snapshot(self.agent, rollout, carry), detailed=config.monitor)
        if not self.runtime.looks:
            figures[ROLLOUT_FINITE], figures[UPDATES_FINITE] = finite_inputs(rollout), self.updates.all_finite
        return Figures.of(figures)

    def _read(self, rollout: Rollout, figures: Figures) -> dict[str, float]:
        """The iteration's figures as numbers: the one place where the device is read for them."""
        report = figures.read()
        self.return_moments.started = bool(report.pop(RETURNS_VARY, self.return_moments.started))
        if not report.pop(ROLLOUT_FINITE, 1.0):
            check_rollout(rollout, self)
        if not report.pop(UPDATES_FINITE, 1.0):
            raise not_finite_in_graph(self)
        return report

    def _report(self, report: dict[str, float]) -> dict[str, float]:
        """Draw the conclusions that must wait for numbers, and add what is known without the device."""
        state, config = self.state, self.config
        if SUPPORT_DRIFT in report:
            drifted = report.pop(SUPPORT_DRIFT) > SUPPORT_DRIFT_LIMIT
            spread = report["critic/return_spread"]
            relaid = lay_supports(self.agent, self.optimizer, self.scaler, spread) if drifted else 0
            report["critic/supports_relaid"] = relaid
        state.degenerate += int(report.get("train/constant_advantages", 0))
        if config.monitor:
            self.alarms += self.health.check(report, state.num_timesteps)
            report |= self.health.figures()
        report["warn/skipped_nonfinite"] = state.skipped
        report["warn/constant_advantages"] = state.degenerate
        report["time/iterations"] = state.iteration
        return report

    # --- acting -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """The policy's action, and the memory to give back with the next observation; as in Stable-Baselines3.

        `observation`: one observation or a batch, in the environment's own form. `state`: what the last call returned,
        None at the start. `episode_start`: [n] bool, where the memory must be cleared. Statistics are not touched.
        """
        rows, single = self.inputs.encode(observation)
        obs = self._observation_scale()(torch.as_tensor(rows, device=self.device))
        count = obs.shape[0]
        memory = self.agent.initial_state(count)[0]
        if state is not None:
            expected = [tuple(part.shape) for part in memory]
            memory = tuple(torch.as_tensor(part, device=self.device) for part in state)
            found = [tuple(part.shape) for part in memory]
            if found != expected:
                raise ConfigError(
                    f"state has shape {found}; for {count} observations it is {expected}. Give back what the last "
                    "predict returned, or None at the start"
                )
        start = torch.zeros(count, dtype=torch.bool, device=self.device)
        if episode_start is not None:
            start = torch.as_tensor(np.asarray(episode_start), dtype=torch.bool, device=self.device).reshape(-1)
            if len(start) != count:
                raise ConfigError(f"episode_start has {len(start)} entries for {count} observations")
        parameters, memory = self.agent.act(obs, memory, start)
        head = self.agent.action_head
        raw = head.mode(parameters) if deterministic else head.sample(parameters, self.prediction_generator)
        action = self.inputs.decode(head.to_env(raw))
        after = tuple(part.cpu().numpy() for part in memory) if self.agent.remembers else None
        return (action[0] if single else action), after

    def inference_policy(self) -> StepPolicy:
        """The deterministic policy for one environment, step by step: the actions of `predict`, bit for bit, faster.

        It has a memory of its own and the weights and statistics of now; make a new one after further training.
        """
        if type(self).predict is not Learner.predict:
            return PredictPolicy(self)  # a subclass decides in its own way
        return InferencePolicy(self.agent, self._observation_scale())

    def get_env(self) -> Any:
        """The environment the agent trains on; an SB3 `VecEnv` if it was given one."""
        return getattr(getattr(self.env, "vector_env", None), "vec_env", self.env)

    def set_env(self, env: Any) -> None:
        """Train on another environment from now on, with fresh episodes; observations and actions must be the same."""
        from tailguard.algorithm.saving import move_to

        move_to(self, env)

    def get_vec_normalize_env(self) -> Any:
        """SB3's `VecNormalize`, if the agent trains on one; else None, for the statistics are the agent's own."""
        env = self.get_env()
        while env is not None and not (hasattr(env, "norm_obs") and hasattr(env, "obs_rms")):
            env = getattr(env, "venv", None)
        return env

    def get_parameters(self) -> dict[str, Any]:
        """Copies of what SB3 calls parameters: `policy` (weights by name) and `policy.optimizer` (its moments).

        `observations` and `returns` come with them: the statistics without which the weights mean something else.
        """
        from tailguard.algorithm.saving import parameters_of

        return parameters_of(self)

    def set_parameters(self, parameters: Mapping[str, Any] | str | Path, exact_match: bool = True) -> None:
        """Put in what `get_parameters` gave, or the parameters of a saved agent.

        `exact_match`: raise unless all of them are there; False takes some of them, and of `policy` some weights.
        """
        from tailguard.algorithm.saving import put_parameters, read_parameters

        given = read_parameters(Path(parameters)) if isinstance(parameters, str | Path) else parameters
        put_parameters(self, given, exact_match=exact_match)

    @property
    def logger(self) -> CallbackLogger:
        """For SB3's callbacks: what they record joins `metrics` when the iteration ends, or at once after that."""
        return CallbackLogger(self.recorded)

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

        An agent of another learner goes on with this one: with its weights and statistics, this learner's own default
        settings where the two differ, and a fresh optimiser. `verbose` and `tensorboard_log` are not saved.
        """
        from tailguard.algorithm.saving import load_agent

        return load_agent(Path(path), env, device, cls, verbose=verbose, tensorboard_log=tensorboard_log)
