"""What users of Stable-Baselines3 do without thinking: it works, or a sentence says how it is done here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.schedules import Schedule
from tailguard.errors import ConfigError, TailguardError
from tailguard.monitor.callbacks import EveryIteration

SMALL: dict[str, Any] = {"n_steps": 8, "minibatch_size": 16, "epochs": 1, "hidden": (8,), "lstm_size": 8}


class Counting(gymnasium.Env[Any, Any]):
    """Episodes of 3 and 4 steps in turn, ended by the time limit and for good; the observation tells where it is."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def __init__(self, first: int = 0) -> None:
        self.episode, self.time = first - 1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:  # noqa: ARG002
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        limit = self.episode % 2 == 0
        over = self.time == (3 if limit else 4)
        obs = np.array([self.episode, self.time], np.float32)
        return obs, self.episode + 0.25 * self.time + float(action[0]), over and not limit, over and limit, {}


def factories() -> list[Callable[[], Counting]]:
    return [lambda: Counting(0), lambda: Counting(1)]


def make(env: Any = None, **options: Any) -> DistributionalPPO:
    return DistributionalPPO(factories() if env is None else env, **SMALL | options)


def weights(agent: DistributionalPPO) -> list[torch.Tensor]:
    return [value.detach().clone() for value in agent.policy.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


# --- SB3's vector environments ---------------------------------------------------------------------------------------


def test_an_sb3_vec_env_gives_the_transitions_of_its_environments() -> None:
    """The same agent learns the same, bit by bit, as on Gymnasium's own vector of the same environments.

    It could not if an end, its kind or an episode's last observation were read wrongly: they are in every target.
    """
    vec_env = DummyVecEnv(factories())
    on_sb3, on_gymnasium = make(vec_env), make()
    for agent in (on_sb3, on_gymnasium):
        agent.learn(5 * 16)
    assert same(weights(on_sb3), weights(on_gymnasium))
    assert on_sb3.snapshot is not None
    assert on_gymnasium.snapshot is not None
    mine, theirs = on_sb3.snapshot.rollout, on_gymnasium.snapshot.rollout
    assert int(mine.terminated.sum()) > 0 < int(mine.truncated.sum())
    for name in ("obs", "rewards", "terminated", "truncated", "final_obs"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert on_sb3.get_env() is vec_env
    assert on_sb3.get_vec_normalize_env() is None


def test_an_sb3_env_without_last_observations_is_refused() -> None:
    class Forgetful(DummyVecEnv):
        def step_wait(self) -> Any:
            obs, rewards, dones, infos = super().step_wait()
            for info in infos:
                info.pop("terminal_observation", None)
            return obs, rewards, dones, infos

    with pytest.raises(TailguardError, match=r"returned no infos\['final_obs'\]"):
        make(Forgetful(factories())).learn(16)


def test_sb3s_normalisation_is_known_to_its_evaluation() -> None:
    """`EvalCallback` copies the training environment's statistics into the evaluation's."""
    training = VecNormalize(DummyVecEnv(factories()))
    evaluation = VecNormalize(DummyVecEnv([Counting]), training=False)
    agent = make(training)
    assert agent.get_vec_normalize_env() is training
    agent.learn(16, callback=EvalCallback(evaluation, eval_freq=8, n_eval_episodes=1, verbose=0, warn=False))
    assert training.obs_rms.count > 16
    assert np.array_equal(evaluation.obs_rms.mean, training.obs_rms.mean)


def test_sb3s_evaluate_policy_plays_the_policy() -> None:
    """The mean return of two episodes, against `predict` in a loop."""
    agent = make().learn(32)
    found, _ = evaluate_policy(agent, DummyVecEnv([Counting]), n_eval_episodes=2, warn=False)
    env, total = Counting(), 0.0
    for _ in range(2):
        obs, state, over = env.reset()[0], None, False
        while not over:
            action, state = agent.predict(obs, state, deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + reward, terminated or truncated
    assert found == pytest.approx(total / 2, rel=1e-6)


# --- parameters and environments -------------------------------------------------------------------------------------


def test_parameters_can_be_taken_out_and_put_back(tmp_path: Path) -> None:
    agent = make().learn(32)
    taken = agent.get_parameters()
    agent.save(tmp_path / "agent")
    before, obs = weights(agent), np.array([[1.0, 2.0], [0.0, 1.0]], np.float32)
    action = agent.predict(obs, deterministic=True)[0]
    agent.learn(32)
    assert not same(weights(agent), before)
    for source in (taken, tmp_path / "agent"):
        other = make(seed=7)
        assert not np.array_equal(other.predict(obs, deterministic=True)[0], action)
        other.set_parameters(source)
        assert same(weights(other), before)
        assert np.array_equal(other.predict(obs, deterministic=True)[0], action)
    assert {"policy", "policy.optimizer"} <= taken.keys()


def test_some_parameters_can_be_put_in() -> None:
    """As in SB3's example of neuro-evolution: change one weight and leave the others."""
    agent = make()
    before = agent.get_parameters()["policy"]
    name = next(iter(before))
    agent.set_parameters({"policy": {name: before[name] + 1}}, exact_match=False)
    after = agent.get_parameters()["policy"]
    assert torch.equal(after[name], before[name] + 1)
    assert all(torch.equal(after[other], before[other]) for other in before if other != name)


@pytest.mark.parametrize(
    ("change", "exact", "message"),
    [
        (lambda given: given.pop("observations"), True, "observations missing"),
        (lambda given: given.update(value=1), False, "value unknown"),
        (lambda given: given["policy"].popitem(), True, "is missing"),
        (lambda given: given["policy"].update(bias=torch.zeros(1)), False, "bias is unknown"),
        (lambda given: next(iter(given["policy"].values())).fill_(np.nan), True, "not finite"),
    ],
)
def test_wrong_parameters_change_nothing(change: Callable[[Any], Any], exact: bool, message: str) -> None:
    agent, given = make(), make(seed=1).get_parameters()
    before = weights(agent)
    change(given)
    with pytest.raises(TailguardError, match=message):
        agent.set_parameters(given, exact_match=exact)
    assert same(weights(agent), before)


def test_a_loaded_agent_learns_on_the_environment_it_is_given(tmp_path: Path) -> None:
    """Exactly as if it had been loaded with it, though it has another number of environments."""
    make().learn(32).save(tmp_path / "agent")
    later, at_once = DistributionalPPO.load(tmp_path / "agent"), DistributionalPPO.load(tmp_path / "agent", factories())
    later.set_env(factories())
    for agent in (later, at_once):
        agent.learn(32, reset_num_timesteps=False)
    assert later.num_timesteps == 64
    assert later.get_env().num_envs == 2
    assert same(weights(later), weights(at_once))
    later.set_env(DummyVecEnv([Counting]))
    assert later.learn(8, reset_num_timesteps=False).num_timesteps == 72


def test_an_environment_of_another_kind_changes_nothing() -> None:
    agent = make()
    env, before = agent.env, weights(agent)
    with pytest.raises(TailguardError, match="set_env: the agent reads 2 numbers"):
        agent.set_env("CartPole-v1")
    assert agent.env is env
    assert same(weights(agent), before)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_policy_kwargs_shape_the_network() -> None:
    given = {
        "net_arch": {"pi": [5, 6], "vf": [5, 6]},
        "activation_fn": nn.ReLU,
        "lstm_hidden_size": 9,
        "n_lstm_layers": 2,
        "shared_lstm": True,
        "enable_critic_lstm": False,
        "log_std_init": -1,
    }
    agent = DistributionalPPO(factories(), n_steps=8, policy_kwargs=given)
    expected = DistributionalPPO(
        factories(), n_steps=8, hidden=(5, 6), activation="relu", lstm_size=9, lstm_layers=2, memory="shared",
        log_std_init=-1.0,
    )  # fmt: skip
    assert agent.config == expected.config
    assert DistributionalPPO(factories(), policy_kwargs={"net_arch": [5, 6]}).config.network.hidden == (5, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_kwargs": {"net_arch": {"pi": [5], "vf": [6]}}}, "encoders of the same widths"),
        ({"policy_kwargs": {"net_arch": [{"pi": [5]}]}}, "not a list of widths"),
        ({"policy_kwargs": {"ortho_init": False}}, "ortho_init cannot be set here; net_arch, .* can"),
        ({"policy_kwargs": {"activation_fn": nn.ELU}}, "activation_fn .* nn.Tanh, nn.SiLU, nn.ReLU"),
        ({"policy_kwargs": {"enable_critic_lstm": False}}, "memory can be separate, shared or none"),
        ({"policy_kwargs": {"net_arch": [5]}, "hidden": (5,)}, "hidden was given as a setting too"),
        ({"batch_size": 64}, "batch_size: is called minibatch_size here"),
        ({"policy": "MlpPolicy"}, r"call DistributionalPPO\(env, …\)"),
        ({"learning_rate": lambda remaining: 1 / remaining}, "learning_rate: a function must give a number"),
        ({"learning_rate": lambda remaining: remaining - 0.5}, "ppo.learning_rate"),
    ],
)
def test_arguments_that_cannot_be_followed_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributionalPPO(factories(), **options)


def test_sb3s_way_of_calling_is_told_ours() -> None:
    with pytest.raises(ConfigError, match=r"policy: 'MlpPolicy' was given.*call DistributionalPPO\(env, …\)"):
        DistributionalPPO("MlpPolicy", Counting())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config: dict was given"):
        DistributionalPPO(factories(), {"n_steps": 8})  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1e3, np.int64(1000), np.float64(1e3)])
