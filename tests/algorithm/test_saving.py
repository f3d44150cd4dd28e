"""Agents on disk: everything comes back, nothing can run code, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.data.bars import Bars
from tailguard.envs.tasks import RecallEnv
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError, TailguardError

MODES: list[dict[str, Any]] = [
    {},
    {"memory": "none", "critic": "categorical", "twin_critics": True, "entropy_coef": 0.01, "entropy_window": 3},
    {"lstm_layers": 2, "twin_critics": True, "twin_trunk": "own", "std": "state", "kl_penalty": 0.2, "target_kl": 1e-3},
    {
        "memory": "shared",
        "critic": "scalar",
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "learning_rate": "linear:1e-2:0",
    },
]


@pytest.mark.parametrize("options", MODES, ids=["plain", "categorical", "own trunks", "shared"])
def test_a_loaded_agent_is_the_saved_one(
    make_learner: Any, scripted_env: Any, everything_in: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    env = scripted_env(dead_rows=True)
    learner = make_learner(env, seed=3, **options)
    learner.learn(5 * 72)
    learner.save(tmp_path / "agent")
    loaded = DistributionalPPO.load(tmp_path / "agent", env=scripted_env(dead_rows=True))
    assert loaded.config == learner.config
    assert loaded.state.entropy == learner.state.entropy
    learner.state.carry = None  # what is saved goes on with fresh episodes
    saved, found = everything_in(learner), everything_in(loaded)
    assert saved.keys() == found.keys()
    assert any("exp_avg_sq" in name for name in saved)
    for name, value in saved.items():
        assert torch.equal(found[name], value), name
    observations = env.obs[0].numpy()
    for deterministic in (True, False):
        ours, theirs = (agent.predict(observations, deterministic=deterministic)[0] for agent in (learner, loaded))
        assert np.array_equal(ours, theirs)
    # Both go on in the same way.
    learner.learn(3 * 72, reset_num_timesteps=False)
    loaded.learn(3 * 72, reset_num_timesteps=False)
    assert loaded.num_timesteps == 8 * 72
    assert learner.env.seeds == [3, 3 + 5]
    found = everything_in(loaded)
    for name, value in everything_in(learner).items():
        assert torch.equal(found[name], value), name


def test_an_untrained_agent_can_be_saved(
    make_learner: Any, scripted_env: Any, everything_in: Any, tmp_path: Path
) -> None:
    learner = make_learner()
    learner.save(str(tmp_path / "new" / "agent"))
    loaded = DistributionalPPO.load(str(tmp_path / "new" / "agent"), env=scripted_env())
    for agent in (learner, loaded):
        agent.learn(72)
    found = everything_in(loaded)
    for name, value in everything_in(learner).items():
        assert torch.equal(found[name], value), name


def test_without_an_environment_it_predicts_and_does_not_learn(make_learner: Any, tmp_path: Path) -> None:
    learner = make_learner()
    learner.learn(144)
    learner.save(tmp_path)
    loaded = DistributionalPPO.load(tmp_path)
    assert loaded.num_timesteps == 144
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    state: Any = None
    other: Any = None
    for _ in range(3):
        ours, state = learner.predict(rows, state, deterministic=True)
        theirs, other = loaded.predict(rows, other, deterministic=True)
        assert np.array_equal(ours, theirs)
    with pytest.raises(TailguardError, match=r"loaded without an environment.*give load\(..., env="):
        loaded.learn(100, reset_num_timesteps=False)
    loaded.save(tmp_path / "again")
    assert DistributionalPPO.load(tmp_path / "again").num_timesteps == 144


def test_nothing_on_disk_is_a_pickle(make_learner: Any, tmp_path: Path) -> None:
    learner = make_learner()
    learner.learn(72)
    learner.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.json", "weights.safetensors"]
    json.loads((tmp_path / "agent.json").read_text())
    header = (tmp_path / "weights.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert "generator" in json.loads(header[8 : 8 + size])
    assert header[:2] != b"\x80\x04"
    assert b"PK\x03\x04" not in header[:4]


@pytest.fixture
def saved(make_learner: Any, tmp_path: Path) -> Path:
    learner = make_learner()
    learner.learn(72)
    learner.save(tmp_path)
    return tmp_path


def truncate(folder: Path) -> None:
    whole = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(whole[: len(whole) // 2])


def edit(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        description = json.loads((folder / "agent.json").read_text()) | changes
        (folder / "agent.json").write_text(json.dumps({k: v for k, v in description.items() if v != "gone"}))

    return apply


def edit_config(name: str, value: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        description = json.loads((folder / "agent.json").read_text())
        description["config"][name] = value
        (folder / "agent.json").write_text(json.dumps(description))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors is missing"),
        (lambda folder: (folder / "agent.json").unlink(), "agent.json is missing"),
        (lambda folder: (folder / "agent.json").write_text('{"format": 1,'), "not readable as JSON"),
        (lambda folder: (folder / "agent.json").write_text("[1]"), "format None; this version reads 1"),
        (lambda folder: (folder / "agent.json").write_bytes(b"\x80\x04\x95"), "not readable as JSON"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"PK\x03\x04" * 8), "not readable as safetensors"),
        (truncate, "not readable as safetensors"),
        (edit(format=99), "format 99; this version reads 1"),
        (edit(config="gone"), "not the description of an agent: KeyError.*config"),
        (edit(learner={"num_timesteps": 3}), "not the description of an agent"),
        (edit(observation_size=5), "the weights do not fit the agent described beside them"),
        (edit_config("gama", 0.9), "not the description of an agent.*gama"),
        (edit_config("gamma", 7.0), "ppo.gamma: 7 is out of range"),
    ],
)
def test_a_damaged_agent_is_a_clear_error(saved: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(saved)
    with pytest.raises(TailguardError, match=message):
        DistributionalPPO.load(saved)


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TailguardError, match=r"nowhere: no agent here: agent\.json is missing"):
        DistributionalPPO.load(tmp_path / "nowhere")


def test_another_environment_is_refused(saved: Path, scripted_env: Any) -> None:
    with pytest.raises(TailguardError, match=r"the agent reads 3 numbers and acts in .*; this environment has 2 and"):
        DistributionalPPO.load(saved, env=RecallEnv(4))
    with pytest.raises(TailguardError, match=r"this environment has 3 and .'sizes': .3, 2.."):
        DistributionalPPO.load(saved, env=scripted_env(discrete=True))
    with pytest.raises(TailguardError, match="device: cuda asked for, and the environment is on cpu"):
        DistributionalPPO.load(saved, env=scripted_env(), device="cuda")


def test_extensions_are_given_anew(saved: Path, scripted_env: Any) -> None:
    loaded = DistributionalPPO.load(saved, env=scripted_env(), extensions=[BehaviourCloning(beta=1.0)])
    assert "train/bc_loss" in loaded.iterate()


def test_bars_of_another_scale_or_other_features_are_refused(make_learner: Any, bars: Bars, tmp_path: Path) -> None:
    """The same numbers must mean the same things; new bars are scaled by what the old ones taught."""
    env = TradingEnv(bars, num_envs=2, episode_length=24)
    learner = make_learner(env)
    learner.learn(24)
    learner.save(tmp_path)
    names = env.prepared.names
    exchanged = TradingEnv(bars, num_envs=2, episode_length=24, features=[*names[1:], names[0]])
    with pytest.raises(TailguardError, match=f"learned with {names[0]}, .* this environment shows {names[1]}, "):
        DistributionalPPO.load(tmp_path, env=exchanged)
    start, end = bars.end_points
    later = bars.between(start + (end - start) / 20, end)
    with pytest.raises(TailguardError, match="shows the same features on another scale"):
        DistributionalPPO.load(tmp_path, env=TradingEnv(later, num_envs=2, episode_length=24))
    scaler = DistributionalPPO.load(tmp_path).spec.scaler  # type: ignore[union-attr]
    loaded = DistributionalPPO.load(tmp_path, env=TradingEnv(later, num_envs=2, episode_length=24, scaler=scaler))
    assert loaded.learn(24, reset_num_timesteps=False).num_timesteps == 48


class Odd(gymnasium.Env[Any, Any]):
    """Choices counted from −1, or observations that are numbers of a state."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


