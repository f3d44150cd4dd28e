"""Bars with another volatility: every return is multiplied, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.data.prepare import prepare, with_rescaled_copies
from tailguard.data.rescaled import rescale_returns
from tailguard.envs.folds import cut_folds

HOUR = 3_600_000


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_log_returns_within_and_between_bars_are_multiplied(bars, factor: float) -> None:
    before, after = bars.panel(), rescale_returns(bars, factor).panel()
    for name in ("open", "high", "low"):
        old, new = (np.log(getattr(each, name) / each.close) for each in (before, after))
        np.testing.assert_allclose(new, factor * old, atol=1e-12)
    old, new = (np.diff(np.log(each.close), axis=0) for each in (before, after))
    np.testing.assert_allclose(new, factor * old, atol=1e-12)
    assert after.open[0] == pytest.approx(before.open[0])
    # The same money changes hands in every bar.
    np.testing.assert_allclose(after.volume * after.close, before.volume * before.close)
    assert np.array_equal(after.time, before.time)


def test_segments_start_anew_at_their_own_price() -> None:
    frame = tg.make_market(400, assets=2, seed=1).bars
    after = rescale_returns(frame, 2.0)
    for symbol in frame.symbols:
        one, two = (each.select(symbol).panel() for each in (frame, after))
        assert two.open[0] == pytest.approx(one.open[0])


def test_copies_follow_the_bars_with_features_of_their_own(bars) -> None:
    names = ["return_24", "atr_14"]
    prepared = prepare(bars, names)
    both = with_rescaled_copies(prepared, bars, (0.5, 2.0))
    rows = prepared.panel.rows
    assert both.own_rows == rows
    assert both.panel.rows == 3 * rows
    np.testing.assert_array_equal(both.features[:rows], prepared.features)
    expected = prepare(rescale_returns(bars, 2.0), scaler=prepared.scaler)
    np.testing.assert_array_equal(both.features[2 * rows :], expected.features)
    # The true range of the copy is twice as large; a return in units of volatility is what it was.
    center, scale = prepared.scaler.center[1], prepared.scaler.scale[1]
    parts = both.features[:rows], both.features[2 * rows :]
    own, copy = (center + scale * part[prepared.usable, 1] for part in parts)
    assert np.median(copy / own) == pytest.approx(2, rel=0.01)
    np.testing.assert_allclose(both.features[2 * rows :, 0], prepared.features[:, 0], atol=1e-4)
    assert len(set(both.panel.segment.tolist())) == 3 * len(set(prepared.panel.segment.tolist()))


def test_no_episode_crosses_from_the_bars_to_a_copy_and_folds_are_left_out_of_all(bars) -> None:
    prepared = with_rescaled_copies(prepare(bars, ["return_24"]), bars, (1.5,))
    env = tg.TradingEnv(prepared, num_envs=4, episode_length=24, volatility_half_life=24)
    rows, segment, time = prepared.own_rows, prepared.panel.segment, prepared.panel.time
    starts = env.starts.numpy()
    assert (segment[starts] == segment[starts + 24]).all()
    assert (starts >= rows).mean() == pytest.approx(0.5, abs=0.01)
    for fold in cut_folds(env, 4, 10 * HOUR):
        assert (fold.inside < rows).all()
        assert (fold.outside >= rows).float().mean() == pytest.approx(0.5, abs=0.01)
        begin, end = time[fold.outside], time[fold.outside + 24]
        assert not ((end >= fold.first_ms - 10 * HOUR) & (begin <= fold.last_ms + 10 * HOUR)).any()
    alone = tg.TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"], volatility_half_life=24)
    assert env.volatility == alone.volatility
