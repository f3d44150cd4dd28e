"""An experiment is what its settings say: the bars, where they are cut, and a learner on the training part."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.config import RunConfig, load_config
from tailguard.errors import ConfigError
from tailguard.experiment.build import build, build_env, load_bars_in_memory, load_market, split_market
from tailguard.runs.prepare_market import prepare_market

SMALL = (
    "data.synthetic_bars=1600",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "data.validation=0.1",
    "data.test=0.2",
    "env.num_envs=4",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.network.hidden=[4]",
    "ppo.network.lstm_size=4",
    "training.seed=3",
)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(overrides=list(SMALL))


def test_the_parts_belong_together(config: RunConfig) -> None:
    lines: list[str] = []
    experiment = build(config, report=lines.append)
    assert experiment.learner.env is experiment.env
    assert (experiment.env.num_envs, experiment.env.episode_length, experiment.learner.seed) == (4, 32, 3)
    assert experiment.market.synthetic is not None
    assert len(experiment.market.bars) == 1_600
    # Of 1,600 bars two embargoes of 24 are unused. Of the other 1,552 a tenth is 155 and a fifth 310, at the end.
    split, first = experiment.split, experiment.market.bars.start
    assert len(split.train) == 1_552 - 155 - 310
    assert [(part.start - first) / timedelta(hours=1) for part in (split.validation, split.test)] == [1_111, 1_290]
    np.testing.assert_array_equal(experiment.env.prepared.panel.time, split.train.panel().time)
    assert [line[:9] for line in lines] == ["market   ", "split    "]


def test_the_same_settings_build_the_same_learner(config: RunConfig) -> None:
    one, other = (build(config).learner.policy.state_dict() for _ in range(2))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_whole_episodes_begin_together_and_parts_of_them_do_not(config: RunConfig) -> None:
    train = split_market(config, load_market(config).bars).train
    assert build_env(config, train, seed=0).stagger == 16
    whole = load_config(overrides=[*SMALL, "ppo.n_steps=32"])
    assert build_env(whole, train, seed=0).stagger is None


def test_volatility_is_scaled_only_where_a_limit_is_set(config: RunConfig) -> None:
    train = split_market(config, load_market(config).bars).train
    assert build_env(config, train, seed=0).volatility is None
    limited = load_config(overrides=[*SMALL, "risk.limit=-0.1", "risk.volatility_half_life=24"])
    assert build_env(limited, train, seed=0).volatility is not None


def test_bars_of_a_file_are_those_of_the_chosen_symbols(tmp_path: Path) -> None:
    tg.make_market(900, assets=2, seed=5).save(tmp_path / "bars.parquet")
    bars = tg.load_bars(tmp_path / "bars.parquet")
    config = load_config(overrides=[f"data.path={tmp_path / 'bars.parquet'}", f"data.symbols=[{bars.symbols[1]}]"])
    market = load_market(config)
    assert market.synthetic is None
    assert market.bars.symbols == bars.symbols[1:]
    assert f"{bars.symbols[1]} · 2" in market.describe()
    assert market.describe().endswith("900 bars")
    assert load_bars_in_memory(config).symbols == bars.symbols[1:]


def test_costs_of_a_symbol_that_is_not_there_are_refused(tmp_path: Path) -> None:
    tg.make_market(400, assets=2, seed=1).save(tmp_path / "bars.parquet")
    config = load_config(overrides=[f"data.path={tmp_path / 'bars.parquet'}", "market.per_symbol={SYN2: {fee: 0.01}}"])
    for use in (load_market, lambda given: prepare_market(given, tmp_path / "market")):
        with pytest.raises(ConfigError, match=r"market.per_symbol: .*no symbol 'SYN2'; SYN02 is near"):
            use(config)


def test_a_fraction_may_be_written_as_text(config: RunConfig) -> None:
    bars = load_market(config).bars
    texts = load_config(overrides=[*SMALL, "data.validation='0.1'", "data.test='0.2'"])
    assert split_market(texts, bars).describe() == split_market(config, bars).describe()
    with pytest.raises(ConfigError, match=r"data\.test|test"):
        split_market(load_config(overrides=[*SMALL, "data.test=soon"]), bars)
