"""Recurrent distributional PPO: act, estimate, update, repeat. Reads top to bottom."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.callbacks import CallbackLike, CallbackLogger, make_callback
from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.estimate import Estimates, estimate, first_returns, look
from tailguard.algorithm.hindsight import Track, check_hindsight, weigh
from tailguard.algorithm.nonfinite import (
    check_estimates,
    check_rollout,
    finite_inputs,
    not_finite_in_graph,
)
from tailguard.algorithm.optimizers import OptimizerState, make_optimizer, make_scaler
from tailguard.algorithm.risk import RiskBudget
from tailguard.algorithm.rollout import Carry, ObservationScale, Rollout, act_and_step, collect
from tailguard.algorithm.runtime import Runtime
from tailguard.algorithm.scale import (
    SUPPORT_DRIFT_LIMIT,
    lay_supports,
    move_return_scale,
    return_spread,
    support_drift,
)
from tailguard.algorithm.schedules import AdaptiveKL, Schedule
from tailguard.algorithm.state import GeneratorState, LearnerState, Stateful
from tailguard.algorithm.tally import Figures
from tailguard.algorithm.update import Batch, Hyper, LossTerm, make_batch
from tailguard.algorithm.updates import Updates
from tailguard.envs.adapt import as_vector_env, policy_inputs
from tailguard.envs.protocol import FunctionalEnv
from tailguard.errors import ConfigError
from tailguard.memory import keep_freed_memory
from tailguard.models.actions import GaussianHead
from tailguard.models.agent import ActorCritic
from tailguard.models.precision import is_narrow, tensor_cores
from tailguard.monitor.episodes import EpisodeTracker
from tailguard.monitor.health import Alarm, HealthMonitor
from tailguard.monitor.metrics import Snapshot, iteration_figures
from tailguard.monitor.progress import Progress
from tailguard.returns import RunningMoments, normalise_advantages
from tailguard.risk.config import RiskConfig
from tailguard.validate import check_count

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
    """None if the rollout must not be used."""
    figures: dict[str, Tensor]

    def snapshot(self, agent: ActorCritic, rollout: Rollout, carry: Carry) -> Snapshot:
        """The iteration as the figures see it."""
        return Snapshot(agent, rollout, self.estimates, carry.state)


class DistributionalPPO:
    """PPO with an LSTM policy, a scalar value and a learned distribution of the return.

    `env`: a `tailguard.TradingEnv`, any Gymnasium environment, vector environment or id.
    `config`: all settings; single ones can be given as keyword arguments instead (`n_steps=64, twin_critics=True`):
        the fields of `PPOConfig` and of `NetworkConfig`.
    `seed`: of the weights, the actions, the minibatches and the environment.
    `device`: where the network lives; the environment's own device by default.
    `num_envs`: copies to make of a Gymnasium id.
    `risk`: a budget for the tail of realised outcomes, which the policy learns to keep.
    `extensions`: further terms of the loss.
    """

    def __init__(
        self,
        env: Any,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        num_envs: int | None = None,
        risk: RiskConfig | None = None,
        extensions: Sequence[LossTerm] = (),
        **options: Any,
    ) -> None:
        self.config = (config or PPOConfig()).with_options(options)
        self.env: VectorEnv = as_vector_env(env, num_envs, device)
        self.inputs = policy_inputs(self.env)
        self.device = self.env.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.seed = seed
        self.extensions = tuple(extensions)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        # Predictions draw from a stream of their own: asking a learning agent for actions must not change its course.
        self.prediction_generator = torch.Generator(self.device).manual_seed(seed)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            network = ActorCritic(self.env.observation_size, self.env.action_space, self.config.network)
        exploration = Schedule.parse(self.config.exploration)
        if not isinstance(network.action_head, GaussianHead) and (exploration.start, exploration.end) != (1, 1):
            raise ConfigError("ppo.exploration: choices have no standard deviation; leave it at 1, or use entropy_coef")
        self.agent = network.to(self.device)
        self.observation_moments = RunningMoments((self.env.observation_size,), device=self.device)
        self.return_moments = RunningMoments((), decay=self.config.return_decay, device=self.device)
        self.hyper = Hyper(*(torch.zeros((), device=self.device) for _ in range(4)))
        self.hyper.learning_rate.fill_(Schedule.parse(self.config.learning_rate)(0.0))
        self.optimizer = make_optimizer(list(self.agent.parameters()), self.config, self.hyper.learning_rate, seed)
        self.scaler = make_scaler(self.optimizer, self.config)
        self.risk: RiskBudget | None = None
        if risk is not None and risk.enabled:
            self.risk = RiskBudget(risk, self.config, self.env, self.agent, seed)
        self.extended: Batch | None = None
        """The batch with what the extensions added, in the place where recorded minibatches find it."""
        self.episodes = EpisodeTracker(self.env.num_envs, self.device)
        self.health = HealthMonitor()
        self.alarms: list[Alarm] = []
        """What has gone wrong in this process, each kind once."""
        self.snapshot: Snapshot | None = None
        """What the last iteration's figures were made of, for callbacks that show more."""
        self.state = LearnerState(kl_coef=self.config.kl_penalty)
        self.runtime = Runtime(self.config.runtime, self.env, self.device, self.config.on_nonfinite)
        if self.runtime.refusal is not None:
            warnings.warn(self.runtime.refusal, stacklevel=2)
        self.runtime.generators = self._generators()
        self.updates = Updates(self)
        self.metrics: dict[str, float] = {}
        """Figures of the last iteration, under SB3's names where it has them."""
        self.set_hyper()

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
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train for at least `total_timesteps` environment steps, in whole rollouts.

        `callback`: an object with SB3's methods (`on_rollout_start`, `on_step` once a rollout, `on_rollout_end`, …), a
            function of `(locals, globals)`, or a list of them; a false return value ends the training.
        `log_interval`: rollouts between two updates of the progress bar.
        `reset_num_timesteps`: count steps from 0, and with them read the schedules; if not, both go on, as in SB3.
            Episodes under way go on in any case.
        """
        check_count("total_timesteps", total_timesteps)
        check_count("log_interval", log_interval)
        if reset_num_timesteps:
            self.state.num_timesteps = 0
        begun = self.state.num_timesteps
        goal = begun + total_timesteps
        listener = make_callback(callback)
        listener.init_callback(self)
        listener.on_training_start(locals(), globals())
        clock = time.perf_counter()
        with Progress(total_timesteps, shown=progress_bar) as bar:
            while self.state.num_timesteps < goal:
                self.state.progress = self.state.num_timesteps / goal
                listener.on_rollout_start()
                said = len(self.alarms)
                self.metrics = self.iterate()
                elapsed = time.perf_counter() - clock
                self.metrics["time/fps"] = (self.state.num_timesteps - begun) / elapsed
                self.metrics["time/total_timesteps"] = self.state.num_timesteps
                listener.on_rollout_end()
                if self.state.iteration % log_interval == 0 or self.state.num_timesteps >= goal:
                    bar.show(self.state.num_timesteps - begun, self.metrics)
                goes_on = listener.on_step()
                # Evaluations run in callbacks, and their figures join the iteration's only then.
                self.alarms += self.health.evaluated(self.metrics, self.state.num_timesteps)
                for alarm in self.alarms[said:]:
                    bar.say(str(alarm))
                if not goes_on:
                    break
        listener.on_training_end()
        return self

    def iterate(self) -> dict[str, float]:
        """One rollout and the updates on it; returns the iteration's figures."""
        with tensor_cores(is_narrow(self.config.network.precision, self.device)):
            return self._iterate()

    def _iterate(self) -> dict[str, float]:
        state, runtime = self.state, self.runtime
        if state.carry is None:
            state.carry = self._begin()
            runtime.forget()
        self.set_hyper()
        rollout = runtime.run("collect", self._collect)
        usable = check_rollout(rollout, self) if runtime.looks else True
        scaled = self.return_moments.started
        prepared = runtime.run(("prepare", usable, scaled), lambda: self._prepare(rollout, usable))
        usable = prepared.batch is not None
        if usable:
            batch = self._extend(rollout, prepared)
            self.updates.run(batch, rollout.inner_resets)
        figures = runtime.run(("finish", usable), lambda: self._finish(rollout, prepared, usable))
        report = self._read(rollout, figures)
        state.skipped += not usable
        state.num_timesteps += self.config.n_steps * self.env.num_envs
        state.iteration += 1
        runtime.iterations += 1
        self.snapshot = prepared.snapshot(self.agent, rollout, state.carry)
        return self._report(report)

    # --- one iteration, step by step ----------------------------------------------------------------------------

    def _begin(self) -> Carry:
        """Fresh episodes and empty memories."""
        if self.config.advantages == "hindsight":  # not earlier: an agent that only acts may do so anywhere
            check_hindsight(self.env)
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

    def set_hyper(self) -> Hyper:
        """Today's hyper-parameters, in the tensors that the optimiser, the policy and recorded graphs hold."""
        config, progress, hyper = self.config, self.state.progress, self.hyper
        if isinstance(self.agent.action_head, GaussianHead):
            self.agent.action_head.exploration.fill_(math.log(Schedule.parse(config.exploration)(progress)))
        hyper.learning_rate.fill_(Schedule.parse(config.learning_rate)(progress))
        hyper.clip_range.fill_(Schedule.parse(config.clip_range)(progress))
        hyper.entropy_coef.fill_(config.entropy_schedule.coefficient(self.state.entropy, progress))
        hyper.kl_coef.fill_(self.state.kl_coef)
        return hyper

    def _collect(self) -> Rollout:
        """Act for one rollout; episodes and memories go on from where they stand."""
        carry, env = self.state.carry, self.env
        assert carry is not None  # `iterate` began
        standing = env.state if isinstance(env, FunctionalEnv) else None
        track = Track() if self.config.advantages == "hindsight" else None
        rollout, after = collect(
            self.agent,
            env,
            carry,
            self._observation_scale(),
            self.config.n_steps,
            self.generator,
            self.runtime.compiled(act_and_step),
            track,
        )
        self.state.carry = self.runtime.keep(carry, after)
        if isinstance(env, FunctionalEnv):
            if track is not None:
                rollout = replace(rollout, hindsight=weigh(self.agent.action_head, env, rollout, track))
            env.state = self.runtime.keep(standing, env.state)
        return rollout

    @torch.no_grad()
    def _prepare(self, rollout: Rollout, usable: bool) -> Prepared:
        """Estimate returns, price risk, normalise the advantages, and bring everything into the return's new units."""
        config, moments, carry = self.config, self.return_moments, self.state.carry
        assert carry is not None
        if usable and not moments.started:
            # Returns that never vary have no scale. The first that do set it, and not what an untrained critic said.
            moments.clear()
            moments.update(first_returns(rollout, config.gamma), rollout.valid)
        views, memory = look(self.agent, rollout, moments, config.estimates)
        self.state.carry = self.runtime.keep(carry, replace(carry, state=(carry.state[0], *memory[1:])))
        estimates = estimate(views, rollout, config.estimates, self.generator)
        if rollout.hindsight is not None:
            estimates = replace(estimates, advantages=rollout.hindsight.advantages(config.gamma))
        if usable and self.runtime.looks:
            usable = check_estimates(estimates, rollout.valid, self)
        if not usable:
            return Prepared(estimates, None, {})
        raw, figures = estimates.advantages, dict[str, Tensor]()
        if self.risk is not None:
            raw, figures = self.risk.advantages(rollout, estimates)
        advantages, degenerate = normalise_advantages(raw, rollout.valid, config.normalise_advantages)
        change = moments.update(estimates.value_targets, rollout.valid & moments.varies)
        move_return_scale(self.agent, self.optimizer, change, self.scaler)
        batch = make_batch(self.agent, rollout, estimates, advantages, moments)
        figures |= {
            "critic/return_mean": moments.mean.clone(),
            "critic/return_std": moments.std.clone(),
            "critic/return_std_drift": change.std_ratio,
            "train/constant_advantages": degenerate.sum(),
            RETURNS_VARY: moments.varies,
        }
        if estimates.distribution_targets is not None:
            spread = return_spread(estimates.distribution_targets, rollout.valid, moments)
            figures["critic/return_spread"] = spread
            drift = support_drift(self.agent, spread)
            if drift is not None:
                figures[SUPPORT_DRIFT] = drift
        return Prepared(estimates, batch, figures)

    def _extend(self, rollout: Rollout, prepared: Prepared) -> Batch:
        """Let the extensions add to the batch. They run outside what is recorded: they may do as they like."""
        batch = prepared.batch
        assert batch is not None  # a rollout that can be used has one
        for extension in self.extensions:
            batch = extension.prepare(rollout, prepared.estimates, batch, self.state.progress)
        if self.extensions and self.runtime.recording:
            self.extended = batch if self.extended is None else self.runtime.keep(self.extended, batch)
            batch = self.extended
        return batch if self.agent.remembers else batch.rows_as_sequences()

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
        if "train/final_kl" in report and config.target_kl is not None and report["train/n_updates"] > 0:
            state.kl_coef = AdaptiveKL(config.target_kl).update(state.kl_coef, report["train/final_kl"])
        state.degenerate += int(report.get("train/constant_advantages", 0))
        if config.monitor:
            self.alarms += self.health.check(report, state.num_timesteps)
            report |= self.health.figures()
        report["warn/skipped_nonfinite"] = state.skipped
        report["warn/constant_advantages"] = state.degenerate
        report["time/iterations"] = state.iteration
        state.entropy = config.entropy_schedule.update(state.entropy, report["rollout/ep_rew_mean"])
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
            memory = tuple(torch.as_tensor(part, device=self.device) for part in state)
        start = torch.zeros(count, dtype=torch.bool, device=self.device)
        if episode_start is not None:
            start = torch.as_tensor(np.asarray(episode_start), dtype=torch.bool, device=self.device).reshape(count)
        parameters, memory = self.agent.act(obs, memory, start)
        head = self.agent.action_head
        raw = head.mode(parameters) if deterministic else head.sample(parameters, self.prediction_generator)
        action = self.inputs.decode(head.to_env(raw))
        after = tuple(part.cpu().numpy() for part in memory) if self.agent.remembers else None
        return (action[0] if single else action), after

    def get_env(self) -> VectorEnv:
        """The environment the agent trains on."""
        return self.env

    def get_vec_normalize_env(self) -> None:
        """None: the statistics are the agent's own. SB3's callbacks ask."""

    @property
    def logger(self) -> CallbackLogger:
        """For SB3's callbacks: what they record joins `metrics`."""
        return CallbackLogger(self.metrics)

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
        extensions: Sequence[LossTerm] = (),
    ) -> DistributionalPPO:
        """Read an agent that `save` wrote. Without an `env` it can predict and be backtested, but not learn.

        `extensions`: terms of the loss to learn on with; they are not saved.
        """
        from tailguard.algorithm.saving import load_agent

        return load_agent(Path(path), env, device, extensions)
