"""A prepared market is the market in memory, number for number, and says what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.config import RunConfig, load_config
from tailguard.data.features import FEATURES, FeatureError, feature
from tailguard.data.splits import Split
from tailguard.envs.prepared_market import RowRanges, open_market
from tailguard.errors import BarsError, BarsWarning, ConfigError, RunError
from tailguard.evaluate.trials import bars_hash
from tailguard.experiment.build import load_bars_in_memory, prepare_training, split_market
from tailguard.runs.checkpoint import CheckpointStore, data_hashes
from tailguard.runs.prepare_market import prepare_market
from tailguard.runs.runner import resume_run, train

NAMES = "data.features=[return_4, atr_14, volume_168, time_of_day_sin]"
"""Warm-ups of up to 187 bars, so that the windows of a test have ends that lie far apart."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One symbol; two symbols, of which one has a gap and a later start."""
    place = tmp_path_factory.mktemp("bars")
    tg.make_market(9_000, seed=3).save(place / "one.parquet")
    tg.make_market(2_500, seed=3).save(place / "short.parquet")
    two = tg.make_market(5_000, assets=2, seed=4).bars.frame.drop("segment").with_row_index("index")
    missing = (pl.col("symbol") == "SYN02") & (pl.int_range(pl.len()).over("symbol").is_between(2_000, 2_010))
    late = (pl.col("symbol") == "SYN02") & (pl.int_range(pl.len()).over("symbol") < 500)
    two.filter(~missing & ~late).drop("index").write_parquet(place / "two.parquet")
    return place


def settings(*changes: str) -> RunConfig:
    return load_config(overrides=["data.embargo=1d", "data.gaps=split", NAMES, *changes])


@pytest.mark.parametrize(
    ("name", "accounts", "rows"),
    [
        ("one", "portfolio", 10_000),
        ("one", "portfolio", 1_300),
        ("two", "portfolio", 2_000),
        ("two", "per_symbol", 900),
    ],
)
def test_every_number_is_that_of_the_market_in_memory(files: Path, tmp_path: Path, name, accounts, rows) -> None:
    config = settings(f"data.path={files / name}.parquet", f"env.accounts={accounts}")
    market = prepare_market(config, tmp_path / "market", rows=rows)
    bars = load_bars_in_memory(config)
    split = split_market(config, bars)
    assert isinstance(split, Split)
    options = {"num_envs": 4, "episode_length": 100, "accounts": accounts}
    memory = tg.TradingEnv(split.train, features=config.data.features, **options)
    mapped = tg.TradingEnv(tmp_path / "market", **options)
    for column in ("time", "open", "high", "low", "close", "volume", "segment", "tradeable"):
        mine, theirs = getattr(mapped.prepared.panel, column), getattr(memory.prepared.panel, column)
        np.testing.assert_array_equal(mine, theirs, err_msg=column)
    np.testing.assert_array_equal(mapped.prepared.usable, memory.prepared.usable)
    np.testing.assert_array_equal(mapped.prepared.features, memory.prepared.features)
    assert torch.equal(mapped.task.market.table, memory.task.market.table)
    assert mapped.starts.shape[0] == memory.starts.shape[0]
    assert torch.equal(mapped.starts.index_select(0, torch.arange(memory.starts.shape[0])), memory.starts)
    np.testing.assert_allclose(mapped.prepared.scaler.scale, memory.prepared.scaler.scale, rtol=1e-12)
    assert data_hashes(mapped) == data_hashes(memory)
    assert market.sha256 == bars_hash(bars)
    assert market.describe() == split.describe()
    for part in ("validation", "test"):
        mine, theirs = getattr(market, part), getattr(split, part)
        assert mine.frame.drop("segment").equals(theirs.frame.drop("segment"))
        assert np.array_equal(mine.panel(accounts).segment, theirs.panel(accounts).segment)
        assert mine.start == theirs.start
    market.verify()


def test_features_in_bfloat16_are_those_of_memory_and_no_others_are_traded(files: Path, tmp_path: Path) -> None:
    config = settings(f"data.path={files / 'one.parquet'}", "data.feature_precision=bfloat16")
    market = prepare_market(config, tmp_path / "market", rows=2_000)
    split = split_market(config, load_bars_in_memory(config))
    assert isinstance(split, Split)
    options = {"num_envs": 4, "episode_length": 100}
    memory = tg.TradingEnv(prepare_training(config, split.train), **options)
    mapped = tg.TradingEnv(market, **options)
    assert mapped.task.features.dtype == torch.bfloat16
    assert torch.equal(mapped.task.features.view(torch.int16), memory.task.features.view(torch.int16))
    assert (tmp_path / "market" / "train" / "features").stat().st_size == 2 * mapped.task.features.numel()
    assert data_hashes(mapped) == data_hashes(memory)
    assert torch.equal(mapped.reset(0), memory.reset(0))
    with pytest.raises(ConfigError, match=r"data.feature_precision: 'float32' is requested.* prepared with 'bfloat16'"):
        split_market(settings(f"data.path={tmp_path / 'market'}"), market)


