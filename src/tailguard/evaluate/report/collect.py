"""Everything that a report shows about a run, computed once."""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard._version import __version__
from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import to_yaml
from tailguard.data.frequency import frequency_label
from tailguard.errors import CheckpointError, ConfigError
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.bootstrap import Interval
from tailguard.evaluate.calibration import Calibration, RiskBudget, calibration
from tailguard.evaluate.notes import baseline_notes
from tailguard.evaluate.predictions import predictions
from tailguard.evaluate.significance import SharpeEvidence, sharpe_evidence
from tailguard.evaluate.standing import Budget, Standing, own_budget, standing
from tailguard.evaluate.stress import NOISE_LEVELS, Scenario, scaled_costs, stress_table
from tailguard.evaluate.table import describe_exposure
from tailguard.evaluate.timing import TimingTest, timing_test
from tailguard.evaluate.trades import Trade, round_trips
from tailguard.evaluate.trained import AGENT, TrainedRun, beside_baselines, share_of_optimum
from tailguard.evaluate.trials import TrialCount, count_trials, given_trials
from tailguard.monitor.health import EVERY_RULE
from tailguard.monitor.recording import STEP
from tailguard.sealed import read_about

if TYPE_CHECKING:
    from tailguard.data.panel import Panel
    from tailguard.market import MarketConfig

Float = NDArray[np.float64]

PIT_BINS = 10
STRESSED_COSTS = (0.0, 2.0, 3.0)
"""Cost factors beside ×1, which is the agent's own backtest."""
ADVICE = {rule.name: rule.usually for rule in EVERY_RULE}


@dataclass(frozen=True)
class AlarmRaised:
    """An alarm of the training, from its metrics."""

    name: str
    step: int
    """Environment steps at which it was raised for the first time."""
    count: int
    """Iterations that were bad."""
    usually: str


@dataclass(frozen=True)
class Evidence:
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
    budgets: Mapping[str, RiskBudget]
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
    prices: Float
    """Closes of the traded bars, [T, A]."""
    trades: tuple[Trade, ...]
    """The agent's round trips in the order of entry."""
    synthetic: bool
    training: tuple[Mapping[str, float], ...]
    """Metrics of every iteration."""
    alarms: tuple[AlarmRaised, ...]
    config: str
    command: str
    """The command that reproduces the run."""
    facts: Mapping[str, str]
    """Hashes and versions."""

    @property
    def agent(self) -> BacktestResult:
        return self.results[AGENT]

    @property
    def budget(self) -> RiskBudget | None:
        """Verdict on the agent's risk budget."""
        return self.budgets.get(AGENT)

    @property
    def captured(self) -> float:
        """The agent's log-growth as a share of the planted optimum's; NaN where none is known or either is ruined."""
        return share_of_optimum(self.results)


def work_ahead(run: TrainedRun, known: Standing | None = None) -> int:
    """Steps that `collect` will take, to show progress."""
    policies = 6 + (run.synthetic is not None and run.synthetic.signal > 0)
    # Two backtests besides the stresses: on the validation part, and for the critics' predictions.
    return (0 if known else 2 * policies) + 2 + len(STRESSED_COSTS) + 1 + len(NOISE_LEVELS)


def collect(
    run: TrainedRun,
    *,
    budget: Budget | None = None,
    trials: int | None = None,
    seed: int = 0,
    known: Standing | None = None,
    before_each: Callable[[str], None] = lambda _: None,
) -> Evidence:
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
        results = beside_baselines(run, test, before_each=before_each)
        notes = baseline_notes(results, test, run.config.market)
        known = standing(results, budget or own_budget(run.config), seed=seed, notes=notes, before_each=before_each)
    own = known.results[AGENT]
    before_each("validation")
    validation = backtest(run.agent, run.split.validation, progress_bar=False)
    before_each("predictions")
    foreseen = _calibration(run)
    stress = _stress(run, own, before_each)
    places = training_folders(run.folder)
    figures = [read_figures(place / "metrics.jsonl") for place in places]
    tried = trials_of(run, own, trials)
    return Evidence(
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
        prices=prices_of(own, panel),
        trades=tuple(round_trips(own, panel)),
        synthetic=run.synthetic is not None,
        training=figures[0],
        alarms=alarms_in(*figures),
        config=to_yaml(run.config),
        command=f"tailguard train {shlex.quote(str(run.folder / 'config.yaml'))} --name {shlex.quote(run.name)}-again",
        facts=_facts(run),
    )


def trials_of(run: TrainedRun, own: BacktestResult, given: int | None = None) -> TrialCount:
    """The trials that the run was chosen from: those of the record beside its folder, or as many as are `given`."""
    found = count_trials(run.trials_path, [run.trial(own.metrics["sharpe"])])
    return found if given is None else given_trials(given, found.sharpes)


