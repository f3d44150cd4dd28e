"""Statistics of observations of many assets, against NumPy over the listed ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailguard.envs.asset_layout import AssetLayout
from tailguard.errors import ConfigError
from tailguard.returns.asset_moments import AssetMoments

LAYOUT = AssetLayout(own=2, market_wide=1)


def test_statistics_are_those_of_all_listed_assets() -> None:
    draw = np.random.default_rng(0)
    features, weights = draw.normal(3.0, 2.0, (6, 4, 3, 2)), draw.normal(size=(6, 4, 3))
    wide, account, listed = draw.normal(size=(6, 4, 1)), draw.normal(size=(6, 4, 3)), draw.random((6, 4, 3)) < 0.6
    flat = np.concatenate([features.reshape(6, 4, 6), wide, listed, weights, account], axis=-1)
    valid = draw.random((6, 4)) < 0.8
    features[2, 1, 0, 0] = np.nan  # leaves its own asset out of that row, and no other
    flat[2, 1, 0] = np.nan
    moments = AssetMoments(LAYOUT)
    for part in (slice(0, 2), slice(2, 6)):
        moments.update(torch.from_numpy(flat[part]), torch.from_numpy(valid[part]))
    counted = listed & valid[..., None] & np.isfinite(features).all(-1)
    of_asset = np.concatenate([features, weights[..., None]], axis=-1)[counted]
    of_account = np.concatenate([wide, account], axis=-1)[valid]
    of_account_seen = np.delete(of_account, [], axis=0)
    mean, std = moments.scale(flat.shape[-1])
    expected = of_asset.mean(0), of_account_seen.mean(0)
    places = [0, 1, 0, 1, 0, 1]
    np.testing.assert_allclose(mean[:6], expected[0][places], rtol=1e-12)
    np.testing.assert_allclose(std[:6], of_asset.std(0)[places], rtol=1e-12)
    np.testing.assert_allclose(mean[6], expected[1][0], rtol=1e-12)
    np.testing.assert_array_equal(mean[7:10], 0.0)  # the mask stays a mask
    np.testing.assert_array_equal(std[7:10], 1.0)
    np.testing.assert_allclose(mean[10:13], expected[0][2], rtol=1e-12)
    np.testing.assert_allclose(std[13:], of_account.std(0)[1:], rtol=1e-12)
    again = AssetMoments(LAYOUT)
    again.load_state_dict(moments.state_dict())
    larger = 50 * 4 + LAYOUT.account_size
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(again.scale(larger), moments.scale(larger), strict=True)
    )


def test_many_assets_are_sampled_by_rows() -> None:
    """Of 40 assets every fifth row: the others may hold anything."""
    size = 40 * 4 + LAYOUT.account_size
    rows = torch.randn(10, 3, size, generator=torch.Generator().manual_seed(0))
    rows[..., 81:121] = 1.0
    some, other = AssetMoments(LAYOUT), AssetMoments(LAYOUT)
    some.update(rows)
    changed = rows.clone()
    changed[[1, 2, 3, 4, 6, 7, 8, 9], :, :80] = 7.0
    other.update(changed)
    assert torch.equal(some.of_asset.mean, other.of_asset.mean)
    assert float(some.of_asset.count) == 2 * 3 * 40


def test_an_observation_of_another_kind_is_refused() -> None:
    assert LAYOUT.assets_in(5 * 4 + LAYOUT.account_size) == 5
    with pytest.raises(ConfigError, match="an observation of 21 numbers does not fit"):
        LAYOUT.assets_in(21)
