"""Training speed beside other learners: the same market, network size, epochs and batch, in one run.

    python benchmarks/training.py             steps a second, about 5 minutes on 2 cores
    python benchmarks/training.py --target    seconds to a target return, 3 seeds, about 15 minutes
    python benchmarks/training.py --quick     three timed turns each: about 2 minutes; with --target one seed, about 5

Beside ours: sb3-contrib's RecurrentPPO as it is; the same with one LSTM call for whole sequences, which computes the
same (tests/bench asserts it); and a recurrent PPO written by hand in the manner of CleanRL (plain_ppo.py).

Candidates of a group take turns, an iteration each; figures are medians, the spread is that of the quartiles. Episodes
are staggered for all. Run it on an otherwise idle machine. How the target is set: see target.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial

import torch
from plain_ppo import PlainPPO
from rich.console import Console
from target import contenders, race, result_table

import tailguard as tg
from tailguard.bench.own_learner import (
    AS_PEOPLE_RUN_IT,
    DEFAULTS,
    EPOCHS,
    EQUAL,
    EVERYTHING,
    RISK_STACK,
    UNITS,
    Shape,
    ours,
    trading_env,
)
from tailguard.bench.stable_baselines import peer
from tailguard.bench.timing import Group, Workload, add_speeds, speed_table, take_turns
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.optim.config import VGSConfig

FIRST_ITERATION = """
import tailguard as tg
from tailguard.bench.own_learner import DEFAULTS, our_learner
from tailguard.data.prepare import prepare
our_learner(prepare(tg.make_market(20_000, seed=0).bars), DEFAULTS).iterate()
"""


def by_hand(prepared: PreparedBars, shape: Shape, stagger: int = 64) -> Workload:
    """One iteration of the loop in plain_ppo.py."""
    return Workload(PlainPPO(trading_env(prepared, shape.envs, stagger), shape).iterate, shape.samples)


def groups(prepared: PreparedBars) -> list[Group]:
    """What is compared with what; ratios are taken to the first of each."""
    own = partial(ours, prepared)
    return [
        {
            f"sb3-contrib, {EQUAL}": partial(peer, prepared, EQUAL),
            "sb3-contrib, whole sequences": partial(peer, prepared, EQUAL, whole_sequences=True),
            "by hand": partial(by_hand, prepared, EQUAL),
            "Tailguard plain (scalar critic)": partial(own, EQUAL, critic="scalar"),
            "Tailguard default (quantile critic)": partial(own, EQUAL),
            "Tailguard all on": partial(own, EQUAL, **EVERYTHING),
            "Tailguard plain, compiled": partial(own, EQUAL, critic="scalar", runtime="compile"),
            "Tailguard all on, compiled": partial(own, EQUAL, **EVERYTHING, runtime="compile"),
        },
        {
            "sb3-contrib, episodes end at any step": partial(peer, prepared, EQUAL, stagger=1),
            "sb3-contrib, whole sequences, any step": partial(peer, prepared, EQUAL, stagger=1, whole_sequences=True),
            "by hand, any step": partial(by_hand, prepared, EQUAL, stagger=1),
            "Tailguard plain, any step": partial(own, EQUAL, stagger=1, critic="scalar"),
            "Tailguard all on, any step": partial(own, EQUAL, stagger=1, **EVERYTHING),
        },
        {
            f"Tailguard plain, {DEFAULTS}": partial(own, DEFAULTS, critic="scalar"),
            "default": partial(own, DEFAULTS),
            "default without figures of health": partial(own, DEFAULTS, monitor=False),
            "quantile critic, risk budget": partial(own, DEFAULTS, risk=RISK_STACK["risk"]),
            "twin quantile critics": partial(own, DEFAULTS, twin_critics=True),
            "twin quantile critics, risk budget": partial(own, DEFAULTS, **RISK_STACK),
            "variance gradient scaling": partial(own, DEFAULTS, vgs=VGSConfig(enabled=True)),
            "UPGDW": partial(own, DEFAULTS, optimizer="upgdw"),
            "all on": partial(own, DEFAULTS, **EVERYTHING),
        },
        {
            f"sb3-contrib as people run it, {AS_PEOPLE_RUN_IT}": partial(peer, prepared, AS_PEOPLE_RUN_IT),
            "sb3-contrib, whole sequences": partial(peer, prepared, AS_PEOPLE_RUN_IT, whole_sequences=True),
            f"by hand, {AS_PEOPLE_RUN_IT}": partial(by_hand, prepared, AS_PEOPLE_RUN_IT),
            f"Tailguard's defaults, {DEFAULTS}": partial(own, DEFAULTS),
            "Tailguard's defaults, compiled": partial(own, DEFAULTS, runtime="compile"),
        },
    ]


def start_up_seconds() -> float:
    """From starting Python to the end of the first iteration, the making of a market included."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", FIRST_ITERATION], check=True)
    return time.perf_counter() - begun


def speeds(console: Console, turns: int, only: str) -> None:
    """Steps a second of all groups, and the start-up."""
    prepared = prepare(tg.make_market(20_000, seed=0).bars)
    table = speed_table(f"training, LSTM {UNITS}, {EPOCHS} epochs")
    for group in groups(prepared):
        if any(only in name for name in group):
            with console.status("") as status:
                add_speeds(table, take_turns(group, turns, status.update))
    console.print(table)
    if not only:
        console.print(f"start-up {start_up_seconds():.1f} s from a fresh process to the end of the first iteration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three timed turns instead of fifteen; one seed")
    parser.add_argument("--only", default="", help="groups with a row, or contenders, whose name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of all learners")
    parser.add_argument("--target", action="store_true", help="measure the time to a target return instead")
    parser.add_argument("--share", type=float, default=0.5, help="the target: share of the planted optimum's growth")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="with --target, of all learners")
    parser.add_argument("--seeds", type=int, help="markets and learners to average over; default 3, or 1 with --quick")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of training before a run is given up")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console = Console()
    turns, seeds = (3, 1) if given.quick else (15, 3)
    measured = f"{given.seeds or seeds} seeds" if given.target else f"medians of {turns} turns"
    console.print(f"torch {torch.__version__}, {given.threads} threads; {measured}", highlight=False)
    if given.target:
        say = partial(console.print, soft_wrap=True, markup=False, highlight=False)
        chosen = {name: make for name, make in contenders(given.learning_rate).items() if given.only in name}
        found = race(chosen, given.share, range(given.seeds or seeds), given.limit, say)
        console.print(result_table(given.share, found))
    else:
        speeds(console, turns, given.only)


if __name__ == "__main__":
    main()
