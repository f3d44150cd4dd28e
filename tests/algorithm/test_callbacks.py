"""Callbacks of whole iterations, functions and lists; Stable-Baselines3's own are in `test_sb3_callbacks`."""

from __future__ import annotations

from typing import Any

import pytest

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.monitor.callbacks import Callback, EveryIteration, make_callback


class Diary(Callback):
    """Writes down what it is told of iterations, and asks for the end after a given one."""

    def __init__(self, end_at: int = 10**9) -> None:
        self.end_at = end_at
        self.entries: list[Any] = []

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:  # noqa: ARG002
        self.entries.append(("training start", locals_["total_timesteps"]))

    def on_rollout_start(self) -> None:
        self.entries.append("rollout start")

    def on_rollout_end(self) -> None:
        self.entries.append(("rollout end", self.model.num_timesteps, dict(self.model.metrics) == {}))

    def on_iteration_end(self) -> None:
        self.entries.append(("iteration end", self.model.num_timesteps, self.model.metrics["train/n_updates"]))

    def on_iteration_logged(self) -> bool:
        self.entries.append(("logged", self.model.state.iteration))
        return bool(self.model.state.iteration < self.end_at)

    def on_training_end(self) -> None:
        self.entries.append("training end")


def test_iterations_are_told_in_order(make_learner: Any) -> None:
    diary = Diary()
    learner = make_learner()
    assert learner.learn(100, callback=diary) is learner
    assert diary.model is learner
    assert diary.entries == [
        ("training start", 100),
        "rollout start",
        ("rollout end", 72, True),
        ("iteration end", 72, 6.0),
        ("logged", 1),
        "rollout start",
        ("rollout end", 144, False),
        ("iteration end", 144, 6.0),
        ("logged", 2),
        "training end",
    ]


def test_an_iterations_false_answer_ends_the_training_after_its_updates(make_learner: Any) -> None:
    diary = Diary(end_at=2)
    learner = make_learner().learn(10_000, callback=diary)
    assert learner.num_timesteps == 144
    assert learner.metrics["train/n_updates"] == 6
    assert diary.entries[-1] == "training end"


@pytest.mark.parametrize(("answer", "iterations"), [(False, 1), (None, 3), (True, 3)])
def test_a_function_can_be_called_every_iteration(make_learner: Any, answer: bool | None, iterations: int) -> None:
    seen = []

    def function(agent: DistributionalPPO) -> bool | None:
        seen.append(agent.num_timesteps)
        return answer

    make_learner().learn(200, callback=EveryIteration(function))
    assert seen == [72, 144, 216][:iterations]


@pytest.mark.parametrize(("answer", "steps"), [(False, 1), (None, 36), (True, 36)])
def test_a_plain_function_is_called_every_step(make_learner: Any, answer: bool | None, steps: int) -> None:
    """Functions often return nothing, which is no wish to stop."""
    seen = []

    def function(locals_: dict[str, Any], _: dict[str, Any]) -> bool | None:
        seen.append(locals_["self"].num_timesteps)
        return answer

    make_learner().learn(200, callback=function)
    assert seen == [6 * (step + 1) for step in range(steps)]


def test_in_a_list_all_hear_of_a_step_and_one_can_end_it(make_learner: Any) -> None:
    class Counter(Callback):
        calls = 0

        def __init__(self, end_at: int) -> None:
            self.end_at = end_at

        def on_step(self) -> bool:
            self.calls += 1
            return self.calls < self.end_at

    early, late, calls = Counter(5), Counter(10**9), []
    learner = make_learner()
    learner.learn(10_000, callback=[early, [late, lambda *_: calls.append(1)]])
    assert early.calls == late.calls == len(calls) == 5
    assert learner.num_timesteps == 30


def test_our_own_callback_does_nothing_until_overridden() -> None:
    assert make_callback(None).on_step()
    assert make_callback(Callback()).on_iteration_logged()
