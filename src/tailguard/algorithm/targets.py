"""Learning targets of a rollout: values, returns, advantages, and the scale of the return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailguard.algorithm.estimate import CriticView, Estimates, estimate, evaluate_critics, first_returns
from tailguard.algorithm.optimizers import unless
from tailguard.algorithm.scale import (
    SUPPORT_DRIFT_LIMIT,
    move_return_scale,
    reset_support,
    return_spread,
    support_drift,
)
from tailguard.returns import RunningMoments

if TYPE_CHECKING:
    from tailguard.algorithm.config import LearnerConfig
    from tailguard.algorithm.context import TrainingContext
    from tailguard.algorithm.rollout import Rollout
    from tailguard.algorithm.update import Batch

SUPPORT_DRIFT, RETURNS_VARY = "support_drift", "returns_vary"
"""Keys of metrics that the learner itself reads."""


@dataclass(frozen=True)
class Prepared:
    """A rollout prepared for the updates."""

    estimates: Estimates
    batch: Batch | None
    """None if the rollout must not be used, and for a learner that has no critics to train."""
    metrics: dict[str, Tensor]


class ReturnTargets:
    """Evaluates critics, estimates returns, and keeps the scale by which both are normalised (PopArt)."""

    def __init__(self, context: TrainingContext, config: LearnerConfig, *, has_critics: bool) -> None:
        self.context, self.config, self.has_critics = context, config, has_critics
        device = context.learning_rate.device
        self.moments = RunningMoments((), decay=config.return_decay, device=device)
        self.varied = torch.zeros((), dtype=torch.bool, device=device)
        """`moments.started` on the device, where members of a population may differ in it."""
        self._known = False

    @torch.no_grad()
    def estimate(
        self, rollout: Rollout, usable: bool, final_obs: Tensor | None = None
    ) -> tuple[tuple[CriticView, ...], Estimates, bool]:
        """The critics' views of a rollout, the estimates made of them, and whether both can be used.

        `final_obs`: see `evaluate_critics`.
        """
        if usable and not self.moments.started:
            # Returns that never vary have no scale. The first that do set it, and not what an untrained critic said.
            unless(self.varied, lambda: self._start_scale(rollout), self.moments.tensors())
        views = self._evaluate_critics(rollout, final_obs) if self.has_critics else ()
        estimates = estimate(views, rollout, self.config.estimates, self.context.generator)
        if usable and self.context.runtime.can_sync:
            usable = self.context.guard.estimates(estimates, rollout.valid)
        return views, estimates, usable

    def _start_scale(self, rollout: Rollout) -> None:
        """The scale by this rollout's returns alone."""
        self.moments.clear()
        self.moments.update(first_returns(rollout, self.config.gamma), rollout.valid)

    def _evaluate_critics(self, rollout: Rollout, final_obs: Tensor | None) -> tuple[CriticView, ...]:
        """Each critic's view of a rollout; advances the critics' recurrent states."""
        context, before = self.context, self.context.state.rollout_state
        assert before is not None  # the rollout was collected
        views, memory = evaluate_critics(context.policy, rollout, self.moments, self.config.estimates, final_obs)
        # The policy's own memory went on while it acted.
        after = replace(before, state=(before.state[0], *memory[1:]))
        context.state.rollout_state = context.runtime.copy_in_place(before, after)
        return views

    @torch.no_grad()
    def rescale(self, rollout: Rollout, estimates: Estimates) -> dict[str, Tensor]:
        """Update the return's scale with the value targets and rescale the critics (PopArt); returns its metrics."""
        moments, context = self.moments, self.context
        change = moments.update(estimates.value_targets, rollout.valid & moments.varies)
        move_return_scale(context.policy, context.optimizer, change, context.scaler)
        metrics = {
            "critic/return_mean": moments.mean.clone(),
            "critic/return_std": moments.std.clone(),
            "critic/return_std_drift": change.std_ratio,
            RETURNS_VARY: moments.varies,
        }
        if estimates.distribution_targets is not None:
            spread = return_spread(estimates.distribution_targets, rollout.valid, moments)
            metrics["critic/return_spread"] = spread
            drift = support_drift(context.policy, spread)
            if drift is not None:
                metrics[SUPPORT_DRIFT] = drift
        return metrics

    def note_started(self, started: bool) -> None:
        """Tell the device whether returns vary."""
        if started != self._known:
            self.varied.fill_(started)
            self._known = started

    def settle(self, report: dict[str, float]) -> dict[str, float]:
        """Apply decisions that need metrics on the host: whether returns vary, and supports that drifted."""
        started = bool(report.pop(RETURNS_VARY, self.moments.started))
        self.note_started(started)
        self.moments.started = started
        if SUPPORT_DRIFT in report:
            drifted = report.pop(SUPPORT_DRIFT) > SUPPORT_DRIFT_LIMIT
            context, spread = self.context, report["critic/return_spread"]
            reset = reset_support(context.policy, context.optimizer, context.scaler, spread) if drifted else 0
            report["critic/supports_relaid"] = reset
        return report
