"""Callbacks: SB3's own objects, functions and lists of them, called once a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)

from tailguard.algorithm.callbacks import Callback, make_callback
from tailguard.algorithm.ppo import DistributionalPPO


class Diary(BaseCallback):
    """Writes down what it is told, and asks for the end at a given call."""

    def __init__(self, end_at: int = 10**9) -> None:
        super().__init__()
        self.end_at, self.entries = end_at, []  # type: ignore[var-annotated]

    def _on_training_start(self) -> None:
        self.entries.append("training start")

    def _on_rollout_start(self) -> None:
        self.entries.append("rollout start")

    def _on_rollout_end(self) -> None:
        self.entries.append(("rollout end", self.model.metrics["train/n_updates"]))  # type: ignore[attr-defined]

    def _on_step(self) -> bool:
        self.entries.append(("step", self.n_calls, self.num_timesteps))
        return self.n_calls < self.end_at

    def _on_training_end(self) -> None:
        self.entries.append("training end")


def test_an_sb3_callback_hears_of_everything_in_order(make_learner: Any) -> None:
    diary = Diary()
    learner = make_learner()
    assert learner.learn(100, callback=diary) is learner
    assert diary.model is learner
    assert diary.training_env is learner.env
    assert diary.entries == [
        "training start",
        "rollout start",
        ("rollout end", 6.0),
        ("step", 1, 72),
        "rollout start",
        ("rollout end", 6.0),
        ("step", 2, 144),
        "training end",
    ]


def test_a_false_answer_ends_the_training(make_learner: Any) -> None:
    diary = Diary(end_at=2)
    learner = make_learner().learn(10_000, callback=diary)
    assert learner.num_timesteps == 144
    assert diary.entries[-1] == "training end"


@pytest.mark.parametrize(("answer", "iterations"), [(False, 1), (None, 3), (True, 3)])
def test_a_function_is_a_callback(make_learner: Any, answer: bool | None, iterations: int) -> None:
    """SB3's functions often return nothing, which is no wish to stop."""
    seen = []

    def function(locals_: dict[str, Any], _: dict[str, Any]) -> bool | None:
        seen.append(locals_["self"].num_timesteps)
        return answer

    learner = make_learner()
    learner.learn(200, callback=function)
    assert seen == [72, 144, 216][:iterations]


def test_in_a_list_all_hear_of_a_step_and_one_can_end_it(make_learner: Any) -> None:
    early, late, calls = Diary(end_at=1), Diary(), []
    make_learner().learn(10_000, callback=[early, late, lambda *_: calls.append(1)])
    assert early.n_calls == late.n_calls == len(calls) == 1
    assert late.entries[-1] == "training end"


def test_our_own_callback_does_nothing_until_overridden(make_learner: Any) -> None:
    class Once(Callback):
        def on_step(self) -> bool:
            return bool(self.model.num_timesteps < 72)

    assert make_learner().learn(10_000, callback=Once()).num_timesteps == 72
    assert make_callback(None).on_step()


def test_sb3s_evaluation_and_checkpoints_work_as_they_are(tmp_path: Path) -> None:
    """Evaluation every second rollout, the best agent saved, training ended at a reward that is soon met."""
    learner = DistributionalPPO("CartPole-v1", num_envs=4, n_steps=16, minibatch_size=32, epochs=1, memory="none")
    enough = StopTrainingOnRewardThreshold(reward_threshold=1.0)
    evaluation = EvalCallback(
        gymnasium.make("CartPole-v1"),
        callback_on_new_best=enough,
        n_eval_episodes=2,
        eval_freq=2,
        best_model_save_path=str(tmp_path / "best"),
        verbose=0,
        warn=False,
    )
    checkpoints = CheckpointCallback(save_freq=1, save_path=str(tmp_path / "all"), name_prefix="agent")
    with pytest.warns(UserWarning, match="not of the same type"):
        learner.learn(10_000, callback=[evaluation, checkpoints])
    assert learner.num_timesteps == 2 * 64
    assert learner.metrics["eval/mean_reward"] == evaluation.best_mean_reward >= 1.0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["agent_128_steps.zip", "agent_64_steps.zip"]
    best = DistributionalPPO.load(tmp_path / "best" / "best_model")
    assert best.num_timesteps == 128
