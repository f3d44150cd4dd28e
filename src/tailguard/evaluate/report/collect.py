"""Everything that a report shows about a run, computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.algorithm.learner import Learner
from tailguard.config import to_yaml
from tailguard.data.frequency import frequency_label
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import AGENT, standard_baselines
from tailguard.evaluate.benchmark import BenchmarkPath, OverRate, Relative
from tailguard.evaluate.bootstrap import Interval
from tailguard.evaluate.budget import Budget, BudgetCheck, own_budget
from tailguard.evaluate.certificates import Certificate, certify
from tailguard.evaluate.optimum import share_of_optimum
from tailguard.evaluate.prediction_calibration import Calibration, calibration
from tailguard.evaluate.predictions import predictions
from tailguard.evaluate.report.audit_record import AuditRecord, read_audit
from tailguard.evaluate.report.provenance import provenance, repeat_command
from tailguard.evaluate.report.training_record import AlarmRaised, alarms_in, read_metrics
from tailguard.evaluate.robustness import ONE_OF_EACH, Disturbed, DisturbedBacktests, feed_disturbances
from tailguard.evaluate.significance import SharpeEvidence, sharpe_evidence
from tailguard.evaluate.stress import NOISE_LEVELS, Scenario, scaled_costs, stress_table
from tailguard.evaluate.summary import EvaluationSummary, evaluate_run
from tailguard.evaluate.timing_test import TimingTest, timing_test
from tailguard.evaluate.trades import Trade, round_trips
from tailguard.evaluate.trials import TrialCount, trials_of
from tailguard.experiment.trained_run import TrainedRun

if TYPE_CHECKING:
    from tailguard.data.panel import Panel
    from tailguard.market import MarketConfig

Float = NDArray[np.float64]

PIT_BINS = 10
STRESSED_COSTS = (0.0, 2.0, 3.0)
"""Cost factors beside ×1, which is the agent's own backtest."""


@dataclass(frozen=True)
class ReportData:
    """A run's report before it becomes a page. All results are of the test period, net of all costs."""

    name: str
    market: str
    """Symbols, frequency, source and period in words."""
    periods: Mapping[str, str]
    """The split's parts in words."""
    results: Mapping[str, BacktestResult]
    """The agent first, then the optimum if it is known, the baselines, and the agent's trades at random times."""
    sharpes: Mapping[str, Interval]
    """Sharpe ratio of each result with its interval."""
    beaten: Mapping[str, Interval]
    """The agent's Sharpe ratio less that of each baseline, over the same bars."""
    budgets: Mapping[str, BudgetCheck]
    """Verdict on the risk budget for each result; empty without a budget, or where the record is too short."""
    skill: SharpeEvidence
    trials: TrialCount
    """Number of trials that the run was selected from, and its source."""
    timing: TimingTest
    notes: tuple[str, ...]
    """Notes on the baselines: assumed funding, orders cut by volume."""
    validation: BacktestResult
    """The agent on the validation part, which chose the checkpoint."""
    calibration: Calibration | None
    """The critics' predictions against realised returns; None where they cannot be compared."""
    stress: tuple[Scenario, ...]
    feeds: tuple[Disturbed, ...]
    """The agent with a clean feed, and then with a feed of every kind of fault."""
    feed_notes: tuple[str, ...]
    """Faults that could not be shown, and why."""
    certificates: tuple[Certificate, ...]
    """Bounds on what an error of the feed can do to a decision; empty where there are none."""
    not_certified: str
    """Why there are no bounds; empty where there are."""
    capital: float
    """What the account begins with."""
    prices: Float
    """Closes of the traded bars, [T, A]."""
    trades: tuple[Trade, ...]
    """The agent's round trips in the order of entry."""
    groups: Mapping[str, tuple[str, ...]]
    """Groups of assets, as the settings name them."""
    synthetic: bool
    training: tuple[Mapping[str, float], ...]
    """Metrics of every iteration."""
    alarms: tuple[AlarmRaised, ...]
    config: str
    command: str
    """The command that reproduces the run."""
    facts: Mapping[str, str]
    """Hashes and versions."""
    relative: Relative | OverRate | None = None
    """The agent beside a benchmark of the user's choice, or over a risk-free rate alone."""
    audit: AuditRecord | None = None
    """The run's audit, where there was one."""

    @property
    def agent(self) -> BacktestResult:
        return self.results[AGENT]

    @property
    def benchmark_path(self) -> BenchmarkPath | None:
        """The benchmark's prices, where there is one."""
        return self.relative.path if isinstance(self.relative, Relative) else None

    @property
    def budget(self) -> BudgetCheck | None:
        """Verdict on the agent's risk budget."""
        return self.budgets.get(AGENT)

    @property
    def captured(self) -> float:
        """The agent's log-growth as a share of the planted optimum's; NaN where none is known or either is ruined."""
        return share_of_optimum(self.results)


def planned_steps(run: TrainedRun, known: EvaluationSummary | None = None) -> int:
    """Steps that `collect` will take, to show progress."""
    assets = 1 if run.config.env.accounts == "per_symbol" else len(run.part("test").symbols)
    policies = 2 + len(standard_baselines(assets=assets)) + (run.synthetic is not None and run.synthetic.signal > 0)
    # Three steps besides the stresses: the validation part, the critics' predictions, the certificates.
    stresses = len(STRESSED_COSTS) + 1 + len(NOISE_LEVELS) + len(ONE_OF_EACH)
    return (0 if known else 2 * policies) + 3 + stresses