def test_a_run_goes_on_from_disk_exactly_as_it_began_in_memory(
    files: Path, tmp_path: Path, small_config, quiet
) -> None:
    config = small_config(f"data.path={files / 'short.parquet'}")
    prepare_market(config, tmp_path / "market", rows=1_000)
    run, again = tmp_path / "run", tmp_path / "again"
    train(config, run, quiet)
    shutil.copytree(run, again)
    CheckpointStore(again, {}).forget_after(256)
    text = (again / "config.yaml").read_text()
    (again / "config.yaml").write_text(text.replace(f"{files / 'short.parquet'}", f"{tmp_path / 'market'}"))
    resume_run(again, quiet)
    for name in ("weights", "state"):
        part = Path("checkpoints") / "step_768" / f"{name}.safetensors"
        assert (again / part).read_bytes() == (run / part).read_bytes()


def test_other_settings_than_it_was_prepared_with_are_refused_by_name(files: Path, tmp_path: Path) -> None:
    config = settings(f"data.path={files / 'one.parquet'}")
    market = prepare_market(config, tmp_path / "market")
    for change in ("data.embargo=2d", "data.test=0.2", "data.features=[return_4]", "env.accounts=per_symbol"):
        name = change.partition("=")[0]
        with pytest.raises(ConfigError, match=f"{name}: .*was prepared with"):
            split_market(settings(change), market)
    with pytest.raises(ConfigError, match=r"market\.impact: 0\.5 is requested.*prepared with 1\.0"):
        tg.TradingEnv(market, tg.MarketConfig(impact=0.5))
    with pytest.raises(ConfigError, match="holds float32"):
        tg.TradingEnv(market, dtype=torch.float64)
    with pytest.raises(ConfigError, match="prepared with its own"):
        tg.TradingEnv(market, features=["return_4"])
    # What acts in the step may change.
    env = tg.TradingEnv(market, tg.MarketConfig(fee=0.01, leverage=3.0))
    assert env.task.market.rates.costs["fee"] == pytest.approx(0.01)


@pytest.fixture
def prepared(files: Path, tmp_path: Path) -> Path:
    prepare_market(settings(f"data.path={files / 'one.parquet'}"), tmp_path / "market")
    return tmp_path / "market"


def test_damage_is_named(prepared: Path) -> None:
    manifest = prepared / "market.json"
    whole = manifest.read_text()
    features = prepared / "train" / "features"
    data = features.read_bytes()
    features.write_bytes(data[:-4])
    with pytest.raises(BarsError, match=r"train/features: [\d,]+ bytes long; [\d,]+ were written"):
        tg.TradingEnv(prepared)
    features.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(BarsError, match=r"train/features: its SHA-256 differs from the manifest"):
        open_market(prepared).verify()
    features.unlink()
    with pytest.raises(BarsError, match=r"train/features: cannot be read"):
        tg.TradingEnv(prepared)
    features.symlink_to("/etc/hostname")
    with pytest.raises(BarsError, match="links are not followed"):
        tg.TradingEnv(prepared)
    for change, message in (
        (whole.replace('"portfolio"', '"per_symbol"'), "does not match its own SHA-256"),
        (whole.replace('"format": 2', '"format": 3'), "format 3; this version of Tailguard reads formats 1 and 2"),
        ("{", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
    ):
        manifest.write_text(change)
        with pytest.raises(BarsError, match=message):
            open_market(prepared)


def forged(prepared: Path, change: Callable[[dict], None]) -> None:
    """Change the manifest as a stranger would: with a hash that fits."""
    from tailguard.envs.prepared_market import digest_of

    manifest = json.loads((prepared / "market.json").read_text())
    change(manifest)
    del manifest["sha256"]
    (prepared / "market.json").write_text(json.dumps(manifest | {"sha256": digest_of(manifest)}))


def test_a_strangers_manifest_cannot_reach_outside(prepared: Path) -> None:
    def name_outside(manifest: dict) -> None:
        manifest["files"]["train"]["../../etc/passwd"] = manifest["files"]["train"]["features"]

    forged(prepared, name_outside)
    with pytest.raises(BarsError, match="outside the folder"):
        open_market(prepared)


def test_any_value_in_any_place_of_a_manifest_is_refused_or_can_be_traded(
    files: Path, tmp_path: Path, forgeries: Any, absurd: Any
) -> None:
    config = settings(f"data.path={files / 'short.parquet'}", "data.features=[return_4]")
    prepare_market(config, tmp_path / "market")
    refused = 0
    for place in forgeries(tmp_path / "market" / "market.json", absurd):
        try:
            market = open_market(tmp_path / "market")
            env = tg.TradingEnv(market, num_envs=2, episode_length=8)
            env.reset()
            env.step(torch.zeros(2, 1))
            split_market(config, market)
            assert len(market) > 0
            assert len(market.test) > 0
            market.verify()
        except (BarsError, ConfigError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"{absurd!r} as {place}") from error
    assert refused > 100


def test_a_strangers_shapes_cannot_reach_beyond_an_array(prepared: Path) -> None:
    def shorter(manifest: dict) -> None:
        entry = manifest["files"]["train"]["features"]
        entry["shape"] = [entry["shape"][0] // 2, entry["shape"][1] * 2]

    forged(prepared, shorter)
    with pytest.raises(BarsError, match="train/features: shape"):
        tg.TradingEnv(prepared)


def test_a_place_that_is_taken_is_left_alone(files: Path, tmp_path: Path, prepared: Path) -> None:
    config = settings(f"data.path={files / 'one.parquet'}")
    before = (prepared / "market.json").read_bytes()
    with pytest.raises(ConfigError, match="replace it with --yes"):
        prepare_market(config, prepared)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="choose another"):
        prepare_market(config, tmp_path / "mine", replace=True)
    with pytest.raises(BarsError):
        prepare_market(settings("data.path=/nowhere.parquet"), prepared, replace=True)
    assert (prepared / "market.json").read_bytes() == before
    prepare_market(config, prepared, replace=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="No partial output is left"):
        prepare_market(config, tmp_path / "file" / "market")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "market", "mine"]


