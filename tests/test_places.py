"""Whatever is replaced exists at every moment: a process is killed before each of its filesystem calls in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tailguard.config import RunConfig, load_config
from tailguard.data.synthetic import make_market
from tailguard.envs.prepared_market import open_market
from tailguard.errors import ConfigError
from tailguard.evaluate.trials import Trial, read_trials, record_trial
from tailguard.experiment.settings import edited_settings
from tailguard.places import lock, new_folder, put_in_place, read_plain, recover, write_synced
from tailguard.runs.folder import RunFolder
from tailguard.runs.prepare_market import prepare_market
from tailguard.runs.walk_forward import _read_plan
from tailguard.sealed import read_sealed, write_sealed

EVENTS = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.listdir", "os.scandir"}
"""Audit events of CPython that come before a filesystem call."""


def killed_at(call: int, work: Callable[[], None]) -> bool:
    """Do the work in a process that dies before its n-th filesystem call; False if it had fewer."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _: object) -> None:
            nonlocal seen
            if event in EVENTS:
                seen += 1
                if seen == call:
                    os._exit(9)

        try:
            sys.addaudithook(count)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) in (0, 9)
    return os.WEXITSTATUS(status) == 9


def write_market(place: Path, text: str) -> None:
    """A folder as `data prepare` makes it: with folders in it, put into place when it is complete."""
    with new_folder(place) as partial:
        (partial / "bars").mkdir()
        write_synced(partial / "bars" / "close", text.encode())
        write_synced(partial / "market.json", text.encode())
        put_in_place(partial, place)


def read_market(place: Path) -> str:
    recover(place)
    texts = {(place / name).read_text() for name in ("bars/close", "market.json")}
    assert len(texts) == 1
    return texts.pop()


def write_agent(place: Path, text: str) -> None:
    write_sealed(place, {"weights": {"value": torch.tensor([float(ord(text))])}}, {"text": text})


def read_agent(place: Path) -> str:
    about, parts = read_sealed(place, ("weights",))
    assert parts["weights"]["value"].item() == ord(about["text"])
    return str(about["text"])


@pytest.mark.parametrize(("write", "read"), [(write_market, read_market), (write_agent, read_agent)])
def test_a_kill_at_any_call_leaves_the_old_folder_or_the_new_one(tmp_path: Path, write, read) -> None:
    found, call = [], 0
    while True:
        call += 1
        place = tmp_path / str(call) / "place"
        write(place, "a")
        was_killed = killed_at(call, lambda place=place: write(place, "b"))
        found.append(read(place))
        # The next writer leaves nothing behind of the dead one.
        write(place, "c")
        assert read(place) == "c"
        assert [path.name for path in place.parent.iterdir()] == ["place"]
        if not was_killed:
            break
    assert found[-1] == "b"
    assert found == sorted(found)
    assert found.count("a") > 5
    assert found.count("b") > 3


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "place"
    write_market(place, "a")
    partial = tmp_path / ".place.1.partial"
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    assert lock(descriptor)
    recover(place)
    assert partial.exists()
    os.close(descriptor)
    recover(place)
    assert not partial.exists()
    assert read_market(place) == "a"


def test_only_leftovers_of_this_place_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "place"
    others = [".place2.1.partial", ".place.x.partial", "place.1.partial", ".place.1.partial.kept", ".places.1.old"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".place.2.partial").symlink_to(tmp_path / others[0])
    recover(place)
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".place.2.partial"}


WITHOUT_POSIX = """
import sys
sys.modules["fcntl"] = None  # importing it fails, as on Windows
import tailguard as tg
agent = tg.DistributionalPPO(tg.TradingEnv(tg.make_market(900, seed=0).bars, num_envs=2, episode_length=16), n_steps=16)
try:
    if sys.argv[1] == "save":
        agent.save("agent")
    else:
        import tailguard.runs.runner
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("work", ["save", "run"])
def test_a_system_without_locks_of_folders_is_told_what_is_missing(tmp_path: Path, work: str) -> None:
    command = [sys.executable, "-c", WITHOUT_POSIX, work]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.endswith("On Windows, use WSL\n"), run.stderr


KILLED_PREPARE = """
import os, sys
from pathlib import Path
from tailguard.cli import main

def die(event, arguments):
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == "market":
        os._exit(9)

sys.addaudithook(die)
sys.argv = ["tailguard", "data", "prepare", "market", "--data", "bars.parquet", "--yes", "--set", "data.embargo=1d"]
main()
"""


def test_a_prepared_market_survives_a_kill_while_it_is_replaced(tmp_path: Path) -> None:
    make_market(1_500, seed=1).save(tmp_path / "bars.parquet")
    config = load_config(overrides=[f"data.path={tmp_path / 'bars.parquet'}", "data.embargo=1d"])
    before = prepare_market(config, tmp_path / "market").sha256
    make_market(1_500, seed=2).save(tmp_path / "bars.parquet")
    command = [sys.executable, "-c", KILLED_PREPARE]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 9
    market = open_market(tmp_path / "market")
    market.verify()
    assert market.sha256 == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bars.parquet", "market"]


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    """A link to a device without an end would take all memory; a pipe that nobody writes to would wait for ever."""
    (tmp_path / "plain").write_bytes(b"\x00abc")
    (tmp_path / "link").symlink_to("plain")
    assert read_plain(tmp_path / "plain") == read_plain(tmp_path / "link") == b"\x00abc"
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("endless", "pipe"):
        with pytest.raises(OSError, match="not a plain file"):
            read_plain(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "missing")


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo], ids=["device", "pipe"])
def test_a_run_refuses_files_without_an_end(tmp_path: Path, make: Callable[[Path], None]) -> None:
    readers = {
        "trials.jsonl": read_trials,
        "settings.json": lambda path: edited_settings(path.with_name("config.yaml"), RunConfig()),
        "walk_forward.json": _read_plan,
        "metrics.jsonl": lambda path: RunFolder(path.parent).cut_metrics(0),
    }
    for name, read in readers.items():
        make(tmp_path / name)
        with pytest.raises((ConfigError, OSError), match="not a plain file"):
            read(tmp_path / name)
    if make is os.mkfifo:  # a link is refused before it is opened
        with pytest.raises(OSError, match="not a plain file"):
            record_trial(tmp_path / "trials.jsonl", Trial("a" * 64, "b" * 64, "run", 1.0))