def collect(
    run: TrainedRun,
    *,
    budget: Budget | None = None,
    trials: int | None = None,
    seed: int = 0,
    known: EvaluationSummary | None = None,
    before_each: Callable[[str], None] = lambda _: None,
) -> ReportData:
    """Run every backtest and every test on the run's test period.

    `budget`: the risk budget to check; the run's own by default.
    `trials`: every configuration that was tried on the way to this run; by default those that the record beside the
    run's folder has.
    `seed`: of the resampling; the same seed gives the same report.
    `known`: the results on the test part with this budget, if already computed.
    `before_each`: called with a name before each step, to show progress.
    """
    test = run.split.test
    panel = test.panel("portfolio")
    if known is None:
        known = evaluate_run(run, test, budget or own_budget(run.config), seed=seed, before_each=before_each)
    own = known.results[AGENT]
    before_each("validation")
    validation = backtest(run.agent, run.split.validation, progress_bar=False)
    before_each("predictions")
    foreseen = _calibration(run)
    stress = _stress(run, own, before_each)
    before_each("certificates")
    certificates, not_certified = _certificates(run)
    feeds, feed_notes = _feeds(run, own, budget or own_budget(run.config), before_each)
    training = [read_metrics(folder.metrics_path) for folder in run.layout.training_folders()]
    tried = trials_of(run, own, trials)
    return ReportData(
        name=run.name,
        market=_market_in_words(run),
        periods={
            name: _period(part.start.timestamp(), part.end_points[1].timestamp() + part.frequency.total_seconds())
            for name, part in (
                ("train", run.split.train),
                ("validation", run.split.validation),
                ("test", run.split.test),
            )
        },
        results=known.results,
        sharpes=known.sharpes,
        beaten=known.beaten,
        budgets=known.budgets,
        skill=sharpe_evidence(own.net, own.bars_per_year, trials=tried.count, trial_sharpes=tried.sharpes),
        trials=tried,
        timing=timing_test(own, panel),
        notes=known.notes,
        validation=validation,
        calibration=foreseen,
        stress=tuple(stress),
        feeds=tuple(feeds),
        feed_notes=tuple(feed_notes),
        certificates=tuple(certificates),
        not_certified=not_certified,
        capital=run.config.market.capital,
        prices=prices_of(own, panel),
        trades=tuple(round_trips(own, panel)),
        groups=run.config.env.constraints.groups,
        synthetic=run.synthetic is not None,
        training=training[0],
        alarms=alarms_in(*training),
        config=to_yaml(run.config),
        command=repeat_command(run),
        facts=provenance(run),
        audit=read_audit(run.layout.audit_path),
    )


def prices_of(result: BacktestResult, panel: Panel) -> Float:
    """Closes of the bars that were traded, [T, A]."""
    return np.asarray(panel.close[np.searchsorted(panel.time, result.time)])


def _stress(run: TrainedRun, own: BacktestResult, before_each: Callable[[str], None]) -> list[Scenario]:
    """The stress table, with the agent's own result where costs are as assumed."""
    factors = [factor for factor in STRESSED_COSTS if _can_be_scaled(run.config.market, factor)]
    table = stress_table(run.agent, run.split.test, cost_factors=factors, before_each=before_each)
    # Free trading comes first; every market can be scaled down to it.
    return [table[0], Scenario("costs ×1, as assumed", own), *table[1:]]


def _feeds(
    run: TrainedRun, own: BacktestResult, budget: Budget | None, before_each: Callable[[str], None]
) -> tuple[list[Disturbed], list[str]]:
    """The agent with each faulty feed, and why a fault is left out where it cannot be computed."""
    backtests = DisturbedBacktests(run.agent, run.split.test, run.config.market, budget, clean=own)
    return backtests.under_each(feed_disturbances(ONE_OF_EACH), before_each)


def _certificates(run: TrainedRun) -> tuple[list[Certificate], str]:
    """Bounds on the agent's decisions, and why there are none where there are none."""
    try:
        found = certify(run.agent, run.split.test)
    except ConfigError as error:
        return [], str(error).removeprefix("bounds: ")
    return found, "" if found else "the bars of the test period are shorter than an episode"


def _can_be_scaled(market: MarketConfig, factor: float) -> bool:
    """Whether the costs times this factor are still in their ranges; a report leaves the others out."""
    try:
        scaled_costs(market, factor)
    except ConfigError:
        return False
    return True


def _calibration(run: TrainedRun) -> Calibration | None:
    """Quantiles that the critics predicted on the test part against the returns that followed."""
    # The critics of an ensemble predict what each member would earn alone.
    predicted = predictions(run.agent, run.split.test) if isinstance(run.agent, Learner) else None
    if predicted is None or predicted.predicted.shape[1] < 2:
        return None
    bins = min(PIT_BINS, predicted.predicted.shape[1])
    return calibration(predicted.predicted, predicted.realised, overlap=predicted.horizon, bins=bins)


def _market_in_words(run: TrainedRun) -> str:
    bars = run.split.test
    source = "synthetic market" if run.synthetic is not None else Path(bars.source).name
    return f"{', '.join(bars.symbols)} · {frequency_label(bars.frequency)} bars · {source}"


def _period(start: float, stop: float) -> str:
    first, last = (np.datetime64(int(moment), "s").astype("datetime64[m]").item() for moment in (start, stop))
    return f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"