def test_errors_and_suspicions_are_found_in_the_middle_of_pieces(tmp_path: Path) -> None:
    frame = tg.make_market(6_000, seed=1).bars.frame.drop("segment").with_row_index("row")

    def prepare(changed: pl.DataFrame, name: str) -> None:
        changed.drop("row").write_parquet(tmp_path / f"{name}.parquet")
        prepare_market(
            load_config(overrides=[f"data.path={tmp_path / name}.parquet", NAMES]), tmp_path / name, rows=1_000
        )

    def at(row: int) -> pl.Expr:
        return pl.col("row") == row

    broken = frame.with_columns(high=pl.when(at(3_000)).then(pl.col("low") / 2).otherwise("high"))
    with pytest.raises(BarsError, match=r"row 3001 .*high .* < low"):
        prepare(broken, "range")
    with pytest.raises(BarsError, match="1 bar missing"):
        prepare(frame.filter(~at(2_000)), "gap")  # the first bar of a piece
    with pytest.raises(BarsError, match="same time as row"):
        prepare(pl.concat([frame.head(2_000), frame.slice(1_999)]), "twice")
    with pytest.raises(BarsError, match=r"row 4001.*no value for close"):
        prepare(frame.with_columns(close=pl.when(~at(4_000)).then("close")), "missing")
    later = frame.with_columns(pl.col("time") + pl.duration(minutes=7 * (pl.col("row") >= 3_000).cast(pl.Int64)))
    with pytest.raises(BarsError, match=r"row 3001 .*off the 1h grid"):
        prepare(later, "grid")
    dollars = frame.with_columns(
        volume=pl.col("volume") * pl.when(pl.col("row") < 2_990).then(pl.col("close")).otherwise(1)
    )
    with pytest.raises(BarsError, match=r"row 29\d\d .*median volume falls"):
        prepare(dollars.drop("quote_volume"), "unit")
    spike = frame.with_columns(low=pl.when(at(1_999)).then(pl.col("low") / 4).otherwise("low"))
    with pytest.warns(BarsWarning, match="row 2000 ") as caught:  # the last bar of a piece
        prepare(spike, "spike")
    # Three pieces see it, as their own bar or as a neighbour; one of them tells.
    assert "\n".join(str(one.message) for one in caught).count("row 2000 ") == 1


def test_a_feature_that_never_forgets_is_refused(files: Path, tmp_path: Path) -> None:
    feature("highest_ever")(lambda: pl.col("close") / pl.col("high").cum_max())
    try:
        config = settings(f"data.path={files / 'one.parquet'}", "data.features=[highest_ever]")
        with pytest.raises(FeatureError, match=r"'highest_ever' at .* depends on more history than its warm-up"):
            prepare_market(config, tmp_path / "market", rows=1_000)
    finally:
        del FEATURES["highest_ever"]
    assert not list(tmp_path.iterdir())


def test_ranges_of_rows_read_as_the_tensor_they_stand_for() -> None:
    ranges = RowRanges(torch.tensor([3, 10, 20]), torch.tensor([2, 1, 3]))
    assert ranges.shape == (6,)
    assert ranges.index_select(0, torch.arange(6)).tolist() == [3, 4, 10, 20, 21, 22]
    assert RowRanges(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).numel() == 0
