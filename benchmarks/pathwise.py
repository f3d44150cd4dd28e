"""Gradients through the market beside PPO and sb3-contrib: time to a target, and what equal time brings.

    python benchmarks/pathwise.py                     5 seeds, about 30 minutes on 2 idle cores
    python benchmarks/pathwise.py --only race         time to half and to three quarters, about 7 minutes
    python benchmarks/pathwise.py --only equal-time   10, 30 and 60 seconds of training, about 23 minutes

**Race.** The task, the clock and the evaluation are those of target.py: the share of the planted optimum's growth that
a learner reaches, acting deterministically, on a year of another market with the same law. One run gives the time to
half and to three quarters. A learner is given up after `--limit` seconds; its time is then infinite, so that a ratio of
medians is a lower bound or not given.

**Equal time.** Both learners do what `tailguard train` does: bars are split 70/15/15 (the training part has the three
years of the race, the test part is not used), the schedules of the learning rate end with the time, and the state with
the highest growth on the validation part is the result. It is looked for ten times in a run, and the looking is in the
time. The share that is reported is, as in the race, that on a year of another market. PPO's settings are constant over
a run, so its states after 10 and 30 s are those of its run of 60 s; the pathwise learner is trained from scratch for
each. The share of the last state is printed beside it. A third row has dropout and the mean of four agents, each with a
quarter of the time and without one fold of the training part: `pathwise.dropout=0.2 training.members=4`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from target import (
    FEATURES,
    SHORT_WINDOWS,
    SIGNAL,
    TRAINING_BARS,
    WINDOWS,
    Contender,
    Reached,
    Task,
    contenders,
    make_task,
    result_table,
    times_to,
)

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.data.prepare import prepare
from tailguard.envs.folds import cut_folds
from tailguard.runs.validation import Validation

PEER, PPO = "sb3-contrib as people run it", "Tailguard's PPO"
PATHWISE, SHORT_PATHWISE = (f"Tailguard, through the market, {shape}" for shape in (WINDOWS, SHORT_WINDOWS))
FOUR, FOUR_WITH_DROPOUT = "Tailguard, four members", "Tailguard, four members with dropout"
EQUAL_TIME = PPO, PATHWISE, FOUR_WITH_DROPOUT
HALF, THREE_QUARTERS = 0.5, 0.75
DURATIONS = (10.0, 30.0, 60.0)
TRAINING_SHARE = 0.7
LOOKS = 10
"""Evaluations on the validation part in a run."""
MEMBERS, EMBARGO_MS = 4, 7 * 24 * 3_600_000
"""Agents of a run of several, and the bars between a fold and what is trained on: `data.embargo`'s default."""

Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def chosen(names: Iterable[str]) -> dict[str, Contender]:
    """Contenders whose names begin so, with the learning rates of their own defaults."""
    found = contenders(3e-4)
    return {name: found[name] for begin in names for name in found if name.startswith(begin)}


# --- time to a target -----------------------------------------------------------------------------------------------


def race(seeds: Iterable[int], limit: float, clock: Clock, say: Callable[[str], None]) -> list[Table]:
    """Tables for half and three quarters of the optimum. The peer races to half only: it rarely gets further."""
    names = chosen((PEER, PPO, PATHWISE, SHORT_PATHWISE))
    half: dict[str, list[Reached]] = {name: [] for name in names}
    three_quarters: dict[str, list[Reached]] = {name: [] for name in names if not name.startswith(PEER)}
    for seed in seeds:
        task = make_task(seed)
        for name, make in names.items():
            learner, shape = make(task, seed)
            both = name in three_quarters
            targets = (HALF, THREE_QUARTERS) if both else (HALF,)
            # The peer may take twice as long: its median must be a number.
            runs = times_to(targets, task, learner, shape.samples, limit if both else 2 * limit, clock)
            half[name].append(runs[0])
            if both:
                three_quarters[name].append(runs[1])
            seconds = ", ".join(
                f"{run.seconds:.3f} s to {target:.0%}" for run, target in zip(runs, targets, strict=True)
            )
            say(f"seed {seed}, {name}: {seconds}, {runs[-1].share:.0%} at the end")
    return [result_table(HALF, half), result_table(THREE_QUARTERS, three_quarters)]


# --- equal time -----------------------------------------------------------------------------------------------------


def task_with_validation(seed: int) -> tuple[Task, tg.Bars]:
    """A task whose training part is followed by bars to choose a state on."""
    market = tg.make_market(round(TRAINING_BARS / TRAINING_SHARE), seed=seed, signal=SIGNAL)
    split = tg.split_bars(market.bars, validation=0.15, test=0.15)
    return make_task(seed, prepare(split.train, FEATURES)), split.validation


