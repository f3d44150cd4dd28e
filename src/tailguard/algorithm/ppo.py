"""Recurrent distributional PPO: collect, estimate, update, repeat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.estimate import AdvantageSource, GAEAdvantages
from tailguard.algorithm.learner import Iteration, Learner
from tailguard.algorithm.loss_terms import LossTerm, check_names
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.sb3 import check_arguments, network_options, sample_schedules
from tailguard.algorithm.schedules import AdaptiveKL, Schedule
from tailguard.algorithm.targets import Prepared
from tailguard.algorithm.update import Batch, Hyper, make_batch
from tailguard.algorithm.updates import PolicyUpdates
from tailguard.errors import ConfigError
from tailguard.models.actions import GaussianHead
from tailguard.returns import normalise_advantages

if TYPE_CHECKING:
    from tailguard.risk.config import RiskConfig
    from tailguard.robust.config import RobustConfig


class DistributionalPPO(Learner):
    """PPO with an LSTM policy, a scalar value and a learned distribution of the return.

    `env`: a `tailguard.TradingEnv`, any Gymnasium environment, vector environment or id.
    `config`: all settings; single ones can be given as keyword arguments instead (`n_steps=64, twin_critics=True`):
        the fields of `PPOConfig` and of `NetworkConfig`.
    `seed`: of the weights, the actions, the minibatches and the environment.
    `device`: where the network lives; the environment's own device by default.
    `num_envs`: copies to make of a Gymnasium id.
    `risk`: a budget for the tail of realised outcomes, which the policy learns to keep.
    `robust`: training against attacks on the observations.
    `extensions`: further terms of the loss, beside those that `loss_terms` names.
    `verbose`: 1 prints the table of metrics while `learn` runs, every `log_interval` iterations.
    `tensorboard_log`: folder for TensorBoard's curves, a numbered one inside for each `learn`.
    `policy_kwargs`: the network in SB3's words (`net_arch`, `lstm_hidden_size`, …), in place of our own names.

    `learning_rate` and `clip_range` may be functions of the remaining progress (1 to 0), as in SB3. They are read at
    1,025 points when the agent is made, with straight lines in between, and are saved with it as such.
    """

    kind: ClassVar[str] = "ppo"
    smooths: ClassVar[Literal["kl", "action"]] = "kl"
    config: PPOConfig

    def __init__(
        self,
        env: Any,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        num_envs: int | None = None,
        risk: RiskConfig | None = None,
        robust: RobustConfig | None = None,
        extensions: Sequence[LossTerm] = (),
        verbose: int = 0,
        tensorboard_log: str | Path | None = None,
        policy_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_arguments(type(self).__name__, PPOConfig, env, config, options)
        options = sample_schedules(options) | network_options(policy_kwargs, options)
        chosen = (config or PPOConfig()).with_options(options)
        super().__init__(
            env,
            chosen,
            seed=seed,
            device=device,
            num_envs=num_envs,
            risk=risk,
            robust=robust,
            verbose=verbose,
            tensorboard_log=tensorboard_log,
        )
        self.advantage_source: AdvantageSource = self.risk or GAEAdvantages()
        self.extensions = tuple(extensions)
        """Terms of the loss that were given."""
        smoothness = () if self.smoothness is None else (self.smoothness,)
        self.terms: tuple[LossTerm, ...] = (*self.extensions, *self.weighted_terms, *smoothness)
        """All terms beside PPO's own: given, named in the settings, and the state-adversarial regulariser."""
        check_names(self.terms)
        explores = any(factor != 1 for factor in Schedule.parse(chosen.exploration).values)
        if not isinstance(self.policy.action_head, GaussianHead) and explores:
            raise ConfigError("ppo.exploration: choices have no standard deviation; leave it at 1, or use entropy_coef")
        self.hyper = Hyper(self.learning_rate, *(torch.zeros((), device=self.device) for _ in range(3)))
        self.state.kl_coef = chosen.kl_penalty
        self.extended: Batch | None = None
        """The batch with the terms' additions, in the storage that recorded minibatches read."""
        self.updates = PolicyUpdates(self.context, chosen, self.hyper, self.terms)
        self.set_hyper()

    def _iterate(self, on_rollout: Callable[[Rollout], bool] | None) -> Iteration:
        runtime = self.runtime
        rollout = runtime.run("collect", self._collect)
        wanted = on_rollout is None or on_rollout(rollout)
        usable = wanted and (self.context.guard.rollout(rollout) if runtime.can_sync else True)
        scaled = self.return_moments.started
        prepared = runtime.run(("prepare", usable, scaled), lambda: self._prepare(rollout, usable))
        usable = prepared.batch is not None
        if usable:
            self.updates.run(self._extend(rollout, prepared), rollout.inner_resets)
        return self._iteration(rollout, prepared, wanted=wanted, usable=usable)

    # --- one iteration, step by step --------------------------------------------------------------------------------

    def set_hyper(self) -> Hyper:
        """Write the current hyper-parameters into the tensors that optimiser, policy and recorded graphs hold."""
        config, progress, hyper = self.config, self.state.progress, self.hyper
        if isinstance(self.policy.action_head, GaussianHead):
            self.policy.action_head.exploration.fill_(math.log(Schedule.parse(config.exploration)(progress)))
        hyper.learning_rate.fill_(Schedule.parse(config.learning_rate)(progress))
        hyper.clip_range.fill_(Schedule.parse(config.clip_range)(progress))
        hyper.entropy_coef.fill_(config.entropy_schedule.coefficient(self.state.entropy, progress))
        hyper.kl_coef.fill_(self.state.kl_coef)
        self.set_coefficients()
        return hyper

    @torch.no_grad()
    def _collect(
        self, noise: Tensor | None = None, mask: Tensor | None = None, *, deterministic: bool = False
    ) -> Rollout:
        # The score function needs no gradient through the environment.
        return super()._collect(noise, mask, deterministic=deterministic)

    @torch.no_grad()
    def _prepare(self, rollout: Rollout, usable: bool) -> Prepared:
        """Evaluate critics, estimate returns, take the source's advantages, normalise them and make the batch."""
        _, estimates, usable = self.targets.estimate(rollout, usable)
        if not usable:
            return Prepared(estimates, None, {})
        raw, metrics = self.advantage_source.advantages(rollout, estimates)
        advantages, degenerate = normalise_advantages(raw, rollout.valid, self.config.normalise_advantages)
        metrics |= self.targets.rescale(rollout, estimates) | {"train/constant_advantages": degenerate.sum()}
        batch = make_batch(self.policy, rollout, estimates, advantages, self.return_moments)
        return Prepared(estimates, batch, metrics)

    def _extend(self, rollout: Rollout, prepared: Prepared) -> Batch:
        """Let further terms add to the batch. They run outside recorded graphs, so they may sync and branch."""
        batch = prepared.batch
        assert batch is not None  # a rollout that can be used has one
        for term in self.terms:
            batch = term.prepare(rollout, prepared.estimates, batch, self.state.progress)
        if self.terms and self.runtime.recording:
            self.extended = batch if self.extended is None else self.runtime.copy_in_place(self.extended, batch)
            batch = self.extended
        return batch if self.policy.is_recurrent else batch.rows_as_sequences()

    def _report(self, report: dict[str, float]) -> dict[str, float]:
        state, config = self.state, self.config
        if "train/final_kl" in report and config.target_kl is not None and report["train/n_updates"] > 0:
            state.kl_coef = AdaptiveKL(config.target_kl).update(state.kl_coef, report["train/final_kl"])
        report = super()._report(report)
        state.entropy = config.entropy_schedule.update(state.entropy, report["rollout/ep_rew_mean"])
        return report

    @classmethod
    def load(
        cls,
        path: str | Path,
        env: Any = None,
        device: torch.device | str | None = None,
        extensions: Sequence[LossTerm] = (),
        *,
        verbose: int = 0,
        tensorboard_log: str | Path | None = None,
    ) -> DistributionalPPO:
        """Read an agent that `save` wrote, as `Learner.load`.

        `extensions`: terms of the loss to learn on with; they are not saved, nor are `verbose` and `tensorboard_log`.
        """
        from tailguard.algorithm.saving import load_agent

        return load_agent(
            Path(path), env, device, cls, extensions=extensions, verbose=verbose, tensorboard_log=tensorboard_log
        )
