"""Backtests: the accounting of the simulator, the inputs of training, and clear refusals."""

from __future__ import annotations

import warnings
from dataclasses import replace
from datetime import timedelta

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.envs.shield import Shield
from tailguard.envs.spec import TradingSpec, task_for
from tailguard.errors import BarsError, BarsWarning, ConfigError, TailguardError
from tailguard.evaluate.baselines import HOLD, Moment
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on
from tailguard.evaluate.metrics import cvar
from tailguard.market import MarketConfig, build_market, open_accounts, step
from tailguard.risk.exposure import Exposure, calibrate_exposure
from tailguard.risk.throttle import Throttle


def test_an_array_of_weights_is_the_simulator_bar_by_bar(bars) -> None:
    targets = np.random.default_rng(0).uniform(-1, 1, (len(bars), 1))
    result = tg.backtest(targets, bars)
    market = build_market(bars.panel(), MarketConfig(), dtype=torch.float64)
    state = open_accounts(torch.tensor([0]), 1, torch.float64)
    equity = [1.0]
    for target in targets[:-1]:
        state, _ = step(market, state, torch.tensor(target)[None])
        equity.append(state.equity.item())
    np.testing.assert_allclose(result.equity, equity, rtol=1e-12)


def test_every_bar_is_accounted_for(bars) -> None:
    targets = np.random.default_rng(1).uniform(-1, 1, (len(bars), 1))
    result = tg.backtest(targets, bars)
    paid = sum(result.costs.values())
    np.testing.assert_allclose(result.net, result.pnl - paid, atol=1e-15)
    np.testing.assert_allclose(result.equity[1:] / result.equity[:-1] - 1, result.net, atol=1e-14)
    frame = result.frame()
    assert frame.height == len(bars) - 1
    assert frame["time"][0] == bars.frame["time"][1]


def test_a_function_sees_the_past_alone_and_equals_its_array(bars) -> None:
    panel = bars.panel()
    seen: list[int] = []

    def momentum(now: Moment) -> np.ndarray:
        assert len(now.close) == now.row + 1
        assert now.time_ms == panel.time[now.row]
        seen.append(now.row)
        if now.row % 3:
            return np.array([HOLD])
        return np.sign(now.close[-1] - now.close[0]) * 0.5

    by_function = tg.backtest(momentum, bars)
    assert seen == list(range(len(bars) - 1))
    targets = np.sign(panel.close - panel.close[0]) * 0.5
    targets[np.arange(len(bars)) % 3 != 0] = HOLD
    by_array = tg.backtest(targets, bars)
    np.testing.assert_array_equal(by_function.equity, by_array.equity)
    assert (by_array.turnover[1::3] == 0).all()


@pytest.fixture(scope="module")
def agent(bars) -> tg.DistributionalPPO:
    env = tg.TradingEnv(bars, num_envs=4, episode_length=32, dtype=torch.float64)
    return tg.DistributionalPPO(env, n_steps=16, hidden=(16,), lstm_size=16, quantiles=8, seed=1).learn(128)


def test_an_agent_sees_in_a_backtest_what_it_would_see_in_its_environment(bars, agent) -> None:
    """The first window of the backtest replayed in an environment: the same observations, bit for bit."""
    result = tg.backtest(agent, bars)
    env = tg.TradingEnv(bars, num_envs=1, episode_length=32, dtype=torch.float64)
    env.reset()
    env.starts = env.starts[:1]
    seen = env.reset()
    memory, weights, rewards = None, [], []
    for index in range(32):
        action, memory = agent.predict(
            seen.numpy(), state=memory, episode_start=np.array([index == 0]), deterministic=True
        )
        taken = env.step(torch.from_numpy(action))
        weights.append(env.task.to_weights(torch.from_numpy(action).double()).item())
        rewards.append(taken.reward.item())
        seen = taken.obs
    np.testing.assert_array_equal(result.targets[:32, 0], weights)
    np.testing.assert_array_equal(np.log1p(result.net[:32]).astype(np.float32), np.array(rewards, np.float32))


