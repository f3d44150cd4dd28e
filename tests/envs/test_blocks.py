"""Blocks of bars: the numbers of all bars in memory, no reward across an exchange, every bar in its turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.envs.blocks import BlockCache, Layout, StartRanges
from tailguard.envs.prepared_market import RowRanges
from tailguard.errors import ConfigError
from tailguard.runs.prepare_market import prepare_market

FEATURES = ("return_4", "time_of_day_sin")
LENGTH = 24
OPTIONS = {"num_envs": 16, "episode_length": LENGTH, "features": FEATURES, "seed": 5}
MANY = {"resident_bars": 480, "resident_blocks": 4}
"""Four blocks of 96 starts and 24 further rows, where the bars have thirteen."""


@pytest.fixture(scope="module")
def market() -> Bars:
    """Two stretches, so that some blocks hold the end of one and the start of another."""
    bars = tg.make_market(1_200, seed=2).bars
    frame = bars.frame.drop("segment").with_row_index("index")
    return tg.load_bars(frame.filter(~pl.col("index").is_between(500, 520)).drop("index"), gaps="split")


def actions(steps: int) -> torch.Tensor:
    return 2 * torch.rand(steps, 16, 1, generator=torch.Generator().manual_seed(3)) - 1


@pytest.mark.parametrize("options", [{}, {"volatility_half_life": 12}, {"reward": "pnl"}])
def test_where_everything_fits_it_is_the_environment_in_memory_bit_for_bit(market: Bars, options: dict) -> None:
    memory = tg.TradingEnv(market, **OPTIONS, **options)
    blocks = tg.TradingEnv(market, **OPTIONS, **options, resident_bars=3_000, resident_blocks=6)
    assert blocks.blocks is not None
    assert len(blocks.blocks.resident) == blocks.blocks.layout.blocks > 2
    assert torch.equal(memory.reset(7), blocks.reset(7))
    for action in actions(80):
        mine, theirs = blocks.step(action), memory.step(action)
        for name in ("obs", "final_obs", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert torch.equal(blocks.state_dict()["row"], memory.state_dict()["row"])


def test_no_reward_crosses_an_exchange_and_every_bar_gets_its_turn(market: Bars) -> None:
    """Each step is repeated on all bars in memory, from the account's row there; accounts move from bar to bar."""
    env = tg.TradingEnv(market, **OPTIONS, **MANY)
    cache, whole = env.blocks, env.whole_task
    assert cache is not None
    assert cache.layout.blocks >= 3 * cache.layout.slots
    addresses = [tensor.data_ptr() for tensor in (*cache.buffers.values(), cache._stop, cache._offset)]
    env.reset(0)
    turns, visited, started = 0, set(), []
    for action in actions(4_000):
        env.exchange(0)  # once due, before anything is read
        before, rows = env.state, cache.rows_of(env.state.market.row)[0]
        visited.update(rows.tolist())
        at = replace(before, market=replace(before.market, row=rows))
        expected, transition = whole.advance(at, whole.decide(action, at)[0])
        result = env.step(action)
        assert torch.equal(result.reward, whole.reward_of(transition, before))
        now = cache.rows_of(env.state.market.row)[0]
        assert torch.equal(torch.where(result.ended, expected.market.row, now), expected.market.row)
        assert torch.equal(result.obs[:, :2], whole.features[now])
        started += now[result.ended].tolist()
        turns = cache.turn
    possible = env.starts.tolist()
    assert set(started) <= set(possible)
    assert turns >= 2 * len(cache._order)
    assert {row + step for row in possible for step in range(LENGTH)} <= visited
    assert [tensor.data_ptr() for tensor in (*cache.buffers.values(), cache._stop, cache._offset)] == addresses


def test_blocks_come_equally_often_and_no_slot_in_use_is_overwritten() -> None:
    rows = torch.arange(1_000)
    layout = Layout.of(1_000, 20, 400, 4)
    assert (layout.length, layout.size, layout.blocks, layout.slots) == (77, 97, 13, 4)
    cache = BlockCache({"row": (rows, 0)}, layout, rows[:-20], accounts=8, device=torch.device("cpu"), seed=1)
    generator = torch.Generator().manual_seed(0)
    seen = []
    nobody, oldest = torch.full((1,), 10_000), torch.zeros(1, dtype=torch.int64)
    for _ in range(2 * 13 * 5):
        for _ in range(4):
            drawn = cache.draw(500, generator)
            # The number at a row of the buffer is the row that it stands for.
            assert torch.equal(cache.buffers["row"][drawn], cache.rows_of(drawn)[0])
            assert (cache.buffers["row"][drawn + 20] == cache.buffers["row"][drawn] + 20).all()
            seen.append(cache.buffers["row"][drawn])
            cache.exchange(5, nobody)
    turn, slot = cache.turn, cache.turn % 4
    for _ in range(20):
        assert not cache.exchange(20, oldest + slot * layout.size)  # an account stays in the oldest slot
    assert cache.turn == turn
    counts = torch.bincount(torch.cat(seen), minlength=1_000)[:-20].double()
    of_blocks = torch.stack([part.mean() for part in counts.split(layout.length)])
    assert counts.min() > 0
    assert of_blocks.max() / of_blocks.min() < 1.35  # the first blocks stay longer, once
    cache.close()