def prices_of(result: BacktestResult, panel: Panel) -> Float:
    """Closes of the bars that were traded, [T, A]."""
    return np.asarray(panel.close[np.searchsorted(panel.time, result.time)])


def read_figures(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of `metrics.jsonl`; a last line truncated by a kill is left out, all others must be valid."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    figures = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            figures.append({name: math.nan if value is None else float(value) for name, value in found.items()})
        except (ValueError, AttributeError, TypeError) as error:
            if number < len(lines):
                raise ConfigError(f"{path}: line {number} is not a line of metrics: {error}") from error
    return tuple(figures)


def training_folders(folder: Path) -> list[Path]:
    """Where a run keeps the metrics of its training: its own folder, or that of each member."""
    members = folder / "members"
    found = [path for path in members.iterdir() if path.name.isdigit()] if members.is_dir() else []
    return sorted(found, key=lambda path: int(path.name)) or [folder]


def alarms_in(*trained: tuple[Mapping[str, float], ...]) -> tuple[AlarmRaised, ...]:
    """Every alarm counted in the metrics of one or several agents, in the order in which they were raised."""
    raised = []
    for name in sorted({name for figures in trained for line in figures for name in line if name.startswith("warn/")}):
        counts = [[(line.get(name, 0.0), line.get(STEP, math.nan)) for line in figures] for figures in trained]
        steps = [step for each in counts for count, step in each if count > 0]
        if steps:
            short = name.removeprefix("warn/")
            total = sum(int(each[-1][0]) for each in counts if each)
            raised.append(AlarmRaised(short, int(min(steps)), total, ADVICE.get(short, "")))
    return tuple(sorted(raised, key=lambda alarm: alarm.step))


def _stress(run: TrainedRun, own: BacktestResult, before_each: Callable[[str], None]) -> list[Scenario]:
    """The stress table, with the agent's own result where costs are as assumed."""
    factors = [factor for factor in STRESSED_COSTS if _can_be_scaled(run.config.market, factor)]
    table = stress_table(run.agent, run.split.test, cost_factors=factors, before_each=before_each)
    # Free trading comes first; every market can be scaled down to it.
    return [table[0], Scenario("costs ×1, as assumed", own), *table[1:]]


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
    found = predictions(run.agent, run.split.test) if isinstance(run.agent, Learner) else None
    if found is None or found.predicted.shape[1] < 2:
        return None
    bins = min(PIT_BINS, found.predicted.shape[1])
    return calibration(found.predicted, found.realised, overlap=found.horizon, bins=bins)


def _market_in_words(run: TrainedRun) -> str:
    bars = run.split.test
    source = "synthetic market" if run.synthetic is not None else Path(bars.source).name
    return f"{', '.join(bars.symbols)} · {frequency_label(bars.frequency)} bars · {source}"


def _period(start: float, stop: float) -> str:
    first, last = (np.datetime64(int(moment), "s").astype("datetime64[m]").item() for moment in (start, stop))
    return f"{first:%Y-%m-%d} to {last:%Y-%m-%d}"


def _facts(run: TrainedRun) -> dict[str, str]:
    """What identifies the run: SHA-256 of its weights, bars and features, and the versions it was made with."""
    manifest = run.folder / "agent" / "manifest.json"
    # An agent that is not saved yet has no hashes.
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.is_file() else {}
    facts = {f"SHA-256 of agent/{name}": entry["sha256"] for name, entry in files.items()}
    checkpoint = training_folders(run.folder)[0] / "checkpoints" / f"step_{run.agent.num_timesteps}"
    made: Mapping[str, Any] = {}
    if checkpoint.is_dir():
        try:
            made = read_about(checkpoint, ("weights", "state"))
        except CheckpointError as error:
            facts["checkpoint"] = str(error)
    facts |= {f"SHA-256 of the training {name}": str(value) for name, value in dict(made.get("data") or {}).items()}
    then = ", ".join(f"{name} {value}" for name, value in dict(made.get("versions") or {}).items())
    facts |= {"trained with": then} if then else {}
    steps, total = run.agent.num_timesteps, run.config.training.total_timesteps
    chosen = f" of {total:,}; the best on validation" if run.config.select == "best" and steps < total else ""
    facts["steps"] = f"{steps:,}{chosen}"
    if isinstance(run.agent, Ensemble):
        facts["members"] = f"{len(run.agent.members)}; the training curves are of the first"
        found = run.agent.calibration
        facts["exposure"] = f"×{run.agent.exposure:.2f}" if found is None else describe_exposure(found)
    facts["report made with"] = f"tailguard {__version__}, python {platform.python_version()}"
    return facts