@pytest.mark.parametrize("shield", [None, Shield(shock=0.2, budget=0.02)])
@pytest.mark.parametrize("assets", [1, 2])
def test_an_agents_backtest_is_a_plain_loop_of_observe_predict_and_step(assets, shield) -> None:
    """Every bar through the public pieces, one tensor at a time: what the backtest must not differ from."""
    bars = tg.make_market(1_100, assets=assets, seed=5).bars
    env = tg.TradingEnv(bars, num_envs=4, episode_length=32, accounts="portfolio", shield=shield)
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(16,), lstm_size=16, seed=2).learn(128)
    with torch.no_grad():
        agent.policy.action_head.linear.weight.mul_(100)  # positions of a trained agent, not of one that begins
    result = tg.backtest(agent, bars)
    assert np.abs(result.weights).mean() > 0.02

    task, usable, panel = task_for(agent.spec, bars, None, torch.float64)
    rows = np.flatnonzero(usable & panel.tradeable)
    assert (np.diff(rows) == 1).all()
    state = task.begin(open_accounts(torch.tensor(rows[:1]), assets, torch.float64))
    memory, targets, weights, equity, held_back = None, [], [], [1.0], []
    for row in rows[:-1]:
        if row > rows[0] and (row - rows[0]) % 32 == 0:
            state = task.begin(state.market)
        start = np.array([(row - rows[0]) % 32 == 0])
        action, memory = agent.predict(task.observe(state).numpy(), memory, start, deterministic=True)
        target, flags = task.decide(torch.from_numpy(action).double(), state)
        state, _ = task.advance(state, target)
        targets.append(target[0].numpy())
        weights.append(state.market.weights[0].numpy())
        equity.append(float(state.market.equity))
        held_back.append(bool(flags))
    np.testing.assert_allclose(result.targets, targets, atol=1e-6)
    np.testing.assert_allclose(result.weights, weights, atol=1e-6)
    np.testing.assert_allclose(result.equity, equity, rtol=1e-9)
    np.testing.assert_array_equal(result.shielded, held_back)
    assert result.shielded.any() == (shield is not None)


def test_an_agent_known_by_predict_alone_trades_as_the_agent_itself(bars, agent) -> None:
    class ByPredict:
        spec = agent.spec

        def predict(self, *args, **options):
            return agent.predict(*args, **options)

    np.testing.assert_array_equal(tg.backtest(ByPredict(), bars).targets, tg.backtest(agent, bars).targets)


def test_an_action_that_is_not_a_number_is_refused(bars, agent) -> None:
    class Broken:
        spec = agent.spec

        def predict(self, observation, state=None, episode_start=None, deterministic=False):  # noqa: ARG002
            return np.full((1, 1), np.nan, np.float32), None

    with pytest.raises(TailguardError, match="not a number"):
        tg.backtest(Broken(), bars)


def test_an_agents_window_starts_anew_while_its_account_goes_on(bars, agent) -> None:
    result = tg.backtest(agent, bars)
    assert np.abs(result.weights[31]) > 0
    # At the end of a window nothing is sold: the next target starts from the position that is there.
    drift = np.abs(result.targets[32:160:32, 0] - result.weights[31:159:32, 0])
    np.testing.assert_allclose(result.turnover[32:160:32], drift, rtol=0.2, atol=1e-3)


def test_positions_are_closed_before_a_gap(bars) -> None:
    rows = pl.int_range(len(bars))
    shift = pl.when(rows >= 600).then(timedelta(days=3)).otherwise(timedelta(0))
    split = replace(
        bars,
        frame=bars.frame.with_columns(
            time=(pl.col("time") + shift).cast(bars.frame["time"].dtype),
            segment=(pl.col("segment") + (rows >= 600).cast(pl.Int32)),
        ),
    )
    result = tg.backtest(np.ones((len(bars), 1)), split)
    at_gap = int(np.flatnonzero(result.time == split.panel().time[599])[0])
    assert result.weights[at_gap] == 0
    assert result.weights[at_gap - 1] > 0.9
    assert result.weights[at_gap + 1] > 0.9
    assert len(result.net) == len(bars) - 2  # neither stretch's first bar can be filled at


