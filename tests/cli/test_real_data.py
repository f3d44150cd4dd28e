"""Real bars through the commands: what `data check`, `train`, `backtest` and `report` say is what the prices say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from backtesting.test import EURUSD, GOOG
from skfolio.datasets import load_sp500_dataset
from typer.testing import CliRunner

from tailguard.cli import app

pytestmark = pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")

FREE = [f"market.{name}=0" for name in ("fee", "half_spread", "impact", "funding_rate", "borrow_rate")]
TINY = [
    "market.participation=inf",
    "data.features=[return_4, bollinger_20]",
    "env.num_envs=4",
    "env.episode_length=16",
    "ppo.n_steps=16",
    "ppo.epochs=1",
    "ppo.network.hidden=[4]",
    "ppo.network.lstm_size=4",
    "training.total_timesteps=128",
    "training.threads=1",
]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@dataclass(frozen=True)
class Record:
    """A data set, what the commands must say of it, and its prices by hand."""

    frame: Callable[[], pd.DataFrame]
    calendar: str
    checked: str
    """A part of what `data check` says."""
    bars_per_year: float
    embargo: int
    """Bars of the seven days between two parts."""
    week: int
    """Bars of a trading week."""
    opens: Callable[[pd.DataFrame], np.ndarray]
    """Prices at which orders fill, [T, A]."""
    closes: Callable[[pd.DataFrame], np.ndarray]


def one(column: str) -> Callable[[pd.DataFrame], np.ndarray]:
    return lambda frame: frame[[column]].to_numpy()


RECORDS = {
    "goog": Record(lambda: GOOG, "XNYS", "XNYS: 5 bars a week, 251.7 a year", 251.7, 5, 5, one("Open"), one("Close")),
    "eurusd": Record(
        lambda: EURUSD, "fx", "fx: 120 bars a week, 6,216.0 a year", 6_216.0, 120, 120, one("Open"), one("Close")
    ),
    # 8,315 sessions from 1990 to 2022. Closes only: orders fill at the close of the next day.
    "stocks": Record(
        load_sp500_dataset,
        "XNYS",
        "XNYS: 5 bars a week, 252.0 a year",
        8_315 / 33,
        5,
        5,
        pd.DataFrame.to_numpy,
        pd.DataFrame.to_numpy,
    ),
}


def test_part(record: Record, frame: pd.DataFrame) -> slice:
    """The rows of the test part: 15 % of what two embargoes leave, at the end."""
    return slice(len(frame) - int(0.15 * (len(frame) - 2 * record.embargo)), None)


def equity_by_hand(record: Record, frame: pd.DataFrame) -> np.ndarray:
    """Equal parts bought at the second fill price of the test part, at every close from then on, with the 1 before."""
    rows = test_part(record, frame)
    opened, closed = record.opens(frame)[rows], record.closes(frame)[rows]
    return np.concatenate([[1.0], (closed[1:] / opened[1]).mean(1)])


def cvar_by_hand(returns: np.ndarray, share: float) -> float:
    """Mean of the worst share, the last of them in part."""
    worst = np.sort(returns)
    weights = np.clip(share * len(returns) - np.arange(len(returns)), 0, 1)
    return float(worst @ weights / (share * len(returns)))


test_part.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RECORDS)
def test_every_command_says_what_the_prices_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, bars = RECORDS[name], tmp_path / f"{name}.csv"
    frame = record.frame()
    frame.to_csv(bars)
    monkeypatch.chdir(tmp_path)
    changes = [each for change in (f"data.calendar={record.calendar}", *FREE, *TINY) for each in ("--set", change)]

    checked = run("data", "check", bars, *changes)
    assert record.checked in checked
    assert "0 errors" in checked

    trained = run("train", "--data", bars, *changes, "--name", name)
    folder = tmp_path / "runs" / name
    run("backtest", folder, "--json", tmp_path / "figures.json", "--csv", tmp_path / "bars.csv")
    figures = json.loads((tmp_path / "figures.json").read_text())["results"]["buy & hold"]
    equity = equity_by_hand(record, frame)
    returns = equity[1:] / equity[:-1] - 1
    growth = (equity[-1] ** (record.bars_per_year / len(returns))) - 1
    sharpe = returns.mean() / returns.std(ddof=1) * math.sqrt(record.bars_per_year)
    weeks = equity[record.week :] / equity[: -record.week] - 1
    assert figures["total_return"] == pytest.approx(equity[-1] - 1, abs=1e-9)
    assert figures["growth_per_year"] == pytest.approx(growth, abs=1e-9)
    assert figures["sharpe"] == pytest.approx(sharpe, abs=1e-9)
    assert figures["cvar_5_week"] == pytest.approx(cvar_by_hand(weeks, 0.05), abs=1e-9)

    # The agent's own record holds together: its times are those of the test part, its equity the product of its bars.
    agent = pl.read_csv(tmp_path / "bars.csv", try_parse_dates=True)
    times = frame.index[test_part(record, frame)][1:]
    assert agent["time"].dt.epoch("ms").to_list() == times.astype("datetime64[ms]").astype(np.int64).to_list()
    np.testing.assert_allclose(agent["equity"].to_numpy(), np.cumprod(1 + agent["net"].to_numpy()), rtol=1e-9)

    said = run("report", folder, "--csv")
    total = equity[-1] - 1 if len(returns) < record.bars_per_year else growth
    assert f"buy & hold made {100 * total:+.1f} %" in said.replace("\n", " ")
    assert f"{100 * total:+.1f} %" in trained
    months = pl.read_csv(folder / "report_data" / "months.csv")["net_return"].to_numpy()
    assert np.prod(1 + months) == pytest.approx(agent["equity"][-1], rel=1e-9)
    assert (folder / "report.html").stat().st_size > 100_000


def test_hourly_currencies_are_flat_by_the_close_and_pay_for_calendar_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an embargo of 12 hours the test part begins on the Friday before Christmas, six hours before the close."""
    EURUSD.to_csv(tmp_path / "eurusd.csv")
    monkeypatch.chdir(tmp_path)
    financed = ["market.preset=fx", "market.tick=0", "market.lot=0", "market.half_spread=0", "market.fee=0"]
    changes = [*financed, *TINY, "data.embargo=12h", "env.flat_by_close=true"]
    run("train", "--data", "eurusd.csv", *(each for change in changes for each in ("--set", change)))
    run("backtest", "runs/run", "--csv", "bars.csv", "--json", "figures.json")
    agent = pl.read_csv("bars.csv", try_parse_dates=True)
    closure = agent["time"].diff(-1).dt.total_hours() < -1
    assert closure.sum() == 7
    assert agent["weight:eurusd"].filter(closure).to_list() == [0.0] * 7
    assert (agent["weight:eurusd"].filter(~closure) != 0).sum() > 600

    # Buy & hold pays at every 0:00, 8:00 and 16:00 UTC that passes, also on the days on which the market is closed.
    rows = EURUSD[len(EURUSD) - int(0.15 * (len(EURUSD) - 24)) :][1:]
    hours = rows.index.to_numpy().astype("datetime64[h]").astype(np.int64)
    stamps = np.diff(hours // 8, append=(hours[-1] + 1) // 8)
    assert stamps.max() > 6
    opened, closed = rows["Open"].iloc[0], rows["Close"].to_numpy()
    paid = 1e-5 * (stamps * closed).sum() / opened
    figures = json.loads((tmp_path / "figures.json").read_text())["results"]["buy & hold"]
    assert figures["total_return"] == pytest.approx(closed[-1] / opened - 1 - paid, abs=1e-9)
