"""False alarms of the audit: tiny clean runs over seeds, critics, optimisers and learners, each audited as a run.

    python benchmarks/audit_false_alarms.py --runs 50 --out false_alarms.jsonl

Every run is trained, opened again, and audited with the parts of its own network and learner; a fifth of them learn for
long enough to earn. A line for each run goes to `--out`; the same command resumes after the lines that are there.
`--whole` runs the slow checks, too; `--only` those that are named. `--minutes` ends early, between two runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tailguard.audit.auditor import audit
from tailguard.audit.subject import Subject
from tailguard.config import load_config
from tailguard.experiment.trained_run import open_run
from tailguard.optim import OPTIMIZERS
from tailguard.runs.runner import train

SMALL = (
    "data.features=[return_24, taker_imbalance_6]", "data.embargo=1d", "env.num_envs=8", "env.episode_length=32",
    "training.threads=1",
)  # fmt: skip
SHORT = ("data.synthetic_bars=2500", "training.total_timesteps=512")
LEARNING = ("data.synthetic_bars=6000", "data.synthetic_signal=30", "training.total_timesteps=50000")
"""A market with a strong signal, and as many steps as it takes to earn from it: its tail strains the limit."""
FACTORS: dict[str, tuple[str, ...]] = {
    "learner": ("ppo", "pathwise"),
    "network.critic": ("quantile", "categorical", "scalar"),
    "optimizer": tuple(OPTIMIZERS),
    "network.memory": ("separate", "none", "shared"),
    "network.twin_critics": ("true", "false"),
    "risk.limit": ("null", "-0.03", "-0.01"),
    "training.members": ("1", "2"),
    "learning": ("no", "no", "no", "no", "yes"),
}
"""Levels of each factor. They come equally often, in an order of the factor's own, so that none goes with another."""
PERIOD = 60
"""Runs after which the levels repeat."""


def level(factor: str, number: int) -> str:
    """The level that a factor has in a run."""
    levels = list(FACTORS[factor]) * (PERIOD // len(FACTORS[factor]))
    random.Random(factor).shuffle(levels)
    return levels[number % len(levels)]


def settings_of(number: int) -> list[str]:
    """What the run with this number has."""
    chosen = {factor: level(factor, number) for factor in FACTORS}
    learner, learns = chosen.pop("learner"), chosen.pop("learning") == "yes"
    own = {"n_steps": "16", "network.hidden": "[8]", "network.lstm_size": "8"}
    own |= {name: chosen[name] for name in chosen if not name.startswith(("risk.", "training."))}
    shared = [f"{name}={value}" for name, value in chosen.items() if name.startswith(("risk.", "training."))]
    chosen_learner = [f"learner={learner}", f"training.seed={number}"]
    return [*chosen_learner, *shared, *(LEARNING if learns else SHORT),
            *(f"{learner}.{name}={value}" for name, value in own.items())]  # fmt: skip


def audited(number: int, *, whole: bool, only: Sequence[str] = ()) -> dict[str, Any]:
    """Train the run with this number and audit it, by these checks alone if some are named."""
    config = load_config(overrides=[*SMALL, *settings_of(number)])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(place) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, folder, Console(quiet=True))
            report = audit(Subject.of_run(open_run(folder)), fast=not whole and not only, only=only)
    failed = [{"id": one.check.id, "measured": one.measurement.measured, "number": one.measurement.number,
               "detail": one.measurement.detail} for one in report.failed]  # fmt: skip
    return {
        "run": number,
        "settings": settings_of(number),
        "checks": len(report.results),
        "skipped": report.count("skipped"),
        "failed": failed,
        "seconds": round(time.process_time() - began, 1),
    }


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("false_alarms.jsonl"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], help="ids of checks, or the beginnings of their ids")
    given = parser.parse_args()
    done, began = {line["run"] for line in lines_of(given.out)}, time.monotonic()
    for number in range(given.runs):
        if number in done or time.monotonic() - began > 60 * given.minutes:
            continue
        line = audited(number, whole=given.whole, only=given.only)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(number, "failed:" if line["failed"] else "ok", line["failed"] or "", f"{line['seconds']} s", flush=True)
    lines = list(lines_of(given.out))
    alarms = [one for line in lines for one in line["failed"]]
    answers = sum(line["checks"] - line["skipped"] for line in lines)
    for factor, levels in FACTORS.items():
        counts = Counter(level(factor, line["run"]) for line in lines)
        print(f"{factor:22} {', '.join(f'{one} {counts[one]}' for one in dict.fromkeys(levels))}")
    print(f"{len(lines)} clean runs, {answers:,} answers, {len(alarms)} false alarms: {[one['id'] for one in alarms]}")


if __name__ == "__main__":
    main()