def test_a_delayed_fill_is_the_decision_of_an_earlier_bar(bars) -> None:
    targets = np.random.default_rng(2).uniform(-1, 1, (len(bars), 1))
    later = tg.backtest(targets, bars, delay=2)
    shifted = np.vstack([np.full((2, 1), HOLD), targets[:-2]])
    np.testing.assert_array_equal(later.equity, tg.backtest(shifted, bars).equity)
    np.testing.assert_array_equal(later.targets[2:], targets[: len(bars) - 3])


class Deaf:
    """An agent that writes down what it is shown and always stays flat."""

    def __init__(self, spec: TradingSpec) -> None:
        self.spec = spec
        self.seen: list[np.ndarray] = []

    def predict(self, observation, state=None, episode_start=None, deterministic=False):  # noqa: ARG002
        assert deterministic
        self.seen.append(observation[0].copy())
        return np.zeros((1, 1), np.float32), state


def test_noise_moves_features_by_its_size_and_leaves_the_account_alone(bars, agent) -> None:
    seen = {noise: Deaf(agent.spec) for noise in (0.0, 0.5)}
    for noise, deaf in seen.items():
        tg.backtest(deaf, bars, noise=noise, seed=3)
    clean, noisy = (np.stack(deaf.seen) for deaf in seen.values())
    account = clean.shape[1] - 4  # the weight, pnl, drawdown and time left
    np.testing.assert_array_equal(clean[:, account:], noisy[:, account:])
    deviation = clean[:, :account].std(0)
    unclipped = np.abs(clean[:, :account]) < 5
    moved = (noisy - clean)[:, :account] / np.where(deviation > 0, deviation, 1)
    np.testing.assert_allclose([moved[rows, i].std() for i, rows in enumerate(unclipped.T)], 0.5, rtol=0.1)
    np.testing.assert_allclose(moved.mean(0), 0, atol=0.07)


def test_noise_is_refused_where_there_is_nothing_to_perturb(bars) -> None:
    with pytest.raises(ConfigError, match="features"):
        tg.backtest(np.zeros((len(bars), 1)), bars, noise=0.1)
    with pytest.raises(ConfigError, match="delay"):
        tg.backtest(np.zeros((len(bars), 1)), bars, delay=-1)


def test_a_liquidated_account_stays_flat(bars) -> None:
    result = tg.backtest(np.full((len(bars), 1), 50.0), bars, MarketConfig(leverage=50.0))
    assert result.liquidated
    first = int(np.flatnonzero(result.costs["liquidation"])[0])
    assert (result.weights[first:] == 0).all()
    assert (result.turnover[first + 1 :] == 0).all()
    assert (result.equity >= 0).all()


def test_costs_reach_the_figures(bars) -> None:
    targets = np.where(np.arange(len(bars)) % 2 == 0, 0.5, -0.5)[:, None]
    cheap = tg.backtest(targets, bars, MarketConfig(fee=0.0005)).metrics
    dear = tg.backtest(targets, bars, MarketConfig(fee=0.001)).metrics
    assert dear["growth_per_year"] < cheap["growth_per_year"]
    assert dear["cost_fee_per_year"] == pytest.approx(2 * cheap["cost_fee_per_year"], rel=0.02)
    assert cheap["turnover_per_day"] == pytest.approx(24.0, rel=0.05)


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (np.full((1_200, 1), 1.5), ConfigError, r"1\.5 times equity.*market\.leverage allows 1"),
        (np.full((1_200, 1), np.inf), TailguardError, "finite"),
        (np.zeros((10, 1)), ConfigError, r"\(10, 1\).*\(1200, 1\)"),
        (lambda _: np.zeros(3), ConfigError, "one for each asset"),
    ],
)
def test_what_cannot_be_traded_is_refused(bars, policy, error, message) -> None:
    with pytest.raises(error, match=message):
        tg.backtest(policy, bars)


