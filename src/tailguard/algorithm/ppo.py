"""Recurrent distributional PPO: act, estimate, update, repeat. Reads top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.algorithm.callbacks import CallbackLike, CallbackLogger, make_callback
from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.estimate import Estimates, estimate, first_returns, look
from tailguard.algorithm.losses import masked_mean
from tailguard.algorithm.nonfinite import check_finite, check_gradient, check_rollout
from tailguard.algorithm.optimizers import OptimizerState, make_optimizer, make_scaler, optimizer_figures
from tailguard.algorithm.risk import RiskBudget
from tailguard.algorithm.rollout import Carry, ObservationScale, Rollout, collect
from tailguard.algorithm.scale import move_return_scale
from tailguard.algorithm.schedules import AdaptiveKL, KLStopState, Schedule
from tailguard.algorithm.state import GeneratorState, LearnerState, Stateful
from tailguard.algorithm.update import Batch, Hyper, LossTerm, make_batch, minibatch_loss
from tailguard.envs.adapt import as_vector_env, policy_inputs
from tailguard.models.agent import ActorCritic
from tailguard.monitor.episodes import EpisodeTracker
from tailguard.monitor.health import Alarm, HealthMonitor
from tailguard.monitor.metrics import GradientNorms, Snapshot, iteration_figures
from tailguard.monitor.progress import Progress
from tailguard.returns import RunningMoments, normalise_advantages
from tailguard.risk.config import RiskConfig
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.envs.protocol import VectorEnv
    from tailguard.envs.spec import TradingSpec

GROUPS = "groups"
"""Key under which the norms of all parts' gradients travel together, until they are named."""


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
        self.seed = seed
        self.extensions = tuple(extensions)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        # Predictions draw from a stream of their own: asking a learning agent for actions must not change its course.
        self.prediction_generator = torch.Generator(self.device).manual_seed(seed)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            network = ActorCritic(self.env.observation_size, self.env.action_space, self.config.network)
        self.agent = network.to(self.device)
        self.observation_moments = RunningMoments((self.env.observation_size,), device=self.device)
        self.return_moments = RunningMoments((), decay=self.config.return_decay, device=self.device)
        self.learning_rate = torch.tensor(Schedule.parse(self.config.learning_rate)(0.0), device=self.device)
        self.optimizer = make_optimizer(list(self.agent.parameters()), self.config, self.learning_rate, seed)
        self.scaler = make_scaler(self.optimizer, self.config)
        self.risk: RiskBudget | None = None
        if risk is not None and risk.enabled:
            self.risk = RiskBudget(risk, self.config, self.env, self.agent, seed)
        self.gradient_norms = GradientNorms(self.agent)
        self.episodes = EpisodeTracker(self.env.num_envs, self.device)
        self.health = HealthMonitor()
        self.alarms: list[Alarm] = []
        """What has gone wrong in this process, each kind once."""
        self.snapshot: Snapshot | None = None
        """What the last iteration's figures were made of, for callbacks that show more."""
        self.state = LearnerState(kl_coef=self.config.kl_penalty)
        self.metrics: dict[str, float] = {}
        """Figures of the last iteration, under SB3's names where it has them."""

    @property
    def spec(self) -> TradingSpec | None:
        """What the agent must find again on new bars; None if it was not trained on bars."""
        return self.inputs.spec

    @property
    def num_timesteps(self) -> int:
        """Environment steps taken so far."""
        return self.state.num_timesteps

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
        state, config = self.state, self.config
        before = self._begin() if state.carry is None else state.carry
        scale = self._observation_scale()
        rollout, carry = collect(self.agent, self.env, before, scale, config.n_steps, self.generator)
        usable = check_rollout(rollout, self)
        if usable and self.return_moments.count == 0:
            self.return_moments.update(first_returns(rollout, config.gamma), rollout.valid)
        views, memory = look(self.agent, rollout, self.return_moments, self.config.estimates)
        estimates = estimate(views, rollout, self.config.estimates, self.generator)
        figures: dict[str, Tensor] = {}
        if usable:
            batch, figures = self._prepare(rollout, estimates)
            figures |= self._train(batch, rollout.inner_resets)
            if config.normalise_observations:
                change = self.observation_moments.update(rollout.obs, rollout.valid)
                figures["data/observation_drift"] = change.mean_shift.max()
        state.skipped += not usable
        state.carry = Carry(carry.obs, carry.episode_start, (carry.state[0], *memory[1:]))
        state.num_timesteps += config.n_steps * self.env.num_envs
        state.iteration += 1
        self.episodes.add(rollout.rewards, rollout.ended, rollout.valid, rollout.outcome)
        self.snapshot = Snapshot(self.agent, rollout, estimates, state.carry.state)
        return self._report(self.snapshot, figures)

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

    def _hyper(self) -> Hyper:
        """Today's hyper-parameters; the learning rate is the tensor that the optimiser holds."""
        config, progress = self.config, self.state.progress

        def tensor(value: float) -> Tensor:
            return torch.tensor(value, device=self.device)

        self.learning_rate.fill_(Schedule.parse(config.learning_rate)(progress))
        return Hyper(
            learning_rate=self.learning_rate,
            clip_range=tensor(Schedule.parse(config.clip_range)(progress)),
            entropy_coef=tensor(config.entropy_schedule.coefficient(self.state.entropy, progress)),
            kl_coef=tensor(self.state.kl_coef),
        )

    # --- one iteration, step by step ----------------------------------------------------------------------------

    @torch.no_grad()
    def _prepare(self, rollout: Rollout, estimates: Estimates) -> tuple[Batch, dict[str, Tensor]]:
        """Price risk, normalise the advantages, move the return's scale, and bring everything into its units."""
        raw, figures = estimates.advantages, dict[str, Tensor]()
        if self.risk is not None:
            raw, figures = self.risk.advantages(rollout, estimates)
        advantages, degenerate = normalise_advantages(raw, rollout.valid, self.config.normalise_advantages)
        moments = self.return_moments
        change = moments.update(estimates.value_targets, rollout.valid)
        relaid = move_return_scale(self.agent, self.optimizer, change, self.scaler)
        if relaid:
            # On other atoms the old logits mean other returns: the critics must say again what they think.
            estimates = replace(estimates, views=look(self.agent, rollout, moments, self.config.estimates)[0])
        batch = make_batch(self.agent, rollout, estimates, advantages, moments)
        for extension in self.extensions:
            batch = extension.prepare(rollout, estimates, batch, self.state.progress)
        figures |= {
            "critic/return_mean": moments.mean.clone(),
            "critic/return_std": moments.std.clone(),
            "critic/return_std_drift": change.std_ratio,
            "critic/supports_relaid": torch.tensor(float(relaid)),
            "train/constant_advantages": degenerate.sum(),
        }
        return (batch if self.agent.remembers else batch.rows_as_sequences()), figures

    def _train(self, batch: Batch, inner_resets: bool) -> dict[str, Tensor]:
        """Epochs of minibatches; stops early when the policy has moved too far."""
        config = self.config
        rows, sequences = batch.log_probs.shape
        count = min(max(1, round(sequences * rows / config.minibatch_size)), sequences)
        hyper = self._hyper()
        stopper, stop = config.kl_stopper, KLStopState.start(self.device)
        seen: list[dict[str, Tensor]] = []
        for _ in range(config.epochs):
            order = torch.randperm(sequences, generator=self.generator, device=self.device)
            for index in order.tensor_split(count):
                figures = self._accumulate(batch, index, hyper, inner_resets)
                if figures is None:
                    self.state.skipped += 1
                    continue
                if stopper is not None:
                    stop = stopper.update(stop, figures["train/approx_kl"])
                    if bool(stop.stopped):
                        break
                self._step()
                seen.append(figures)
                last = index
            if bool(stop.stopped):
                break
        self.optimizer.zero_grad(set_to_none=True)
        means = {name: torch.stack([figures[name] for figures in seen]).mean(0) for name in (seen or [{}])[0]}
        if GROUPS in means:
            means |= self.gradient_norms.named(means.pop(GROUPS))
        if config.kl_penalty > 0 and config.target_kl is not None and seen:
            # Measured after the last step: before it, a single minibatch an iteration would always show 0.
            reached = self._policy_kl(batch.select(last), inner_resets)
            self.state.kl_coef = AdaptiveKL(config.target_kl).update(self.state.kl_coef, float(reached))
            means["train/final_kl"] = reached
        return (
            means
            | optimizer_figures(self.optimizer, self.scaler)
            | {
                "train/n_updates": torch.tensor(float(len(seen))),
                "train/early_stop": stop.stopped.float(),
                "train/learning_rate": hyper.learning_rate.clone(),
                "train/clip_range": hyper.clip_range,
                "train/entropy_coef": hyper.entropy_coef,
                "train/kl_coef": hyper.kl_coef,
            }
        )

    @torch.no_grad()
    def _policy_kl(self, batch: Batch, inner_resets: bool) -> Tensor:
        """Exact KL from the policy that acted to today's, mean over the batch."""
        output = self.agent(batch.obs, batch.state, batch.episode_start, None if inner_resets else False)
        return masked_mean(self.agent.action_head.kl(batch.parameters, output.parameters), batch.weights)

    def _accumulate(self, batch: Batch, index: Tensor, hyper: Hyper, inner_resets: bool) -> dict[str, Tensor] | None:
        """Gradient of one minibatch, through its microbatches, clipped; None if it must be skipped."""
        config = self.config
        self.optimizer.zero_grad(set_to_none=True)
        figures: dict[str, Tensor] = {}
        parts = [batch.select(part) for part in index.tensor_split(config.microbatches) if part.numel()]
        total_weight = batch.weights.index_select(1, index).sum()
        for part, numbers in zip(parts, index.tensor_split(config.microbatches), strict=False):
            # Without looking at the rows, a fused call needs to know that no episode starts inside.
            found = minibatch_loss(
                self.agent, part, hyper, config, self.extensions, total_weight, None if inner_resets else False
            )
            found.total.backward()  # type: ignore[no-untyped-call]
            if not check_finite(found, numbers, self):
                return None
            for name, value in found.figures.items():
                figures[name] = figures[name] + value if name in figures else value
            figures["train/loss"] = figures.get("train/loss", torch.zeros_like(found.total)) + found.total.detach()
        norm, groups = self.gradient_norms()
        if not check_gradient(norm, self):
            return None
        if self.scaler is not None:
            self.scaler.update_statistics()
        if config.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.agent.parameters(), config.max_grad_norm, norm)
        figures["train/grad_norm"] = norm
        figures["train/grad_norm_clipped"] = norm.clamp(max=config.max_grad_norm) if config.max_grad_norm > 0 else norm
        if config.monitor:
            figures[GROUPS] = groups
        return figures

    def _step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.optimizer_step()

    def _report(self, snapshot: Snapshot, figures: dict[str, Tensor]) -> dict[str, float]:
        """The iteration's figures as numbers: the one place where the device is read for them."""
        state = self.state
        figures |= iteration_figures(snapshot, detailed=self.config.monitor)
        names = list(figures)
        numbers = torch.stack([figures[name].detach().double().cpu() for name in names]).tolist()
        report = dict(zip(names, numbers, strict=True))
        report["rollout/ep_rew_mean"] = self.episodes.mean("return")
        report["rollout/ep_len_mean"] = self.episodes.mean("length")
        if "pnl" in snapshot.rollout.outcome:
            report["rollout/ep_pnl_mean"] = self.episodes.mean("pnl")
        state.degenerate += int(report.get("train/constant_advantages", 0))
        if self.config.monitor:
            self.alarms += self.health.check(report, state.num_timesteps)
            report |= self.health.figures()
        report["warn/skipped_nonfinite"] = state.skipped
        report["warn/constant_advantages"] = state.degenerate
        report["time/iterations"] = state.iteration
        state.entropy = self.config.entropy_schedule.update(state.entropy, report["rollout/ep_rew_mean"])
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
