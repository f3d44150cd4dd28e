"""Checks of the risk budget's promises: that a limit acts and is kept, and that a broken one is said and judged."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.pathwise import PathwiseLearner
from tailguard.audit.registry import Measurement, at_least, at_most, register_check, within, worst
from tailguard.audit.subject import Subject
from tailguard.config import load_config
from tailguard.data.synthetic import make_market
from tailguard.envs.tasks import BetsEnv
from tailguard.envs.trading import TradingEnv
from tailguard.evaluate.budget import BudgetVerdict, check_limit
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on
from tailguard.experiment.trained_run import TrainedRun
from tailguard.monitor.health import HealthMonitor
from tailguard.risk.config import RiskConfig
from tailguard.risk.constraint import CVaRConstraint
from tailguard.risk.cvar import cvar_from_samples
from tailguard.risk.exposure import calibrate_exposure
from tailguard.risk.throttle import Throttle
from tailguard.runs.training import print_tail_in_training

NORMAL_ES = 2.0627128
"""ES of a standard Normal at 5 %."""
BET = (0.05, 0.2, 0.25)
"""Mean and deviation of a bet, and the limit on the loss of its tail."""
BET_WEIGHT = 0.68957
"""The weight at which its tail is the limit: d / (σ·φ(z)/α − μ)."""
YEARS = 40

# --- the limit acts --------------------------------------------------------------------------------------------------


def learned_bet(seed: int, limit: float | None) -> float:
    """The weight that gradients through a Normal bet end at, under a limit or without one; at most 5."""
    env = BetsEnv(2048, 1, BET[0], BET[1], bounds=(-1.0, 5.0))
    learner = PathwiseLearner(
        env, n_steps=1, critic_epochs=0, memory="none", hidden=(), critic="scalar", seed=seed, runtime="eager",
        risk=None if limit is None else RiskConfig(limit=limit, margin=0.0, window=2048, kp=1.5, ki=0.06),
        learning_rate="exponential:0.3:0.01",
    )  # fmt: skip
    weights = []
    for update in range(60):
        learner.state.progress = update / 60
        learner.iterate()
        action, _ = learner.predict(env.reset()[:1].numpy(), deterministic=True)
        weights.append(float(action[0, 0]))
    return float(np.mean(weights[45:]))


def windows_of_unseen_years(run: TrainedRun, signal: float) -> Tensor:
    """Net returns of every bar, [windows, bars], of the run's agent at its exposure, without its throttle.

    The windows follow each other on years of its synthetic market's own law that nobody has seen.
    """
    config, spec = run.config, run.agent.spec
    assert spec is not None  # the run was opened as one that trades bars
    fresh = make_market(YEARS * 8_766, seed=config.training.seed + 10_007, signal=signal).bars
    (episodes,) = episodes_on(spec, fresh)
    first, last, length = int(episodes.starts[0]), int(episodes.starts[-1]), spec.episode_length
    whole = HeldOutEpisodes(episodes.task, torch.arange(first, last + 1, length), length)
    return whole.trade(run.agent, "bar").measured


def throttled(windows: Tensor, throttle: Throttle) -> Tensor:
    """The returns of the windows, [n], at the exposure that the throttle allows after those before them.

    Net returns are proportional to exposure but for market impact, which is convex: less exposure has less of it.
    """
    outcomes = []
    for window in windows:
        outcomes.append(float((1 + throttle.factor * window).prod() - 1))
        throttle.observe(outcomes[-1])
    return torch.tensor(outcomes, dtype=torch.float64)


def tail_of_run(run: TrainedRun, signal: float) -> Measurement | None:
    """The tail of the run's agent on unseen years, in units of its limit, as the promise reads; None: it has none."""
    limit = run.config.risk.limit
    if limit is None or run.config.risk.measure != "episode" or not isinstance(run.agent, Ensemble):
        return None
    windows, throttle = windows_of_unseen_years(run, signal), run.agent.make_throttle()
    about = f"this agent's tail on {YEARS} unseen years of its market"
    if throttle is not None:
        outcomes = throttled(windows, throttle)
        # The theorem of risk/throttle.py: it holds on every path, so there is no luck in it.
        bound = throttle.bound(len(outcomes), float(-outcomes.min())) / -limit
        ratio = float(cvar_from_samples(outcomes, run.config.risk.alpha)) / limit
        return at_most(f"{about}, throttled, in units of its limit", ratio, max(1.0, bound))
    calibration = run.agent.calibration
    if calibration is None:
        return None
    # Without a throttle the limit is kept as surely as held-out episodes know the tail. The mean of k outcomes beyond a
    # threshold has a relative error of 1/√k where they are exponential; four such errors are no bad luck.
    ratio = float(cvar_from_samples((1 + windows).prod(1) - 1, run.config.risk.alpha)) / limit
    bound = 1 + 4 / math.sqrt(max(calibration.tail_episodes, 1e-9))
    return at_most(f"{about}, without a throttle, in units of its limit", ratio, bound)