def test_shorts_are_refused_where_they_are_not_allowed(bars) -> None:
    with pytest.raises(ConfigError, match="allow_short"):
        tg.backtest(np.full((len(bars), 1), -0.5), bars, MarketConfig(allow_short=False))


def test_an_agent_refuses_bars_of_another_frequency(agent) -> None:
    other = tg.make_market(600, seed=1, frequency="15m").bars
    with pytest.raises(BarsError, match=r"15 minutes.*60 minutes"):
        tg.backtest(agent, other)


def test_a_spec_survives_json(agent) -> None:
    import json

    spec = agent.spec
    again = TradingSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again.to_dict() == spec.to_dict()
    assert again.scaler.digest() == spec.scaler.digest()
    assert again.market == spec.market


def test_a_result_is_short_in_a_notebook_and_can_be_plotted(bars) -> None:
    result = tg.backtest(np.random.default_rng(1).uniform(-1, 1, (len(bars), 1)), bars)
    line, table = repr(result), result._repr_html_()
    gain = f"{100 * (result.equity[-1] - 1):+.1f} %"
    assert gain in line
    assert gain in table
    assert "1,199" in line
    assert len(line) < 300
    assert "<script" not in replace(result, symbols=("<script>",))._repr_html_()
    chart = result.plot()
    equity, falls = (np.array(trace.y) for trace in chart.data)
    np.testing.assert_allclose(equity, result.equity)
    np.testing.assert_allclose(falls, 100 * (result.equity / np.maximum.accumulate(result.equity) - 1))


def test_an_agent_is_short_in_a_notebook(agent) -> None:
    for shown in (repr(agent), agent._repr_html_()):
        assert "LSTM 16 × 1" in shown
        assert "128" in shown
        assert len(shown) < 1_000


# --- bars that the agent was trained on -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split(bars):
    return tg.split_bars(bars, validation=0.2, test=0.2, embargo="1d")


@pytest.fixture(scope="module")
def careful(split) -> tg.DistributionalPPO:
    """Trained on the training part alone."""
    env = tg.TradingEnv(split.train, num_envs=4, episode_length=32, features=["return_4"])
    return tg.DistributionalPPO(env, n_steps=16, hidden=(4,), lstm_size=4, quantiles=4, seed=1)


def test_a_backtest_on_training_bars_warns_with_their_share_and_dates(bars, split, careful) -> None:
    times = bars.frame["time"]
    seen = times.filter(times.is_in(split.train.frame["time"].to_list()))
    share = f"{100 * len(seen) / len(times):.3g} % of the times"
    dates = f"{seen.min():%Y-%m-%d %H:%M} to {seen.max():%Y-%m-%d %H:%M}"
    with pytest.warns(BarsWarning, match=f"in-sample: .*SYN01 at {share} of these bars, {dates}") as caught:
        warned = tg.backtest(careful, bars)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", BarsWarning)
        quiet = tg.backtest(careful, bars, warn_in_sample=False)
    np.testing.assert_array_equal(warned.equity, quiet.equity)


def test_a_backtest_on_other_bars_does_not_warn(bars, split, careful, tmp_path) -> None:
    """Later bars, though their lead-in is older; another symbol; a rule; an agent that does not know its bars."""
    other = replace(bars, frame=bars.frame.with_columns(symbol=pl.lit("OTHER")))
    older = Deaf(replace(careful.spec, training_bars=None))
    careful.save(tmp_path / "agent")
    loaded = tg.DistributionalPPO.load(tmp_path / "agent")
    with warnings.catch_warnings():
        warnings.simplefilter("error", BarsWarning)
        for part in (split.validation, split.test):
            tg.backtest(loaded, part)
        tg.backtest(careful, other)
        tg.backtest(np.ones((len(bars), 1)), bars)
        tg.backtest(older, bars)
    with pytest.warns(BarsWarning, match="in-sample"):
        tg.backtest(loaded, split.train)


