"""Give the program whatever a user, a disk or a stranger could give it, and count what it does not answer in words.

    python benchmarks/fuzz.py --workers 2
    python benchmarks/fuzz.py --scale 0.05 --seed 7

Four kinds: settings (400), CSV files (300), command lines (200) and hostile files (200: agents, checkpoints, prepared
markets, Parquet, YAML; cut short, with flipped bits, links to a device, or with manifests that were changed and sealed
again). A part of the settings and of the CSV files is unusual and legal, and is trained on for a moment. A case is
answered when the command ends by itself with status 0 (accepted), 1 or 2 (refused in words) and no traceback. Anything
else is printed with what repeats it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

SECONDS = 120
"""A case that takes longer hangs."""
MEMORY = 8 * 2**30
"""Bytes that a process may take; a case needs less than one GiB."""
SIZES = {"settings": 400, "csv": 300, "commands": 200, "files": 200}
TINY: dict[str, Any] = {
    "data": {"synthetic_bars": 1_200, "features": ["return_24"], "embargo": "1d"},
    "env": {"num_envs": 4, "episode_length": 16},
    "ppo": {"n_steps": 8, "minibatch_size": 16, "epochs": 1, "network": {"hidden": [4], "lstm_size": 4}},
    "pathwise": {"n_steps": 8, "minibatch_size": 16, "critic_epochs": 1, "network": {"hidden": [4], "lstm_size": 4}},
    "training": {"total_timesteps": 32, "threads": 1},
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 40, 10**30, -(10**30), 0.5, 1.5, -0.5, 1e-300, 1e300),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "nan",
        "1e6",
        "1e400",
        "linear:1:0",
        "cosine:1:x",
        "1d",
        "0d",
    ),
    *("9999d", "cuda:9", [], [1, 2], ["a"], {}, {"a": 1}, "[/b]", "\x1b[31m", "9" * 5_000),
    *("separate", "shared", "none", "quantile", "categorical", "scalar", "own", "adam", "adamw", "upgd", "upgdw"),
    *("off", "min", "mean", "portfolio", "per_symbol", "log", "simple", "pnl", "per_quantile", "mean_only", "skip"),
]
SIZES_IN_WORDS = ["1h", "2d", "5d", "0.1", "0.3"]
WORDS = [
    *("train", "config", "data", "check", "make", "prepare", "fetch", "report", "backtest", "compare", "demo", "bench"),
    *(
        "--set",
        "--name",
        "--resume",
        "--data",
        "--yes",
        "--seed",
        "--bars",
        "--signal",
        "--symbol",
        "--help",
        "--split",
    ),
    *(
        "--walk-forward",
        "--folds",
        "--seeds",
        "--costs",
        "--delay",
        "--noise",
        "--csv",
        "--json",
        "--trials",
        "--limit",
    ),
    *("good.yaml", "bad.yaml", "bars.csv", "runs", "runs/run", "nope", ".", "..", "/", "[red]x", "a[/b]", "../x", "-"),
    *("ppo", "ppo.gamma=0.9", "ppo.gamma=2", "a.b=1", "=", "x=[", "x=&a [*a]", "-1", "0", "1e9", "nan", "", " ", "é"),
    *("out.csv", "out.json", "no/out.csv", "test", "train", "2021-13-40", "{", "\u202e", "--"),
]


@dataclass(frozen=True)
class Answer:
    """What became of a case: answered, traceback or hang."""

    kind: str
    number: int
    outcome: str
    what: str = ""
    accepted: bool = False
    """Whether the input was taken as good; else it was refused in words."""


class Hang(BaseException):
    """Raised by the alarm."""


def run(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and output of the command, in this process; an exception that it lets out is raised."""
    from tailguard.cli import main

    said = io.StringIO()
    sys.argv = ["tailguard", *arguments]
    os.chdir(folder)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            return (stop.code if isinstance(stop.code, int) else int(bool(stop.code))), said.getvalue()
    return 0, said.getvalue()


# --- cases ----------------------------------------------------------------------------------------------------------


