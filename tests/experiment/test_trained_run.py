"""A run opened again meets exactly the bars it was trained and tested on, or says why not."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

import tailguard as tg
from tailguard.config import RunConfig, load_config, to_yaml
from tailguard.errors import BarsError, ConfigError
from tailguard.experiment.trained_run import open_run
from tailguard.runs.runner import train


def test_a_folder_without_a_run_and_a_run_without_an_agent_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run here: config\.yaml is missing"):
        open_run(tmp_path)
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig()))
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