def test_a_throttled_account_that_is_ruined_stays_at_nothing(bars: tg.Bars) -> None:
    """A price that rises thirtyfold takes all of a short account; its later windows lose nothing more."""
    env = tg.TradingEnv(bars, num_envs=4, episode_length=24)
    agent = tg.DistributionalPPO(env, n_steps=24, hidden=(8,), lstm_size=8, seed=0)
    with torch.no_grad():
        agent.policy.action_head.linear.bias.fill_(-5.0)
    ensemble = Ensemble([agent], Exposure(1.0, -0.9, 0.2, 0.9, -0.01, -0.01, -0.01, 5.0), throttled=True)
    row = pl.arange(bars.frame.height)
    risen = [pl.when(row >= bars.frame.height - 200).then(30 * pl.col(name)).otherwise(pl.col(name)).alias(name)
             for name in ("open", "high", "low", "close")]  # fmt: skip
    found = tg.backtest(ensemble, replace(bars, frame=bars.frame.with_columns(risen)), warn_in_sample=False)
    assert found.equity[-1] == 0
    assert found.throttle is not None
    assert np.isfinite(found.throttle).all()


def test_a_throttle_follows_the_windows_of_the_account(bars: tg.Bars) -> None:
    """The factors again, from the equity at the windows' ends; and without the switch nothing is throttled."""
    env = tg.TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"])
    agent = tg.PathwiseLearner(env, n_steps=24, hidden=(6,), lstm_size=5, critic="scalar")
    agent.policy.action_head.linear.bias.data[0] = 1.0  # always long
    exposure = Exposure(0.8, -0.002, 0.2, 0.9, -0.004, -0.001, -0.002, 3.0)
    ensemble = Ensemble([agent], exposure, throttled=True)
    found = tg.backtest(ensemble, bars, warn_in_sample=False)
    free = tg.backtest(ensemble, bars, warn_in_sample=False, throttle=False)
    assert free.throttle is None
    assert free.metrics["throttled"] == 0
    throttle = Throttle(-0.002, 0.2)
    for begin in range(0, len(found.net), 24):
        np.testing.assert_allclose(found.throttle[begin : begin + 24], throttle.factor)
        end = min(begin + 24, len(found.net))
        throttle.observe(found.equity[end] / found.equity[begin] - 1)
    assert 0.2 < found.metrics["throttled"] < 1
    assert found.unthrottled_return == pytest.approx(free.equity[-1] - 1, abs=0.01)
    assert abs(found.unthrottled_return - (found.equity[-1] - 1)) > 0.03  # what it cost, or saved
    first = int(np.argmax(found.throttle < 1))
    assert first > 0
    np.testing.assert_array_equal(found.targets[:first], free.targets[:first])
    assert (np.abs(found.targets[first:]) < np.abs(free.targets[first:])).mean() > 0.9
    plain = tg.backtest(Ensemble([agent], exposure), bars, warn_in_sample=False)
    np.testing.assert_array_equal(plain.equity, free.equity)
    assert (plain.unthrottled_return, free.unthrottled_return) == (None, None)
    stopped = tg.backtest(Ensemble([agent], exposure, throttled=Throttle(-1e-5, 0.2)), bars, warn_in_sample=False)
    assert stopped.throttle.min() == 0
    assert stopped.unthrottled_return == free.equity[-1] - 1


