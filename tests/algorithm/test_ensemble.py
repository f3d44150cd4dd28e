"""An ensemble is the mean of its members at an exposure: in predict, in a backtest, and after a journey to disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble, load_agent
from tailguard.errors import CheckpointError, ConfigError
from tailguard.risk.exposure import calibrate_exposure
from tailguard.risk.throttle import Throttle

FEATURES = ["return_24", "taker_imbalance_6"]
SIZES = {"hidden": (6,), "lstm_size": 5, "critic": "scalar"}


@pytest.fixture(scope="module")
def bars() -> tg.Bars:
    return tg.make_market(900, seed=5, signal=30).bars


@pytest.fixture(scope="module")
def members(bars: tg.Bars) -> list[tg.PathwiseLearner]:
    env = tg.TradingEnv(bars, num_envs=8, episode_length=24, features=FEATURES)
    found = []
    for seed in range(3):
        agent = tg.PathwiseLearner(env, seed=seed, n_steps=24, learning_rate=0.05, **SIZES)
        agent.learn(8 * 24 * 4)
        found.append(agent)
    return found


def observations(agent: tg.PathwiseLearner, count: int, steps: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.standard_normal((steps, count, agent.env.observation_size)).astype(np.float32)


@pytest.mark.parametrize("exposure", [0.4, 1.0, 20.0])
def test_the_action_is_the_mean_of_the_members_times_the_exposure_within_bounds(members, exposure) -> None:
    ensemble, memory, own = Ensemble(members, exposure), None, [None] * 3
    clipped = 0
    for number, rows in enumerate(observations(members[0], 4, 6)):
        start = np.full(4, number == 0)
        action, memory = ensemble.predict(rows, memory, start)
        each = []
        for index, member in enumerate(members):
            chosen, own[index] = member.predict(rows, own[index], start, deterministic=True)
            each.append(chosen)
        assert np.ptp(each, axis=0).max() > 1e-3  # members that agree would prove nothing
        wanted = exposure * np.mean(each, axis=0)
        np.testing.assert_allclose(action, np.clip(wanted, -1, 1), rtol=1e-6)
        clipped += (np.abs(wanted) > 1).sum()
    assert (clipped > 0) == (exposure == 20)


def test_each_member_keeps_its_own_memory(members) -> None:
    """With the memories of two members exchanged, the action is another one."""
    ensemble, rows = Ensemble(members), observations(members[0], 2, 2)
    _, memory = ensemble.predict(rows[0])
    assert len(memory) == 3 * 2  # hidden and cell state of each
    swapped = (*memory[2:4], *memory[:2], *memory[4:])
    right, wrong = (ensemble.predict(rows[1], state)[0] for state in (memory, swapped))
    assert np.abs(right - wrong).max() > 1e-6
    with pytest.raises(ConfigError, match="state has 5 parts for 3 members"):
        ensemble.predict(rows[1], memory[:5])


def test_step_by_step_equals_predict_bit_for_bit(members) -> None:
    ensemble, memory = Ensemble(members, 0.7), None
    policy = ensemble.inference_policy()
    with torch.inference_mode():
        for number, rows in enumerate(observations(members[0], 1, 8)):
            action, memory = ensemble.predict(rows, memory, np.array([number == 0]))
            np.testing.assert_array_equal(action, policy(torch.as_tensor(rows), number == 0).numpy())


def test_a_backtest_scales_with_the_exposure(members, bars) -> None:
    """One member at exposure 1 trades as itself; at half of it, half the weights."""
    alone = tg.backtest(members[0], bars, warn_in_sample=False)
    same = tg.backtest(Ensemble(members[:1]), bars, warn_in_sample=False)
    np.testing.assert_array_equal(alone.targets, same.targets)
    ensemble, half = (tg.backtest(Ensemble(members, m), bars, warn_in_sample=False) for m in (1.0, 0.5))
    assert np.abs(ensemble.targets - alone.targets).max() > 0.01
    # Not exactly half at every bar: the account is part of the observation.
    assert 0.4 < np.abs(half.targets).sum() / np.abs(ensemble.targets).sum() < 0.6


def test_what_is_saved_trades_the_same(tmp_path: Path, members, bars) -> None:
    found = calibrate_exposure(lambda m: -m * torch.ones(20) / 50, -0.01, alpha=0.1)
    ensemble = Ensemble(members, found)
    assert ensemble.exposure == found.factor == pytest.approx(0.5, rel=0.01)
    ensemble.save(tmp_path / "agent")
    loaded = load_agent(tmp_path / "agent")
    assert isinstance(loaded, Ensemble)
    assert (loaded.calibration, loaded.exposure) == (found, found.factor)
    assert loaded.num_timesteps == members[0].num_timesteps
    before, after = (tg.backtest(agent, bars, warn_in_sample=False) for agent in (ensemble, loaded))
    np.testing.assert_array_equal(before.equity, after.equity)
    members[0].save(tmp_path / "single")
    assert isinstance(load_agent(tmp_path / "single"), tg.PathwiseLearner)


def test_the_throttle_is_saved_with_the_agent(tmp_path: Path, members) -> None:
    calibrated = calibrate_exposure(lambda m: -m * torch.ones(20) / 50, -0.01, alpha=0.1)
    agents = {
        "calibrated": (Ensemble(members, calibrated, throttled=True), Throttle(-0.01, 0.1)),
        "own": (Ensemble(members, 0.5, throttled=Throttle(-0.03, 0.2)), Throttle(-0.03, 0.2)),
        "off": (Ensemble(members, calibrated), None),
    }
    for name, (agent, expected) in agents.items():
        agent.save(tmp_path / name)
        for each in (agent, load_agent(tmp_path / name)):
            assert each.make_throttle() == expected
            assert each.throttled == (expected is not None)
    one, other = (agents["own"][0].make_throttle() for _ in range(2))
    one.observe(-0.5)
    assert one.factor == 0
    assert other.factor == 1  # each account has its own
    with pytest.raises(ConfigError, match="a throttle follows a limit"):
        Ensemble(members, 0.5, throttled=True)


def test_one_learner_cannot_be_loaded_from_an_ensemble(tmp_path: Path, members) -> None:
    Ensemble(members).save(tmp_path / "agent")
    with pytest.raises(CheckpointError, match="an ensemble of agents"):
        tg.PathwiseLearner.load(tmp_path / "agent")
    members[0].save(tmp_path / "single")
    with pytest.raises(CheckpointError, match="not the description of an ensemble"):
        Ensemble.load(tmp_path / "single")


def test_a_damaged_or_edited_ensemble_is_refused(tmp_path: Path, members) -> None:
    Ensemble(members).save(tmp_path / "agent")
    weights = tmp_path / "agent" / "weights_1.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"weights_1\.safetensors"):
        Ensemble.load(tmp_path / "agent")
    manifest = tmp_path / "agent" / "manifest.json"
    about = json.loads(manifest.read_text())
    about["about"]["exposure"] = 3.0
    manifest.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="SHA-256"):
        Ensemble.load(tmp_path / "agent")


def test_members_that_do_not_belong_together_are_refused(members, bars) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Ensemble([])
    with pytest.raises(ConfigError, match="exposure"):
        Ensemble(members, -0.5)
    other = tg.TradingEnv(bars, num_envs=2, episode_length=24, features=["return_24"])
    with pytest.raises(ConfigError, match="same observations"):
        Ensemble([members[0], tg.PathwiseLearner(other, **SIZES)])
    later = tg.TradingEnv(tg.make_market(900, seed=6).bars, num_envs=2, episode_length=24, features=FEATURES)
    with pytest.raises(ConfigError, match="same features and scaling"):
        Ensemble([members[0], tg.PathwiseLearner(later, **SIZES)])
    long_only = tg.TradingEnv(
        bars, tg.MarketConfig(allow_short=False), num_envs=2, episode_length=24, features=FEATURES
    )
    with pytest.raises(ConfigError, match="same observations and actions"):
        Ensemble([members[0], tg.PathwiseLearner(long_only, **SIZES)])
    with pytest.raises(ConfigError, match="deterministic"):
        Ensemble(members).predict(observations(members[0], 1, 1)[0], deterministic=False)
