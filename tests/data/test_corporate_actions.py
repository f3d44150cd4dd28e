"""Dividends and splits: an owner's return, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from tailguard.data.sources import load_bars
from tailguard.errors import BarsError, BarsWarning
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)
DAYS = pd.bdate_range("2021-01-04", periods=40)


def shares() -> pd.DataFrame:
    """Unadjusted bars: 2 of dividend on day 20, when the price opens 2 lower, and a split of 4:1 on day 30."""
    close = 100 * np.exp(0.01 * np.sin(np.arange(40)))
    close[20:] -= 2
    close[30:] /= 4
    opened = np.concatenate([[100.0], close[:-1]])
    opened[20] -= 2
    opened[30] /= 4
    table = {"open": opened, "high": np.maximum(opened, close), "low": np.minimum(opened, close), "close": close}
    volume = np.where(np.arange(40) < 30, 1e6, 4e6) + np.arange(40)
    frame = pd.DataFrame({**table, "volume": volume}, index=DAYS.rename("Date"))
    dividend, split = np.zeros(40), np.zeros(40)
    dividend[20], split[30] = 2.0, 4.0
    return frame.assign(Dividends=dividend, **{"Stock Splits": split})


def owner(frame: pd.DataFrame) -> float:
    """Wealth of one share bought at the second open: the dividend buys shares at its day's open, a split makes four."""
    opened, units = frame["open"].to_numpy(), 1.0
    for day in range(2, 40):
        units *= 4.0 if day == 30 else 1.0
        units += units * 2.0 / opened[day] if day == 20 else 0.0
    return units * float(frame["close"].iloc[-1]) / opened[1]


def test_an_owner_earns_dividends_and_keeps_his_wealth_in_a_split() -> None:
    frame = shares()
    bars = load_bars(frame, adjust="all")
    assert backtest(BuyAndHold(), bars, FREE).equity[-1] == pytest.approx(owner(frame), rel=1e-12)
    # The return over the day of the dividend: the open and the dividend over the close before.
    day = bars.frame.row(20, named=True)
    before = bars.frame["close"][19]
    assert day["open"] / before == pytest.approx((frame["open"].iloc[20] + 2) / frame["close"].iloc[19], rel=1e-12)
    # The last prices are those that were paid; the volume before the split counts new shares.
    assert bars.frame["close"][-1] == frame["close"].iloc[-1]
    assert bars.frame["volume"].to_list()[28:31] == pytest.approx([4 * (1e6 + 28), 4 * (1e6 + 29), 4e6 + 30])


def test_what_is_adjusted_is_chosen() -> None:
    frame = shares()
    split_only = load_bars(frame, adjust="splits").frame["close"]
    assert split_only[19] == pytest.approx(frame["close"].iloc[19] / 4, rel=1e-12)
    with pytest.warns(BarsWarning, match="probably a split of 4:1"):
        plain = load_bars(frame)
    assert plain.frame["close"][19] == frame["close"].iloc[19]


def test_events_may_come_as_a_table_of_their_own(tmp_path: Path) -> None:
    frame = shares().drop(columns=["Dividends", "Stock Splits"])
    dates = [DAYS[20].date(), DAYS[30].date()]
    events = pl.DataFrame({"ex_date": dates, "dividend": [2.0, None], "split": [None, 4.0]})
    path = tmp_path / "events.csv"
    events.write_csv(path)
    for given in (events, path):
        bars = load_bars(frame, adjust="all", events=given)
        assert backtest(BuyAndHold(), bars, FREE).equity[-1] == pytest.approx(owner(frame), rel=1e-12)
    other = events.with_columns(symbol=pl.lit("MSFT"))
    two = pd.concat([frame.assign(symbol="AAPL"), frame.assign(symbol="MSFT")])
    with pytest.warns(BarsWarning):
        bars = load_bars(two, adjust="all", events=other)
    assert bars.select("AAPL").frame["close"][0] == frame["close"].iloc[0]
    assert bars.select("MSFT").frame["close"][0] < frame["close"].iloc[0] / 4
    # An event on a day without trading belongs to the next bar.
    saturday = events.with_columns(ex_date=pl.Series([(DAYS[20] - pd.Timedelta(days=2)).date(), DAYS[30].date()]))
    assert DAYS[20].day_name() == "Monday"
    assert load_bars(frame, adjust="all", events=saturday).frame.equals(bars_of(frame, events))


def bars_of(frame: pd.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    return load_bars(frame, adjust="all", events=events).frame


def test_prices_that_are_adjusted_already_are_refused() -> None:
    frame = shares()
    done = load_bars(frame, adjust="splits").frame
    again = done.drop("segment", "symbol").with_columns(split=pl.Series(frame["Stock Splits"].to_numpy()))
    with pytest.raises(BarsError, match=r"a split of 4:1 that is not in the prices .* Use adjust='dividends'"):
        load_bars(again.drop("Stock Splits"), adjust="all")


@pytest.mark.parametrize(
    ("adjust", "events", "message"),
    [
        ("all", None, "needs columns named dividend and split, or a table of events"),
        ("none", pl.DataFrame({"date": ["2021-01-04"], "split": [2.0]}), "events are given and adjust='none'"),
        ("all", pl.DataFrame({"day": ["2021-01-04"], "split": [2.0]}), "a table of events has a column date"),
        ("all", pl.DataFrame({"date": ["soon"], "split": [2.0]}), "'soon' in column 'date' is not a date"),
    ],
)
def test_what_cannot_be_adjusted_is_named(adjust: str, events: pl.DataFrame | None, message: str) -> None:
    frame = shares().drop(columns=["Dividends", "Stock Splits"])
    with pytest.raises(BarsError, match=message):
        load_bars(frame, adjust=adjust, events=events)  # type: ignore[arg-type]
