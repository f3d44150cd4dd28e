"""A population whose command is stopped or killed in the middle of a round leaves no process, and goes on exactly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tailguard.config import RunConfig
from tailguard.experiment.build import build
from tailguard.population import judge
from tailguard.population.evolution import evolve
from tailguard.population.local import SHARED, LocalExecutor
from tailguard.population.options import PopulationSettings
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop

from .conftest import SMALL, is_alive

ENDLESS = """
import os
from pathlib import Path

from tailguard.population.judge import measure

PLACE = Path({place!r})


@measure("endless")
def endless(agent, result):
    if agent.num_timesteps > 512 and not (PLACE / "ends").exists():
        (PLACE / f"{{os.getpid()}}.worker").touch()
        while True:
            pass
    return result.growth
"""
SPACE = {"pathwise.learning_rate": {"log": [1e-4, 1e-1]}, "pathwise.max_grad_norm": {"linear": [0.1, 2.0]}}
SETTINGS = PopulationSettings(members=4, rounds=4, metric="endless")
COMMAND = (
    *(sys.executable, "-c", "from tailguard.cli import main; main()", "population", "--search", "space.yaml"),
    *("--members", "4", "--rounds", "4", "--metric", "endless", "--executor", "local", "--processes", "2"),
)


def lineage_of(workshop: Workshop, folder: Path) -> str:
    """That of this process, from where the folder's record ends."""
    executor = LocalExecutor(workshop, folder / "members", 1)
    evolve(executor, SearchSpace.parse(SPACE), SETTINGS, 1024, folder / "lineage.jsonl")
    executor.close()
    assert not (folder / "members" / SHARED).exists()
    return (folder / "lineage.jsonl").read_text()


@pytest.fixture
def endless(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_parts: None
) -> Workshop:
    """Members whose judgement in the third round never ends, unless there is a file `ends`."""
    del own_parts
    monkeypatch.setattr(judge, "MEASURES", dict(judge.MEASURES))
    plugin = tmp_path / "endless.py"
    plugin.write_text(ENDLESS.format(place=str(tmp_path)))
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    return Workshop.of(build(tiny_config(f"plugins=[{plugin}]")), SETTINGS, SearchSpace.parse(SPACE))


@contextlib.contextmanager
def begun(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The command, and its two workers in the middle of the third round; nothing of it is left afterwards."""
    given = [part for setting in (*SMALL, f"plugins=[{folder / 'endless.py'}]") for part in ("--set", setting)]
    driver = subprocess.Popen([*COMMAND, *given], cwd=folder, stderr=subprocess.PIPE, text=True)
    workers: list[int] = []
    try:
        deadline = time.monotonic() + 300
        while len(workers) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
            workers = [int(path.stem) for path in folder.glob("*.worker")]
        yield driver, workers
    finally:
        for process in (driver.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        driver.communicate()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_the_workers_end_with_the_command_and_a_resume_makes_the_same_lineage(
    endless: Workshop, tmp_path: Path, number: int
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "ends").touch()
    reference = lineage_of(endless, tmp_path / "alone")
    (tmp_path / "ends").unlink()
    with begun(tmp_path) as (driver, workers):
        driver.send_signal(number)
        said = driver.communicate(timeout=90)[1]
        deadline = time.monotonic() + 30
        while any(map(is_alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, workers))
    if number == signal.SIGKILL:
        assert driver.returncode == -number
    else:
        assert driver.returncode == 128 + number
        assert "stopping; finished rounds are kept; a second Ctrl-C stops at once" in said
        assert "stopped  finished rounds are kept. Go on with: tailguard population --resume runs/population" in said
        assert "Traceback" not in said
    folder = tmp_path / "runs" / "population"
    assert len((folder / "lineage.jsonl").read_text().splitlines()) == 3  # its head, and two of four rounds
    (tmp_path / "ends").touch()
    assert lineage_of(endless, folder) == reference
