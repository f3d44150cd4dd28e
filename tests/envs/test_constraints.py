"""Limits on portfolios where they are in force: training, backtests, ensembles, and what comes after them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.config import RunConfig, load_config, to_dict
from tailguard.data.sources import load_bars
from tailguard.envs.constraints import Constraints
from tailguard.envs.episodes import TradingTask
from tailguard.envs.projection import project
from tailguard.envs.shield import Shield
from tailguard.envs.spec import TradingSpec
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult
from tailguard.experiment.build import build
from tailguard.market import MarketConfig, build_market, open_accounts
from tailguard.risk.exposure import Exposure

FEATURES = ("return_24", "rsi_14", "trend_24")
GROUPS = {"first": ("SYN01", "SYN02"), "second": ("SYN03",)}
LIMITS = Constraints(
    asset_max=0.3, groups=GROUPS, group_caps={"first": 0.4}, gross_max=0.6, net_min=-0.2, net_max=0.25, turnover_max=0.1
)


@pytest.fixture(scope="module")
def bars() -> Any:
    return tg.make_market(900, assets=4, seed=0).bars


def environment(bars: Any, **options: Any) -> tg.TradingEnv:
    return tg.TradingEnv(bars, num_envs=8, episode_length=32, features=FEATURES, **options)


def agent_of(kind: Any, env: tg.TradingEnv, seed: int = 0) -> Any:
    """An agent that has learned a little, with positions far beyond every limit."""
    plain = {"n_steps": 16, "hidden": (8,), "lstm_size": 8, "seed": seed}
    agent = kind(env, **plain).learn(2 * 8 * 16)
    with torch.no_grad():
        agent.policy.action_head.linear.weight.mul_(300)
    return agent


def assert_kept(targets: np.ndarray, held: np.ndarray, limits: Constraints, symbols: tuple[str, ...]) -> None:
    """Targets [T, A], written down from the definitions; `held` are the weights before."""
    rounding = 1e-6
    assert np.abs(targets).max() <= limits.asset_max + rounding  # type: ignore[operator]
    first = [symbols.index(name) for name in limits.groups["first"]]
    assert np.abs(targets[:, first]).sum(1).max() <= limits.group_caps["first"] + rounding
    assert np.abs(targets).sum(1).max() <= limits.gross_max + rounding  # type: ignore[operator]
    assert targets.sum(1).min() >= limits.net_min - rounding  # type: ignore[operator]
    assert targets.sum(1).max() <= limits.net_max + rounding  # type: ignore[operator]
    bound = limits.limits(symbols, len(symbols), 1.0)
    assert bound is not None
    forced = np.abs(project(torch.from_numpy(held), bound).numpy() - held).sum(1)
    assert (np.abs(targets - held).sum(1) <= np.maximum(limits.turnover_max, forced) + rounding).all()


@pytest.mark.parametrize("kind", [tg.DistributionalPPO, tg.PathwiseLearner])
def test_both_learners_train_and_are_backtested_within_the_limits(
    kind: Any, bars: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    decide = TradingTask.decide

    def watch(task: TradingTask, action: torch.Tensor, state: Any) -> Any:
        target, shielded = decide(task, action, state)
        seen.append((target.detach().double().numpy(), state.market.weights.detach().double().numpy()))
        return target, shielded

    monkeypatch.setattr(TradingTask, "decide", watch)
    env = environment(bars, constraints=LIMITS)
    agent = agent_of(kind, env)
    agent.learn(2 * 8 * 16)
    targets, held = (np.concatenate(part) for part in zip(*seen, strict=True))
    assert len(targets) >= 4 * 8 * 16
    assert_kept(targets, held, LIMITS, bars.symbols)
    assert np.abs(targets).sum(1).max() > 0.55
    result = tg.backtest(agent, bars, warn_in_sample=False, progress_bar=False)
    assert_kept(result.targets, before(result), LIMITS, bars.symbols)
    free = agent_of(kind, environment(bars))
    wild = tg.backtest(free, bars, warn_in_sample=False, progress_bar=False)
    assert np.abs(wild.targets).sum(1).max() > 0.95
    assert np.abs(np.diff(wild.targets, axis=0)).sum(1).max() > 0.5


def before(result: BacktestResult) -> np.ndarray:
    """Weights at the close at which each decision was made, [T, A]."""
    return np.vstack([np.zeros((1, result.weights.shape[1])), result.weights[:-1]])


def test_an_ensembles_exposure_throttle_and_shield_stay_within_the_limits(bars: Any) -> None:
    """Exposure comes before the limits, so does the throttle; the shield reduces after them."""
    env = environment(bars, constraints=LIMITS, shield=Shield(0.5, 0.2), volatility_half_life=24)
    members = [agent_of(tg.PathwiseLearner, env, seed) for seed in (0, 1)]
    exposure = Exposure(1.7, -0.003, 0.05, 0.9, -0.01, -0.004, -0.0029, 5.0)
    agent = Ensemble(members, exposure, throttled=True)
    result = tg.backtest(agent, bars, warn_in_sample=False, progress_bar=False)
    assert result.throttle is not None
    assert result.throttle.min() < 1
    assert result.shielded.any()
    assert_kept(result.targets[~result.shielded], before(result)[~result.shielded], LIMITS, bars.symbols)
    # Where the shield acted, it may have sold more than the turnover cap allows.
    assert_kept(result.targets, result.targets, LIMITS, bars.symbols)


def test_training_and_backtest_limit_alike(bars: Any) -> None:
    """The same wish and the same held weights: the tensor path of training and the plain one of a backtest."""
    env = environment(bars, constraints=LIMITS, dtype=torch.float64)
    state = env.task.begin(open_accounts(torch.full((6,), 300), 4, torch.float64))
    generator = torch.Generator().manual_seed(0)
    held = 0.1 * torch.randn(6, 4, generator=generator, dtype=torch.float64)
    state = replace(state, market=replace(state.market, weights=held))
    action = torch.rand(6, 4, generator=generator, dtype=torch.float64) * 2 - 1
    target, _ = env.task.decide(action, state)
    for account in range(6):
        wish = env.task.weights_of_one(action[account].tolist(), 300)
        alone = env.task.limit_one(wish, held[account].tolist(), 300)
        np.testing.assert_allclose(alone, target[account].numpy(), rtol=0, atol=1e-15)


def test_a_function_holds_what_its_limits_leave_alone(bars: Any) -> None:
    """NaN holds a position; one that drifts beyond its cap is brought back to it."""
    caps = Constraints(asset_max=0.25)

    def hold(moment: Any) -> np.ndarray:
        return np.full(4, 0.25) if moment.first else np.full(4, np.nan)

    result = tg.backtest(hold, bars, constraints=caps, progress_bar=False)
    drifted = before(result) > 0.25
    assert 10 < drifted[1:].sum() < drifted.size - 10
    np.testing.assert_array_equal(result.targets[1:][drifted[1:]], 0.25)
    assert np.isnan(result.targets[1:][~drifted[1:]]).all()
    with pytest.raises(ConfigError, match="those that it was trained under"):
        tg.backtest(agent_of(tg.PathwiseLearner, environment(bars)), bars, constraints=caps)


def test_absent_symbols_stay_at_0_in_a_portfolio_that_must_be_invested() -> None:
    frame = tg.make_market(500, assets=3, seed=1).bars.frame.drop("segment")
    late = frame["time"].unique().sort()[250]
    bars = load_bars(frame.filter((pl.col("symbol") != "SYN03") | (pl.col("time") >= late)), universe="ragged")
    limits = Constraints(long_only=True, net_min=0.9, asset_max=0.4)
    result = tg.backtest(lambda _: np.zeros(3), bars, constraints=limits, progress_bar=False)
    early = result.time <= int(late.timestamp() * 1000)
    assert early.sum() > 200
    np.testing.assert_array_equal(result.targets[early, 2], 0)
    # Two assets of at most 0.4 reach 0.8; three reach 0.9.
    np.testing.assert_allclose(result.targets[early].sum(1), 0.8, atol=1e-12)
    np.testing.assert_allclose(result.targets[~early].sum(1), 0.9, atol=1e-12)


def test_without_limits_nothing_is_there(bars: Any) -> None:
    env = environment(bars)
    assert env.task.limits is None
    assert environment(bars, constraints=Constraints(groups=GROUPS)).task.limits is None
    longs = environment(bars, constraints=Constraints(long_only=True))
    assert longs.action_space.low.tolist() == [0.0] * 4


def test_an_agent_keeps_its_limits_in_its_description(bars: Any) -> None:
    spec = TradingSpec.of(environment(bars, constraints=LIMITS))
    state = json.loads(json.dumps(spec.to_dict()))
    assert TradingSpec.from_dict(state).constraints == LIMITS
    del state["constraints"]
    assert TradingSpec.from_dict(state).constraints == Constraints()


def test_the_settings_reach_the_environment() -> None:
    """Tables and numbers by the command line's way; the environment of the run has them."""
    given = (
        "env.constraints.asset_caps={SYN01: 0.2}",
        "env.constraints.groups={all: [SYN01]}",
        "env.constraints.group_caps={all: 0.15}",
        "env.constraints.turnover_max=0.05",
        "data.synthetic_bars=3000",
    )
    config = load_config(None, given)
    assert config.env.constraints.groups == {"all": ("SYN01",)}
    assert load_config(None, (), base=config) == config
    assert to_dict(config)["env"]["constraints"]["asset_caps"] == {"SYN01": 0.2}
    limits = build(config).env.task.limits
    assert limits is not None
    assert limits.asset is not None
    assert limits.group is not None
    assert limits.turnover is not None
    assert (limits.asset.tolist(), limits.group.tolist(), float(limits.turnover)) == (
        pytest.approx([0.2]),
        pytest.approx([0.15]),
        pytest.approx(0.05),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"net_min": 0.5, "net_max": 0.3}, r"net_min: 0.5 is above env.constraints.net_max 0.3"),
        ({"net_min": 0.9, "cash_min": 0.2}, r"net_min: 0.9 leaves 0.1 in cash.*cash_min is 0.2"),
        ({"net_min": 0.9, "gross_max": 0.5}, r"net_min: 0.9 is above env.constraints.gross_max 0.5"),
        ({"asset_max": 0.0}, "asset_max: 0 is out of range"),
        ({"net_max": -0.1}, "net_max: -0.1 is out of range"),
        ({"turnover_max": 0.0}, "turnover_max: 0 is out of range"),
        ({"groups": {"a": ("X", "Y"), "b": ("Y",)}}, "Y is in a and in b"),
        ({"groups": {"a": "XY"}}, r"groups.a: 'XY' must be a list of symbols"),
        ({"groups": {"banks": ("X",)}, "group_caps": {"bank": 0.1}}, "no group 'bank'. Did you mean 'banks'"),
        ({"group_max": 0.1}, "no groups, so it would have no effect"),
    ],
)
def test_combinations_that_no_weights_keep_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Constraints(**settings)


