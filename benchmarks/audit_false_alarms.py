"""False alarms of the audit: tiny clean runs over seeds, critics, optimisers and learners, each audited as a run.

    python benchmarks/audit_false_alarms.py --runs 50 --out false_alarms.jsonl

Every run is trained, opened again, and audited with the parts of its own network and learner. A line for each run goes
to `--out`; the same command resumes after the lines that are there. `--whole` runs the slow checks, too. `--minutes`
ends early, between two runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
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
    "data.synthetic_bars=2500", "data.features=[return_24, taker_imbalance_6]", "data.embargo=1d", "env.num_envs=8",
    "env.episode_length=32", "training.total_timesteps=256", "training.threads=1", "training.members=1",
)  # fmt: skip


def settings_of(number: int) -> list[str]:
    """What the run with this number has: every learner, critic, optimiser and kind of memory comes with every seed."""
    learner = ("ppo", "pathwise")[number % 2]
    critic = ("quantile", "categorical", "scalar")[number % 3]
    optimizer = list(OPTIMIZERS)[number % len(OPTIMIZERS)]
    memory = ("separate", "none", "shared")[number // 3 % 3]
    own = {
        "n_steps": 16, "network.hidden": "[8]", "network.lstm_size": 8, "network.critic": critic,
        "optimizer": optimizer, "network.memory": memory, "network.twin_critics": str(number // 2 % 2 == 0).lower(),
    }  # fmt: skip
    limit = ["risk.limit=-0.03"] if number % 4 < 2 else []
    chosen = [f"learner={learner}", f"training.seed={number}", *limit]
    return [*chosen, *(f"{learner}.{name}={value}" for name, value in own.items())]


def audited(number: int, *, whole: bool) -> dict[str, Any]:
    """Train the run with this number and audit it."""
    config = load_config(overrides=[*SMALL, *settings_of(number)])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(place) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            train(config, folder, Console(quiet=True))
            report = audit(Subject.of_run(open_run(folder)), fast=not whole)
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
    given = parser.parse_args()
    done, began = {line["run"] for line in lines_of(given.out)}, time.monotonic()
    for number in range(given.runs):
        if number in done or time.monotonic() - began > 60 * given.minutes:
            continue
        line = audited(number, whole=given.whole)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(number, "failed:" if line["failed"] else "ok", line["failed"] or "", f"{line['seconds']} s", flush=True)
    lines = list(lines_of(given.out))
    alarms = [one for line in lines for one in line["failed"]]
    answers = sum(line["checks"] - line["skipped"] for line in lines)
    print(f"{len(lines)} clean runs, {answers:,} answers, {len(alarms)} false alarms: {[one['id'] for one in alarms]}")


if __name__ == "__main__":
    main()
