"""A user's mistake, whatever it is, ends in a message and status 2 (1 for bars that fail a check), not a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailguard.cli import main
from tailguard.config import RunConfig, load_config, to_dict
from tailguard.data.synthetic import make_market
from tailguard.errors import TailguardError
from tailguard.experiment.build import build

fuzz = settings(
    max_examples=int(os.environ.get("TAILGUARD_FUZZ", "40")),
    deadline=None,
    derandomize="TAILGUARD_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
"""The same few cases in every test run; TAILGUARD_FUZZ=5000 tries that many new ones."""


def command(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and messages of the command, run in this process; any exception but the exit goes to the test."""
    said = io.StringIO()
    before, here = sys.argv, os.getcwd()
    sys.argv = ["tailguard", *arguments]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as stop:
        return int(stop.code or 0), said.getvalue()
    finally:
        sys.argv = before
        os.chdir(here)
    return 0, said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which no run can begin, so that no combination of arguments trains for minutes."""
    place = tmp_path_factory.mktemp("fuzz")
    (place / "runs").write_text("")
    (place / "good.yaml").write_text("ppo: {gamma: 0.9}\n")
    (place / "bad.yaml").write_text("ppo: [1, 2\n")
    (place / "list.yaml").write_text("- 1\n- 2\n")
    (place / "folder.yaml").mkdir()
    (place / "binary.yaml").write_bytes(bytes(range(256)))
    make_market(12, seed=1).save(place / "bars.csv")
    return place


WORDS = [
    *("train", "config", "data", "check", "make", "--set", "--name", "--resume", "--data", "--yes", "-y", "--seed"),
    *(
        "--bars",
        "--assets",
        "--signal",
        "--correlation",
        "--frequency",
        "--gaps",
        "--symbol",
        "--volume-unit",
        "--help",
    ),
    *(
        "good.yaml",
        "bad.yaml",
        "list.yaml",
        "folder.yaml",
        "binary.yaml",
        "nowhere.yaml",
        "bars.csv",
        "runs",
        ".",
        "..",
        "/",
    ),
    *("ppo", "market", "pppo", "ppo.gamma=0.9", "ppo.gamma=2", "ppo=1", "a.b.c=1", "=", "x=[", "x={", "ppo.network=3"),
    *(
        "-1",
        "0",
        "1e9",
        "nan",
        "inf",
        "",
        " ",
        "\t",
        "é",
        "'",
        "\x00x"[1:],
        "--",
        "-",
        "out.csv",
        "out.xyz",
        "no/out.csv",
    ),
]


@given(arguments=st.lists(st.sampled_from(WORDS), max_size=6))
@fuzz
def test_any_arguments(folder: Path, arguments: list[str]) -> None:
    status, message = command(arguments, folder)
    assert status in (0, 1, 2)
    assert "Traceback" not in message
    if status == 2:
        assert message.strip()


# --- settings -------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "data": {"synthetic_bars": 1_200, "features": ["return_24"], "embargo": "1d"},
    "env": {"num_envs": 4, "episode_length": 16},
    "ppo": {
        "n_steps": 8,
        "minibatch_size": 16,
        "epochs": 1,
        "network": {"hidden": [4], "lstm_size": 4, "quantiles": 4},
    },
    "training": {"total_timesteps": 32, "threads": 1},
}


def leaves(settings: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in settings.items():
        found += leaves(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]
    return found


KEYS = leaves(to_dict(RunConfig()))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([10**30, -(10**30), 1.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), -float("inf")]),
    st.floats(-2, 2),
    st.sampled_from(
        ["", "x", "nan", "linear:1:0", "linear:1", "cosine:1:x", "1d", "0d", "-1d", "9999d", "cuda:9", "quote"]
    ),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 5), st.text(max_size=3), st.floats(-2, 2)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
CHOICES = [
    *("separate", "shared", "none", "quantile", "categorical", "scalar", "own", "hl_gauss", "two_hot", "tanh", "silu"),
    *(
        "adam",
        "adamw",
        "upgd",
        "adaptive_upgd",
        "upgdw",
        "per_env",
        "off",
        "global",
        "state",
        "min",
        "mean",
        "portfolio",
    ),
    *("per_symbol", "log", "simple", "pnl", "per_quantile", "mean_only", "mean_and_variance", "stop", "skip", "split"),
]


@given(changes=st.dictionaries(st.sampled_from(KEYS), ODD | st.sampled_from(CHOICES), min_size=1, max_size=3))
@fuzz
def test_any_settings(tmp_path_factory: pytest.TempPathFactory, changes: dict[tuple[str, ...], Any]) -> None:
    """Refused by name, or good enough to build everything and train for an iteration."""
    settings: dict[str, Any] = yaml.safe_load(yaml.safe_dump(TINY))
    for path, value in changes.items():
        place = settings
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    place = tmp_path_factory.mktemp("run")
    (place / "run.yaml").write_text(yaml.safe_dump(settings))
    with contextlib.suppress(TailguardError):
        config = load_config(place / "run.yaml")
        build(config).learner.iterate()


@given(text=st.text(max_size=60) | st.binary(max_size=60))
@fuzz
def test_any_text_as_a_config(folder: Path, text: str | bytes) -> None:
    path = folder / "any.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    status, message = command(["train", "any.yaml"], folder)
    assert status == 2
    assert "Traceback" not in message


@given(text=st.text(max_size=30))
@fuzz
def test_any_override(folder: Path, text: str) -> None:
    status, message = command(["train", f"--set={text}"], folder)
    assert status == 2
    assert message.strip()


# --- bars -----------------------------------------------------------------------------------------------------------


@st.composite
def damaged_csv(draw: st.DrawFn, whole: str) -> bytes:
    lines = [line.split(",") for line in whole.splitlines()]
    for _ in range(draw(st.integers(1, 4))):
        row = draw(st.integers(0, len(lines) - 1))
        column = draw(st.integers(0, max(len(lines[row]) - 1, 0)))
        kind = draw(st.sampled_from(["cell", "drop", "repeat", "swap", "shorter", "longer", "empty"]))
        if kind == "cell" and lines[row]:
            lines[row][column] = draw(
                st.sampled_from(["", "nan", "-1", "0", "1e400", "x", '"', "2021-13-40", "1e-320", "∞", "9" * 40])
            )
        elif kind == "drop" and len(lines) > 1:
            lines.pop(row)
        elif kind == "repeat":
            lines.insert(row, list(lines[row]))
        elif kind == "swap":
            lines[row], lines[-1] = lines[-1], lines[row]
        elif kind == "shorter" and lines[row]:
            lines[row].pop(column)
        elif kind == "longer":
            lines[row].append("7")
        elif kind == "empty":
            lines[row] = []
    text = "\n".join(",".join(line) for line in lines).encode()
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@given(data=st.data())
@fuzz
def test_any_bars(folder: Path, data: st.DataObject) -> None:
    (folder / "any.csv").write_bytes(data.draw(damaged_csv((folder / "bars.csv").read_text())))
    status, message = command(["data", "check", "any.csv"], folder)
    assert status in (0, 1, 2)
    assert "Traceback" not in message
    if status:
        trained, message = command(["train", "--data", "any.csv", "--name", "x"], folder)
        assert trained == 2
        assert message.strip()


@pytest.mark.parametrize("suffix", ["csv", "parquet", "feather", "zip", "csv.gz"])
@given(text=st.binary(max_size=200))
@fuzz
def test_any_bytes_as_bars(folder: Path, suffix: str, text: bytes) -> None:
    (folder / f"any.{suffix}").write_bytes(text)
    status, message = command(["data", "check", f"any.{suffix}"], folder)
    assert status in (1, 2)
    assert "Traceback" not in message
