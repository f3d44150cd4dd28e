"""Checks of what training promises: alarms on memorising, advantages of real fills, repeatability, early refusals."""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from tailguard.algorithm.pathwise import PathwiseLearner
from tailguard.audit.auditor import all_checks, run_check
from tailguard.audit.promises import FREE
from tailguard.audit.registry import Measurement, at_least, at_most, none_of, register_check, worst
from tailguard.audit.subject import Subject, Witness
from tailguard.config import load_config
from tailguard.data.synthetic import make_market
from tailguard.envs.trading import TradingEnv
from tailguard.errors import TailguardError
from tailguard.evaluate.report.collect import collect
from tailguard.experiment.trained_run import open_run
from tailguard.market import MarketConfig
from tailguard.monitor.health import HealthMonitor
from tailguard.runs.runner import train
from tailguard.runs.validation import Validation

# --- memorising ------------------------------------------------------------------------------------------------------


@register_check(
    "P3",
    "Is an agent that knows its training bars by heart an alarm?",
    why="An agent once earned 38 % an episode in training, lost its limit six times over on the test, and nothing said "
    "a word.",
    remedy="See memorised in monitor/health.py and training_growth in runs/validation.py.",
)
def memorised_bars_are_an_alarm(subject: Subject) -> Measurement:
    # Bars without any signal: what is earned on them is known by heart.
    learned, held_out = (
        make_market(rows, seed=2 * subject.seed + number).bars for number, rows in enumerate((300, 4_000))
    )
    market = MarketConfig(**FREE)
    features = ("return_1", "return_24")
    env = TradingEnv(learned, market, num_envs=32, episode_length=24, stagger=8, seed=subject.seed,
                     features=features)  # fmt: skip
    agent = PathwiseLearner(env, n_steps=24, hidden=(64,), lstm_size=32, learning_rate=1e-2, seed=subject.seed,
                            runtime="eager", critic_epochs=0)  # fmt: skip
    validation, monitor, raised = Validation(agent, held_out), HealthMonitor(), []
    agent.learn(80 * 24 * 32)
    for step in range(2):
        evaluation = validation.evaluate(agent)
        assert evaluation is not None  # the part is longer than an episode
        gap = validation.training_growth(agent) - evaluation.growth
        raised += monitor.evaluated({"eval/growth": evaluation.growth, "eval/gap": gap}, step)
    found = [at_least("alarms that an agent has memorised its bars, after 80 rollouts on 300 bars of noise",
                      sum(alarm.name == "memorised" for alarm in raised), 1.0, f"gap {gap:.1f} a year")]  # fmt: skip
    # The same growth on both parts is no memory.
    calm = HealthMonitor()
    false = [alarm for step in range(4) for alarm in calm.evaluated({"eval/growth": 3.0, "eval/gap": 0.0}, step)]
    found.append(at_most("alarms where training and validation earn the same", len(false), 0.0))
    return worst(found)


# --- partial fills ---------------------------------------------------------------------------------------------------


def zero_critics(learner: Any) -> None:
    """Critics that say 0, so that advantages are discounted sums of what was earned."""
    with torch.no_grad():
        for critic in learner.policy.each_critic():
            for head in critic.heads:
                head.layer.weight.zero_()
                head.layer.bias.zero_()


@register_check(
    "P6",
    "Are advantages made of what really filled, and of nothing else?",
    why="An advantage by the price's move, as if every order filled whole, turned +7.4 % into −4.2 % under a cap of "
    "5 % of the volume.",
    remedy="Advantages come from realised rewards alone: see algorithm/estimate.py and TradingTask.advance.",
    fast=True,
)
def advantages_are_of_real_fills(subject: Subject) -> Measurement:
    # Orders of an account of a hundred million reach the cap at nearly every bar.
    market = MarketConfig(capital=1e8, participation=0.02)
    env = TradingEnv(subject.bars, market, num_envs=8, episode_length=12, stagger=4, seed=subject.seed)
    witness = Witness()
    learner = subject.learner(env, extensions=(witness,), gamma=0.9, gae_lambda=1.0, critic="scalar", baseline="scalar")
    learner.return_moments.update(torch.tensor([-1.0, 1.0]))
    zero_critics(learner)
    learner.iterate()
    rollout, raw = witness.rollout, witness.estimates.advantages.double()
    unfilled = rollout.outcome["unfilled"]
    earned = (1 + rollout.outcome["net"].double()).log()
    following, gap = torch.zeros_like(earned[0]), 0.0
    for row in reversed(range(len(earned))):
        following = earned[row] + 0.9 * torch.where(rollout.ended[row], 0.0, following)
        gap = max(gap, float((raw[row] - following).abs().max()))
    equity = rollout.outcome["pnl"].double()
    grown = _grown(rollout, earned)
    found = [
        at_least("share of orders that filled in part", float((unfilled > 0).double().mean()), 0.5),
        at_most("gap of advantages (critics at 0) to discounted sums of the account's realised log-growth", gap, 1e-5),
        at_most("gap of the account's gain since the episode's start to its realised bars",
                float((equity - grown).abs().max()), 1e-5),
    ]  # fmt: skip
    return worst(found)