def test_losses_before_a_gap_reach_the_throttle(bars: tg.Bars) -> None:
    """Stretches shorter than a window: counted in traded bars, windows end in the middle of a later stretch."""
    env = tg.TradingEnv(bars, num_envs=4, episode_length=48, features=["return_24"])
    agent = tg.PathwiseLearner(env, n_steps=48, hidden=(6,), lstm_size=5, critic="scalar")
    agent.policy.action_head.linear.bias.data[0] = 1.0  # always long
    ensemble = Ensemble([agent], Exposure(0.8, -0.002, 0.2, 0.9, -0.004, -0.001, -0.002, 3.0), throttled=True)
    stretch = pl.int_range(len(bars)) // 200  # 32 bars after those that the feature needs
    frame = bars.frame.with_columns(
        time=(pl.col("time") + stretch * timedelta(days=3)).cast(bars.frame["time"].dtype),
        segment=stretch.cast(pl.Int32),
    )
    found = tg.backtest(ensemble, replace(bars, frame=frame), warn_in_sample=False)
    throttle = Throttle(-0.002, 0.2)
    for begin in range(0, len(found.net), 48):
        np.testing.assert_allclose(found.throttle[begin : begin + 48], throttle.factor)
        end = min(begin + 48, len(found.net))
        throttle.observe(found.equity[end] / found.equity[begin] - 1)
    assert 0 < found.metrics["throttled"] < 1


def doubled_from(bars: tg.Bars, row: int) -> tg.Bars:
    """The bars with all returns after this row twice as large."""
    anchor = float(bars.frame["close"][row - 1])
    late = pl.int_range(pl.len()) >= row
    larger = [
        pl.when(late).then(pl.col(name) ** 2 / anchor).otherwise(pl.col(name)).alias(name)
        for name in ("open", "high", "low", "close")
    ]
    return replace(bars, frame=bars.frame.with_columns(*larger))


def test_volatility_that_doubles_overnight_breaks_the_limit_only_for_a_while() -> None:
    """A trained agent, calibrated on a calm market and backtested through the change: four months before it, ten after.

    With both volatility scaling and the throttle the tail of all windows after the change is at the limit, and inside
    it after 30 days, which the scaling and the throttle need to notice; with neither it is half as deep again.
    """
    limit, length, change = -0.01, 24, 3_000
    after = doubled_from(tg.make_market(10_000, seed=200, signal=20.0).bars, change)
    held = tg.make_market(6_000, seed=100, signal=20.0).bars
    tails = {}
    for half_life in (48, 0):
        env = tg.TradingEnv(
            tg.make_market(8_000, seed=0, signal=20.0).bars,
            num_envs=128,
            episode_length=length,
            features=["return_1", "return_24", "taker_imbalance_1", "taker_imbalance_6"],
            volatility_half_life=half_life,
        )
        agent = tg.PathwiseLearner(env, risk=tg.RiskConfig(limit=limit, alpha=0.1), hidden=(8,), lstm_size=8)
        agent.learn(30 * 128 * length)
        (part,) = episodes_on(agent.spec, held)

        def outcomes_at(
            exposure: float, part: HeldOutEpisodes = part, agent: tg.PathwiseLearner = agent
        ) -> torch.Tensor:
            return part.trade(Ensemble([agent], exposure)).measured

        exposure = calibrate_exposure(outcomes_at, limit, alpha=0.1, overlap=8)
        on = half_life > 0
        result = tg.backtest(Ensemble([agent], exposure, throttled=True), after, throttle=on)
        ends = result.equity[::length]
        windows = ends[1:] / ends[:-1] - 1
        calm = change // length
        tails[on] = [cvar(part, 0.1) / limit for part in (windows[:calm], windows[calm:], windows[calm + 30 :])]
        assert (result.throttle is not None) == on
    before, all_after, later = tails[True]
    assert before <= 1
    assert all_after <= 1.05
    assert later <= 1
    before, all_after, _ = tails[False]
    assert before <= 1.05
    assert all_after > 1.4


def test_the_summary_of_a_backtest_of_many_symbols_is_short() -> None:
    bars = tg.make_market(100, assets=60).bars
    result = tg.backtest(np.full((100, 60), 1 / 60), bars, progress_bar=False)
    assert len(repr(result)) < 220
    assert "SYN03 … (60 in all)" in repr(result)
    assert "(60 in all)" in result._repr_html_()
