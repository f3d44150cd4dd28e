"""A trading agent's spec: which bars it was trained on, and back from JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.envs.spec import TradingSpec, TrainingBars
from tailguard.runs.prepare_market import prepare_market


def test_the_training_bars_are_those_that_can_be_traded(bars: Bars) -> None:
    """A split's lead-in feeds features only: it is not part of the period."""
    split = tg.split_bars(bars, validation=0.2, test=0.2, embargo="1d")
    env = tg.TradingEnv(split.validation, num_envs=2, episode_length=8, features=["return_4"])
    found = TradingSpec.of(env).training_bars
    assert found is not None
    assert split.validation.end_points[0] < split.validation.start
    first, last = (datetime.fromtimestamp(moment / 1000, UTC) for moment in (found.first_ms, found.last_ms))
    assert (first, last) == (split.validation.start, split.validation.end_points[1])
    assert found.symbols == ("SYN01",)


def test_the_period_spans_all_symbols_in_accounts_of_their_own() -> None:
    """The symbols' rows follow one another, so the first and the last row need not be the ends of the period."""
    two = tg.make_market(400, assets=2, seed=3).bars
    env = tg.TradingEnv(two, num_envs=2, episode_length=8, features=["return_4"], accounts="per_symbol")
    hour = 3_600_000
    begin = int(two.start.timestamp() * 1000)
    assert TradingSpec.of(env).training_bars == TrainingBars(("SYN01", "SYN02"), begin, begin + 399 * hour)


def test_a_prepared_market_has_the_training_bars_of_its_bars_in_memory(tmp_path: Path) -> None:
    tg.make_market(1_500, seed=5).save(tmp_path / "bars.parquet")
    changes = [f"data.path={tmp_path / 'bars.parquet'}", "data.embargo=1d", "data.features=[return_4]"]
    prepare_market(load_config(overrides=changes), tmp_path / "market")
    split = tg.split_bars(tg.load_bars(tmp_path / "bars.parquet"), validation=0.15, test=0.15, embargo="1d")
    memory = tg.TradingEnv(split.train, num_envs=2, episode_length=8, features=["return_4"])
    mapped = tg.TradingEnv(tmp_path / "market", num_envs=2, episode_length=8)
    assert TradingSpec.of(mapped).training_bars == TradingSpec.of(memory).training_bars


def test_a_spec_without_training_bars_is_read_and_a_wrong_one_refused(bars: Bars) -> None:
    """Agents that were saved before the training bars were kept have none."""
    spec = TradingSpec.of(tg.TradingEnv(bars, num_envs=2, episode_length=8, features=["return_4"]))
    state = json.loads(json.dumps(spec.to_dict()))
    assert TradingSpec.from_dict(state).training_bars == spec.training_bars
    for wrong in ({"symbols": ["A"], "first_ms": None, "last_ms": 1}, {"symbols": "A", "first_ms": 0, "last_ms": 1}):
        with pytest.raises(TypeError, match="training bars"):
            TradingSpec.from_dict(state | {"training_bars": wrong})
    del state["training_bars"]
    assert TradingSpec.from_dict(state).training_bars is None