def calibrated_factor(outcomes: Tensor, limit: float, level: float, seed: int) -> float:
    """The exposure at which the bound of these outcomes keeps the limit."""
    return calibrate_exposure(lambda m: m * outcomes, -limit, alpha=0.05, level=level, seed=seed).factor


@register_check(
    "P1",
    "Does a limit change the true tail, and keep it?",
    why="A limit that does not act is worse than none: limits of 2 and 4 % once gave true tails of 14 to 16 %, in "
    "training and out of it.",
    remedy="See risk/constraint.py for training, risk/exposure.py for what is held out and risk/throttle.py for the "
    "rest; give more held-out bars, and leave risk.throttle on.",
    reads_run=True,
)
def limit_acts_on_the_true_tail(subject: Subject) -> Measurement:
    # Calibrated: the true tail of a Normal account at 3.3 times the limit, after its exposure was calibrated on records
    # of 400 episodes. Its bound is a bootstrap's, which holds a little less often than the 90 % that it says.
    draw = torch.Generator().manual_seed(subject.seed)
    limit, deviation, records = 0.02, 0.066 / NORMAL_ES, 120
    seen = [deviation * torch.randn(400, generator=draw, dtype=torch.float64) for _ in range(records)]
    tails = 0.066 * torch.tensor([calibrated_factor(one, limit, 0.9, seed) for seed, one in enumerate(seen)])
    kept = float((tails <= limit).double().mean())
    found = [
        at_least(f"share of {records} calibrated accounts whose true tail keeps the limit", kept, 0.75),
        within("median true tail of them, in units of the limit", float(tails.median()) / limit, 0.8, 1.0),
    ]
    # Learned: a bet whose tail has a closed form.
    free, bound = (learned_bet(subject.seed, limit) for limit in (None, -BET[2]))
    found.append(at_least("weight of a bet that pays, learned without a limit", free, 4.0))
    found.append(within("weight learned under a limit, in units of the one at which the tail is the limit",
                        bound / BET_WEIGHT, 0.9, 1.12))  # fmt: skip
    if subject.run is not None and subject.run.synthetic is not None:
        of_run = tail_of_run(subject.run, subject.run.synthetic.signal)
        found += [of_run] if of_run is not None else []
    return worst(found)


# --- a broken limit is said ------------------------------------------------------------------------------------------


def updates_until_alarm(gains: tuple[float, float], seed: int, updates: int, names: Sequence[str]) -> tuple[int, str]:
    """Updates of a run under a tail of 3.3 times the limit until one of these alarms is raised, and which one."""
    constraint = CVaRConstraint(RiskConfig(limit=-0.02).with_gains(*gains))
    monitor = HealthMonitor(updates=updates)
    draw = torch.Generator().manual_seed(seed)
    counted = torch.ones(400, dtype=torch.bool)
    for update in range(updates):
        constraint.observe(0.066 / NORMAL_ES * torch.randn(400, generator=draw), counted)
        metrics = {name: float(value) for name, value in constraint.metrics().items()}
        raised = monitor.check(metrics | {"risk/tail_outcomes": 20.0, "train/n_updates": 1.0}, update)
        said = [alarm.name for alarm in raised if alarm.name in names]
        if said:
            return update + 1, said[0]
    return updates + 1, "none"


