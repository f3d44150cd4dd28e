"""A run opened again meets exactly the bars it was trained and tested on, or says why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from rich.console import Console

import tailguard as tg
from tailguard.config import load_config
from tailguard.errors import BarsError, ConfigError
from tailguard.evaluate.trained import AGENT, OPTIMUM, beside_baselines, open_run
from tailguard.runs.runner import resume_run, train


def test_the_results_are_those_that_the_training_showed(run_folder: Path, trained) -> None:
    shown = resume_run(run_folder, Console(quiet=True)).results
    mine = beside_baselines(trained, trained.split.test)
    assert list(mine) == list(shown)
    assert list(mine)[:2] == [AGENT, OPTIMUM]
    for name, result in mine.items():
        np.testing.assert_array_equal(result.equity, shown[name].equity, err_msg=name)


def test_a_folder_without_a_run_and_a_run_without_an_agent_are_named(tmp_path: Path, run_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run here: config\.yaml is missing"):
        open_run(tmp_path)
    shutil.copy(run_folder / "config.yaml", tmp_path)
    with pytest.raises(ConfigError, match=r"no agent yet.*tailguard train --resume"):
        open_run(tmp_path)


def test_bars_that_changed_since_the_training_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bars.parquet"
    market = tg.make_market(1_500, seed=1)
    market.save(path)
    small = ("env.num_envs=4", "env.episode_length=16", "ppo.n_steps=16", "ppo.network.hidden=[4]", "ppo.epochs=1")
    settings = [f"data.path={path}", "data.features=[return_24]", "data.embargo=1d", *small]
    config = load_config(overrides=[*settings, "ppo.network.lstm_size=4", "training.total_timesteps=64"])
    train(config, tmp_path / "run", Console(quiet=True))
    assert open_run(tmp_path / "run").split.test.symbols == market.bars.symbols
    frame = pl.read_parquet(path)
    frame.tail(frame.height - 200).write_parquet(path)
    with pytest.raises(BarsError, match=r"bars\.parquet: these are no longer the bars"):
        open_run(tmp_path / "run")
