"""A finished run, opened again: its settings, its agent, and the bars that both were made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from tailguard.algorithm.ensemble import Ensemble, load_agent
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.data.prepare import prepare
from tailguard.data.splits import Split
from tailguard.data.synthetic import SyntheticMarket
from tailguard.envs.prepared_market import MappedBars, PreparedMarket
from tailguard.errors import BarsError, ConfigError
from tailguard.experiment.build import MarketData, load_market, split_market
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.settings import changed_since, load_run_config
from tailguard.places import recover
from tailguard.plugins import announce

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

SplitPart = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class TrainedRun:
    """The contents of a run's folder, and the market it was trained on."""

    folder: Path
    config: RunConfig
    agent: Learner | Ensemble
    market: MarketData
    """All bars, before they were split."""
    split: Split | PreparedMarket

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.folder)

    @property
    def bars(self) -> Bars | PreparedMarket:
        return self.market.bars

    @property
    def synthetic(self) -> SyntheticMarket | None:
        return self.market.synthetic

    def part(self, name: SplitPart) -> Bars:
        if isinstance(self.split, PreparedMarket):
            return self.split.bars(name)
        bars: Bars = getattr(self.split, name)
        return bars

    def select(self, symbol: str) -> TrainedRun:
        """The run on one of its symbols, for an agent that trades each symbol in an account of its own."""
        return replace(self, split=Split(*(self.part(name).select(symbol) for name in get_args(SplitPart))))


def open_run(folder: Path, *, trust_plugins: bool = False) -> TrainedRun:
    """Read a finished run; refuses bars that are no longer those the agent was trained on.

    `trust_plugins`: run the plugins that its settings name, see `read_run_config`.
    """
    config = read_run_config(folder, trust_plugins=trust_plugins)
    agent = load_run_agent(folder)
    market = load_market(config)
    run = TrainedRun(folder, config, agent, market, split_market(config, market.bars))
    _check_same_bars(run)
    return run


def read_run_config(folder: Path, *, trust_plugins: bool = False) -> RunConfig:
    """The settings of the run in this folder.

    `trust_plugins`: run the plugins that they name; else they are refused, unless this process has run them already.
    Warns of plugins that are no longer what the run was trained with.
    """
    layout = RunLayout(folder)
    if layout.walk_forward_page_path.is_file():
        page = layout.walk_forward_page_path
        raise ConfigError(f"{folder}: a walk forward, which has a page of its own: {page}")
    if not layout.is_run():
        missing = layout.config_path.name
        raise ConfigError(f"{folder}: no run here: {missing} is missing. Give the folder of a run, as runs/demo")
    config = load_run_config(layout.config_path, trust_plugins=trust_plugins)
    for change in changed_since(layout.config_path, config):
        announce(f"WARNING  {folder}: {change}: results may differ from those of the run; restore it to repeat them")
    return config


def load_run_agent(folder: Path) -> Learner | Ensemble:
    """The agent of the run in this folder."""
    path = RunLayout(folder).agent_path
    recover(path)
    if not path.is_dir():
        raise ConfigError(
            f"{folder}: the run has no agent yet: its training has not finished. Resume it with: "
            f"tailguard train --resume {folder}"
        )
    return load_agent(path)


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
        features, shared = run.config.data.features or None, then.market_wide is not None
        now = prepare(train, features, accounts=run.agent.spec.accounts, shared_scaling=shared).scaler
    same = then.names == now.names and all(
        np.allclose(mine, theirs, rtol=1e-6, atol=1e-12)
        for mine, theirs in ((then.center, now.center), (then.scale, now.scale))
    )
    if not same:
        raise BarsError(
            f"{source}: these are no longer the bars that {run.folder} was trained on: its features now have another "
            "scale. Bring back the data of the run, or name the bars to use with: tailguard backtest RUN --data FILE"
        )