@register_check(
    "P2",
    "Is a limit that training breaks an alarm on the way, and said at its end?",
    why="A tail of 6.6 % against 2 % went on for a million steps with a multiplier of one, no alarm and no word.",
    remedy="See limit_broken and risk_infeasible in monitor/health.py, and dual_step in risk/constraint.py, whose "
    "multiplier must reach its cap.",
    fast=True,
)
def broken_limits_are_said(subject: Subject) -> Measurement:
    found = []
    for kind, name in (("ppo", "PPO"), ("pathwise", "gradients through the market")):
        config = load_config(overrides=["risk.limit=-0.02", f"learner={kind}"])
        gains, steps = config.chosen.multiplier_gains, config.num_envs * config.chosen.n_steps
        updates, alarm = updates_until_alarm(gains, subject.seed, 400, ["risk_infeasible"])
        found.append(at_most(f"updates under a tail of 3.3 times the limit until λ at its cap is said, gains of {name}",
                             updates, 200, alarm))  # fmt: skip
        of_run = math.ceil(config.training.total_timesteps / steps)
        # The median: in one run of sixteen updates a single mild one moves the alarm.
        waited = sorted(
            updates_until_alarm(gains, 5 * subject.seed + draw, of_run, ["limit_broken", "risk_infeasible"])
            for draw in range(5)
        )
        updates, alarm = waited[2]
        found.append(at_most(f"share of a default run's updates under such a tail until an alarm, median of 5, {name}",
                             updates / of_run, 0.5, alarm))  # fmt: skip
    # A learner whose limit no position keeps: the sentence at the end of its training.
    env = TradingEnv(subject.bars, num_envs=24, episode_length=12, stagger=4, seed=subject.seed)
    learner = subject.learner(env, risk=RiskConfig(limit=-1e-5, alpha=0.5, window=48))
    for _ in range(4):
        learner.iterate()
    said = io.StringIO()
    print_tail_in_training(learner, Console(file=said, width=120))
    found.append(at_least("sentences at the end of training that call the limit broken",
                          float("broken" in said.getvalue()), 1.0, said.getvalue().strip()))  # fmt: skip
    return worst(found)


# --- the verdict -----------------------------------------------------------------------------------------------------


@register_check(
    "P4",
    "Does the verdict give the probability that the limit holds, and decide what is clear?",
    why="A tail of −10 % against a limit of −2 % was once called undecided; a reader then trades what has failed.",
    remedy="See check_limit and TailEvidence.probability in evaluate/budget.py.",
    fast=True,
)
def verdict_decides_what_is_clear(subject: Subject) -> Measurement:
    def judged(tail: float, bars: int, seed: int) -> tuple[BudgetVerdict, float]:
        """The verdict on a limit of 2 % for a record of independent Normal returns whose CVaR is −`tail`."""
        returns = tail / NORMAL_ES * np.random.default_rng(seed).normal(size=bars)
        equity = np.concatenate([[1.0], np.cumprod(1 + returns)])
        check = check_limit(equity, -0.02, np.random.default_rng(seed), resamples=400)
        return check.verdict, check.probability

    seeds = [subject.seed * 100 + number for number in range(4)]
    far = [judged(0.10, 60, seed) for seed in seeds]
    near = [judged(0.005, 400, seed) for seed in seeds]
    even = [judged(0.02, 200, seed)[1] for seed in seeds]
    broken, kept = (sum(one is wanted for one, _ in found) for found, wanted in
                    ((far, BudgetVerdict.BROKEN), (near, BudgetVerdict.KEPT)))  # fmt: skip
    highest, lowest = max(probability for _, probability in far), min(probability for _, probability in near)
    return worst(
        [
            at_most("probability that a limit holds whose tail is five times as deep, 60 windows", highest, 0.025),
            at_least("records of them that are called broken, of 4", broken, 4),
            at_least("probability that a limit holds whose tail is a quarter of it, 400 windows", lowest, 0.975),
            at_least("records of them that are called kept, of 4", kept, 4),
            within("median probability where the tail is the limit", float(np.median(even)), 0.02, 0.98),
            at_most("probabilities that are not numbers", sum(map(math.isnan, even)), 0.0),
        ]
    )