def settings(draw: random.Random, place: Path, _: Path) -> list[list[str]]:
    """Up to six settings with legal or odd values, trained for a moment if they are legal."""
    from tailguard.config import RunConfig

    learner = draw.choice(["ppo", "pathwise"])
    other = "ppo" if learner == "pathwise" else "pathwise"
    # Settings of the learner that is not chosen are checked, and never used.
    keys = [one for one in leaves(RunConfig()) if not one[0].startswith(other) or draw.random() < 0.1]
    chosen = yaml.safe_load(yaml.safe_dump(TINY | {"learner": learner}))
    odd = draw.choice([0.0, 0.0, 0.3, 1.0])
    for key, hint, value in draw.sample(keys, draw.randint(1, 6)):
        spot = chosen
        *sections, last = key.split(".")
        for section in sections:
            spot = spot.setdefault(section, {})
        spot[last] = draw.choice(ODD) if draw.random() < odd else legal(draw, key, hint, value)
    if chosen["training"].get("total_timesteps") != 32:
        chosen["training"]["total_timesteps"] = draw.choice([32, "1e1", -1, None])  # never one of hours
    (place / "run.yaml").write_text(yaml.safe_dump(chosen))
    return [["train", "run.yaml", "--name", "x"]]


def leaves(config: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Name, type and default of every setting."""
    found = []
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), f"{path}{item.name}"
        found += leaves(value, f"{name}.") if dataclasses.is_dataclass(value) else [(name, hints[item.name], value)]
    return found


def legal(draw: random.Random, key: str, hint: Any, value: Any) -> Any:
    """A value of the setting's type that is most often inside its range, and cheap to train with."""
    choices = [choice for one in (hint, *get_args(hint)) if get_origin(one) is Literal for choice in get_args(one)]
    if key.endswith("runtime"):
        return draw.choice(["auto", "eager"])  # others compile for minutes
    if choices:
        return draw.choice(choices)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([0, 1, 2, 3, 4, 8, 16, 24])
    if isinstance(value, float):
        schedules = ["linear:0.001:0", "cosine:0.01:0.001"] if str in get_args(hint) else []
        return draw.choice([value * draw.choice([0.0, 0.1, 0.5, 2.0, 10.0]), draw.random(), 0.0, 1.0, *schedules])
    if value is None:
        return draw.choice([None, -0.04, -0.5, 0.0, 5, 0.1])
    if isinstance(value, tuple):
        return draw.choice([list(value), [], [3], [4, 2], ["return_24", "hour"], [-1.0, 1.0]])
    return draw.choice([value, *SIZES_IN_WORDS])


def csv(draw: random.Random, place: Path, made: Path) -> list[list[str]]:
    """Bars with damaged cells, rows and ends, checked and trained on."""
    lines = [line.split(",") for line in (made / "bars.csv").read_text().splitlines()]
    if draw.random() < 0.4:
        return unusual_csv(lines, draw, place)
    cells = ["", "nan", "-1", "0", "1e400", "x", '"', "2021-13-40", "1e-320", "∞", "9" * 40, "inf", "null", "[/b]"]
    for _ in range(draw.randint(1, 5)):
        row = draw.randrange(len(lines))
        kind = draw.choice(["cell", "cell", "drop", "repeat", "swap", "shorter", "longer", "empty"])
        if kind == "cell" and lines[row]:
            lines[row][draw.randrange(len(lines[row]))] = draw.choice(cells)
        elif kind == "drop" and len(lines) > 1:
            lines.pop(row)
        elif kind == "repeat":
            lines.insert(row, list(lines[row]))
        elif kind == "swap":
            lines[row], lines[-1] = lines[-1], lines[row]
        elif kind == "shorter" and lines[row]:
            lines[row].pop()
        elif kind == "longer":
            lines[row].append("7")
        elif kind == "empty":
            lines[row] = []
    text = "\n".join(",".join(line) for line in lines).encode()
    if draw.random() < 0.3:
        text = text[: draw.randrange(len(text))]
    (place / "any.csv").write_bytes(text)
    (place / "run.yaml").write_text(yaml.safe_dump(TINY | {"data": {"embargo": "1d"}}))
    commands = [["data", "check", "any.csv"]]
    if draw.random() < 0.2:
        commands.append(["train", "run.yaml", "--data", "any.csv", "--name", "x"])
    return commands


def unusual_csv(lines: list[list[str]], draw: random.Random, place: Path) -> list[list[str]]:
    """Bars that may well be right: flat, without volume, of any scale, short, with gaps, in other columns."""
    header, rows = lines[0], lines[1:]
    prices = [header.index(name) for name in ("open", "high", "low", "close")]
    volume = header.index("volume")
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["scale", "flat", "quiet", "short", "gap", "column", "order", "jump"])
        begin = draw.randrange(len(rows))
        end = min(len(rows), begin + draw.choice([1, 10, 1_000]))
        factor = draw.choice([1e-9, 1e-3, 0.5, 3.0, 1e6, 1e12])
        if kind in ("scale", "jump"):
            for row in rows if kind == "scale" else rows[begin:]:
                for column in prices:
                    row[column] = repr(float(row[column]) * factor)
        elif kind in ("flat", "quiet"):
            for row in rows[begin:end]:
                for column in prices if kind == "flat" else [volume]:
                    row[column] = rows[begin][prices[0]] if kind == "flat" else "0"
        elif kind == "short":
            del rows[draw.choice([1, 2, 30, len(rows) // 2]) :]
        elif kind == "gap" and len(rows) > 20:
            del rows[len(rows) // 3 : len(rows) // 3 + draw.choice([1, 5])]
        elif kind == "column":
            header.append(draw.choice(["sentiment", "funding_rate", "trades"]))
            for row in rows:
                row.append(draw.choice(["0", "0.0001", str(factor)]))
        elif kind == "order":
            rows.reverse()
    (place / "any.csv").write_text("\n".join(",".join(line) for line in [header, *rows]))
    settings = {"embargo": "1h", "features": ["return_1"], "gaps": draw.choice(["error", "split"])}
    (place / "run.yaml").write_text(yaml.safe_dump(TINY | {"data": settings}))
    return [["data", "check", "any.csv"], ["train", "run.yaml", "--data", "any.csv", "--name", "x"]]


def commands(draw: random.Random, place: Path, made: Path) -> list[list[str]]:
    """Words that the command knows, in any order; a file where runs belong keeps them from training for minutes."""
    shutil.copytree(made / "runs", place / "kept")
    (place / "runs").write_text("")
    (place / "good.yaml").write_text("ppo: {gamma: 0.9}\n")
    (place / "bad.yaml").write_text("ppo: [1, 2\n")
    shutil.copy(made / "bars.csv", place / "bars.csv")
    words = [draw.choice(WORDS) for _ in range(draw.randint(0, 7))]
    heavy = {"demo", "bench", "fetch"} & set(words) and "--help" not in words
    return [["--help", *words] if heavy else [word.replace("runs/run", "kept/run") for word in words]]


def files(draw: random.Random, place: Path, made: Path) -> list[list[str]]:
    """A damaged file of a run, a prepared market, bars or settings, and the commands that read it."""
    for name in ("runs", "market"):
        shutil.copytree(made / name, place / name)
    for name in ("bars.parquet", "bars.csv"):
        shutil.copy(made / name, place / name)
    target = draw.choice(sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size))
    if target.name in ("manifest.json", "market.json") and draw.random() < 0.7:
        reseal(target, draw)
    else:
        damage(target, draw)
    inside = target.relative_to(place).parts
    if inside[0] == "runs":
        resume = ["train", "--resume", "runs/run", "--yes"]
        return [
            draw.choice([["backtest", "runs/run"], ["report", "runs/run"], resume, ["compare", "runs/run", "runs/run"]])
        ]
    if inside[0] == "market":
        (place / "run.yaml").write_text(yaml.safe_dump(TINY | {"data": {"embargo": "1d"}}))
        return [draw.choice([["data", "check", "market"], ["train", "run.yaml", "--data", "market", "--name", "x"]])]
    return [["data", "check", target.name]]


def damage(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    kind = draw.choice(["flip", "flip", "cut", "garbage", "empty", "grow", "link"])
    if kind == "flip":
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "garbage":
        data[:] = draw.randbytes(draw.randint(1, 4096))
    elif kind == "empty":
        data.clear()
    elif kind == "grow":
        data += draw.randbytes(100)
    path.unlink()
    if kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(data)


def reseal(path: Path, draw: random.Random) -> None:
    """Change something in a manifest, and its hash with it, as a stranger would."""
    import hashlib

    manifest = json.loads(path.read_text())
    spot: Any = manifest
    while isinstance(spot, dict | list) and spot:
        key = draw.choice(sorted(spot)) if isinstance(spot, dict) else draw.randrange(len(spot))
        if key == "sha256" and spot is manifest:
            continue
        if not isinstance(spot[key], dict | list) or not spot[key] or draw.random() < 0.2:
            spot[key] = draw.choice(
                [None, "x", -1, 0, 1.5, 10**30, [], {}, True, float("nan"), "../x", ["a"], {"a": 1}]
            )
            break
        spot = spot[key]
    manifest.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest | {"sha256": digest}))


CASES: dict[str, Callable[[random.Random, Path, Path], list[list[str]]]] = {
    "settings": settings,
    "csv": csv,
    "commands": commands,
    "files": files,
}


# --- the loop -------------------------------------------------------------------------------------------------------


def case(kind: str, number: int, seed: int, made: Path) -> Answer:
    """One case in a folder of its own; the same seed and number make the same case."""
    draw = random.Random(f"{seed} {kind} {number}")

    def ring(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    here, shown, status = os.getcwd(), "", 0
    with tempfile.TemporaryDirectory() as folder:
        signal.alarm(SECONDS)
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # where no signal is heard, the process ends
        try:
            for arguments in CASES[kind](draw, Path(folder), made):
                shown = " ".join(arguments)
                status, said = run(arguments, Path(folder))
                if status not in (0, 1, 2) or "Traceback" in said or (status and not said.strip()):
                    return Answer(kind, number, "traceback", f"{shown}: status {status}: {said[-600:]}")
        except Hang:
            return Answer(kind, number, "hang", shown)
        except BaseException:
            return Answer(kind, number, "traceback", f"{shown}\n{traceback.format_exc()[-1_500:]}")
        finally:
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            os.chdir(here)
    return Answer(kind, number, "answered", accepted=status == 0)


def prepare_worker() -> None:
    """A worker that tells where it dies, and that cannot take the machine's memory."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def answers_of(wanted: list[tuple[str, int]], seed: int, made: Path, pool: ProcessPoolExecutor) -> list[Answer]:
    """The answers in order, up to a case whose process died."""
    found: list[Answer] = []
    with pool:
        waiting = [pool.submit(case, kind, number, seed, made) for kind, number in wanted]
        with contextlib.suppress(BrokenProcessPool):
            for future in waiting:
                found.append(shown(future.result()))
    return found


def alone(one: tuple[str, int], seed: int, made: Path, pool: ProcessPoolExecutor) -> list[Answer]:
    """The answer of a case in a process of its own, which may die of it."""
    return answers_of([one], seed, made, pool) or [shown(Answer(*one, "traceback", "the process died"))]


def shown(answer: Answer) -> Answer:
    """The answer, printed if it is none."""
    if answer.outcome != "answered":
        print(f"--- {answer.kind} {answer.number}: {answer.outcome}: {answer.what}", flush=True)
    return answer


def make_things(made: Path) -> None:
    """A finished run, a prepared market and bars, to be damaged copy by copy."""
    from tailguard.data.synthetic import make_market

    market = make_market(1_200, seed=1)
    market.save(made / "bars.parquet")
    make_market(300, seed=1).save(made / "bars.csv")
    (made / "run.yaml").write_text(yaml.safe_dump(TINY))
    bound = yaml.safe_dump(TINY | {"data": {"embargo": "1d"}})
    (made / "market.yaml").write_text(bound)
    for arguments in (
        ["train", "run.yaml", "--name", "run"],
        ["data", "prepare", "market", "market.yaml", "--data", "bars.parquet"],
    ):
        status, said = run(arguments, made)
        if status:
            raise SystemExit(f"fuzz: {' '.join(arguments)} failed: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases; 0.05 is a quick look")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=sorted(CASES), help="one kind of case")
    parser.add_argument("--case", type=int, help="with --only: this case alone")
    arguments = parser.parse_args()
    begun = time.monotonic()
    wanted = [
        (kind, number)
        for kind, size in SIZES.items()
        if arguments.only in (None, kind)
        for number in range(max(1, round(size * arguments.scale)))
    ]
    if arguments.case is not None:
        wanted = [(arguments.only, arguments.case)]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        # Spawned: a fork of a process in which Polars has run can hang.
        pool = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"), initializer=prepare_worker)
        with pool(1) as first:
            first.submit(make_things, made).result()
        answers: list[Answer] = []
        while wanted:
            done = answers_of(wanted, arguments.seed, made, pool(arguments.workers))
            if len(done) < len(wanted):  # a process died; alone, the case that killed it is known
                done += alone(wanted[len(done)], arguments.seed, made, pool(1))
            answers += done
            wanted = wanted[len(done) :]
    counts = Counter((answer.kind, answer.outcome) for answer in answers)
    taken = Counter(answer.kind for answer in answers if answer.accepted)
    print(f"\n{'kind':<10}{'cases':>8}{'accepted':>10}{'refused':>9}{'traceback':>11}{'hang':>6}")
    for kind in SIZES:
        cells = [counts[kind, outcome] for outcome in ("answered", "traceback", "hang")]
        print(f"{kind:<10}{sum(cells):>8}{taken[kind]:>10}{cells[0] - taken[kind]:>9}{cells[1]:>11}{cells[2]:>6}")
    print(f"seed {arguments.seed}, {time.monotonic() - begun:.0f} s")
    sys.exit(0 if all(answer.outcome == "answered" for answer in answers) else 1)


if __name__ == "__main__":
    main()
