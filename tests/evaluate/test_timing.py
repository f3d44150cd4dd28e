"""Timing: every shift of the positions at once, and what the share of better ones says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.timing import timing_test


def test_every_shift_is_the_sum_over_moved_positions(bars) -> None:
    draw = np.random.default_rng(2)
    targets = np.where(draw.random((len(bars), 1)) < 0.1, draw.uniform(-1, 1, (len(bars), 1)), np.nan)
    result, panel = tg.backtest(targets, bars), bars.panel()
    found = timing_test(result, panel)
    rows = np.searchsorted(panel.time, result.time)
    before = np.vstack([[0.0], result.weights[:-1]])
    held = np.where(np.isnan(result.targets), before, result.targets)
    sums = []
    for shift in range(len(rows)):
        moved = np.roll(rows, -shift)
        inside = panel.close[moved] / panel.open[moved] - 1
        gap = panel.open[moved] / panel.close[moved - 1] - 1
        sums.append(float((held * inside + before * gap).sum()))
    years = len(rows) / result.bars_per_year
    tenth = len(rows) // 10
    np.testing.assert_allclose(found.elsewhere, np.array(sums[tenth : len(rows) - tenth]) / years, atol=1e-9)
    # At the actual times it is the gain that the books have, but for fills that the volume cut.
    assert found.earned == pytest.approx(result.pnl.sum() / years, rel=0.02)
    exceeding = sum(value >= sums[0] for value in sums[tenth : len(rows) - tenth])
    assert found.p_value == (1 + exceeding) / (1 + len(found.elsewhere))


def test_foresight_is_found_and_blind_switching_seldom_passes_for_it(bars) -> None:
    panel = bars.panel()
    ahead = np.vstack([np.sign(panel.close[1:] - panel.open[1:]), [[0.0]]])
    result = tg.backtest(ahead, bars)
    assert timing_test(result, panel).p_value < 0.002
    draw = np.random.default_rng(5)
    found = []
    for _ in range(300):
        side = np.repeat(draw.choice([-1.0, 1.0], 100), 12)[: len(result.net), None]
        found.append(timing_test(replace(result, targets=side, weights=side), panel).p_value)
    # A right test is below 0.1 in a tenth of all cases without skill.
    assert 0.05 < np.mean(np.array(found) <= 0.1) < 0.16


def test_other_bars_than_those_of_the_result_are_refused(bars) -> None:
    result = tg.backtest(np.ones((len(bars), 1)), bars)
    with pytest.raises(ConfigError, match="not made on these bars"):
        timing_test(result, tg.make_market(1_000, seed=3).bars.panel())