def _grown(rollout: Any, earned: Tensor) -> Tensor:
    """Gain since the start of the episode, by the realised bars alone, [T, N]; episodes of before the rollout at 0."""
    total, rows = torch.zeros_like(earned[0]), []
    for row in range(len(earned)):
        total = torch.where(rollout.episode_start[row], 0.0, total) + earned[row]
        rows.append(total.expm1())
    return torch.stack(rows)


# --- order -----------------------------------------------------------------------------------------------------------

REPEATED = ("F1", "F2", "F5", "F9", "F12", "T2", "T3")
"""Checks whose answers are compared in several orders."""


@register_check(
    "P8",
    "Are the answers the same in any order, bit for bit?",
    why="A result that depends on what ran before it cannot be repeated, and a test that does so hides a fault.",
    remedy="Look for state that is shared: random streams of the process, defaults of torch, registries, caches.",
)
def answers_do_not_depend_on_order(subject: Subject) -> Measurement:
    checks = {check.id: check for check in all_checks() if check.id in REPEATED}
    order, draw = list(checks), random.Random(subject.seed)
    before, answers, wrong = process_state(), [], []
    for _ in range(3):
        draw.shuffle(order)
        answers.append({name: run_check(checks[name], subject).measurement for name in order})
        if process_state() != before:
            wrong.append(f"after {', '.join(order)} the process has other defaults: {process_state()}")
    for name in checks:
        numbers = {repr(one[name].number) for one in answers}
        if len(numbers) > 1:
            wrong.append(f"{name}: {', '.join(sorted(numbers))}")
    return none_of(f"of {len(checks)} checks in three orders, those with another answer", wrong)


def process_state() -> Mapping[str, Any]:
    """Defaults of the process that a computation could leave changed."""
    return {
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's stream": torch.get_rng_state().sum().item(),
        "NumPy's stream": float(np.random.get_state()[1].sum()),  # type: ignore[index]  # noqa: NPY002
        "division by zero": np.geterr()["divide"],
    }


# --- refused too late ------------------------------------------------------------------------------------------------

TINY = (
    "data.synthetic_bars=2500", "data.features=[return_24, taker_imbalance_6]", "data.embargo=1d", "env.num_envs=8",
    "env.episode_length=32", "training.total_timesteps=256", "training.threads=1",
)  # fmt: skip
NETWORKS = ("n_steps=16", "network.hidden=[8]", "network.lstm_size=8")
GRID: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ppo", ("risk.limit=-0.04", "ppo.minibatch_size=64", "ppo.network.twin_critics=true", "training.members=2")),
    ("ppo", ("risk.penalty=0.5", "risk.measure=drawdown", "ppo.network.critic=categorical", "ppo.network.memory=none")),
    ("pathwise", ("risk.limit=-0.02", "risk.measure=bar", "market.leverage=3")),
    ("pathwise", ("training.select=last", "market.allow_short=false", "risk.limit=-0.02", "risk.confidence=0")),
)
"""Legal settings, each a learner and what differs from its defaults."""


def refused_late(seed: int) -> Iterator[str]:
    """Settings that begin to train, and are refused at its end or by the report."""
    console = Console(quiet=True)
    for learner, changes in GRID:
        own = [f"{learner}.{setting}" for setting in NETWORKS]
        config = load_config(overrides=[*TINY, f"learner={learner}", f"training.seed={seed}", *own, *changes])
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "tried" / "a"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    train(config, folder, console)
                    collect(open_run(folder))
            except TailguardError as error:
                if any(folder.rglob("step_*")):
                    yield f"{learner}, {', '.join(changes)}: {error}"


@register_check(
    "P9",
    "Is nothing refused after training that was known before it?",
    why="Hours of training that end in an error message about a setting, or in a report that cannot be made.",
    remedy="Refuse it when the settings are read, or in the dry run before training (runs/dry_run.py).",
)
def nothing_is_refused_late(subject: Subject) -> Measurement:
    return none_of(f"of {len(GRID)} legal settings, trained in small and reported, those refused after training",
                   refused_late(subject.seed))  # fmt: skip