def train(learner: Any, validation: tg.Bars, seconds: tuple[float, ...], clock: Clock) -> Iterator[tuple[float, Any]]:
    """Train until the last of these times; at each of them, the time and the parameters that validation chose so far.

    The learner may be evaluated then: the clock stands still.
    """
    judge, best, kept = Validation(learner, validation), -math.inf, learner.get_parameters()
    elapsed = 0.0
    ends = sorted({*seconds, *(seconds[-1] * look / LOOKS for look in range(1, LOOKS + 1))})
    for end in ends:
        begun = clock() - elapsed
        while elapsed < end:
            learner.state.progress = elapsed / seconds[-1]
            learner.iterate()
            elapsed = clock() - begun
        score = judge.evaluate(learner)
        assert score is not None  # the part is half a year long
        if score.score > best:
            best, kept = score.score, learner.get_parameters()
        elapsed = clock() - begun
        if end in seconds:
            yield end, kept


def one_agent(
    task: Task, validation: tg.Bars, make: Contender, seed: int, seconds: tuple[float, ...], clock: Clock
) -> dict[float, tuple[float, float]]:
    """Shares of the chosen and of the last state after each of these times, in one run that ends with the last."""
    learner: Any = make(task, seed)[0]
    shares = dict[float, tuple[float, float]]()
    for end, kept in train(learner, validation, seconds, clock):
        present, last = learner.get_parameters(), task.share(learner)
        learner.set_parameters(kept)
        shares[end] = task.share(learner), last
        learner.set_parameters(present)
    return shares


def several_agents(
    task: Task, validation: tg.Bars, make: Contender, seed: int, seconds: tuple[float, ...], clock: Clock
) -> dict[float, tuple[float, float]]:
    """The same of the mean of `MEMBERS` agents, each of which has its part of the time and leaves out a fold."""
    (whole,) = seconds
    members: list[Any] = [make(task, seed + number)[0] for number in range(MEMBERS)]
    chosen, last = [], []
    for member, fold in zip(members, cut_folds(members[0].env, MEMBERS, EMBARGO_MS), strict=True):
        member.env.restrict_starts(fold.outside)
        for _, kept in train(member, validation, (whole / MEMBERS,), clock):
            last.append(member.get_parameters())
            chosen.append(kept)
    shares = []
    for states in (chosen, last):
        for member, state in zip(members, states, strict=True):
            member.set_parameters(state)
        shares.append(task.share(Ensemble(members)))
    return {whole: (shares[0], shares[1])}


def equal_time(
    seeds: Iterable[int],
    durations: tuple[float, ...],
    clock: Clock,
    say: Callable[[str], None],
    only: tuple[str, ...] | None = None,
) -> Table:
    """Shares after equal time, medians over the seeds."""
    learners = chosen(EQUAL_TIME) if only is None else chosen(only)
    shares: dict[str, dict[float, list[float]]] = {name: {seconds: [] for seconds in durations} for name in learners}
    for seed in seeds:
        task, validation = task_with_validation(seed)
        for name, make in learners.items():
            # One run for all where nothing depends on how long it is to be.
            runs = [durations] if name.startswith(PPO) else [(seconds,) for seconds in durations]
            trained = several_agents if name.startswith(FOUR) else one_agent
            for run in runs:
                for seconds, (share, last) in trained(task, validation, make, seed, run, clock).items():
                    shares[name][seconds].append(share)
                    say(f"seed {seed}, {name}: {share:.1%} after {seconds:.0f} s, {last:.1%} without choosing")
    headings = [Column(f"after {seconds:.0f} s", justify="right", no_wrap=True) for seconds in durations]
    table = Table(Column("share of the optimum, out of sample", no_wrap=True), *headings, box=None, pad_edge=False)
    for name, by_time in shares.items():
        cells = [
            f"{statistics.median(found):.1%} ({', '.join(f'{share:.0%}' for share in found)})"
            for found in by_time.values()
        ]
        table.add_row(name, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="markets and learners to take the median over")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--limit", type=float, default=30.0, help="seconds before a run is given up; the peer's is twice"
    )
    parser.add_argument("--seconds", type=float, nargs="+", default=DURATIONS, help="times of the part equal-time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of all learners")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu: where the machine is not idle")
    parser.add_argument("--only", choices=("race", "equal-time"), help="one part of the two")
    parser.add_argument("--learners", nargs="+", help="beginnings of the names of the learners of equal-time")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console, seeds, clock = Console(width=180), range(given.first, given.first + given.seeds), CLOCKS[given.clock]

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    say(f"torch {torch.__version__}, {given.threads} threads, seeds {seeds[0]} to {seeds[-1]}, {given.clock} clock")
    tables = []
    if given.only in (None, "race"):
        tables += race(seeds, given.limit, clock, say)
    if given.only in (None, "equal-time"):
        names = None if given.learners is None else tuple(given.learners)
        tables.append(equal_time(seeds, tuple(sorted(given.seconds)), clock, say, names))
    for table in tables:
        console.print(table, "", sep="\n")


if __name__ == "__main__":
    main()
