"""Stable-Baselines3's own callbacks: they see and do with this learner what they see and do with SB3's PPO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.monitor.callbacks import Callback, EveryIteration
from tailguard.monitor.writers import MetricsWriter

ENVS, STEPS = 2, 8


class Clockwork(gymnasium.Env[Any, Any]):
    """Episodes of 5 steps, ended in turn by a time limit and for good, with known rewards, whatever the actions are."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode, self.time = -1, 0

    def _observation(self) -> np.ndarray:
        return np.array([self.episode, self.time], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:  # noqa: ARG002
        self.episode, self.time = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:  # noqa: ARG002
        self.time += 1
        over, for_good = self.time == 5, self.episode % 2 == 1
        reward = 0.5 * self.time + self.episode
        return self._observation(), reward, over and for_good, over and not for_good, {"clock": self.time}


def ours(**options: Any) -> DistributionalPPO:
    shape = {"n_steps": STEPS, "minibatch_size": 16, "epochs": 1, "memory": "none", "hidden": (8,)} | options
    return DistributionalPPO(gymnasium.vector.SyncVectorEnv([Clockwork] * ENVS, autoreset_mode="SameStep"), **shape)


def sb3s() -> PPO:
    return PPO("MlpPolicy", make_vec_env(Clockwork, ENVS), n_steps=STEPS, batch_size=16, n_epochs=1, device="cpu")


BOTH = [pytest.param(ours, id="ours"), pytest.param(sb3s, id="sb3")]


class Diary(BaseCallback):
    """Writes down all it is told, in numbers that do not depend on the learner."""

    def __init__(self, end_at: int = 10**9) -> None:
        super().__init__()
        self.end_at, self.entries = end_at, []  # type: ignore[var-annotated]

    def _on_training_start(self) -> None:
        self.entries.append(("training start", self.locals["total_timesteps"]))

    def _on_rollout_start(self) -> None:
        self.entries.append(("rollout start", self.model.num_timesteps))

    def _on_step(self) -> bool:
        infos = [
            {
                "clock": info["clock"],
                "return": info.get("episode", {}).get("r"),
                "length": info.get("episode", {}).get("l"),
                "last": tuple(info.get("terminal_observation", ())),
                "truncated": info.get("TimeLimit.truncated", False),
            }
            for info in self.locals["infos"]
        ]
        rewards, dones = self.locals["rewards"].tolist(), self.locals["dones"].tolist()
        seen = self.locals["new_obs"].tolist()
        row, of = self.locals["n_steps"], self.locals["n_rollout_steps"]
        self.entries.append(("step", self.n_calls, self.num_timesteps, row, of, rewards, dones, seen, infos))
        return self.n_calls < self.end_at

    def _on_rollout_end(self) -> None:
        self.entries.append(("rollout end", self.model.num_timesteps))

    def _on_training_end(self) -> None:
        self.entries.append(("training end", self.model.num_timesteps))


@pytest.mark.parametrize("end_at", [10**9, 11])
def test_a_callback_sees_what_it_sees_in_sb3(end_at: int) -> None:
    """Order, counts, rewards, ends, next observations and infos, to the end and with an end in the second rollout."""
    mine, theirs = Diary(end_at), Diary(end_at)
    learner, model = ours(), sb3s()
    learner.learn(3 * ENVS * STEPS, callback=mine)
    model.learn(3 * ENVS * STEPS, callback=theirs)
    assert mine.entries == theirs.entries
    assert learner.num_timesteps == model.num_timesteps == (48 if end_at > 11 else 22)
    if end_at > 11:  # a later call goes on counting, and the callback is told of the true goal
        learner.learn(10, callback=mine, reset_num_timesteps=False)
        model.learn(10, callback=theirs, reset_num_timesteps=False)
        assert mine.entries[-12:][0] == theirs.entries[-12:][0]
        assert [entry[:3] for entry in mine.entries] == [entry[:3] for entry in theirs.entries]


def test_an_end_in_a_rollout_leaves_the_weights_alone() -> None:
    """The first rollout is learned from, the second is not."""
    stopped, one = ours(), ours()
    stopped.learn(100, callback=Diary(end_at=STEPS + 3))
    one.learn(ENVS * STEPS)
    for mine, expected in zip(stopped.policy.parameters(), one.policy.parameters(), strict=True):
        assert bool((mine == expected).all())
    assert stopped.metrics["warn/skipped_nonfinite"] == 0
    assert stopped.learn(ENVS * STEPS, reset_num_timesteps=False).metrics["train/n_updates"] > 0


@pytest.mark.parametrize("make", BOTH)
def test_checkpoints_are_written_when_sb3_writes_them(make: Callable[[], Any], tmp_path: Path) -> None:
    make().learn(200, callback=CheckpointCallback(15, str(tmp_path), name_prefix="agent"))
    steps = [30 * count for count in range(1, 208 // 30 + 1)]
    assert {path.name for path in tmp_path.iterdir()} == {f"agent_{step}_steps.zip" for step in steps}


def test_twenty_thousand_steps_give_two_checkpoints(tmp_path: Path) -> None:
    """Every 1,000 steps of 8 environments, with default names; each is an agent, to be loaded as in SB3."""
    learner = DistributionalPPO(
        "CartPole-v1", num_envs=8, n_steps=128, minibatch_size=1024, epochs=1, memory="none", hidden=(8,)
    )
    learner.learn(20_000, callback=CheckpointCallback(1000, str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {"rl_model_8000_steps.zip", "rl_model_16000_steps.zip"}
    assert DistributionalPPO.load(tmp_path / "rl_model_8000_steps").num_timesteps == 8000
    assert DistributionalPPO.load(tmp_path / "rl_model_16000_steps.zip").num_timesteps == 16_000


@pytest.mark.parametrize("make", BOTH)
def test_evaluations_happen_when_sb3_evaluates(make: Callable[[], Any], tmp_path: Path) -> None:
    """Every 10 calls; a Clockwork episode's return is known: 7.5 + 5 · its number."""
    evaluation = EvalCallback(
        DummyVecEnv([Clockwork]),
        n_eval_episodes=2,
        eval_freq=10,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path / "best"),
        verbose=0,
        warn=False,
    )
    learner = make()
    learner.learn(5 * ENVS * STEPS, callback=evaluation)
    found = np.load(tmp_path / "evaluations.npz")
    assert found["timesteps"].tolist() == [20, 40, 60, 80]
    # A DummyVecEnv starts the next episode at each end, and evaluate_policy resets: three episodes an evaluation.
    expected = [[7.5 + 5 * number, 12.5 + 5 * number] for number in (0, 3, 6, 9)]
    assert found["results"].tolist() == expected
    assert evaluation.best_mean_reward == np.mean(expected[-1])
    (saved,) = (tmp_path / "best").iterdir()
    assert saved.stem == "best_model"
    if isinstance(learner, DistributionalPPO):
        assert DistributionalPPO.load(tmp_path / "best" / "best_model.zip").num_timesteps == 80
        assert learner.metrics["eval/mean_reward"] == np.mean(expected[-1])
        assert learner.metrics["time/total_timesteps"] == 80


@pytest.mark.parametrize("make", BOTH)
def test_training_stops_at_a_reward(make: Callable[[], Any]) -> None:
    """The second evaluation gives 22.5 + 27.5 over 2, the first 7.5 + 12.5 over 2."""
    enough = StopTrainingOnRewardThreshold(reward_threshold=20.0)
    evaluation = EvalCallback(
        DummyVecEnv([Clockwork]), callback_on_new_best=enough, n_eval_episodes=2, eval_freq=10, verbose=0, warn=False
    )
    learner = make()
    learner.learn(1000, callback=evaluation)
    assert learner.num_timesteps == 40
    if isinstance(learner, DistributionalPPO):
        assert learner.metrics["eval/mean_reward"] == 25.0


@pytest.mark.parametrize("make", BOTH)
def test_training_stops_after_so_many_episodes(make: Callable[[], Any]) -> None:
    """Both environments end an episode every 5 steps; 3 episodes in each take 15 steps of two."""
    stop = StopTrainingOnMaxEpisodes(max_episodes=3)
    learner = make()
    learner.learn(1000, callback=stop)
    assert (stop.n_episodes, learner.num_timesteps) == (6, 30)


@pytest.mark.parametrize("make", BOTH)
def test_the_progress_bar_counts_every_step(make: Callable[[], Any]) -> None:
    bar = ProgressBarCallback()
    make().learn(40, callback=bar)
    assert (bar.pbar.n, bar.pbar.total) == (48, 40)


@pytest.mark.parametrize("make", BOTH)
def test_lists_events_and_functions_count_steps(make: Callable[[], Any]) -> None:
    """A list of a diary and of an event every 10 steps; and a function, which SB3 calls once a step as well."""
    diary, event, seen = Diary(), Diary(), []

    def function(locals_: dict[str, Any], _: dict[str, Any]) -> bool:
        seen.append((locals_["self"].num_timesteps, int(locals_["dones"].sum())))
        return True

    make().learn(40, callback=CallbackList([diary, EveryNTimesteps(10, event)]))
    assert [entry[2] for entry in event.entries if entry[0] == "step"] == [10, 20, 30, 40]
    assert diary.n_calls == 24
    make().learn(40, callback=function)
    assert seen == [(2 * call, 2 * (call % 5 == 0)) for call in range(1, 25)]


def test_a_writer_inside_an_sb3_list_hears_of_iterations() -> None:
    class Writer(MetricsWriter):
        def __init__(self) -> None:
            self.lines: list[tuple[int, float]] = []

        def write(self, metrics: Any, step: int) -> None:
            self.lines.append((step, metrics["train/n_updates"]))

    class Records(BaseCallback):
        def _on_step(self) -> bool:
            self.logger.record("eval/calls", self.n_calls)
            return True

    writer = Writer()
    learner = ours().learn(32, callback=CallbackList([writer, Records()]))
    assert writer.lines == [(16, 1.0), (32, 1.0)]
    assert learner.metrics["eval/calls"] == 16


def test_steps_cost_nothing_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without a callback nor with callbacks of whole iterations is a step looked at."""
    from tailguard.algorithm import step_replay

    looked = []
    monkeypatch.setattr(step_replay, "_Steps", lambda *arguments: looked.append(arguments))
    iterations: list[int] = []
    ours().learn(32)
    ours().learn(32, callback=[Callback(), EveryIteration(lambda agent: iterations.append(agent.num_timesteps))])
    assert (looked, iterations) == ([], [16, 32])


def test_what_is_no_callback_is_named() -> None:
    with pytest.raises(Exception, match="int is neither a function nor a callback: it has no init_callback"):
        ours().learn(16, callback=3)  # type: ignore[arg-type]
