"""Checks of what a run was made of: its costs, bars, plugins, the metric it was chosen by, and the errors of its tail.

They ask whether this run's numbers can mean what they seem to mean; those of its evidence are in `evidence_of_run`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.ensemble import Ensemble
from tailguard.audit.black_box import Pipeline
from tailguard.audit.registry import Measurement, at_least, information, none_of, not_applicable, register_check
from tailguard.audit.subject import Subject
from tailguard.errors import CheckpointError

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.experiment.layout import RunLayout
    from tailguard.market import MarketConfig

# --- costs -----------------------------------------------------------------------------------------------------------

HELD_BARS = 8
"""Bars for which the reference policy holds its positions."""
LEAST_COST = 0.1
"""Of what the preset charges; maker orders and high tiers of fees pay less, but not this little."""


def charged(bars: Bars, config: MarketConfig) -> float:
    """All costs, in shares of equity, of half of the equity bought and sold every eight bars."""
    from tailguard.evaluate.backtest import backtest

    rows, symbols = bars.panel("portfolio").rows, len(bars.symbols)
    wanted = np.where((np.arange(rows) // HELD_BARS) % 2 == 0, 0.5, 0.0)
    found = backtest(np.repeat(wanted[:, None] / symbols, symbols, axis=1), bars, config, progress_bar=False)
    return float(sum(cost.sum() for cost in found.costs.values()))


@register_check(
    "E3",
    "Are the run's costs those of a real market?",
    why="Without fees and spread the best agent trades at every bar: it earns most in the backtest and loses most "
    "where costs exist.",
    remedy="Set market.preset to the kind of market, and fee, half_spread, impact and funding_rate to those of your "
    "own account.",
    of_run=True,
)
def costs_are_realistic(subject: Subject) -> Measurement:
    from tailguard.market import MarketConfig

    own = subject.config.market
    usual = MarketConfig.for_market(own.preset, capital=own.capital, leverage=own.leverage)
    bars = Pipeline.of(subject).bars
    mine, reference = charged(bars, own), charged(bars, usual)
    if reference <= 0:
        return not_applicable(f"half of {own.capital:,.0f} is less than the smallest order of {own.preset}")
    below = [
        f"{name} {getattr(own, name):g}, usually {getattr(usual, name):g}"
        for name in ("fee", "half_spread", "impact", "funding_rate", "borrow_rate")
        if getattr(own, name) < getattr(usual, name)
    ]
    return at_least(f"costs of buying and selling half of the equity every {HELD_BARS} bars of the test part, over "
                    f"those of the preset {own.preset}", mine / reference, LEAST_COST, "; ".join(below))  # fmt: skip


# --- the metric of the evaluation ------------------------------------------------------------------------------------


def evaluations(layout: RunLayout) -> list[dict[str, float]]:
    """The lines of the record that have an evaluation."""
    lines = [json.loads(line) for line in layout.metrics_path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if any(name.startswith("eval/") for name in line)]


def wrong_evaluations(layout: RunLayout) -> Iterator[str]:
    """Metrics of the evaluation that never change, and those that differ from what a checkpoint holds."""
    from tailguard.monitor.writers import STEP
    from tailguard.runs.checkpoint import CheckpointStore

    lines, place = evaluations(layout), layout.path.name
    for name in ("eval/growth", "eval/score"):
        values = [line.get(name) for line in lines]
        if len(values) > 1 and len(set(values)) == 1:
            yield f"{place}: {name} is {values[0]} in all {len(values)} evaluations"
    store = CheckpointStore(layout.path, {})
    by_step = {int(line[STEP]): line for line in lines}
    for step in store.steps():
        saved, line = store.evaluation(step), by_step.get(step)
        if saved is None or line is None:
            continue
        for name, value in (("growth", saved.growth), ("score", saved.score)):
            recorded = line.get(f"eval/{name}")
            if recorded is None or not math.isclose(recorded, value, rel_tol=1e-6, abs_tol=1e-12):
                where = f"{place}: eval/{name} of step {step:,}"
                yield f"{where} is {recorded} in the record and {value:.6g} in its checkpoint"


@register_check(
    "E4",
    "Did the evaluation's metric change while the run learned, and is it that of the checkpoints?",
    why="A metric that stays where it is chooses a checkpoint by chance. One that is 0 throughout is that of an agent "
    "that never trades, or of an evaluation that sees no account.",
    remedy="Look at eval/growth and data/turnover in metrics.jsonl: costs above any gain, a volume cap, or lots larger "
    "than the account keep an agent from trading.",
    of_run=True,
)
def evaluation_is_not_constant(subject: Subject) -> Measurement:
    folders = [layout for layout in subject.trained.layout.training_folders() if layout.metrics_path.is_file()]
    count = sum(len(evaluations(layout)) for layout in folders)
    if count == 0:
        return not_applicable("the record has no evaluation")
    wrong = [line for layout in folders for line in wrong_evaluations(layout)]
    return none_of(f"of {count} evaluations, metrics that never change or are not those of a checkpoint", wrong)


# --- the tail at this run's sizes ------------------------------------------------------------------------------------


def student_quantiles(levels: Tensor) -> Tensor:
    """Quantiles of Student's t with three degrees of freedom, by bisection of its closed distribution function."""
    low, high = torch.full_like(levels, -1e6), torch.full_like(levels, 1e6)
    for _ in range(100):
        x = (low + high) / 2
        below = 0.5 + (x / math.sqrt(3) / (1 + x.square() / 3) + (x / math.sqrt(3)).atan()) / math.pi < levels
        low, high = torch.where(below, x, low), torch.where(below, high, x)
    return (low + high) / 2


