"""Agents that share weights over assets: they learn, are saved, and trade symbols and universes that they never saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tailguard.algorithm.ensemble import Ensemble, load_agent
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.pathwise import PathwiseLearner
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.data.bars import Bars
from tailguard.data.sources import load_bars
from tailguard.data.synthetic import make_market
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError, TailguardError
from tailguard.evaluate.backtest import backtest
from tailguard.risk.config import RiskConfig

FEATURES = ["bollinger_20", "trend_24", "volume_168", "time_of_day_sin", "time_of_day_cos"]


def market(assets: int, seed: int = 0) -> Bars:
    return make_market(400, assets=assets, seed=seed, signal=8.0).bars


def environment(bars: Bars, **options: Any) -> TradingEnv:
    chosen: dict[str, Any] = {"num_envs": 6, "episode_length": 32, "features": FEATURES, "shared_scaling": True}
    return TradingEnv(bars, **{**chosen, **options})


def agent_of(kind: Any, bars: Bars, **options: Any) -> Learner:
    plain: dict[str, Any] = {"n_steps": 8, "hidden": (8,), "lstm_size": 6, "seed": 3}
    if kind is DistributionalPPO:
        plain["minibatch_size"] = 16
    learner: Learner = kind(environment(bars), **{**plain, **options})
    return learner


def renamed(bars: Bars, names: dict[str, str]) -> Bars:
    frame = bars.frame.drop("segment").with_columns(pl.col("symbol").replace_strict(names))
    return load_bars(frame)


@pytest.mark.parametrize("kind", [DistributionalPPO, PathwiseLearner])
@pytest.mark.parametrize("encoder", ["shared", "attention"])
def test_a_universe_in_another_order_is_traded_alike(kind: Any, encoder: str) -> None:
    """Symbols renamed so that their order is reversed: the same trades, under the other names."""
    bars = market(3)
    agent = agent_of(kind, bars, encoder=encoder).learn(3 * 48)
    reverse = dict(zip(bars.symbols, reversed(bars.symbols), strict=True))
    plain, other = (
        backtest(agent, these, warn_in_sample=False, progress_bar=False) for these in (bars, renamed(bars, reverse))
    )
    assert np.abs(plain.weights).max() > 1e-3
    np.testing.assert_allclose(other.weights[:, ::-1], plain.weights, atol=2e-5)  # float32, fed back bar by bar
    np.testing.assert_allclose(other.equity, plain.equity, rtol=1e-5)


@pytest.mark.parametrize("kind", [DistributionalPPO, PathwiseLearner])
def test_a_saved_agent_trades_and_learns_on_a_universe_of_another_size(kind: Any, tmp_path: Path) -> None:
    agent = agent_of(kind, market(3), encoder="shared").learn(2 * 48)
    agent.save(tmp_path / "agent")
    loaded = load_agent(tmp_path / "agent")
    unseen = renamed(market(5, seed=9), {f"SYN0{number}": f"NEW{number}" for number in range(1, 6)})
    for bars in (unseen, unseen.select("NEW2")):
        mine, theirs = (backtest(each, bars, progress_bar=False) for each in (agent, loaded))
        np.testing.assert_array_equal(mine.weights, theirs.weights)
        assert np.abs(mine.weights).max() > 0
    # `predict` and the step-by-step policy agree on any universe.
    env = environment(unseen, scaler=agent.spec.scaler, features=None)  # type: ignore[union-attr]
    obs = env.reset(seed=1).numpy()
    step = loaded.inference_policy()
    with torch.inference_mode():
        np.testing.assert_array_equal(
            agent.predict(obs[:1], deterministic=True)[0], step(torch.from_numpy(obs[:1]), True).numpy()
        )
    assert agent.predict(obs)[0].shape == (6, 5)
    with pytest.raises(ConfigError, match="does not fit"):
        agent.predict(obs[:, :-1])
    assert isinstance(loaded, Learner)
    before = {name: weight.clone() for name, weight in loaded.policy.named_parameters()}
    loaded.set_env(env)
    loaded.learn(48)
    assert any(not torch.equal(weight, before[name]) for name, weight in loaded.policy.named_parameters())


def test_an_ensemble_trades_any_universe(tmp_path: Path) -> None:
    bars = market(2)
    members = [agent_of(PathwiseLearner, bars, encoder="shared", seed=seed).learn(48) for seed in (0, 1)]
    Ensemble(members, 0.5).save(tmp_path / "both")
    other = market(4, seed=2)
    result = backtest(load_agent(tmp_path / "both"), other, warn_in_sample=False, progress_bar=False)
    alone = [backtest(member, other, warn_in_sample=False, progress_bar=False) for member in members]
    assert result.weights.shape[1] == 4
    np.testing.assert_allclose(result.targets[0], 0.25 * (alone[0].targets[0] + alone[1].targets[0]), rtol=1e-5)


def test_the_ratio_starts_at_one_and_both_learners_keep_a_budget() -> None:
    """Acting one row at a time and learning whole sequences give the same probabilities."""
    bars = market(3)
    risk = RiskConfig(limit=-0.05, confidence=0)
    ppo = agent_of(DistributionalPPO, bars, encoder="attention", epochs=1, minibatch_size=10_000, risk=risk)
    ppo.learn(48)
    assert abs(ppo.metrics["train/approx_kl"]) < 1e-6
    assert ppo.metrics["risk/cost_critic_loss"] >= 0 if "risk/cost_critic_loss" in ppo.metrics else True
    pathwise = agent_of(PathwiseLearner, bars, encoder="attention", n_steps=32, risk=risk)
    pathwise.learn(2 * 6 * 32)
    assert np.isfinite(pathwise.metrics["pathwise/cost"])


def test_absent_symbols_have_no_weight_and_do_not_change_the_others() -> None:
    frame = market(3).frame.drop("segment")
    late = frame.filter((pl.col("symbol") != "SYN03") | (pl.col("time") >= frame["time"].unique().sort()[200]))
    bars = load_bars(late, universe="ragged")
    agent = agent_of(PathwiseLearner, bars, encoder="shared").learn(2 * 48)
    result = backtest(agent, bars, warn_in_sample=False, progress_bar=False)
    early = result.time < int(late.filter(pl.col("symbol") == "SYN03")["time"].dt.epoch("ms").min())  # type: ignore[arg-type]
    assert early.sum() > 25
    assert (result.weights[early, 2] == 0).all()
    assert (result.weights[~early, 2] != 0).any()
    # Before the third is listed, the first two are traded as if it did not exist.
    alone = backtest(agent, bars.select("SYN01", "SYN02"), warn_in_sample=False, progress_bar=False)
    np.testing.assert_allclose(alone.weights[: early.sum()], result.weights[early, :2], atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    bars = market(2)
    with pytest.raises(ConfigError, match="shared_scaling=True"):
        agent_of(PathwiseLearner, bars, encoder="shared", seed=0).__class__(
            environment(bars, shared_scaling=False), encoder="shared"
        )
    flat = PathwiseLearner(environment(bars, shared_scaling=False), n_steps=8)
    with pytest.raises(ConfigError, match="a scaling of each symbol's own"):
        environment(bars, scaler=flat.spec.scaler, features=None)  # type: ignore[union-attr]
    with pytest.raises(TailguardError, match="scaler: fitted on"):
        backtest(flat, market(3), progress_bar=False)