def test_steps_may_be_whole_floats(steps: Any) -> None:
    assert make().learn(steps).num_timesteps == 1008


@pytest.mark.parametrize("steps", [1.5, "10", None, True, float("nan")])
def test_other_steps_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"total_timesteps: .* is not a whole number"):
        make().learn(steps)


@pytest.mark.parametrize(
    ("function", "setting"),
    [
        (lambda remaining: 3e-4 * remaining, "linear:0.0003:0.0"),
        (lambda remaining: 1e-3, 1e-3),  # noqa: ARG005
        (lambda remaining: 1e-3 * remaining**2, None),
        (lambda remaining: 1e-3 if remaining > 0.5 else 1e-4, None),
    ],
)
def test_a_function_of_the_remaining_progress_is_followed_also_after_loading(
    function: Callable[[float], float], setting: Any, tmp_path: Path
) -> None:
    """Each iteration's rate is the function's at its start; where it jumps, but for 1/1024 of the training.

    Between two points a parabola's straight line is off by up to f″ / 8 · (1/1024)², here 2.4e-10.
    """
    agent = make(learning_rate=function, clip_range=lambda remaining: 0.1 + 0.1 * remaining)
    if setting is not None:
        assert agent.config.learning_rate == setting
    rates: list[float] = []
    agent.learn(5 * 16, callback=EveryIteration(lambda one: rates.append(one.metrics["train/learning_rate"])))
    assert rates == pytest.approx([function(1 - done / 5) for done in range(5)], rel=1e-6, abs=2.4e-10)
    agent.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent")
    assert loaded.config == agent.config
    schedule = Schedule.parse(loaded.config.learning_rate)
    for progress in (0.0, 0.1, 0.3333, 0.7, 0.99, 1.0):
        assert schedule(progress) == pytest.approx(function(1 - progress), rel=1e-6, abs=2.4e-10)


