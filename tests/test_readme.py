"""The README's examples as a reader runs them: in their order, in one folder, on the reader's own bars."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tailguard as tg
from tailguard.cli import main

README = Path(__file__).parents[1] / "README.md"
QUICK = (
    "training.total_timesteps=512",
    "env.num_envs=8",
    "env.episode_length=32",
    "ppo.n_steps=32",
    "ppo.minibatch_size=128",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "data.features=[return_1,return_24]",
)
"""Settings that make a training run take a second."""


def blocks(heading: str, language: str = "") -> list[str]:
    """The code blocks of one section."""
    section = README.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bars that the README speaks of, as the reader has them."""
    path = tmp_path_factory.mktemp("reader")
    tg.make_market(3_000, seed=4).bars.frame.write_parquet(path / "btc.parquet")
    return path


def test_every_command_runs_in_order_and_on_the_readers_bars(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run trains on the reader's bars, and the limit that the text speaks of is the one in its settings."""
    (text,) = blocks("Your own bars")
    commands = [line.partition("#")[0].strip() for line in text.splitlines() if line]
    assert len(commands) >= 5
    monkeypatch.chdir(folder)
    for command in commands:
        program, *arguments = shlex.split(command.partition(">")[0])
        assert program == "tailguard"
        if arguments[0] == "train":
            arguments += [part for setting in QUICK for part in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["tailguard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        assert end.value.code == 0, f"{command}\n{printed.out}\n{printed.err}"
        if ">" in command:
            (folder / command.partition(">")[2].strip()).write_text(printed.out, encoding="utf-8")
    settings = {path.parent.name: yaml.safe_load(path.read_text()) for path in folder.glob("runs/*/config.yaml")}
    assert len(settings) == sum(command.startswith("tailguard train") for command in commands) == 2
    assert {run["data"]["path"] for run in settings.values()} == {"btc.parquet"}
    assert sorted(str(run["risk"]["limit"]) for run in settings.values()) == ["-0.04", "None"]
    assert (folder / "runs" / "btc" / "report.html").is_file()


def test_the_python_example_reports_on_bars_it_has_not_trained_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks("From Python", "python")
    quick = code.replace("agent.learn(200_000", "agent.learn(512").replace("num_envs=256", "num_envs=8")
    assert quick.count("512") == 1
    assert quick.count("num_envs=8") == 1
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(quick, str(README), "exec"), names)
    trained = names["env"].prepared.panel.time
    tested = names["result"].time
    assert trained.max() < tested.min()
    assert len(tested) > 300
    everything = names["bars"].frame["time"].dt.epoch("ms").to_numpy()
    assert tested.max() == everything.max()
    assert names["agent"].num_timesteps >= 512
    assert float(capsys.readouterr().out.split()[-1]) == names["result"].metrics["sharpe"]
    assert (folder / "agent").is_dir()