def test_limits_that_do_not_fit_the_market_or_the_run_are_refused(bars: Any) -> None:
    with pytest.raises(ConfigError, match=r"net_min: 0.9 cannot be reached.* allow a sum of weights of 0.8"):
        environment(bars, constraints=Constraints(net_min=0.9, asset_max=0.2))
    caps = {"SYN01": 0.4, "SYN04": 0.5}
    with pytest.raises(ConfigError, match=r"0.9 cannot be reached.*of 0.7"):
        environment(bars, constraints=Constraints(net_min=0.9, groups=GROUPS, group_max=0.1, asset_caps=caps))
    with pytest.raises(ConfigError, match=r"no symbol 'SYN1' in these bars. Did you mean 'SYN01'"):
        environment(bars, constraints=Constraints(asset_caps={"SYN1": 0.2}))
    with pytest.raises(ConfigError, match=r"need env.accounts=portfolio"):
        environment(bars, accounts="per_symbol", constraints=Constraints(asset_caps={"SYN01": 0.2}))
    with pytest.raises(ConfigError, match=r"net_min: 0.5 keeps the account invested, and env.shield_shock"):
        environment(bars, constraints=Constraints(net_min=0.5), shield=Shield(0.1, 0.1))
    with pytest.raises(ConfigError, match=r"net_min.*risk.throttle must be able to"):
        load_config(None, ("env.constraints.net_min=0.5", "risk.limit=-0.04"))
    with pytest.raises(
        ConfigError, match=r"env.constraints.asset_mx: no such setting. Did you mean env.constraints.asset_max"
    ):
        load_config(None, ("env.constraints.asset_mx=0.5",))
    assert RunConfig().env.constraints == Constraints()


