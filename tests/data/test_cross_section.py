"""The planted cross-section: scores are worth what is said, and no portfolio within the limits is worth more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import linprog

from tailguard.data.cross_section import HOLDING_HOURS, MOOD_SIZE, make_cross_section
from tailguard.data.synthetic import HOURS_PER_YEAR, VOLATILITY
from tailguard.errors import ConfigError


def scores(universe) -> np.ndarray:
    parts = universe.bars.frame.partition_by("symbol", maintain_order=True)
    return np.stack([part["score"].to_numpy() for part in parts], axis=1)


def test_the_next_return_is_what_the_relative_score_says() -> None:
    """A regression of returns from open to close on the expected ones has slope 1, on the bar's own ones 0 more."""
    universe = make_cross_section(4_000, assets=30, seed=3, signal=20.0)
    panel = universe.bars.panel("portfolio")
    moves = panel.close / panel.open - 1
    relative = moves - moves.mean(1, keepdims=True)
    expected = universe.expected
    error = relative[1:].std() / np.sqrt(expected[:-1].size) / expected.std()
    slope = (relative[1:] * expected[:-1]).sum() / (expected[:-1] ** 2).sum()
    assert slope == pytest.approx(1, abs=4 * error)
    assert error < 0.05
    # The score is the relative score and the mood that all assets share.
    drift = 20.0 * VOLATILITY / HOURS_PER_YEAR
    own = scores(universe) - scores(universe).mean(1, keepdims=True)
    np.testing.assert_allclose(drift * own, expected, atol=1e-12)
    assert own.std() == pytest.approx(np.sqrt(29 / 30), rel=0.05)
    mood = scores(universe).mean(1)
    assert mood.std() == pytest.approx(np.sqrt(MOOD_SIZE**2 + 1 / 30), rel=0.35)
    # A difference of two scores is without the mood, and changes when either is drawn anew.
    pairs = scores(universe)[:, ::2] - scores(universe)[:, 1::2]
    stays = (np.abs(np.diff(pairs, axis=0)) < 1e-9).mean()
    assert stays == pytest.approx(math.exp(-2 / HOLDING_HOURS), abs=2e-3)


@pytest.mark.parametrize(("asset_max", "leverage"), [(0.05, 1.0), (0.3, 1.0), (0.4, 1.5), (2.0, 1.0)])
def test_the_best_portfolio_is_that_of_a_linear_programme(asset_max: float, leverage: float) -> None:
    universe = make_cross_section(50, assets=8, seed=1)
    weights = universe.best_weights(asset_max, leverage)
    for row in (0, 17, 49):
        both = np.concatenate([-universe.expected[row], universe.expected[row]])
        found = linprog(both, A_ub=[np.ones(16)], b_ub=[leverage], bounds=[(0, asset_max)] * 16)
        assert universe.best_return(asset_max, leverage)[row] == pytest.approx(-found.fun, rel=1e-9)
        assert weights[row] @ universe.expected[row] == pytest.approx(-found.fun, rel=1e-9)
    assert np.abs(weights).max() <= min(asset_max, leverage)
    assert np.abs(weights).sum(1).max() <= leverage + 1e-12


def test_seeds_and_names_are_the_callers() -> None:
    one, same, other = (make_cross_section(20, assets=3, seed=seed, prefix="NEW") for seed in (4, 4, 5))
    assert one.bars.symbols == ("NEW001", "NEW002", "NEW003")
    assert one.bars.frame.equals(same.bars.frame)
    assert not one.bars.frame.equals(other.bars.frame)
    with pytest.raises(ConfigError, match="assets: 1 is out of range"):
        make_cross_section(20, assets=1)