def test_a_saved_state_goes_on_exactly_in_the_middle_of_an_exchange(market: Bars) -> None:
    taken = actions(600)
    env = tg.TradingEnv(market, **OPTIONS, **MANY)
    env.reset(0)
    saved = {}
    for at, action in enumerate(taken):
        if at in (130, 163):
            saved[at] = {name: value.clone() for name, value in env.state_dict().items()}
        env.step(action)
    assert saved[163]["blocks"][0] > 0
    end = env.state_dict()
    for at, state in saved.items():
        again = tg.TradingEnv(market, **OPTIONS, **MANY)
        again.reset(9)
        again.load_state_dict(state)
        for action in taken[at:]:
            again.step(action)
        for name, value in again.state_dict().items():
            assert torch.equal(value, end[name]), name


def test_a_state_of_bars_in_memory_goes_on_where_all_blocks_fit(market: Bars) -> None:
    memory = tg.TradingEnv(market, **OPTIONS, stagger=6)
    memory.reset(0)
    for action in actions(50):
        memory.step(action)
    state = memory.state_dict()
    fitting = tg.TradingEnv(market, **OPTIONS, stagger=6, resident_bars=3_000, resident_blocks=6)
    fitting.reset(1)
    fitting.load_state_dict(state)
    for action in actions(50):
        mine, theirs = fitting.step(action), memory.step(action)
        assert torch.equal(mine.obs, theirs.obs)
    few = tg.TradingEnv(market, **OPTIONS, **MANY)
    few.reset(1)
    with pytest.raises(ConfigError, match="saved with all bars in memory"):
        few.load_state_dict(state)


def test_a_restriction_of_the_starts_holds_in_every_block(market: Bars) -> None:
    env = tg.TradingEnv(market, **OPTIONS, **MANY)
    allowed = env.starts[(env.starts < 300) | (env.starts > 700)]
    env.restrict_starts(allowed)
    env.reset(0)
    assert env.blocks is not None
    starts = []
    for action in actions(1_500):
        result = env.step(action)
        starts.append(env.blocks.rows_of(env.state.market.row)[0][result.ended])
    found = set(torch.cat(starts).tolist())
    assert found <= set(allowed.tolist())
    assert len(found) > 0.7 * len(allowed)


def test_ranges_of_starts_are_those_of_the_rows() -> None:
    ranges = StartRanges.of(torch.tensor([3, 4, 10, 20, 21, 22]))
    assert ranges.begin.tolist() == [3, 10, 20]
    assert ranges.stop.tolist() == [5, 11, 23]
    same = StartRanges.of(RowRanges(torch.tensor([3, 10, 20]), torch.tensor([2, 1, 3])))
    assert np.array_equal(same.begin, ranges.begin)
    assert np.array_equal(same.stop, ranges.stop)
    begin, count = ranges.between(4, 22)
    assert begin.tolist() == [4, 10, 20]
    assert count.tolist() == [1, 1, 2]


def test_a_cache_that_is_too_small_is_refused(market: Bars) -> None:
    with pytest.raises(ConfigError, match=r"resident_bars: 100 bars in 8 blocks are too few for episodes of 24.*384"):
        tg.TradingEnv(market, **OPTIONS, resident_bars=100)


def test_a_prepared_market_trains_from_blocks_as_from_its_maps(market: Bars, tmp_path: Path) -> None:
    market.frame.drop("segment").write_parquet(tmp_path / "bars.parquet")
    settings = load_config(
        overrides=[
            f"data.path={tmp_path / 'bars.parquet'}",
            f"data.features=[{', '.join(FEATURES)}]",
            "data.gaps=split",
            "data.embargo=1d",
        ]
    )
    prepare_market(settings, tmp_path / "market", rows=1_000)
    options = {"num_envs": 16, "episode_length": LENGTH, "seed": 5}
    mapped = tg.TradingEnv(tmp_path / "market", **options)
    blocks = tg.TradingEnv(tmp_path / "market", **options, resident_bars=3_000, resident_blocks=5)
    assert torch.equal(mapped.reset(7), blocks.reset(7))
    for action in actions(60):
        assert torch.equal(blocks.step(action).obs, mapped.step(action).obs)
    few = tg.TradingEnv(tmp_path / "market", **options, resident_bars=400, resident_blocks=4)
    assert few.blocks is not None
    few.reset(0)
    for action in actions(400):
        few.step(action)
    assert few.blocks.turn > 3
    rows = few.blocks.rows_of(few.state.market.row)[0]
    assert torch.equal(few.task.observe(few.state)[:, :2], few.whole_task.features[rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.slow
@pytest.mark.parametrize("learner", [tg.DistributionalPPO, tg.PathwiseLearner])
def test_a_recorded_iteration_reads_the_blocks_of_the_day(market: Bars, learner: type) -> None:
    """Eager and recorded learners see the same exchanges; which episodes have ended by then does not matter."""
    agents = []
    for runtime in ("eager", "graph"):
        options = {**OPTIONS, **MANY, "num_envs": 64, "device": "cuda"}
        sizes = {"n_steps": 16, "hidden": (8,), "lstm_size": 8, "precision": "float32", "runtime": runtime}
        agents.append(learner(tg.TradingEnv(market, **options), **sizes))
    eager, recorded = agents
    start = [weight.detach().clone() for weight in eager.policy.parameters()]
    for _ in range(14):
        eager.iterate()
        recorded.iterate()
    assert recorded.runtime.recording
    assert recorded.env.blocks.turn == eager.env.blocks.turn >= 3
    assert torch.equal(recorded.env.state_dict()["row"], eager.env.state_dict()["row"])
    pairs = list(zip(eager.policy.parameters(), recorded.policy.parameters(), strict=True))
    way = max(float((one - old).abs().max()) for (one, _), old in zip(pairs, start, strict=True))
    assert max(float((one - two).abs().max()) for one, two in pairs) < 1e-2 * way
