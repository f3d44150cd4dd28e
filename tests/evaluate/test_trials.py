"""The record of trials counts every training once, whoever writes at the same time and whatever cut a line short."""

from __future__ import annotations

import json
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import tailguard as tg
from tailguard.config import load_config
from tailguard.errors import ConfigError
from tailguard.evaluate.trials import (
    Trial,
    bars_hash,
    count_trials,
    read_trials,
    record_trial,
    settings_hash,
)


def trial(config: int = 0, data: int = 0, sharpe: float | None = 1.0) -> Trial:
    return Trial(f"{data:064d}", f"{config:064d}", f"run-{config}", sharpe)


def write_many(path: Path, writer: int) -> None:
    for number in range(50):
        record_trial(path, trial(number if number % 2 else 1_000 * writer + number))


def test_a_trial_is_counted_once_however_often_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    assert record_trial(path, trial(1, sharpe=0.5))
    assert record_trial(path, trial(2, sharpe=None))
    assert not record_trial(path, trial(1, sharpe=0.7))  # resumed, repeated, or under another name
    assert record_trial(path, trial(1, data=9))  # on other bars
    found = count_trials(path, [trial(3, sharpe=2.0)])
    assert found.count == 3
    assert sorted(found.sharpes) == [0.5, 2.0]
    assert found.source == f"{path} has 3 training runs tested on these bars"
    assert count_trials(path, [trial(1)]).count == 2
    assert count_trials(tmp_path / "none.jsonl", [trial(1)]).count == 1


def test_writers_at_the_same_time_neither_lose_nor_double_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, writer)) for writer in (1, 2, 3, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found, unreadable = read_trials(path)
    assert unreadable == []
    assert len(found) == 4 * 25 + 25
    assert len({each.config for each in found}) == len(found)


def test_a_line_cut_short_stays_alone_is_named_and_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    record_trial(path, trial(1))
    record_trial(path, trial(2))
    os.truncate(path, path.stat().st_size - 30)  # as a crash in the middle of a write leaves it
    assert len(read_trials(path)[0]) == 1
    record_trial(path, trial(3))
    found, unreadable = read_trials(path)
    assert [each.run for each in found] == ["run-1", "run-3"]
    assert unreadable == [2]
    counted = count_trials(path, [trial(3)])
    assert counted.count == 3
    assert "among them 1 line that cannot be read (line 2)" in counted.source


@pytest.mark.parametrize("line", ['{"data": 1}', "[]", '{"data": "x", "config": "y", "run": "z", "sharpe": 1}', "\x00"])
def test_what_is_no_trial_is_not_taken_for_one(tmp_path: Path, line: str) -> None:
    (tmp_path / "trials.jsonl").write_text(line + "\n")
    assert read_trials(tmp_path / "trials.jsonl") == ([], [1])


def test_a_link_is_not_followed_and_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "trials.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        record_trial(tmp_path / "trials.jsonl", trial())
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder: the record of trials cannot be read"):
        read_trials(tmp_path / "folder")


def test_what_changes_the_learning_is_another_trial_and_where_it_runs_is_not() -> None:
    plain = load_config()
    for same in ("training.threads=3", "data.path=copy.parquet", "training.keep_checkpoints=9"):
        assert settings_hash(load_config(overrides=[same])) == settings_hash(plain), same
    for other in ("training.seed=1", "ppo.gamma=0.9", "risk.limit=-0.1", "data.test=0.2", "market.fee=0"):
        assert settings_hash(load_config(overrides=[other])) != settings_hash(plain), other
    assert settings_hash(plain, {"folds": 2}) != settings_hash(plain, {"folds": 3})


def test_bars_are_known_by_their_content(tmp_path: Path) -> None:
    market = tg.make_market(600, seed=1)
    market.save(tmp_path / "a.parquet")
    market.save(tmp_path / "b.csv")
    mine = bars_hash(market.bars)
    assert bars_hash(tg.load_bars(tmp_path / "a.parquet")) == mine
    assert bars_hash(tg.load_bars(tmp_path / "b.csv")) == mine
    start, stop = market.bars.end_points
    assert bars_hash(market.bars.between(start, stop)) != mine
    moved = market.bars.frame.with_columns(time=market.bars.frame["time"] + timedelta(hours=1))
    assert bars_hash(tg.data.bars.Bars(moved, market.bars.frequency, "moved")) != mine


def test_a_line_is_plain_json(tmp_path: Path) -> None:
    record_trial(tmp_path / "trials.jsonl", trial(4, sharpe=np.float64(1.25)))
    (line,) = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert json.loads(line)["sharpe"] == 1.25
