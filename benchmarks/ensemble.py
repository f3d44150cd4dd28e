"""What an ensemble is worth: the Sharpe ratio of one agent and of eight together, over markets and seeds.

    python benchmarks/ensemble.py --seeds 8       about 10 minutes on 2 cores

For each seed eight agents are trained on a market of four years as `tailguard train` trains the members of a run. The
first of them alone, and the mean of all, are judged by their yearly Sharpe ratio in 40 unseen years of the same law.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from pathlib import Path

import torch
from promise import BARS, LAWS, LENGTH, SIGNAL, YEAR, settings, unseen
from rich.console import Console

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.experiment.build import split_market
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Members, train_members

LAW, LIMIT, COUNT = "default", -0.04, 8


def sharpes(seed: int) -> tuple[float, float]:
    """Yearly Sharpe ratio of the first member alone, and of all of them."""
    torch.set_num_threads(1)
    config = settings(seed, LIMIT, "pathwise", [f"training.members={COUNT}"])
    split = split_market(config, tg.make_market(BARS, seed=seed, signal=SIGNAL, law=LAWS[LAW]).bars)
    with tempfile.TemporaryDirectory() as folder:
        agent = train_members(
            Members.on(config, split.train, seed),
            RunFolder(Path(folder)),
            None,
            Console(quiet=True),
            resume=False,
            again="",
            ask=lambda _: False,
        )
    assert isinstance(agent, Ensemble)
    part = unseen(LAW, SIGNAL, agent)
    found = []
    for members in (agent.members[:1], agent.members):
        outcomes = part.trade(Ensemble(members, agent.exposure)).measured
        found.append(float(outcomes.mean() / outcomes.std()) * (YEAR / LENGTH) ** 0.5)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = []
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:  # Polars does not survive a fork
        for one, all_of_them in pool.imap(sharpes, range(given.first, given.first + given.seeds)):
            found.append((one, all_of_them))
            print(f"seed {given.first + len(found) - 1}: one {one:.2f}, {COUNT} together {all_of_them:.2f}", flush=True)
    for name, ratios in zip(("one agent", f"{COUNT} together"), zip(*found, strict=True), strict=True):
        spread = statistics.stdev(ratios)
        print(f"{name}: median {statistics.median(ratios):.2f}, standard deviation over seeds {spread:.2f}")


if __name__ == "__main__":
    main()
