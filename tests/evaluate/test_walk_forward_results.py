"""Walk forward: every fold is tested on what came after it, once, and the tests make one account."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import tailguard as tg
from tailguard.algorithm.saving import describe
from tailguard.config import RunConfig, load_config
from tailguard.data.bars import Bars
from tailguard.evaluate.significance import backtest_overfitting
from tailguard.evaluate.walk_forward_results import WalkForwardPlan, WalkForwardResults, plan_folds
from tailguard.experiment.build import build, build_learner
from tailguard.runs.walk_forward import run_walk_forward

SMALL = (
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "env.num_envs=4",
    "env.episode_length=16",
    "ppo.n_steps=16",
    "ppo.epochs=1",
    "ppo.network.hidden=[4]",
    "ppo.network.lstm_size=4",
    "training.total_timesteps=128",
)
PLAN = WalkForwardPlan(folds=3, seeds=2, train=800)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(overrides=list(SMALL))


@pytest.fixture(scope="module")
def market() -> Bars:
    return tg.make_market(1_900, seed=4, signal=20).bars


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walk") / "run"


@pytest.fixture(scope="module")
def walked(config: RunConfig, market: Bars, folder: Path) -> WalkForwardResults:
    return run_walk_forward(config, market, folder, PLAN, Console(quiet=True))


def test_no_fold_learns_from_bars_near_or_after_its_test(config: RunConfig, market: Bars) -> None:
    folds = plan_folds(config, market, PLAN)
    for fold in folds:
        gap = (fold.test.start - fold.train.end_points[1]) / market.frequency - 1
        assert gap == 16 + 24  # purged episode, embargo
    growing = plan_folds(config, market, WalkForwardPlan(folds=3, train=800, expanding=True))
    assert len({fold.train.start for fold in growing}) == 1
    assert len({fold.train.start for fold in folds}) == 3


def test_a_folds_agent_is_built_as_that_of_a_single_run() -> None:
    other = ("env.reward=simple", "env.shield_shock=0.1", "market.fee=0.002", "risk.limit=-0.1", "training.seed=3")
    config = load_config(overrides=[*SMALL, "data.synthetic_bars=1600", *other])
    experiment = build(config)
    single = experiment.learner
    mine = build_learner(config, experiment.split.train, seed=3)
    assert json.dumps(describe(mine)) == json.dumps(describe(single))
    single.learn(64)
    mine.learn(64)
    for name, value in single.policy.state_dict().items():
        assert torch.equal(value, mine.policy.state_dict()[name]), name


def test_the_stitched_account_is_every_decision_in_a_row(walked: WalkForwardResults, market: Bars) -> None:
    whole, parts = walked.stitched[0], walked.results[0]
    asked = whole.targets[~np.isnan(whole.targets).any(1)]
    np.testing.assert_array_equal(asked, np.concatenate([part.targets for part in parts]))
    # One bar between two folds is held; the account neither starts anew nor closes there.
    assert np.isnan(whole.targets).sum() == len(parts) - 1
    np.testing.assert_array_equal(
        whole.time[np.isnan(whole.targets[:, 0])], [int(p.time[0]) - 3_600_000 for p in parts[1:]]
    )
    assert whole.time[0] == parts[0].time[0]
    assert whole.time[-1] == market.panel().time[-1]
    # Inside a fold its net returns are those of the fold's own account, but for the trade that took over.
    second = np.searchsorted(whole.time, parts[1].time)[5:]
    np.testing.assert_allclose(whole.net[second], parts[1].net[5:], atol=2e-5)
    assert {len(result.net) for result in walked.baselines.values()} == {len(whole.net)}


def test_seeds_are_summed_up_over_folds(walked: WalkForwardResults) -> None:
    assert walked.sharpes.shape == (2, 3)
    found = walked.over_seeds(np.random.default_rng(0))
    assert found is not None
    middle = np.sort(walked.sharpes.reshape(-1))[1:-1]
    assert found.iqm == pytest.approx(middle.mean())
    assert not np.array_equal(walked.results[0][0].equity, walked.results[1][0].equity)


def test_choosing_a_seed_by_its_record_is_judged(walked: WalkForwardResults) -> None:
    found = walked.overfitting()
    assert found is not None
    expected = backtest_overfitting(np.stack([each.net for each in walked.stitched], axis=1), 16)
    assert found.probability == expected.probability
    assert 0 <= found.probability <= 1
    # The median of two is the worse one: the better must not stand for both.
    assert walked.middle is min(walked.stitched, key=lambda each: each.metrics["sharpe"])
    assert replace(walked, stitched=walked.stitched[:1]).overfitting() is None


def test_each_symbol_in_accounts_of_its_own_walks_forward_too(tmp_path: Path) -> None:
    bars = tg.make_market(1_900, assets=2, seed=6).bars
    config = load_config(overrides=[*SMALL, "env.accounts=per_symbol"])
    walked = run_walk_forward(config, bars, tmp_path / "walk", WalkForwardPlan(folds=2, train=800), Console(quiet=True))
    whole = walked.stitched[0]
    assert whole.symbols == ("SYN01", "SYN02")
    agent = tg.DistributionalPPO.load(tmp_path / "walk" / "fold_1" / "seed_0" / "agent")
    parts = [tg.backtest(agent, walked.folds[0].test.select(symbol)) for symbol in whole.symbols]
    np.testing.assert_allclose(walked.results[0][0].equity, (parts[0].equity + parts[1].equity) / 2)
    assert {len(result.net) for result in walked.baselines.values()} == {len(whole.net)}