def student_cvar(alpha: float) -> float:
    """CVaR_α of Student's t with three degrees of freedom: −(3 + q²)/2 · f(q)/α."""
    q = float(student_quantiles(torch.tensor([alpha], dtype=torch.float64)))
    density = 2 / (math.pi * math.sqrt(3) * (1 + q * q / 3) ** 2)
    return -(3 + q * q) / 2 * density / alpha


@register_check(
    "E5",
    "How wrong is the critics' CVaR at this run's number of quantiles, where tails are heavy?",
    why="Quantiles say nothing beyond the outermost one. For a Normal the estimate is exact; heavy tails are guessed "
    "from the quantiles that there are.",
    remedy="Raise network.quantiles or risk.alpha. The budget does not depend on it: it reads realised outcomes.",
    of_run=True,
)
def heavy_tails_are_estimated(subject: Subject) -> Measurement:
    from tailguard.models.critics.base import midpoints
    from tailguard.risk.cvar import cvar_from_quantiles

    count, alpha = subject.config.chosen.network.quantiles, subject.config.risk.alpha
    quantiles = student_quantiles(midpoints(count, dtype=torch.float64))
    error = float(cvar_from_quantiles(quantiles, alpha)) / student_cvar(alpha) - 1
    return information(f"relative error of CVaR at {alpha:g} from {count} exact quantiles of Student's t with three "
                       "degrees of freedom", error)  # fmt: skip


LONGEST = 192
"""Steps of the chain at most, because the time grows with their square."""


@register_check(
    "E6",
    "How biased is the tail that the critics learn at this run's λ and length of episodes?",
    why="Each bootstrap replaces what is to come by samples of N quantiles, whose tail is cut off: with a low λ and "
    "long episodes the tail is learned too mild.",
    remedy="Set distribution_lambda to 1, or raise network.quantiles; see docs/cvar.md.",
    of_run=True,
)
def long_tails_are_learned(subject: Subject) -> Measurement:
    from tailguard.audit.formulas_critics import ALPHA, chain_cvar, chain_quantiles
    from tailguard.risk.cvar import cvar_from_quantiles

    agent = subject.trained.agent
    config = (agent.members[0] if isinstance(agent, Ensemble) else agent).config
    if not config.network.critic_kind.predicts_distribution:
        return not_applicable("the critic is scalar, and has no distribution")
    steps, lam = min(subject.config.env.episode_length, LONGEST), config.distribution_lambda
    quantiles = chain_quantiles(lam, subject.seed, steps=steps, rollout=min(config.n_steps, steps))
    gap = float(cvar_from_quantiles(quantiles, ALPHA)) / chain_cvar(steps) - 1
    return information(f"relative gap of CVaR₀.₀₅ of a chain of {steps} steps, learned from rollouts of "
                       f"{config.n_steps}, to its closed form, λ {lam:g}", gap)  # fmt: skip


# --- bars and plugins ------------------------------------------------------------------------------------------------


def changed_since_training(subject: Subject) -> Iterator[str]:
    """Bars, features and plugins that are not those of the run's checkpoints and settings."""
    from tailguard.algorithm.saving import PARTS
    from tailguard.audit.evidence_of_run import first_learner
    from tailguard.experiment.settings import changed_since
    from tailguard.runs.checkpoint import CheckpointStore, data_hashes
    from tailguard.sealed import read_about

    run = subject.trained
    yield from changed_since(run.layout.config_path, run.config)
    now = data_hashes(first_learner(subject).env)
    layout = run.layout.training_folders()[0]
    for step in CheckpointStore(layout.path, {}).steps():
        try:
            then: Any = read_about(layout.checkpoint_path(step), PARTS).get("data")
        except CheckpointError as error:
            yield str(error)
            continue
        for name, digest in now.items():
            recorded = then.get(name) if isinstance(then, dict) else None
            if recorded != digest:
                yield f"{name} of step {step:,} had the SHA-256 {str(recorded)[:12]}…, now {digest[:12]}…"


@register_check(
    "E7",
    "Are the bars, the features and the plugins those that the run was trained with?",
    why="A report on other bars, or with another feature under the old name, is about an agent that does not exist.",
    remedy="Bring back the bars and the plugins of the run, or train again.",
    of_run=True,
)
def inputs_are_unchanged(subject: Subject) -> Measurement:
    plugins = len(subject.config.plugins)
    return none_of(f"hashes of bars, features and {plugins} plugins that differ from those of the training",
                   changed_since_training(subject))  # fmt: skip


@register_check(
    "E8",
    "Is anything suspicious in the run's bars?",
    why="A frozen feed, a price that jumps and comes back, or a change of the volume's unit is a market that nobody "
    "could have traded, and an agent learns it.",
    remedy="Look at tailguard data check, and compare with another source.",
    of_run=True,
)
def bars_are_suspicious(subject: Subject) -> Measurement:
    from tailguard.data.bars import Bars
    from tailguard.data.sources import check_source, read_source

    bars, data = subject.trained.bars, subject.config.data
    if not isinstance(bars, Bars):
        return not_applicable("the bars are on disk; they were checked when they were prepared")
    source = read_source(bars.frame.drop("segment"))
    report = check_source(source, calendar=data.calendar, gaps="split", universe=data.universe)
    found = [check for check in report.checks if check.level in ("warning", "error")]
    # No bound: real markets do jump.
    return information("suspicious bars, or runs of them", sum(check.count for check in found),
                       "; ".join(check.summary for check in found))  # fmt: skip
