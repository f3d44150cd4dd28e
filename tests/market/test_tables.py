"""The table a step reads: each column by hand, and no row that knows a later bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.data.panel import Panel
from tailguard.errors import BarsError
from tailguard.market import Market, MarketConfig, build_market
from tailguard.market.tables import COLUMNS, TableStream, _ema

PRICES = ("open", "high", "low", "close")


def column(market: Market, name: str) -> torch.Tensor:
    return market.table[COLUMNS.index(name)]


def with_bars_changed(panel: Panel, first: int, last: int | None = None) -> Panel:
    """The panel with other prices, volumes and funding in bars `first` up to, not including, `last`."""
    changed = {name: getattr(panel, name).copy() for name in (*PRICES, "volume", "funding")}
    for name, factor in zip(changed, (1.3, 1.9, 0.4, 1.1, 7.0, -3.0), strict=True):
        changed[name][first:last] *= factor
    return replace(panel, **changed)


def test_returns_are_relative_to_the_previous_close_and_the_open(hand_panel: Callable[..., Panel]) -> None:
    panel = hand_panel(open=[100, 105, 90], close=[100, 84, 99], high=[100, 126, 108], low=[100, 63, 81])
    market = build_market(panel, dtype=torch.float64)
    expected = {"gap": [0, 0.05, 90 / 84 - 1], "move": [0, -0.2, 0.1], "low": [0, -0.4, -0.1], "high": [0, 0.2, 0.2]}
    for name, values in expected.items():
        assert column(market, name).flatten().tolist() == pytest.approx(values, abs=1e-15), name


def test_a_segment_starts_without_a_gap_and_without_memory(random_panel: Callable[..., Panel]) -> None:
    whole = random_panel(0, 60, 2, silent=0.0)
    split = replace(whole, segment=np.repeat(np.array([0, 1], dtype=np.int32), [25, 35]))
    tail = replace(
        whole, **{name: getattr(whole, name)[25:] for name in ("time", "segment", "tradeable", *PRICES, "volume")}
    )
    table = build_market(split, dtype=torch.float64).table
    assert torch.equal(table[:, :25], build_market(whole, dtype=torch.float64).table[:, :25])
    torch.testing.assert_close(table[:, 25:], build_market(tail, dtype=torch.float64).table, rtol=1e-12, atol=0)
    assert (column(build_market(split), "gap")[25] == 0).all()


@given(seed=st.integers(0, 1000), row=st.integers(0, 78))
@settings(max_examples=25, deadline=None)
def test_no_row_knows_a_later_bar(random_panel: Callable[..., Panel], seed: int, row: int) -> None:
    panel = random_panel(seed, 80, 2, funding=0.001)
    table = build_market(panel).table
    changed = build_market(with_bars_changed(panel, row + 1)).table
    assert torch.equal(changed[:, : row + 1], table[:, : row + 1])
    assert not torch.equal(changed[:, row + 1], table[:, row + 1])


@pytest.mark.parametrize("row", [1, 2, 40])
def test_impact_of_a_bar_is_known_before_it_opens(random_panel: Callable[..., Panel], row: int) -> None:
    panel = random_panel(3, 80, 2, funding=0.001, silent=0.0)
    impact = column(build_market(panel), "impact")
    changed = column(build_market(with_bars_changed(panel, row, row + 1)), "impact")
    assert torch.equal(changed[: row + 1], impact[: row + 1])
    assert (changed[row + 1] != impact[row + 1]).all()


def test_impact_weighs_older_bars_by_the_halflife(hand_panel: Callable[..., Panel]) -> None:
    """Two bars, ln(H/L) 0.02 then 0.04, notional 100 and 300: with a half-life of one bar the newer weighs 2/3.

    σ_day² = 24·(0.02²/3 + 0.04²·2/3) / (4 ln 2), V_day = 24·(100/3 + 300·2/3).
    """
    panel = hand_panel(open=[1, 1, 1], high=np.exp([0.01, 0.02, 0.5]), low=np.exp([-0.01, -0.02, -0.5]))
    panel = replace(panel, volume=np.array([[100.0], [300.0], [5.0]]))
    market = build_market(panel, MarketConfig(impact=2.0, capital=1e4, volatility_halflife=1.0), dtype=torch.float64)
    sigma_day = np.sqrt(24 * (0.02**2 / 3 + 0.04**2 * 2 / 3) / (4 * np.log(2)))
    expected = 2.0 * sigma_day * np.sqrt(1e4 / (24 * (100 / 3 + 200)))
    assert column(market, "impact")[2].item() == pytest.approx(expected, rel=1e-12)


def test_exponential_average_equals_the_loop_over_rows() -> None:
    rng = np.random.default_rng(0)
    for rows, assets, decay in ((1, 1, 0.5), (777, 3, 0.97), (3000, 2, 0.999999), (257, 1, 1e-9)):
        values = np.exp(3 * rng.normal(size=(rows, assets)))
        first = rng.random(rows) < 0.01
        first[0] = True
        expected = np.empty_like(values)
        total, weight = np.zeros(assets), 0.0
        for row in range(rows):
            carried = 0.0 if first[row] else decay
            total, weight = carried * total + values[row], carried * weight + 1.0
            expected[row] = total / weight
        np.testing.assert_allclose(_ema(values, decay, first)[0], expected, rtol=1e-12)


def test_capacity_is_a_share_of_the_fill_bars_notional(hand_panel: Callable[..., Panel]) -> None:
    panel = hand_panel(open=[100, 200], volume=50.0)
    capped = build_market(panel, MarketConfig(participation=0.2, capital=1e4), dtype=torch.float64)
    assert column(capped, "capacity").flatten().tolist() == pytest.approx([0.1, 0.2])
    assert (column(build_market(panel, MarketConfig(participation=np.inf)), "capacity") == torch.inf).all()


def test_nothing_fills_before_the_first_volume_gives_size_a_price(hand_panel: Callable[..., Panel]) -> None:
    panel = hand_panel(open=[100] * 4, high=[101] * 4, low=[99] * 4)
    panel = replace(panel, volume=np.array([[0.0], [0.0], [10.0], [10.0]]))
    priced = build_market(panel, MarketConfig(participation=np.inf))
    assert column(priced, "capacity").flatten().tolist() == [0, 0, 0, torch.inf]
    assert column(priced, "impact")[3] > 0
    free = build_market(panel, MarketConfig(participation=np.inf, impact=0.0))
    assert column(free, "capacity").flatten().tolist() == [torch.inf] * 4


@pytest.mark.parametrize(
    ("minutes", "start_hour", "paying"),
    [
        (15, 0, {31: 1, 63: 1, 95: 1}),
        (60, 0, {7: 1, 15: 1, 23: 1}),
        (60, 7, {0: 1, 8: 1, 16: 1}),
        (60, 8, {7: 1, 15: 1, 23: 1}),
        (240, 0, {1: 1, 3: 1, 5: 1}),
        (240, 2, {1: 1, 3: 1, 5: 1}),
        (480, 0, {0: 1, 1: 1, 2: 1}),
        (1440, 0, {0: 3}),
    ],
)
def test_a_day_has_funding_stamps_at_00_08_and_16_utc(
    hand_panel: Callable[..., Panel], minutes: int, start_hour: int, paying: dict[int, int]
) -> None:
    bars = 24 * 60 // minutes
    start = 1_609_459_200_000 + start_hour * 3_600_000
    panel = hand_panel(open=[100] * bars, frequency_ms=minutes * 60_000, start_ms=start)
    rates = column(build_market(panel, MarketConfig(funding_rate=0.001), dtype=torch.float64), "funding").flatten()
    assert {bar: round(rate / 0.001) for bar, rate in enumerate(rates.tolist()) if rate} == paying
    assert rates.sum().item() == pytest.approx(0.003, rel=1e-12)


def test_reach_bounds_price_loss_funding_interest_and_margin(hand_panel: Callable[..., Panel]) -> None:
    """A range of −20 % to +10 % reaches 0.2; margin 1 % and funding 0.3 % are on up to 1.2, interest on 1."""
    panel = hand_panel(open=[100], high=[110], low=[80], funding=[-0.003], start_ms=1_609_459_200_000 + 7 * 3_600_000)
    config = MarketConfig(maintenance_margin=0.01, borrow_rate=0.36525)
    reach = column(build_market(panel, config, dtype=torch.float64), "reach").item()
    assert reach == pytest.approx(0.2 + 0.013 * 1.2 + 0.36525 / 8766)


def test_observed_funding_is_used_when_it_is_there_and_wanted(hand_panel: Callable[..., Panel]) -> None:
    panel = hand_panel(open=[100] * 2, funding=[0.002, -0.004], frequency_ms=8 * 3_600_000)
    observed = build_market(panel, dtype=torch.float64)
    assert observed.signed_funding
    assert column(observed, "funding").flatten().tolist() == [0.002, -0.004]
    assumed = build_market(panel, MarketConfig(observed_funding=False, funding_rate=0.001), dtype=torch.float64)
    assert not assumed.signed_funding
    assert column(assumed, "funding").flatten().tolist() == [0.001, 0.001]


def test_a_bar_that_cannot_be_traded_is_named(hand_panel: Callable[..., Panel]) -> None:
    panel = hand_panel(open=[100, 100, 100], funding=[0.0, 0.0, np.nan], frequency_ms=8 * 3_600_000)
    with pytest.raises(BarsError, match=r"ASSET: row 3 \(2021-01-01 16:00:00\): funding is nan"):
        build_market(panel)


def test_bars_without_any_volume_are_refused_unless_volume_plays_no_part(hand_panel: Callable[..., Panel]) -> None:
    panel = hand_panel(open=[100, 100], volume=0.0)
    for config in (MarketConfig(), MarketConfig(impact=0.0), MarketConfig(participation=np.inf)):
        with pytest.raises(BarsError, match="ASSET: volume is 0 in every bar"):
            build_market(panel, config)
    build_market(panel, MarketConfig(impact=0.0, participation=np.inf))


def test_memory_grows_with_bars_only(random_panel: Callable[..., Panel]) -> None:
    def size(rows: int) -> int:
        market = build_market(random_panel(0, rows))
        return sum(tensor.nbytes for tensor in (market.table, market.segment, market.time))

    assert size(1000) == 1000 * (len(COLUMNS) * 4 + 4 + 8)
    assert size(3000) == 3 * size(1000)


@pytest.mark.parametrize("size", [1, 7, 100, 299])
def test_a_table_made_piece_by_piece_is_the_whole_one(random_panel: Callable[..., Panel], size: int) -> None:
    panel = random_panel(3, 300)
    panel = replace(panel, segment=np.repeat([0, 1, 2], [120, 1, 179]).astype(np.int32))
    config = MarketConfig(volatility_halflife=50.0, borrow_rate=0.1)
    whole = build_market(panel, config, dtype=torch.float64).table.numpy()
    stream = TableStream(config)
    pieces = [stream.extend(panel.rows_between(start, start + size)) for start in range(0, 300, size)]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-13, atol=0)


def test_volume_that_comes_in_a_later_piece_is_volume(random_panel: Callable[..., Panel]) -> None:
    panel = random_panel(0, 20)
    panel = replace(panel, volume=np.where(np.arange(20) < 10, 0.0, 5.0)[:, None] * np.ones((1, panel.assets)))
    stream = TableStream(MarketConfig())
    stream.extend(panel.rows_between(0, 10))
    with pytest.raises(BarsError, match="volume is 0 in every bar"):
        stream.check_volume()
    stream.extend(panel.rows_between(10, 20))
    stream.check_volume()
