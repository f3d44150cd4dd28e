"""The metrics of an iteration: collected on the device, read once, checked for alarms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from tailguard.algorithm.iteration_metrics import Snapshot, iteration_metrics
from tailguard.algorithm.nonfinite import finite_inputs, not_finite_in_graph
from tailguard.monitor.device_metrics import DeviceMetrics
from tailguard.monitor.episode_metrics import EpisodeTracker
from tailguard.monitor.health import Alarm, HealthMonitor

if TYPE_CHECKING:
    from tailguard.algorithm.config import LearnerConfig
    from tailguard.algorithm.context import TrainingContext
    from tailguard.algorithm.estimate import Estimates
    from tailguard.algorithm.rollout import Rollout
    from tailguard.envs.protocol import VectorEnv

ROLLOUT_FINITE, UPDATES_FINITE = "rollout_finite", "updates_finite"
"""Keys of flags that stand in for checks where the device must not be read in the middle of an iteration."""


class IterationRecorder:
    """Tracks episodes and health, and assembles an iteration's metrics."""

    def __init__(self, context: TrainingContext, config: LearnerConfig, env: VectorEnv) -> None:
        self.context, self.config = context, config
        self.episodes = EpisodeTracker(env.num_envs, env.device)
        self.health = HealthMonitor()
        self.alarms: list[Alarm] = []
        """Alarms raised in this process, each kind once."""

    def snapshot(self, rollout: Rollout, estimates: Estimates) -> Snapshot:
        """The data that the iteration's metrics are computed from."""
        rollout_state = self.context.state.rollout_state
        assert rollout_state is not None  # a rollout was collected
        return Snapshot(self.context.policy, rollout, estimates, rollout_state.state)

    def collect(self, snapshot: Snapshot, metrics: Mapping[str, Tensor], all_updates_finite: Tensor) -> DeviceMetrics:
        """Add the rollout's metrics to those of targets and updates; nothing is read from the device yet."""
        rollout, collected = snapshot.rollout, dict(metrics)
        self.episodes.add(rollout.rewards, rollout.ended, rollout.valid, rollout.outcome)
        episodes = self.episodes.metrics()
        collected["rollout/ep_rew_mean"] = episodes["return"]
        collected["rollout/ep_len_mean"] = episodes["length"]
        if "pnl" in rollout.outcome:
            collected["rollout/ep_pnl_mean"] = episodes["pnl"]
        collected |= iteration_metrics(snapshot, detailed=self.config.monitor)
        if not self.context.runtime.can_sync:
            collected[ROLLOUT_FINITE], collected[UPDATES_FINITE] = finite_inputs(rollout), all_updates_finite
        return DeviceMetrics.of(collected)

    def read(self, metrics: DeviceMetrics, rollout: Rollout, learner: str) -> dict[str, float]:
        """The metrics as numbers: the one place where the device is read for them. `learner`: its name, for errors."""
        report = metrics.read()
        if not report.pop(ROLLOUT_FINITE, 1.0):
            self.context.guard.rollout(rollout)
        if not report.pop(UPDATES_FINITE, 1.0):
            raise not_finite_in_graph(self.context.state.num_timesteps, learner)
        return report

    def report(self, report: dict[str, float]) -> dict[str, float]:
        """Raise alarms, and add metrics that are known on the host."""
        state = self.context.state
        state.degenerate += int(report.get("train/constant_advantages", 0))
        if self.config.monitor:
            self.alarms += self.health.check(report, state.num_timesteps)
            report |= self.health.metrics()
        report["warn/skipped_nonfinite"] = state.skipped
        report["warn/constant_advantages"] = state.degenerate
        report["time/iterations"] = state.iteration
        return report
