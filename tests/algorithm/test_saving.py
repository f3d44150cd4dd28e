"""Agents on disk: everything comes back, nothing can run code, and what does not fit is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.saving import PARTS, capture, restore
from tailguard.data.bars import Bars
from tailguard.envs.shield import Shield
from tailguard.envs.tasks import RecallEnv
from tailguard.envs.trading import TradingEnv
from tailguard.errors import CheckpointError, ConfigError, TailguardError
from tailguard.evaluate.backtest import backtest
from tailguard.monitor.callbacks import EveryIteration
from tailguard.optim.config import VGSConfig
from tailguard.risk.config import RiskConfig
from tailguard.sealed import flat_tensors, read_sealed, write_sealed

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
    learner.state.rollout_state = None  # what is saved goes on with fresh episodes
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


EXACT: dict[str, dict[str, Any]] = {
    "plain": {"learning_rate": "linear:3e-3:0"},
    "everything": {
        "twin_critics": True,
        "twin_trunk": "own",
        "critic": "categorical",
        "kl_penalty": 0.2,
        "target_kl": 1e-3,
        "entropy_coef": "linear:0.01:0",
        "entropy_window": 3,
        "optimizer": "upgdw",
        "vgs": VGSConfig(enabled=True),
    },
    "upgd": {"optimizer": "upgd", "memory": "none"},
    "adaptive_upgd": {"optimizer": "adaptive_upgd", "lstm_layers": 2, "memory": "shared"},
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_a_restored_agent_goes_on_bit_by_bit(
    make_learner: Any, everything_in: Any, bars: Bars, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Episodes, accounts, memories, statistics, moments, schedules and every random stream return."""

    def make() -> DistributionalPPO:
        learner: DistributionalPPO = make_learner(
            TradingEnv(bars, num_envs=4, episode_length=24, stagger=12), seed=5, **options
        )
        return learner

    learner = make()
    lines: list[dict[str, float]] = []
    kept: dict[int, Path] = {}

    def keep(agent: DistributionalPPO) -> None:
        lines.append({name: value for name, value in agent.metrics.items() if name != "time/fps"})
        agent.predict(np.zeros(agent.env.observation_size), deterministic=False)
        if agent.state.iteration in (1, 4):
            kept[agent.num_timesteps] = tmp_path / str(agent.num_timesteps)
            agent.save(kept[agent.num_timesteps])

    learner.learn(8 * 48, callback=EveryIteration(keep))
    assert list(kept) == [48, 192]
    whole = lines.copy()
    for step, folder in kept.items():
        resumed = make()
        restore(resumed, read_sealed(folder, PARTS)[1], "here", episodes=True)
        lines.clear()
        resumed.learn(8 * 48 - step, callback=EveryIteration(keep), reset_num_timesteps=False)
        assert [str(line) for line in lines] == [str(line) for line in whole[step // 48 :]]  # str: NaN equals NaN
        found = everything_in(resumed)
        for name, value in everything_in(learner).items():
            assert torch.equal(found[name], value), name
        for name, value in flat_tensors(capture(learner)["state"]):
            resumed_value = dict(flat_tensors(capture(resumed)["state"]))[name]
            torch.testing.assert_close(resumed_value, value, rtol=0, atol=0, equal_nan=True, msg=name)


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


def test_an_agent_is_two_tensor_files_and_a_manifest(make_learner: Any, tmp_path: Path) -> None:
    learner = make_learner()
    learner.learn(72)
    learner.save(tmp_path)
    names = ["manifest.json", "state.safetensors", "weights.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["about"]["step"] == 72
    for name in names[1:]:
        data = (tmp_path / name).read_bytes()
        assert manifest["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    header = (tmp_path / "weights.safetensors").read_bytes()
    weights = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert set(weights) - {"__metadata__"} == set(learner.policy.state_dict())


def test_any_value_in_any_place_of_a_manifest_is_refused_or_can_be_traded_with(
    bars: Bars, tmp_path: Path, forgeries: Any, absurd: Any
) -> None:
    env = TradingEnv(bars, num_envs=2, episode_length=16, features=["return_4"], shield=Shield(0.1, 0.05))
    options: dict[str, Any] = {"n_steps": 8, "hidden": (2,), "lstm_size": 2, "quantiles": 2}
    DistributionalPPO(env, **options, risk=RiskConfig(limit=-0.04)).save(tmp_path)
    few = replace(bars, frame=bars.frame.head(12))
    refused = 0
    for place in forgeries(tmp_path / "manifest.json", absurd):
        try:
            backtest(DistributionalPPO.load(tmp_path), few, warn_in_sample=False)
        except TailguardError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{absurd!r} as {place}") from error
    assert refused > 30


@pytest.mark.parametrize("seed", [None, "1", 1.5, True, 2**63])
def test_a_seed_that_is_none_is_refused_by_name(make_learner: Any, seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed: "):
        make_learner(seed=seed)


def test_saving_again_replaces_the_agent_and_nothing_else(make_learner: Any, tmp_path: Path) -> None:
    learner = make_learner()
    learner.save(tmp_path / "agent")
    learner.learn(72)
    learner.save(tmp_path / "agent")
    assert DistributionalPPO.load(tmp_path / "agent").num_timesteps == 72
    (tmp_path / "agent" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds other files \(notes.txt\); choose a new folder"):
        learner.save(tmp_path / "agent")
    assert (tmp_path / "agent" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not a folder"):
        learner.save(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        learner.save(tmp_path / "file" / "agent")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "file"]


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(make_learner: Any, tmp_path: Path) -> None:
    learner = make_learner()
    learner.save(tmp_path / "good")
    name, parameter = next(iter(learner.policy.named_parameters()))
    parameter.data.view(-1)[0] = torch.nan
    with pytest.raises(CheckpointError, match=f"1 of {parameter.numel()} numbers in weights/{name} are not finite"):
        learner.save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    reseal(tmp_path / "good", lambda _, parts: parts["weights"].update({name: parameter.detach()}))
    with pytest.raises(CheckpointError, match=f"good: 1 of {parameter.numel()} numbers in weights/{name} are not"):
        DistributionalPPO.load(tmp_path / "good")


@pytest.fixture
def saved(make_learner: Any, tmp_path: Path) -> Path:
    learner = make_learner()
    learner.learn(72)
    learner.save(tmp_path)
    return tmp_path


def reseal(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """What a stranger could do: change the content and seal it again, every hash in order."""
    about, parts = read_sealed(folder, PARTS)
    change(about, parts)
    write_sealed(folder, parts, about)


def set_config(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    def change(about: dict[str, Any], _: dict[str, Any]) -> None:
        place = about["config"]
        *path, last = name.split(".")
        for part in path:
            place = place[part]
        place[last] = value

    return change


def set_state(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    def change(_: dict[str, Any], parts: dict[str, Any]) -> None:
        place = parts["state"]
        *path, last = name.split("/")
        for part in path:
            place = place[part]
        place[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, _: about.pop("config"), "not the description of an agent: KeyError.*config"),
        (lambda about, _: about.update(config=[]), "not the description of an agent"),
        (lambda about, _: about.update(observation_size="many"), "not the description of an agent"),
        (lambda about, _: about.update(observation_size=5), r"weights/.* has shape \(7, 3\) .* needs \(7, 5\)"),
        (lambda about, _: about.update(observation_size=10**15), "describes a layer of 1,000,000,000,000,000 units"),
        (lambda about, _: about.update(action_space={"sizes": [2, 2]}), "weights/.*this agent"),
        (set_config("gama", 0.9), "not the description of an agent.*gama"),
        (set_config("gamma", 7.0), "ppo.gamma: 7 is out of range"),
        (set_config("network.hidden", [10**12, 10**12]), "describes a layer of 1,000,000,000,000 units"),
        (set_config("network.hidden", [4000, 4000]), "weights/.* is missing"),
        (set_config("network.lstm_layers", 10**9), "lstm_layers|layer"),
        (lambda _, parts: parts["weights"].popitem(), "weights/.* is missing"),
        (lambda _, parts: parts["weights"].update(extra=torch.zeros(1)), "weights/extra is unknown to this agent"),
        (lambda _, parts: parts["state"].pop("returns"), "state/returns is missing"),
        (lambda _, parts: parts["state"].update(returns=3), "state/returns is not a group of values"),
        (set_state("returns/mean", 3.0), "state/returns/mean is not a tensor"),
        (set_state("returns/mean", torch.zeros(2, dtype=torch.float64)), r"returns/mean has shape \(2,\) of float64"),
        (set_state("learner/iteration", "many"), "state/learner/iteration is 'many'; int is needed"),
        (set_state("learner/__class__", "x"), "state/learner/__class__ is unknown to this agent"),
        (set_state("learner/entropy/history", ["x"]), "state/learner/entropy/history is"),
        (set_state("optimizer/moments/nothing", {"exp_avg": torch.zeros(1)}), "moments of nothing"),
        (set_state("generator/state", torch.zeros(5056, dtype=torch.uint8)), "does not fit this agent"),
    ],
)
def test_a_forged_agent_is_a_clear_error(saved: Path, change: Callable[..., Any], message: str) -> None:
    """Every hash is right, and still nothing is allocated, set or executed that this agent would not have itself."""
    reseal(saved, change)
    with pytest.raises(TailguardError, match=message):
        DistributionalPPO.load(saved)


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TailguardError, match="nowhere: no agent here: there is no such folder"):
        DistributionalPPO.load(tmp_path / "nowhere")


def test_another_environment_is_refused(saved: Path, scripted_env: Any) -> None:
    with pytest.raises(TailguardError, match=r"the agent reads 3 numbers and acts in .*; this environment has 2 and"):
        DistributionalPPO.load(saved, env=RecallEnv(4))
    with pytest.raises(TailguardError, match=r"this environment has 3 and .'sizes': .3, 2.."):
        DistributionalPPO.load(saved, env=scripted_env(discrete=True))
    with pytest.raises(TailguardError, match="device: cuda requested, but the environment is on cpu"):
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


@pytest.mark.parametrize("part", ["observations", "returns"])
@pytest.mark.parametrize("figure", ["mean", "squares"])
def test_statistics_that_are_not_finite_are_neither_saved_nor_loaded(
    make_learner: Any, tmp_path: Path, part: str, figure: str
) -> None:
    learner = make_learner()
    learner.learn(72)
    learner.save(tmp_path / "good")
    about, parts = read_sealed(tmp_path / "good", PARTS)
    parts["state"][part][figure].view(-1)[0] = torch.nan
    write_sealed(tmp_path / "bad", parts, about)
    with pytest.raises(CheckpointError, match=f"numbers in {part}/{figure} are not finite"):
        DistributionalPPO.load(tmp_path / "bad")
    moments = learner.observation_moments if part == "observations" else learner.return_moments
    getattr(moments, figure).view(-1)[0] = torch.inf
    with pytest.raises(CheckpointError, match=f"this agent: 1 of .* numbers in {part}/{figure} are not finite"):
        learner.save(tmp_path / "never")
    assert not (tmp_path / "never").exists()
