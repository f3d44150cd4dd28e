"""From settings to what is trained: bars, their split, the environment and a fresh learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailguard.algorithm.learner import Learner
from tailguard.algorithm.saving import LEARNERS
from tailguard.config import DataConfig, RunConfig, to_dict
from tailguard.data.prepare import PreparedBars, in_precision, prepare, with_rescaled_copies
from tailguard.data.published import with_published
from tailguard.data.sources import load_bars
from tailguard.data.splits import Split, split_bars
from tailguard.data.synthetic import SyntheticMarket, describe, make_market
from tailguard.data.windows import parse_size
from tailguard.envs.prepared_market import (
    MappedBars,
    PreparedMarket,
    check_same_setting,
    is_prepared_market,
    open_market,
)
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.experiment.faulty_feed import randomised_feeds
from tailguard.experiment.memory_needs import check_memory, check_synthetic
from tailguard.market.per_symbol import check_known

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

BOUND = (
    *("data.symbols", "data.calendar", "data.universe", "data.gaps", "data.volume_unit", "data.adjust", "data.events"),
    *("data.validation", "data.test", "data.embargo", "data.features", "data.feature_precision", "env.accounts"),
)
"""Settings that are fixed in a prepared market, besides those of the market's table, which the environment compares."""


@dataclass(frozen=True)
class MarketData:
    """The bars that the settings name, and their generator if they are synthetic."""

    bars: Bars | PreparedMarket
    """In memory, or prepared on disk."""
    synthetic: SyntheticMarket | None = None
    """The generator of the bars, which knows the optimal policy; none for bars from a file."""

    def describe(self) -> str:
        """Symbols, period and source in a line."""
        if self.synthetic is not None:
            return describe(self.synthetic)
        first, last = self.bars.end_points
        symbols = ", ".join(self.bars.symbols)
        text = f"{self.bars.source} · {symbols} · {first:%Y-%m-%d} → {last:%Y-%m-%d} · {len(self.bars):,} bars"
        if self.bars.sessions is None:
            return text
        return f"{text} · {self.bars.pace.per_week:g} a week, {self.bars.pace.per_year:,.1f} a year"


@dataclass(frozen=True)
class Experiment:
    """Everything built from a run's settings, before any training."""

    config: RunConfig
    market: MarketData
    """All bars, before they are split."""
    split: Split | PreparedMarket
    env: TradingEnv
    """Trades the training part."""
    learner: Learner
    """Untrained; it acts in `env`."""


def build(config: RunConfig, *, report: Callable[[str], None] = lambda _: None) -> Experiment:
    """Build everything that a training needs. `report` is called with a line on each part once it exists."""
    market = load_market(config)
    report(f"market   {market.describe()}")
    split = split_market(config, market.bars)
    report(f"split    {split.describe()}")
    learner = build_learner(config, prepare_training(config, split.train), config.training.seed)
    return Experiment(config, market, split, trading_env(learner), learner)


def load_market(config: RunConfig) -> MarketData:
    """The bars that the settings name, or the synthetic market with its generator."""
    data = config.data
    if data.path is None:
        check_synthetic(config)
        synthetic = make_market(data.synthetic_bars, seed=config.training.seed, signal=data.synthetic_signal)
        return MarketData(synthetic.bars, synthetic)
    bars = open_market(data.path) if is_prepared_market(Path(data.path)) else read_bars(data.path, data)
    check_known(config.market, bars.symbols, bars.source)
    return MarketData(bars)


def read_bars(path: str | Path, data: DataConfig) -> Bars:
    """The bars of a file or folder under these settings, of the symbols that they name."""
    bars = load_bars(
        path,
        calendar=data.calendar,
        gaps=data.gaps,
        volume_unit=data.volume_unit,
        adjust=data.adjust,
        events=data.events,
        universe=data.universe,
        delistings=data.delistings or None,
    )
    bars = bars.select(*data.symbols) if data.symbols else bars
    if data.published is None:
        return bars
    delay = timedelta(0) if data.published_delay is None else data.published_delay
    return with_published(bars, data.published, delay=delay, before=data.published_before)


def load_bars_in_memory(config: RunConfig) -> Bars:
    """The bars that the settings name, for work that needs all of them; a prepared market has one split only."""
    bars = load_market(config).bars
    if isinstance(bars, PreparedMarket):
        raise ConfigError(f"data.path: {bars.folder} is prepared for one split; a walk forward needs files of bars")
    return bars