def test_rewards_have_the_right_slopes_through_the_limits(make_panel: Any) -> None:
    """Five bars with fees: rewards and weights in the actions, where caps, groups, net and turnover bind."""
    panel = replace(make_panel(8, 4, seed=2, volatility=0.05), symbols=("SYN01", "SYN02", "SYN03", "SYN04"))
    market = build_market(panel, MarketConfig(impact=0.5), dtype=torch.float64)
    task = TradingTask(
        market, torch.zeros(8, 1, dtype=torch.float64), ("none",), episode_length=8,
        limits=replace(LIMITS, turnover_max=0.3).limits(panel.symbols, 4, 1.0),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    actions = (torch.rand(5, 3, 4, generator=generator, dtype=torch.float64) * 2 - 1).requires_grad_()

    def value(x: torch.Tensor) -> torch.Tensor:
        state = task.begin(open_accounts(torch.zeros(3, dtype=torch.int64), 4, torch.float64))
        for action in x:
            state, _ = task.advance(state, task.decide(action, state)[0])
        return state.market.equity.log().sum() + state.market.weights.pow(2).sum()

    (found,) = torch.autograd.grad(value(actions), actions)
    assert float(found.abs().max()) > 1e-3
    with torch.no_grad():
        for index in range(actions.numel()):
            shift = torch.zeros_like(actions)
            shift.view(-1)[index] = 1e-6
            expected = float(value(actions + shift) - value(actions - shift)) / 2e-6
            assert float(found.view(-1)[index]) == pytest.approx(expected, abs=1e-7)
