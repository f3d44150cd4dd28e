"""Timing: every shift of the positions at once, and what the share of better ones says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import signal

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.timing_test import timing_test


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
    np.testing.assert_allclose(found.elsewhere, np.array(sums[1:]) / years, atol=1e-9)
    # At the actual times it is the gain that the books have, but for fills that the volume cut.
    assert found.earned == pytest.approx(result.pnl.sum() / years, rel=0.02)
    exceeding = sum(value >= sums[0] for value in sums[1:])
    assert found.p_value == (1 + exceeding) / len(sums)


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


def regimes(draw: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Positions that stay for a geometric time of this mean and know nothing, [count, 1]."""
    begins = np.where(draw.random(count) < 1 / length, np.arange(count), 0)
    return draw.uniform(-1, 1, count)[np.maximum.accumulate(begins)][:, None]


def skill_less_p_values(bars, length: int, memory: float, samples: int, seed: int) -> np.ndarray:
    """Of positions that know nothing, on prices whose log-volatility is an AR(1) process."""
    draw, count = np.random.default_rng(seed), len(bars)
    panel = bars.panel()
    template = tg.backtest(np.zeros((count, 1)), bars)
    found = []
    for _ in range(samples):
        shocks = draw.normal(0, 0.5 * np.sqrt(1 - memory**2), count)
        volatility = np.exp(signal.lfilter([1.0], [1.0, -memory], shocks)) if memory else np.ones(count)
        prices = 100 * np.exp(np.cumsum(0.005 * volatility * draw.normal(size=count)))[:, None]
        opens = np.vstack([[[100.0]], prices[:-1]])
        held = regimes(draw, len(template.net), length)
        found.append(
            timing_test(replace(template, targets=held, weights=held), replace(panel, open=opens, close=prices)).p_value
        )
    return np.array(found)


@pytest.mark.parametrize("memory", [0.0, 0.99])
def test_slow_positions_without_skill_pass_as_seldom_as_the_level_says(bars, memory: float) -> None:
    """Regimes of 400 bars in 1,200: luck lasts for a third of the record. 0.05 ± 0.018 at two deviations."""
    found = skill_less_p_values(bars, 400, memory, 600, seed=11)
    assert np.mean(found <= 0.05) <= 0.068
    assert np.mean(found <= 0.2) == pytest.approx(0.2, abs=0.05)  # and it is not merely strict


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.0, 0.99])
@pytest.mark.parametrize("length", [20, 100, 400])
def test_the_size_of_the_timing_test_is_its_level(bars, length: int, memory: float) -> None:
    found = skill_less_p_values(bars, length, memory, 4_000, seed=12)
    assert np.mean(found <= 0.05) <= 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / 4_000)


def test_a_position_that_never_changes_has_no_timing(bars) -> None:
    held = np.ones((len(bars) - 1, 1))
    result = replace(tg.backtest(np.ones((len(bars), 1)), bars), targets=held, weights=held)
    inside = bars.panel()
    # Opens at the last close: every shift of the constant position earns the same sum, and no time stands out.
    panel = replace(inside, open=np.vstack([inside.open[:1], inside.close[:-1]]))
    assert timing_test(result, panel).p_value == 1


def test_other_bars_than_those_of_the_result_are_refused(bars) -> None:
    result = tg.backtest(np.ones((len(bars), 1)), bars)
    with pytest.raises(ConfigError, match="not computed on these bars"):
        timing_test(result, tg.make_market(1_000, seed=3).bars.panel())