def split_market(config: RunConfig, bars: Bars | PreparedMarket) -> Split | PreparedMarket:
    """Training, validation and test bars by the settings; a prepared market is already split."""
    if isinstance(bars, PreparedMarket):
        usual = bound_settings(RunConfig())
        for name, value in bound_settings(config).items():
            # A setting that did not exist when the market was prepared had the effect of today's default.
            check_same_setting(bars.folder, name, bars.settings.get(name, usual[name]), value)
        return bars
    sizes = (config.data.validation, config.data.test)
    validation, test = (parse_size(size) for size in sizes)
    return split_bars(bars, validation=validation, test=test, embargo=config.data.embargo)


def bound_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a prepared market depends on, by their names."""
    plain = to_dict(config)
    return {name: plain[name.partition(".")[0]][name.partition(".")[2]] for name in BOUND}


def prepare_training(config: RunConfig, bars: Bars | MappedBars) -> PreparedBars:
    """Training bars with their scaled features, computed once for all learners of a run."""
    factors, accounts = config.env.randomisation.volatility, config.env.accounts
    if isinstance(bars, MappedBars):
        if config.robust.feed:
            raise ConfigError(
                f"robust.feed: faults act on bars before features, and {bars.folder} holds features that are computed "
                "already. Train on the files of bars"
            )
        shared = bars.scaler.market_wide is not None
        if shared != (config.chosen.network.encoder != "flat"):
            raise ConfigError(
                f"network.encoder: {config.chosen.network.encoder} is requested; the market in {bars.folder} was "
                f"prepared for {'shared or attention' if shared else 'flat'}, which scales features "
                f"{'alike for all symbols' if shared else 'symbol by symbol'}. Use that, or prepare the bars again"
            )
        if factors:
            raise ConfigError(
                "env.randomisation.volatility: a market that is prepared on disk has no copies with other volatility; "
                "leave it empty, or train from files of bars"
            )
        return bars
    if factors and config.robust.feed:
        raise ConfigError("env.randomisation.volatility, robust.feed: choose one of them; both make copies of the bars")
    shared_scaling = config.chosen.network.encoder != "flat"
    prepared = prepare(bars, config.data.features or None, accounts=accounts, shared_scaling=shared_scaling)
    if config.robust.feed:
        prepared = randomised_feeds(config, bars, prepared)
    elif factors:
        prepared = with_rescaled_copies(prepared, bars, factors, accounts)
    return in_precision(prepared, config.data.feature_precision)


def build_env(config: RunConfig, bars: Bars | PreparedBars, seed: int) -> TradingEnv:
    """The environment that trades these training bars."""
    n_steps, length = config.chosen.n_steps, config.env.episode_length
    return TradingEnv(
        bars,
        config.market,
        config.num_envs,
        config.training.device,
        episode_length=length,
        features=None if isinstance(bars, PreparedBars) else config.data.features or None,
        accounts=config.env.accounts,
        reward=config.env.reward,
        shield=config.env.shield,
        constraints=config.env.constraints,
        volatility_half_life=config.risk.volatility_half_life if config.risk.limit is not None else 0,
        randomisation=config.env.randomisation,
        flat_by_close=config.env.flat_by_close,
        resident_bars=config.data.resident_bars,
        resident_blocks=config.data.resident_blocks,
        stagger=None if n_steps == length else n_steps,  # whole episodes begin together
        seed=seed,
    )


def build_learner(config: RunConfig, bars: Bars | PreparedBars, seed: int, other: TradingEnv | None = None) -> Learner:
    """A fresh learner on these training bars. Settings that cannot fit into memory are refused first.

    `other`: an environment of these settings, on whose market the learner trades too.
    """
    env = build_env(config, bars, seed) if other is None else other.sibling(seed)
    check_memory(config, env)
    kind, _ = LEARNERS[config.learner]
    learner: Learner = kind(env, config.chosen, seed=seed, risk=config.risk, robust=config.robust)
    return learner


def trading_env(learner: Learner) -> TradingEnv:
    """The environment of a run's learner, which trades bars."""
    env: Any = learner.env
    assert isinstance(env, TradingEnv)
    return env
