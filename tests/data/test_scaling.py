"""Scaling: robust statistics of training rows only, exact storage, and refusal of other features."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tailguard.data.features import FeatureTable
from tailguard.data.scaling import Scaler
from tailguard.errors import ConfigError


def table_of(values: np.ndarray, **changes: tuple[str, ...]) -> FeatureTable:
    columns = range(values.shape[1])
    names = changes.get("names", tuple(f"f{column}" for column in columns))
    definitions = changes.get("definitions", tuple(f"d{column}" for column in columns))
    return FeatureTable(values, names, np.isfinite(values).all(axis=1), definitions)


def every_row(table: FeatureTable) -> np.ndarray:
    return np.ones(len(table.valid), dtype=bool)


def test_center_and_scale_are_median_and_normalised_quartile_range() -> None:
    table = table_of(np.arange(101.0)[:, None])  # quartiles 25, 50, 75
    scaler = Scaler.fit(table, every_row(table))
    assert scaler.center[0] == 50.0
    assert scaler.scale[0] == pytest.approx(50 / (2 * 0.6744897501960817), rel=1e-15)


def test_a_normal_feature_gets_unit_deviation() -> None:
    table = table_of(3.0 + 7.0 * np.random.default_rng(0).normal(size=(200_000, 1)))
    scaled = Scaler.fit(table, every_row(table)).transform(table)
    assert scaled.dtype == np.float32
    assert scaled.mean() == pytest.approx(0.0, abs=0.01)
    assert scaled.std() == pytest.approx(1.0, abs=0.01)


def test_crash_bars_do_not_set_the_scale() -> None:
    calm = np.random.default_rng(0).normal(size=(10_000, 1))
    crashed = calm.copy()
    crashed[:50] = -1e6
    quiet, loud = (Scaler.fit(table_of(values), np.ones(10_000, dtype=bool)) for values in (calm, crashed))
    assert loud.scale[0] == pytest.approx(quiet.scale[0], rel=0.02)


def test_rows_outside_the_mask_and_rows_warming_up_leave_the_statistics_alone() -> None:
    values = np.random.default_rng(1).normal(size=(100, 3))
    rows = np.arange(100) < 60
    expected = Scaler.fit(table_of(values[10:60]), np.ones(50, dtype=bool))
    values[60:] = 1e9
    values[:10, 1] = np.nan
    values[:10, 0] = -1e9
    fitted = Scaler.fit(table_of(values), rows)
    assert (fitted.center == expected.center).all()
    assert (fitted.scale == expected.scale).all()


def test_a_feature_that_is_mostly_one_value_is_scaled_by_its_deviation() -> None:
    values = np.zeros((1_000, 1))
    values[:100] = 5.0
    scaler = Scaler.fit(table_of(values), np.ones(1_000, dtype=bool))
    assert scaler.scale[0] == pytest.approx(5 * np.sqrt(0.1 * 0.9), rel=1e-12)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3e8])
def test_a_constant_feature_is_zero_then_and_later_but_missing_stays_missing(constant: float) -> None:
    table = table_of(np.full((1_001, 1), constant))
    scaler = Scaler.fit(table, every_row(table))
    assert scaler.scale[0] == 0.0
    with np.errstate(all="raise"):
        scaled = scaler.transform(np.array([[constant], [constant + 1.0], [np.nan]]))
    np.testing.assert_array_equal(scaled, np.array([[0.0], [0.0], [np.nan]], dtype=np.float32))


def test_a_constant_with_rounding_errors_is_constant() -> None:
    values = np.full((1_000, 1), 0.3)
    values[::2] = np.nextafter(0.3, 1.0)
    assert Scaler.fit(table_of(values), np.ones(1_000, dtype=bool)).scale[0] == 0.0


def test_clip_bounds_both_sides_and_its_share_is_counted_over_defined_values() -> None:
    scaler = Scaler(("a", "b"), ("", ""), center=np.zeros(2), scale=np.array([1.0, 2.0]))
    values = np.array([[11.0, 20.0], [-1e300, 20.1], [9.0, np.nan], [0.0, np.nan]])
    assert scaler.transform(values)[:2].tolist() == [[10.0, 10.0], [-10.0, 10.0]]
    assert scaler.clipped_share(values).tolist() == [0.5, 0.5]


def test_transform_takes_any_leading_shape() -> None:
    scaler = Scaler(("a", "b"), ("", ""), center=np.array([1.0, 0.0]), scale=np.array([2.0, 4.0]))
    values = np.random.default_rng(0).normal(size=(5, 3, 2))
    np.testing.assert_array_equal(scaler.transform(values)[4, 1], scaler.transform(values[4, 1]))
    assert scaler.transform(np.array([2.0, 2.0])).tolist() == [0.5, 0.5]


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(center=hnp.arrays(np.float64, 4, elements=finite), scale=hnp.arrays(np.float64, 4, elements=st.floats(0, 1e300)))
def test_json_keeps_every_bit(center: np.ndarray, scale: np.ndarray) -> None:
    scaler = Scaler(("a", "b:ETH/USDT", "c", "d"), ("1", "2", "3", "4"), center, scale, clip=7.1)
    again = Scaler.from_dict(json.loads(json.dumps(scaler.to_dict())))
    assert again.center.tobytes() == center.tobytes()
    assert again.scale.tobytes() == scale.tobytes()
    assert (again.names, again.definitions, again.clip) == (scaler.names, scaler.definitions, scaler.clip)
    assert again.digest() == scaler.digest()


def test_digest_changes_with_each_thing_that_changes_the_inputs() -> None:
    def digest(
        name: str = "a", definition: str = "1", center: float = 0.0, scale: float = 1.0, clip: float = 10.0
    ) -> str:
        return Scaler((name,), (definition,), np.array([center]), np.array([scale]), clip).digest()

    nudged = float(np.nextafter(1.0, 2.0))
    digests = [
        digest(),
        digest("b"),
        digest(definition="2"),
        digest(center=1e-300),
        digest(scale=nudged),
        digest(clip=9.0),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digest()


def test_other_features_are_refused() -> None:
    table = table_of(np.random.default_rng(0).normal(size=(10, 2)))
    scaler = Scaler.fit(table, every_row(table))
    with pytest.raises(ConfigError, match="fitted on the features f0, f1; it was given f1, f0"):
        scaler.transform(table_of(table.values, names=("f1", "f0")))
    with pytest.raises(ConfigError, match="feature 'f1' has another definition"):
        scaler.transform(table_of(table.values, definitions=("d0", "changed")))
    with pytest.raises(ConfigError, match=r"shape \(10, 3\) do not hold 2 features"):
        scaler.transform(np.zeros((10, 3)))


def test_unusable_masks_and_stored_states_are_refused() -> None:
    table = table_of(np.full((10, 2), np.nan))
    with pytest.raises(ConfigError, match="0 of the 10 training rows"):
        Scaler.fit(table, every_row(table))
    with pytest.raises(ConfigError, match="boolean mask of 10 rows, got int64"):
        Scaler.fit(table, np.arange(10))
    good = Scaler(("a",), ("1",), np.zeros(1), np.ones(1)).to_dict()
    with pytest.raises(ConfigError, match="keys"):
        Scaler.from_dict({key: value for key, value in good.items() if key != "clip"})
    with pytest.raises(ConfigError, match="one length"):
        Scaler.from_dict(good | {"center": [0.0, 1.0]})
    with pytest.raises(ConfigError, match="finite"):
        Scaler.from_dict(good | {"scale": [-1.0]})
    with pytest.raises(ConfigError, match="clip=0"):
        Scaler.from_dict(good | {"clip": 0.0})


def test_a_shared_scaling_is_that_of_all_assets_together() -> None:
    """Two features of three assets and one of the market; NaN where an asset is not listed."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=(500, 7)) * [1, 5, 2, 5, 3, 5, 7] + [0, 1, 10, 1, 20, 1, 3]
    values[:100, 2:4] = np.nan
    names = ("a:X", "b:X", "a:Y", "b:Y", "a:Z", "b:Z", "clock")
    definitions = ("da", "db", "da", "db", "da", "db", "dc")
    valid = np.ones(500, bool)
    table = FeatureTable(values, names, valid, definitions, np.isfinite(values[:, [0, 2, 4]]), market_wide=1)
    scaler = Scaler.fit(table, valid, shared=True)
    assert (scaler.names, scaler.definitions) == (("a", "b", "clock"), ("da", "db", "dc"))
    every_a = values[:, [0, 2, 4]].ravel()
    low, middle, high = np.quantile(every_a[np.isfinite(every_a)], (0.25, 0.5, 0.75))
    assert scaler.center[0] == pytest.approx(middle, rel=1e-12)
    assert scaler.scale[0] == pytest.approx((high - low) / 1.3489795003921634, rel=1e-12)
    scaled = scaler.transform(table)
    for asset in range(3):
        expected = np.clip((values[:, 2 * asset] - middle) / scaler.scale[0], -10, 10)
        np.testing.assert_allclose(scaled[:, 2 * asset], expected, rtol=1e-6)
    # Any number of assets, also one whose columns have no symbol.
    one = FeatureTable(values[:, [4, 5, 6]], ("a", "b", "clock"), valid, ("da", "db", "dc"), market_wide=1)
    np.testing.assert_array_equal(scaler.transform(one), scaled[:, [4, 5, 6]])
    again = Scaler.from_dict(json.loads(json.dumps(scaler.to_dict())))
    assert again.market_wide == 1
    assert again.digest() == scaler.digest()
    np.testing.assert_array_equal(again.transform(table), scaled)
    with pytest.raises(ConfigError, match="8 columns are not 2 features of each asset and 1"):
        scaler.transform(np.zeros((3, 8)))
    other = FeatureTable(values[:, :3], ("a:X", "a:Y", "clock"), valid, ("da", "da", "dc"), market_wide=1)
    with pytest.raises(ConfigError, match="fitted on the features a, b, clock"):
        scaler.transform(other)
    assert "market_wide" not in Scaler.fit(one, valid).to_dict()
