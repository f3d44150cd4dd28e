"""Backtests of a saved run on its own or on other bars, with costs, delays and noise made worse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import AGENT
from tailguard.evaluate.budget import own_budget
from tailguard.evaluate.notes import baseline_notes
from tailguard.evaluate.overlap import Overlap, overlap_of, overlap_with_run
from tailguard.evaluate.report.verdict import budget_in_words, probability
from tailguard.evaluate.significance import SharpeEvidence, sharpe_evidence
from tailguard.evaluate.stress import scaled_costs
from tailguard.evaluate.summary import EvaluationSummary, summarise
from tailguard.evaluate.trials import TrialCount, given_trials, trials_of
from tailguard.evaluate.with_baselines import backtest_with_baselines
from tailguard.experiment.build import read_bars
from tailguard.experiment.trained_run import SplitPart, TrainedRun, load_run_agent, open_run, read_run_config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tailguard.data.bars import Bars


@dataclass(frozen=True)
class Stress:
    """What a backtest makes worse, and whether the agent may react to it."""

    costs: float = 1.0
    """Factor on all assumed costs."""
    delay: int = 0
    """Extra bars between a decision and its fill."""
    noise: float = 0.0
    """Noise on the agent's features, in standard deviations of each."""
    throttle: bool = True
    """Whether an agent's throttle acts."""


@dataclass(frozen=True)
class StressedBacktest:
    """A run's agent beside the baselines on some bars, and what the run has seen of these bars."""

    title: str
    summary: EvaluationSummary
    trials: TrialCount | None
    """None on bars that were not used to choose between trials."""
    seen: Overlap
    """Which of the bars the run has seen."""

    @property
    def skill(self) -> SharpeEvidence | None:
        """None also where the agent was trained or selected on the bars."""
        if self.trials is None or not self.seen.honest:
            return None
        own = self.summary.results[AGENT]
        tried = self.trials
        return sharpe_evidence(own.net, own.bars_per_year, trials=tried.count, trial_sharpes=tried.sharpes)

    def lines(self) -> list[str]:
        """The lines below the table."""
        lines, skill = [], self.skill
        if skill is not None and self.trials is not None and math.isfinite(skill.deflated):
            lines.append(
                f"luck     the probability that its Sharpe ratio exceeds what luck explains is "
                f"{probability(skill.deflated)}"
            )
            lines.append(f"trials   {self.trials.source}")
        budget = self.summary.budgets.get(AGENT)
        if budget is not None:
            lines.append(f"budget   {budget_in_words(budget, self.summary.results[AGENT].pace)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; NaN and infinity become null."""
        skill = self.skill
        return {
            "trials": None if self.trials is None else self.trials.count,
            "seen_in_training_or_validation": None if self.seen.unknown else self.seen.share,
            "warnings": [line.removeprefix("WARNING  ") for line in self.seen.lines()],
            "deflated_sharpe": None if skill is None else _finite(skill.deflated),
            "sharpe_interval": {
                name: [_finite(ratio.low), _finite(ratio.high)] for name, ratio in self.summary.sharpes.items()
            },
            "budget": {name: str(check.verdict) for name, check in self.summary.budgets.items()},
            "budget_probability": {name: _finite(check.probability) for name, check in self.summary.budgets.items()},
            "results": {
                name: {metric: _finite(value) for metric, value in result.metrics.items()}
                for name, result in self.summary.results.items()
            },
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def backtest_saved_run(
    folder: Path,
    data: Path | None,
    split: SplitPart | None,
    symbol: str | None,
    stress: Stress,
    trials: int | None,
    progress: Callable[[], AbstractContextManager[Callable[[str], None]]],
) -> StressedBacktest:
    """The stressed agent and the baselines with the same costs, and the budget that the run was trained with.

    `data`: other bars than the run's own. `split`: a part of the run's own bars, by default the test part.
    `trials`: configurations that were tried, if the record beside the run does not count.
    `progress`: begins a display of progress; what it yields is called with the name of each step.
    """
    chosen = choose_bars(folder, data, split, symbol)
    bars, market = chosen.bars, scaled_costs(chosen.config.market, stress.costs)
    with progress() as begin:
        results = backtest_with_baselines(
            chosen.agent,
            bars,
            market,
            delay=stress.delay,
            noise=stress.noise,
            throttle=stress.throttle,
            before_each=begin,
        )
        notes = baseline_notes(results, bars, market)
        summary = summarise(results, own_budget(chosen.config), notes=notes, before_each=begin)
    tried = None if trials is None else given_trials(trials)
    if chosen.run is not None and split in (None, "test"):
        tried = trials_of(chosen.run, results[AGENT], trials)
    return StressedBacktest(chosen.title, summary, tried, chosen.seen)


@dataclass(frozen=True)
class ChosenBars:
    """A saved run's agent and the bars that it is to trade."""

    config: RunConfig
    run: TrainedRun | None
    """The run, opened; None on other bars than its own."""
    agent: Learner | Ensemble
    bars: Bars
    title: str
    """The bars in words."""
    seen: Overlap
    """Which of them the run has seen."""


def choose_bars(folder: Path, data: Path | None, split: SplitPart | None, symbol: str | None) -> ChosenBars:
    """The agent of a run, and other bars (`data`) or a part of its own, by default the test part."""
    config = read_run_config(folder)
    if data is not None:
        if split is not None:
            raise ConfigError(
                f"--split {split}: names a part of the run's own bars, but --data {data} gives other bars. Choose one"
            )
        agent = load_run_agent(folder)
        bars = select_account(agent, _other_bars(data, config, symbol), symbol, pool=True)
        return ChosenBars(config, None, agent, bars, f"{data.name}, net", overlap_with_run(config, bars))
    run = open_run(folder)
    part: SplitPart = split or "test"
    bars = select_account(run.agent, run.part(part), symbol, pool=True)
    seen = Overlap(0.0) if part == "test" else overlap_of(bars, run.part("train"), run.part("validation"))
    return ChosenBars(config, run, run.agent, bars, f"{part}, net of costs", seen)


def select_account(agent: Learner | Ensemble, bars: Bars, symbol: str | None, pool: bool = False) -> Bars:
    """The bars of the symbols that the agent can trade in one account; only those of `symbol` if it is given.

    `pool`: also accept several accounts side by side, for an agent with one account per symbol.
    """
    if symbol is not None:
        bars = bars.select(symbol)
    scaled = () if agent.spec is None else agent.spec.scaler.names
    known = {name.partition(":")[2] for name in scaled} - {""}
    symbols = ", ".join(bars.symbols)
    if known and known != set(bars.symbols):
        raise ConfigError(f"the agent trades {', '.join(sorted(known))} in one account; these bars have {symbols}")
    side_by_side = pool and agent.spec is not None and agent.spec.accounts == "per_symbol"
    if not known and len(bars.symbols) > 1 and not side_by_side:
        raise ConfigError(
            f"the agent trades one symbol per account; choose one of {symbols} with --symbol {bars.symbols[0]}"
        )
    return bars


def _other_bars(path: Path, config: RunConfig, symbol: str | None) -> Bars:
    """Bars from another source, of the symbols in the run's settings."""
    return read_bars(path, config.data if symbol is None else replace(config.data, symbols=()))