def test_verbose_prints_the_table_and_tensorboard_log_makes_numbered_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = make(verbose=1, tensorboard_log=tmp_path)
    agent.learn(2 * 16, log_interval=2)
    assert capsys.readouterr().out.count("total_timesteps") == 1
    agent.learn(16, tb_log_name="other")
    agent.learn(16, reset_num_timesteps=False)  # goes on in the same folder, as in SB3
    assert {path.name for path in tmp_path.iterdir()} == {"DistributionalPPO_1", "other_1"}
    agent.learn(16)
    assert {path.name for path in tmp_path.iterdir()} == {"DistributionalPPO_1", "DistributionalPPO_2", "other_1"}
    agent.save(tmp_path / "agent")
    assert DistributionalPPO.load(tmp_path / "agent", verbose=1).verbose == 1


# --- predict ---------------------------------------------------------------------------------------------------------


class Nested(Counting):
    observation_space = spaces.Dict(  # type: ignore[assignment]
        {"image": spaces.Box(-1, 1, (2, 3), np.float32), "mode": spaces.Discrete(4)}
    )


@pytest.mark.parametrize(
    ("env", "observation", "message"),
    [
        (Counting, np.zeros(3), r"observation has shape \(3,\); the agent reads \(2,\) or a batch \(n, 2\)"),
        (Counting, np.zeros((4, 3)), r"observation has shape \(4, 3\)"),
        (Counting, np.zeros((1, 1, 2)), r"observation has shape \(1, 1, 2\)"),
        (Counting, [[1.0, 2.0], [1.0]], "observation: cannot be read"),
        (Nested, {"image": np.zeros((3, 2)), "mode": 1}, r"observation\['image'\] has shape \(3, 2\)"),
        (Nested, {"image": np.zeros((2, 3))}, r"observation\['mode'\]: cannot be read"),
        (Nested, {"image": np.zeros((5, 2, 3)), "mode": np.zeros(4, int)}, "batches of different sizes"),
        (Nested, np.zeros((2, 3)), r"observation\['image'\]: cannot be read"),
    ],
)
def test_a_wrong_observation_is_named_with_the_right_shape(env: type, observation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make([env]).predict(observation)


def test_wrong_memories_and_starts_are_named() -> None:
    agent = make()
    state = agent.predict(np.zeros((3, 2)))[1]
    with pytest.raises(ConfigError, match=r"state has shape .* for 2 observations"):
        agent.predict(np.zeros((2, 2)), state)
    with pytest.raises(ConfigError, match="episode_start has 3 entries for 2 observations"):
        agent.predict(np.zeros((2, 2)), episode_start=np.ones(3))
