"""What a run is made of, by its settings: bars, their parts, a fresh agent; and a finished run, opened again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.ensemble import load_agent as load_agent_of
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.saving import LEARNERS
from tailguard.config import RunConfig, load_run_config
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.data.sources import load_bars
from tailguard.data.splits import Split, split_bars
from tailguard.data.synthetic import SyntheticMarket, make_market
from tailguard.envs.mapped_market import MappedBars, PreparedMarket, is_prepared_market, open_market
from tailguard.envs.trading import TradingEnv
from tailguard.errors import BarsError, ConfigError, TailguardError
from tailguard.evaluate.accounts import pooled, separate
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import random_timing, standard_baselines
from tailguard.evaluate.needs import check_memory, check_synthetic
from tailguard.evaluate.prepared import check_settings
from tailguard.evaluate.trials import Trial, bars_hash, settings_hash, trials_path
from tailguard.places import recover

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tailguard.data.bars import Bars
    from tailguard.market import MarketConfig

AGENT = "agent"
OPTIMUM = "planted optimum"
RANDOM = "random timing"
"""The agent's own trades at other times: a policy of equal turnover that knows nothing."""
Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class TrainedRun:
    """What a run's folder holds, and what it was made from."""

    folder: Path
    config: RunConfig
    agent: Learner | Ensemble
    bars: Bars | PreparedMarket
    """All of them, before they were split."""
    split: Split | PreparedMarket
    synthetic: SyntheticMarket | None
    """The generator of the bars, which knows the best that could be done; none for bars from a file."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def part(self, name: Part) -> Bars:
        if isinstance(self.split, PreparedMarket):
            return self.split.bars(name)
        bars: Bars = getattr(self.split, name)
        return bars

    def select(self, symbol: str) -> TrainedRun:
        """The run on one of its symbols, for an agent that trades each symbol in an account of its own."""
        return replace(self, split=Split(*(self.part(name).select(symbol) for name in get_args(Part))))

    def trial(self, sharpe: float) -> Trial:
        """The run as the record of trials knows it, with the yearly Sharpe ratio of its test period."""
        ratio = sharpe if math.isfinite(sharpe) else None
        bars = self.bars.sha256 if isinstance(self.bars, PreparedMarket) else bars_hash(self.bars)
        return Trial(bars, settings_hash(self.config), self.name, ratio)

    @property
    def trials_path(self) -> Path:
        """The record of trials that the run belongs to."""
        return trials_path(self.folder)


def open_run(folder: Path) -> TrainedRun:
    """Read a finished run; refuses bars that are no longer those the agent was trained on."""
    config = run_config(folder)
    agent = load_agent(folder)
    bars, synthetic = market_of(config)
    run = TrainedRun(folder, config, agent, bars, split_of(config, bars), synthetic)
    _check_same_bars(run)
    return run


def run_config(folder: Path) -> RunConfig:
    """The settings of the run in this folder."""
    path, page = folder / "config.yaml", folder / "walk_forward.html"
    if page.is_file():
        raise ConfigError(f"{folder}: a walk forward, which has a page of its own: {page}")
    if not path.is_file():
        raise ConfigError(f"{folder}: no run here: {path.name} is missing. Give the folder of a run, as runs/demo")
    return load_run_config(path)


def load_agent(folder: Path) -> Learner | Ensemble:
    """The agent of the run in this folder."""
    path = folder / "agent"
    recover(path)
    if not path.is_dir():
        raise ConfigError(
            f"{folder}: the run has no agent yet: its training has not finished. Resume it with: "
            f"tailguard train --resume {folder}"
        )
    return load_agent_of(path)


def market_of(config: RunConfig) -> tuple[Bars | PreparedMarket, SyntheticMarket | None]:
    """The bars that the settings name, in memory or prepared on disk, or the synthetic market with its generator."""
    data = config.data
    if data.path is None:
        check_synthetic(config)
        market = make_market(data.synthetic_bars, seed=config.training.seed, signal=data.synthetic_signal)
        return market.bars, market
    if is_prepared_market(Path(data.path)):
        return open_market(data.path), None
    bars = load_bars(data.path, gaps=data.gaps, volume_unit=data.volume_unit)
    return (bars.select(*data.symbols) if data.symbols else bars), None


def bars_in_memory(config: RunConfig) -> Bars:
    """The bars that the settings name, for work that needs all of them; a prepared market has one split only."""
    bars, _ = market_of(config)
    if isinstance(bars, PreparedMarket):
        raise ConfigError(f"data.path: {bars.folder} is prepared for one split; a walk forward needs files of bars")
    return bars


def split_of(config: RunConfig, bars: Bars | PreparedMarket) -> Split | PreparedMarket:
    """Training, validation and test bars, as the settings cut them; a prepared market is cut already."""
    if isinstance(bars, PreparedMarket):
        check_settings(bars, config)
        return bars
    sizes = (config.data.validation, config.data.test)
    validation, test = (_size(size) for size in sizes)
    return split_bars(bars, validation=validation, test=test, embargo=config.data.embargo)


def build_agent(config: RunConfig, bars: Bars | PreparedBars, seed: int) -> Learner:
    """A fresh agent on these training bars."""
    chosen, length = config.chosen, config.env.episode_length
    env = TradingEnv(
        bars,
        config.market,
        config.num_envs,
        config.training.device,
        episode_length=length,
        features=None if isinstance(bars, PreparedBars) else config.data.features or None,
        accounts=config.env.accounts,
        reward=config.env.reward,
        shield=config.env.shield,
        volatility_half_life=config.risk.volatility_half_life if config.risk.limit is not None else 0,
        stagger=None if chosen.n_steps == length else chosen.n_steps,  # whole episodes begin together
        seed=seed,
    )
    check_memory(config, env)
    kind, _ = LEARNERS[config.learner]
    learner: Learner = kind(env, chosen, seed=seed, risk=config.risk)
    return learner


def _size(value: float | str) -> float | str:
    """A fraction written in YAML as text is still a fraction."""
    try:
        return float(value)
    except ValueError:
        return value


def _check_same_bars(run: TrainedRun) -> None:
    """The scaling that the training bars give now must be the one that the agent learned with."""
    if run.agent.spec is None:
        raise ConfigError(
            f"{run.folder}: its agent was not trained on a TradingEnv, so it cannot be backtested on bars"
        )
    then, source = run.agent.spec.scaler, run.config.data.path or "the synthetic market"
    train = run.split.train
    if isinstance(train, MappedBars):
        now = train.scaler
    else:
        now = prepare(train, run.config.data.features or None, accounts=run.agent.spec.accounts).scaler
    same = then.names == now.names and all(
        np.allclose(mine, theirs, rtol=1e-6, atol=1e-12)
        for mine, theirs in ((then.center, now.center), (then.scale, now.scale))
    )
    if not same:
        raise BarsError(
            f"{source}: these are no longer the bars that {run.folder} was trained on: its features now have another "
            "scale. Bring back the data of the run, or name the bars to use with: tailguard backtest RUN --data FILE"
        )


def beside_baselines(
    run: TrainedRun, bars: Bars, *, before_each: Callable[[str], None] = lambda _: None
) -> dict[str, BacktestResult]:
    """Backtests by name: the agent, the optimum of a synthetic market that knows it, and every baseline.

    `bars`: a part of the run's own split. `before_each`: called with each name, to show progress.
    """
    optimum = None
    if run.synthetic is not None and run.synthetic.signal > 0 and why_no_optimum(run) is None:
        optimum = _optimal_weights(run, run.synthetic, bars)
    return agent_and_baselines(run.agent, bars, run.config.market, optimum=optimum, before_each=before_each)


def share_of_optimum(results: Mapping[str, BacktestResult]) -> float:
    """The agent's log-growth as a share of the planted optimum's on the same bars.

    NaN where no optimum is known, where it did not grow, and where the agent is ruined.
    """
    if OPTIMUM not in results:
        return math.nan
    mine, best = (float(results[name].equity[-1]) for name in (AGENT, OPTIMUM))
    return math.log(mine) / math.log(best) if mine > 0 and best > 1 else math.nan


def why_no_optimum(run: TrainedRun) -> str | None:
    """Why the best policy on a synthetic market's planted signal is unknown for these settings; None where it is not.

    Settings that the dynamic programme does not cover, such as costs of a large part of the equity, are legal.
    """
    if run.synthetic is None or run.synthetic.signal == 0:
        return None
    try:
        run.synthetic.optimum(*_optimum_settings(run.config))
    except TailguardError as error:
        return str(error)
    return None


def agent_and_baselines(
    agent: Learner | Ensemble,
    bars: Bars,
    market: MarketConfig,
    *,
    delay: int = 0,
    noise: float = 0.0,
    optimum: np.ndarray | None = None,
    seed: int = 0,
    before_each: Callable[[str], None] = lambda _: None,
) -> dict[str, BacktestResult]:
    """Backtests by name: the agent, the best weights if they are known, and every baseline under the same costs.

    An agent that trades each symbol in an account of its own is shown as one capital, shared out equally among the
    symbols at the start, and so is every baseline. `noise` is on the agent's features, `seed` also that of the random
    times of its trades.
    """
    parts = separate(bars, "portfolio" if agent.spec is None else agent.spec.accounts)

    # The bar of the whole work shows its progress, and `overlap` tells more exactly what a run has seen.
    trade_bars = partial(backtest, progress_bar=False, warn_in_sample=False)

    def each(trade: Callable[[Bars, int], BacktestResult]) -> list[BacktestResult]:
        return [trade(part, number) for number, part in enumerate(parts)]

    before_each(AGENT)
    own = each(lambda part, _: trade_bars(agent, part, market, delay=delay, noise=noise, seed=seed))
    results = {AGENT: own}
    # What an agent cannot trade, for want of features, no baseline may.
    parts = [_from_first_trade(part, result) for part, result in zip(parts, own, strict=True)]
    if optimum is not None:
        before_each(OPTIMUM)
        results[OPTIMUM] = [trade_bars(optimum, bars, market, delay=delay)]
    for name, policy in standard_baselines(market.leverage, market.allow_short).items():
        before_each(name)
        results[name] = [trade_bars(policy, part, market, delay=delay) for part in parts]
    before_each(RANDOM)
    draw = np.random.default_rng(seed)
    # The agent's decisions as they filled, so a delay is in them already.
    results[RANDOM] = each(lambda part, number: trade_bars(random_timing(own[number], part, draw), part, market))
    return {name: pooled(found) for name, found in results.items()}


def _from_first_trade(bars: Bars, result: BacktestResult) -> Bars:
    """The same bars, to be traded from the bar at whose close the result's first decision was made."""
    first = datetime.fromtimestamp(int(result.time[0]) / 1000, UTC) - bars.frequency
    return replace(bars, first=first) if first > bars.start else bars


def _optimal_weights(run: TrainedRun, synthetic: SyntheticMarket, bars: Bars) -> np.ndarray:
    weights = synthetic.oracle_weights(*_optimum_settings(run.config))
    times = synthetic.bars.frame["time"].unique(maintain_order=True)
    first, last = bars.end_points
    return weights[np.flatnonzero(((times >= first) & (times <= last)).to_numpy())]


def _optimum_settings(config: RunConfig) -> tuple[float, float, float, bool]:
    """Cost of a trade, leverage, funding rate and whether shorts are allowed, as the planted optimum takes them."""
    market = config.market
    return market.fee + market.half_spread, market.leverage, market.funding_rate, market.allow_short
