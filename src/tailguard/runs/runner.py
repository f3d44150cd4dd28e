"""One run: bars, split, training, and an honest look at the test period."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console

from tailguard._version import __version__
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.config import RunConfig, to_yaml
from tailguard.data.sources import load_bars
from tailguard.data.splits import Split, split_bars
from tailguard.data.synthetic import SyntheticMarket, describe, make_market
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import standard_baselines
from tailguard.evaluate.table import growth, print_table
from tailguard.monitor.writers import JsonlWriter, TensorBoardWriter

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

AGENT = "agent"
ORACLE = "planted optimum"


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    folder: Path
    agent: DistributionalPPO
    results: Mapping[str, BacktestResult]
    """Backtests on the test period, by name: the agent, the baselines, and the optimum if it is known."""

    @property
    def captured(self) -> float:
        """The agent's log-growth as a share of the planted optimum's on the same bars; NaN where none is known."""
        if ORACLE not in self.results:
            return math.nan
        mine, best = (math.log(self.results[name].equity[-1]) for name in (AGENT, ORACLE))
        return mine / best if best > 0 else math.nan


def train(config: RunConfig, folder: Path, console: Console, *, replace: bool = False) -> RunResult:
    """Train an agent as the config says, keep it in `folder`, and show what it does on the test period."""
    _claim(folder, replace)
    if config.training.threads:
        torch.set_num_threads(config.training.threads)
    console.print(
        f"[bold]Tailguard {__version__}[/bold] · {config.training.device}, {torch.get_num_threads()} threads "
        f"· seed {config.training.seed} · {folder}"
    )
    bars, synthetic = _bars(config)
    console.print(f"market   {describe(synthetic) if synthetic else _describe_bars(bars)}", soft_wrap=True)
    data = config.data
    split = split_bars(bars, validation=_size(data.validation), test=_size(data.test), embargo=data.embargo)
    console.print(f"split    {split.describe()}", soft_wrap=True)
    agent = _agent(config, split)
    console.print(f"agent    {describe_agent(agent)}", soft_wrap=True)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    writers = [JsonlWriter(folder / "metrics.jsonl"), TensorBoardWriter(folder / "tensorboard")]
    agent.learn(config.training.total_timesteps, callback=writers, progress_bar=True)
    agent.save(folder / AGENT)
    result = RunResult(folder, agent, _evaluate(agent, config, split.test, synthetic))
    console.print()
    print_table(result.results, "test, net of costs", console)
    console.print(f"\nverdict  {verdict(result)}", soft_wrap=True)
    console.print(f"saved    {folder / AGENT}  (curves: tensorboard --logdir {folder})", soft_wrap=True)
    return result


def verdict(result: RunResult) -> str:
    """The outcome in words, also when it is a bad one."""
    agent = result.results[AGENT].metrics
    held = result.results["buy & hold"].metrics
    better = agent["growth_per_year"] > held["growth_per_year"]
    won = agent["growth_per_year"] > 0
    words = (
        f"out of sample the agent {'grew' if won else 'lost'}: {growth(agent['growth_per_year'])} a year net of costs, "
        f"{'more' if better else 'less'} than buy & hold ({growth(held['growth_per_year'])})"
    )
    if not math.isnan(result.captured):
        words += f"; that is {100 * result.captured:.0f} % of the log-growth of the planted optimum on these bars"
    if not won:
        words += ". It lost money: do not trade it"
    return words + "."


def describe_agent(agent: DistributionalPPO) -> str:
    """The network and the length of training in one line."""
    network = agent.config.network
    memory = "no memory" if network.memory == "none" else f"LSTM {network.lstm_size} ({network.memory})"
    critics = "twin critics" if network.twin_critics else "one critic"
    spread = {"quantile": f"{network.quantiles} quantiles", "categorical": f"{network.atoms} atoms", "scalar": "scalar"}
    size = sum(parameter.numel() for parameter in agent.agent.parameters())
    return (
        f"{memory} · {critics}, {spread[network.critic]} · {size:,} parameters · "
        f"{agent.env.num_envs} accounts × {agent.config.n_steps} steps a rollout"
    )


def _claim(folder: Path, replace: bool) -> None:
    """Make the folder, before any work is done for it."""
    if folder.exists() and not replace and any(folder.iterdir()):
        raise ConfigError(f"{folder}: this run exists already; choose another --name or remove the folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error}") from error


def _bars(config: RunConfig) -> tuple[Bars, SyntheticMarket | None]:
    data = config.data
    if data.path is None:
        market = make_market(data.synthetic_bars, seed=config.training.seed, signal=data.synthetic_signal)
        return market.bars, market
    bars = load_bars(data.path, gaps=data.gaps, volume_unit=data.volume_unit)
    return (bars.select(*data.symbols) if data.symbols else bars), None


def _describe_bars(bars: Bars) -> str:
    first, last = bars.end_points
    return f"{bars.source} · {', '.join(bars.symbols)} · {first:%Y-%m-%d} → {last:%Y-%m-%d} · {len(bars):,} bars"


def _size(value: float | str) -> float | str:
    """A fraction written in YAML as text is still a fraction."""
    try:
        return float(value)
    except ValueError:
        return value


def _agent(config: RunConfig, split: Split) -> DistributionalPPO:
    env = TradingEnv(
        split.train,
        config.market,
        config.env.num_envs,
        config.training.device,
        episode_length=config.env.episode_length,
        features=config.data.features or None,
        accounts=config.env.accounts,
        reward=config.env.reward,
        stagger=config.ppo.n_steps,
        seed=config.training.seed,
    )
    return DistributionalPPO(env, config.ppo, seed=config.training.seed)


def _evaluate(
    agent: DistributionalPPO, config: RunConfig, test: Bars, synthetic: SyntheticMarket | None
) -> dict[str, BacktestResult]:
    results = {AGENT: backtest(agent, test)}
    if synthetic is not None and synthetic.signal > 0:
        market = config.market
        weights = synthetic.oracle_weights(market.fee + market.half_spread, market.leverage, market.funding_rate)
        times = synthetic.bars.frame["time"].unique(maintain_order=True)
        first, last = test.end_points
        rows = np.flatnonzero(((times >= first) & (times <= last)).to_numpy())
        results[ORACLE] = backtest(weights[rows], test, market)
    for name, policy in standard_baselines(config.market.leverage, config.market.allow_short).items():
        results[name] = backtest(policy, test, config.market)
    return results