ROW = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("observations", "actions", "plain"),
    [
        (ROW, spaces.Discrete(3), True),
        (ROW, spaces.MultiDiscrete([3, 2]), True),
        (ROW, spaces.Box(-1, 1, (2,)), True),
        (ROW, spaces.Discrete(3, start=-1), False),
        (ROW, spaces.MultiDiscrete([3]), False),
        (ROW, spaces.Box(-1, 1, (2, 2)), False),
        (spaces.Discrete(4), spaces.Discrete(3), False),
        (spaces.Box(-1, 1, (2, 2)), spaces.Discrete(3), False),
        (spaces.Dict(a=ROW, b=spaces.Discrete(2)), spaces.Discrete(3), False),
    ],
    ids=str,
)
def test_only_agents_of_plain_rows_do_without_their_environment(
    make_learner: Any, tmp_path: Path, observations: spaces.Space[Any], actions: spaces.Space[Any], plain: bool
) -> None:
    """Otherwise a choice −1 would come back as 0, or a state's number be read as a row."""
    env = Odd(observations, actions)
    learner = make_learner(env)
    learner.iterate()
    learner.save(tmp_path)
    batch, _ = env.reset(seed=1)
    expected, _ = learner.predict(batch, deterministic=True)
    if plain:
        found, _ = DistributionalPPO.load(tmp_path).predict(batch, deterministic=True)
    else:
        with pytest.raises(TailguardError, match=r"not plain rows of numbers.*give load\(..., env="):
            DistributionalPPO.load(tmp_path)
        found, _ = DistributionalPPO.load(tmp_path, env=env).predict(batch, deterministic=True)
    assert np.array_equal(found, expected)
    assert actions.contains(found if isinstance(found, np.ndarray) else np.int64(found))


def test_wrong_rows_are_refused_by_a_loaded_agent(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"observation has shape \(5,\); the agent reads \(3,\) or a batch"):
        DistributionalPPO.load(saved).predict(np.zeros(5))
