"""Markets that close, prepared on disk: every number is that of the bars in memory, and a run goes on from either."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from backtesting.test import EURUSD, GOOG

import tailguard as tg
from tailguard.config import RunConfig, load_config
from tailguard.data.splits import Split
from tailguard.envs.prepared_market import digest_of, open_market
from tailguard.errors import BarsError
from tailguard.evaluate.trials import bars_hash
from tailguard.experiment.build import load_bars_in_memory, load_market, split_market
from tailguard.runs.checkpoint import CheckpointStore, data_hashes
from tailguard.runs.prepare_market import prepare_market
from tailguard.runs.runner import resume_run, train

pytestmark = pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")

FEATURES = "data.features=[return_4, bollinger_20, time_since_open]"


@pytest.fixture(scope="module", autouse=True)
def counted():
    """A feature that counts the bars of a session, however long it is."""
    import polars as pl

    from tailguard.data.features import FEATURES as registered
    from tailguard.data.features import feature

    feature("time_since_open", needs=("session_start", "closed_hours"))(
        lambda: pl.col("closed_hours") + pl.col("session_start")
    )
    yield
    del registered["time_since_open"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Currencies by the hour; two shares by the day, of which one has a hole and begins later; a day of shares."""
    place = tmp_path_factory.mktemp("closing")
    EURUSD.to_csv(place / "eurusd.csv")
    late = GOOG[400:].drop(GOOG.index[[900, 901, 1500]])
    shares = [frame.rename_axis("date").reset_index().assign(symbol=name) for name, frame in (("A", GOOG), ("B", late))]
    pd.concat(shares).to_csv(place / "shares.csv", index=False)
    times = [
        day + pd.Timedelta(hours=14.5 + bar) for day in pd.bdate_range("2021-06-01", periods=160) for bar in range(7)
    ]
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.01, len(times))))
    pd.DataFrame({"time": times, "close": close, "volume": 1e6}).assign(open=close, high=close, low=close).to_csv(
        place / "hours.csv", index=False
    )
    # Sessions of a trading week, longer than the history that a window reads.
    minutes = pd.date_range("2021-06-07", periods=8 * 7 * 288, freq="5min")
    minutes = minutes[minutes.dayofweek < 5]
    close = 100 * np.exp(np.cumsum(np.random.default_rng(1).normal(0, 0.001, len(minutes))))
    pd.DataFrame({"time": minutes, "open": close, "high": close, "low": close, "close": close, "volume": 1e6}).to_csv(
        place / "minutes.csv", index=False
    )
    return place


def settings(path: Path, *changes: str) -> RunConfig:
    return load_config(overrides=["data.embargo=7d", "data.gaps=split", FEATURES, f"data.path={path}", *changes])


@pytest.mark.parametrize(
    ("name", "changes", "rows"),
    [
        ("eurusd", ("data.calendar=fx", "market.preset=fx"), 900),
        ("eurusd", ("data.calendar=auto",), 10_000),
        ("shares", ("data.calendar=XNYS", "market.preset=equity"), 400),
        ("shares", ("data.calendar=XNYS", "env.accounts=per_symbol"), 300),
        ("minutes", ("data.calendar=auto", "data.features=[time_since_open]"), 1_000),
        ("hours", ("data.calendar=auto", "env.flat_by_close=true"), 250),
    ],
)
def test_every_number_is_that_of_the_market_in_memory(
    files: Path, tmp_path: Path, name: str, changes: tuple[str, ...], rows: int
) -> None:
    config = settings(files / f"{name}.csv", *changes)
    market = prepare_market(config, tmp_path / "market", rows=rows)
    bars = load_bars_in_memory(config)
    split = split_market(config, bars)
    assert isinstance(split, Split)
    options = {"accounts": config.env.accounts, "flat_by_close": config.env.flat_by_close, "episode_length": 50}
    memory = tg.TradingEnv(split.train, config.market, num_envs=4, features=config.data.features, **options)
    mapped = tg.TradingEnv(market, config.market, num_envs=4, **options)
    for column in ("time", "open", "high", "low", "close", "volume", "segment", "tradeable", "held_ms"):
        mine, theirs = getattr(mapped.prepared.panel, column), getattr(memory.prepared.panel, column)
        np.testing.assert_array_equal(mine, theirs, err_msg=column)
    assert mapped.prepared.panel.sessions == memory.prepared.panel.sessions == bars.sessions
    np.testing.assert_array_equal(mapped.prepared.features, memory.prepared.features)
    assert mapped.task.market.columns == memory.task.market.columns
    assert "held" in mapped.task.market.columns
    assert torch.equal(mapped.task.market.table, memory.task.market.table)
    assert torch.equal(mapped.starts.index_select(0, torch.arange(memory.starts.shape[0])), memory.starts)
    if memory.task.flat_rows is not None:
        assert memory.task.flat_rows.any()
        assert torch.equal(mapped.task.flat_rows, memory.task.flat_rows)
    assert data_hashes(mapped) == data_hashes(memory)
    assert market.sha256 == bars_hash(bars)
    assert market.describe() == split.describe()
    for part in ("validation", "test"):
        mine, theirs = getattr(market, part), getattr(split, part)
        assert mine.frame.drop("segment").equals(theirs.frame.drop("segment"))
        assert np.array_equal(mine.panel(config.env.accounts).segment, theirs.panel(config.env.accounts).segment)
        assert (mine.start, mine.sessions) == (theirs.start, theirs.sessions)
    said = load_market(settings(tmp_path / "market", *changes)).describe()
    assert f"{bars.pace.per_week:g} a week, {bars.pace.per_year:,.1f} a year" in said
    market.verify()


def test_a_run_goes_on_from_disk_exactly_as_it_began_in_memory(
    files: Path, tmp_path: Path, small_config, quiet
) -> None:
    changes = (f"data.path={files / 'eurusd.csv'}", "data.calendar=fx", "market.preset=fx", "data.features=[return_4]")
    config = small_config(*changes)
    prepare_market(config, tmp_path / "market", rows=1_000)
    run, again = tmp_path / "run", tmp_path / "again"
    train(config, run, quiet)
    shutil.copytree(run, again)
    CheckpointStore(again, {}).forget_after(256)
    text = (again / "config.yaml").read_text()
    (again / "config.yaml").write_text(text.replace(f"{files / 'eurusd.csv'}", f"{tmp_path / 'market'}"))
    resume_run(again, quiet)
    for name in ("weights", "state"):
        part = Path("checkpoints") / "step_768" / f"{name}.safetensors"
        assert (again / part).read_bytes() == (run / part).read_bytes()


def test_sessions_without_their_times_are_refused(files: Path, tmp_path: Path) -> None:
    prepare_market(settings(files / "hours.csv", "data.features=[return_4]"), tmp_path / "market")
    place = tmp_path / "market" / "market.json"
    whole = json.loads(place.read_text())
    for sessions, says in ((None, "held_ms"), ({"per_year": "many"}, "sessions"), ([], "sessions")):
        manifest = {**whole, "about": {**whole["about"], "sessions": sessions}}
        del manifest["sha256"]
        place.write_text(json.dumps(manifest | {"sha256": digest_of(manifest)}))
        with pytest.raises(BarsError, match=says):
            tg.TradingEnv(open_market(tmp_path / "market"), num_envs=1, episode_length=8)
