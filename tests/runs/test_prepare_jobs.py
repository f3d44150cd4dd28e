"""Preparing in several processes gives the files of one and leaves nothing half done."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.config import RunConfig, load_config
from tailguard.data.features import FeatureError
from tailguard.data.splits import Split
from tailguard.data.synthetic import make_market
from tailguard.errors import ConfigError, RunError
from tailguard.experiment.build import build, load_bars_in_memory, prepare_training, split_market
from tailguard.runs.checkpoint import data_hashes
from tailguard.runs.prepare_market import prepare_market

SMALL = (
    "learner=ppo",
    "data.embargo=1d",
    "data.gaps=split",
    "env.episode_length=32",
    "env.num_envs=8",
    "ppo.n_steps=16",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
)
NAMES = "data.features=[return_4, atr_14, volume_168, time_of_day_sin]"


def settings(path: Path, *changes: str) -> RunConfig:
    return load_config(overrides=[*SMALL, NAMES, f"data.path={path}", *changes])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each of five symbols, one of them in two files, one with a gap and a later start."""
    place = tmp_path_factory.mktemp("symbols")
    frame = make_market(2_400, assets=5, seed=4).bars.frame.drop("segment")
    for number, part in enumerate(frame.partition_by("symbol")):
        name = part["symbol"][0]
        part = part.filter(~pl.int_range(pl.len()).is_between(1_000, 1_010)).tail(2_000) if number == 3 else part
        if number == 1:
            part.head(1_000).drop("symbol").write_parquet(place / f"{name}-1h-2021-01.parquet")
            part.tail(1_400).drop("symbol").write_parquet(place / f"{name}-1h-2021-02.parquet")
        else:
            part.drop("symbol").write_csv(place / f"{name}.csv")
    return place


def content(place: Path) -> dict[str, bytes]:
    return {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
@pytest.mark.parametrize("accounts", ["portfolio", "per_symbol"])
def test_two_processes_write_the_bytes_of_one(folder: Path, tmp_path: Path, accounts: str) -> None:
    config = settings(folder, f"env.accounts={accounts}", "data.feature_precision=bfloat16")
    one, two = (prepare_market(config, tmp_path / str(jobs), jobs=jobs, rows=700) for jobs in (1, 2))
    assert content(one.folder) == content(two.folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    split = split_market(config, load_bars_in_memory(config))
    assert isinstance(split, Split)
    memory = tg.TradingEnv(prepare_training(config, split.train), num_envs=2, episode_length=32, accounts=accounts)
    assert data_hashes(tg.TradingEnv(two, num_envs=2, episode_length=32, accounts=accounts)) == data_hashes(memory)


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
@pytest.mark.parametrize("accounts", ["portfolio", "per_symbol"])
def test_a_network_that_shares_weights_finds_the_features_of_memory(
    folder: Path, tmp_path: Path, accounts: str
) -> None:
    changes = (f"env.accounts={accounts}", "ppo.network.encoder=shared")
    config = settings(folder, *changes)
    market = prepare_market(config, tmp_path / "market", rows=600)
    agents = [build(settings(path, *changes)).learner for path in (folder, market.folder)]
    prepared = [agent.env.prepared for agent in agents]  # type: ignore[attr-defined]
    assert prepared[0].names == prepared[1].names
    assert prepared[0].scaler.names == prepared[1].scaler.names
    np.testing.assert_array_equal(prepared[0].features, prepared[1].features)
    for agent in agents:
        agent.learn(128)
    weights = [torch.cat([weight.flatten() for weight in agent.policy.parameters()]) for agent in agents]
    assert torch.equal(*weights)
    with pytest.raises(ConfigError, match=r"network.encoder: flat is requested.*prepared for shared or attention"):
        build(settings(market.folder, f"env.accounts={accounts}"))


def test_a_process_that_dies_is_an_error_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """The first process that is started is killed while it works."""
    begun = set(children())

    def kill() -> None:
        for _ in range(3_000):
            for process in children():
                if process not in begun and "spawn_main" in command_of(process):
                    os.kill(process, signal.SIGKILL)
                    return
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunError, match=r"process that was \w+ \w+ ended before it was done.*fewer than 2 --jobs"):
        prepare_market(settings(folder), tmp_path / "market", jobs=2, rows=1_000)
    killer.join()
    assert not list(tmp_path.iterdir())


def children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(each) for each in path.read_text().split()] if path.exists() else []


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


PLUGIN = """
import polars as pl
from tailguard.data.registry import feature


@feature("half_return", warmup=1)
def half_return() -> pl.Expr:
    return pl.col("close").log().diff() / 2


@feature("since_ever")
def since_ever() -> pl.Expr:
    return pl.col("close") / pl.col("close").first()
"""


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
def test_processes_know_features_of_plugins_and_their_errors_come_back(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PLUGIN)
    plugin = f"plugins=[{tmp_path / 'parts.py'}]"
    config = settings(folder, plugin, "data.features=[half_return]")
    prepare_market(config, tmp_path / "market", jobs=2)
    with pytest.raises(FeatureError, match=r"'since_ever' at .* depends on more history"):
        prepare_market(settings(folder, plugin, "data.features=[since_ever]"), tmp_path / "other", jobs=2, rows=1_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["market", "parts.py"]


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import tailguard as tg
from pathlib import Path
from tailguard.config import load_config
from tailguard.runs.prepare_market import prepare_market
settings = ["data.embargo=0d", "data.features=[return_4]", f"data.path={sys.argv[1]}", "data.calendar=24/7"]
market = prepare_market(load_config(overrides=settings), Path(sys.argv[2]))
env = tg.TradingEnv(market, num_envs=2, episode_length=8)
env.reset(0)
print(len(market.test.symbols), env.task.market.assets)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_NOFILE"), reason="a limit of POSIX")
def test_more_symbols_than_files_that_may_be_open(tmp_path: Path) -> None:
    """Thirty symbols, in one file of bars, have 360 columns; a process may have 48 files open."""
    frame = make_market(300, seed=4).bars.frame.drop("segment", "symbol")
    many = [frame.with_columns(symbol=pl.lit(f"S{number:02d}")) for number in range(30)]
    pl.concat(many).sort("time", maintain_order=True).write_parquet(tmp_path / "bars.parquet")
    command = [sys.executable, "-W", "ignore", "-c", FEW_FILES, tmp_path / "bars.parquet", tmp_path / "market", "48"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["30", "30"], done.stderr[-2_000:]
