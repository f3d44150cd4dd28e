"""The loop of `learn`: iterations until the steps are done, with callbacks, a progress bar and alarms."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from tailguard.algorithm.sb3 import make_writers, whole_number
from tailguard.algorithm.step_replay import StepReplay
from tailguard.monitor.callbacks import CallbackLike, make_callback, make_callbacks
from tailguard.monitor.progress import Progress
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner


def run_iterations(
    learner: Learner,
    total_timesteps: int,
    callback: CallbackLike,
    log_interval: int,
    *,
    tb_log_name: str | None,
    reset_num_timesteps: bool,
    progress_bar: bool,
) -> None:
    """Train for at least `total_timesteps` steps, in whole rollouts; arguments as of `Learner.learn`."""
    total_timesteps = whole_number("total_timesteps", total_timesteps)
    check_count("total_timesteps", total_timesteps)
    check_count("log_interval", log_interval)
    state = learner.state
    if reset_num_timesteps:
        state.num_timesteps = 0
    begun = state.num_timesteps
    goal = begun + total_timesteps
    rollout_size = learner.config.n_steps * learner.env.num_envs
    writers = make_writers(learner, log_interval, tb_log_name or type(learner).__name__, new_run=reset_num_timesteps)
    learner.health.updates = learner.health.iterations + math.ceil(total_timesteps / rollout_size)
    listener = make_callback([*make_callbacks(callback), *writers])
    listener.init_callback(learner)
    scope = {"self": learner, "total_timesteps": goal, "log_interval": log_interval, "callback": listener}
    listener.on_training_start(scope, globals())
    replay = StepReplay(learner, listener)
    clock = time.perf_counter()
    with Progress(math.ceil(total_timesteps / rollout_size) * rollout_size, shown=progress_bar) as bar:
        while state.num_timesteps < goal:
            state.progress = state.num_timesteps / goal
            learner.recorded = {}
            replay.begin()
            said = len(learner.alarms)
            learner.metrics = learner.iterate(replay) | learner.recorded
            learner.recorded = learner.metrics
            elapsed = time.perf_counter() - clock
            learner.metrics["time/fps"] = (state.num_timesteps - begun) / elapsed
            learner.metrics["time/total_timesteps"] = state.num_timesteps
            listener.on_iteration_end()
            if state.iteration % log_interval == 0 or state.num_timesteps >= goal:
                bar.show(state.num_timesteps - begun, learner.metrics)
            goes_on = listener.on_iteration_logged() and replay.goes_on
            # Evaluations run in callbacks, and their metrics join the iteration's only then.
            learner.alarms += learner.health.evaluated(learner.metrics, state.num_timesteps)
            for alarm in learner.alarms[said:]:
                bar.say(str(alarm))
            if not goes_on:
                break
    listener.on_training_end()
