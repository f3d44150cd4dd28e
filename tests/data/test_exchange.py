"""Downloads from a scripted exchange with ccxt's interface: every answer is chosen by the test."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ccxt
import polars as pl
import pytest
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.data.fetch import Fetched, FetchError, Retry, fetch

HOUR = 3_600_000
FIRST = int(datetime(2021, 3, 1, tzinfo=UTC).timestamp() * 1000)
COUNT = 3_000
PAGE = 1_000
Candle = list[Any]
Answer = Callable[[int, list[Candle]], list[Candle]]
"""From the time asked for and the right answer to the one that is given."""


def candle(place: int) -> Candle:
    price = 100.0 + place % 50
    return [FIRST + place * HOUR, price, price + 1, price - 1, price + 0.5, 10.0 + place]


class Scripted:
    """What `fetch` uses of a ccxt exchange."""

    candles = tuple(candle(place) for place in range(COUNT))
    answers: dict[int, Answer]
    """By the number of the request for candles, counted from 1; 0 is every other request."""
    asked: list[int]

    id = "binance"
    has = {"fetchOHLCV": True, "fetchTime": True}  # noqa: RUF012 (as ccxt declares it)
    timeframes = {"1h": "1h"}  # noqa: RUF012
    symbols = ("BTC/USDT",)
    last_response_headers = None

    def __init__(self, settings: dict[str, Any]) -> None:
        pass

    def load_markets(self) -> None:
        pass

    def fetch_time(self) -> int:
        return FIRST + COUNT * HOUR

    def feature_value(self, *_: Any) -> int:
        return PAGE

    def fetch_ohlcv(self, _symbol: str, _timeframe: str, since: int, limit: int) -> list[Candle]:
        self.asked.append(since)
        right = [list(row) for row in self.candles if row[0] >= since][:limit]
        answer = self.answers.get(len(self.asked)) or self.answers.get(0)
        return answer(since, right) if answer else right


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    class Fresh(Scripted):
        answers: dict[int, Answer] = {}  # noqa: RUF012 (one class a test)
        asked: list[int] = []  # noqa: RUF012

    monkeypatch.setattr(ccxt, "binance", Fresh)
    return Fresh


def download(folder: Path, **changes: Any) -> Fetched:
    settings: dict[str, Any] = {"out": folder / "btc.parquet", "start": "2021-03-01"}
    settings["retry"] = Retry(attempts=3, wait=0.001)
    return fetch("binance", "BTC/USDT", "1h", **(settings | changes))


def assert_complete(fetched: Fetched, candles: tuple[Candle, ...] = Scripted.candles) -> None:
    frame = pl.read_parquet(fetched.path)
    assert frame["open_time"].dt.epoch("ms").to_list() == [row[0] for row in candles]
    assert frame["volume"].to_list() == [row[5] for row in candles]


@pytest.mark.parametrize("request_number", [1, 2, 3])
@pytest.mark.parametrize(
    "answer",
    [
        lambda _, right: right[300:],
        lambda _, right: right[-2:],
        lambda _, right: right[:1],
        lambda *_: [],
    ],
    ids=["starts late", "the end only", "the first bar only", "nothing"],
)
def test_a_page_that_lacks_bars_once_loses_none(
    exchange: type[Scripted], tmp_path: Path, answer: Answer, request_number: int
) -> None:
    exchange.answers[request_number] = answer

    fetched = download(tmp_path)

    assert fetched.missing == 0
    assert_complete(fetched)


def test_an_exchange_that_always_gives_one_bar_is_followed_bar_by_bar(exchange: type[Scripted], tmp_path: Path) -> None:
    exchange.answers[0] = lambda _, right: right[:1]

    fetched = download(tmp_path, stop="2021-03-02")

    assert_complete(fetched, Scripted.candles[:24])


def test_an_exchange_whose_start_is_exclusive_is_followed(exchange: type[Scripted], tmp_path: Path) -> None:
    exchange.answers[0] = lambda since, right: [row for row in right if row[0] > since]

    fetched = download(tmp_path, start="2021-02-28T23:00")

    assert_complete(fetched)
    assert fetched.missing == 1


def test_an_exchange_that_always_starts_late_is_an_error_and_no_hole(exchange: type[Scripted], tmp_path: Path) -> None:
    exchange.answers[0] = lambda since, right: right if since <= FIRST else right[500:]

    with pytest.raises(
        FetchError, match=r"from 2021-04-11 15:00, a time that it returned before, and got bars from 2021-05-02"
    ):
        download(tmp_path)

    # What came before is kept, and has no hole.
    assert pl.read_parquet(tmp_path / "btc.parquet").height == PAGE


def test_bars_that_are_really_missing_are_asked_for_twice_and_counted(exchange: type[Scripted], tmp_path: Path) -> None:
    exchange.candles = Scripted.candles[:40] + Scripted.candles[45:]

    fetched = download(tmp_path)

    assert fetched.missing == 5
    assert_complete(fetched, exchange.candles)
    assert exchange.asked.count(FIRST + 39 * HOUR) == 1


def replace(place: int, value: Any) -> Answer:
    def answer(_: int, right: list[Candle]) -> list[Candle]:
        right[7][place] = value
        return right

    return answer


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (4, "n/a", r"bar at 2021-03-01 07:00: close 'n/a' is not a number"),
        (1, math.nan, r"bar at 2021-03-01 07:00: open nan is not a positive number"),
        (2, math.inf, r"bar at 2021-03-01 07:00: high inf is not a positive number"),
        (3, 0.0, r"bar at 2021-03-01 07:00: low 0 is not a positive number"),
        (5, math.nan, r"bar at 2021-03-01 07:00: volume nan is not zero or a positive number"),
        (5, -1.0, r"bar at 2021-03-01 07:00: volume -1 is not zero or a positive number"),
        (5, None, r"bar at 2021-03-01 07:00 is incomplete"),
        (0, None, r"a bar without a time: \[None, 107.0, "),
        (0, "soon", r"a bar without a time: \['soon', 107.0, "),
        (0, math.nan, r"a bar without a time: \[nan, 107.0, "),
    ],
)
def test_values_that_are_no_bar_are_named_and_not_stored(
    exchange: type[Scripted], tmp_path: Path, place: int, value: Any, message: str
) -> None:
    exchange.answers[1] = replace(place, value)

    with pytest.raises(FetchError, match=message):
        download(tmp_path)

    assert not (tmp_path / "btc.parquet").exists()


def test_prices_as_text_are_numbers(exchange: type[Scripted], tmp_path: Path) -> None:
    exchange.answers[0] = lambda _, right: [[row[0], *map(str, row[1:])] for row in right]

    assert_complete(download(tmp_path))


@pytest.mark.parametrize("answer", [None, {"error": "none"}, "text", [17], [[]]])
def test_an_answer_that_is_no_list_of_bars_is_named(exchange: type[Scripted], tmp_path: Path, answer: Any) -> None:
    exchange.answers[1] = lambda *_: answer

    with pytest.raises(
        FetchError, match=r"binance BTC/USDT: (the response is not a list of bars|a bar without a time)"
    ):
        download(tmp_path)


def test_offline_says_so_from_the_first_attempt_and_gives_up_after_three(
    exchange: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    tried: list[int] = []

    def offline(_: Scripted) -> None:
        tried.append(1)
        raise ccxt.NetworkError("Cannot connect to host")

    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(exchange, "load_markets", offline)
    command = ["data", "fetch", "binance", "BTC/USDT", "1h", "--start", "90d", "--out", str(tmp_path / "btc.parquet")]

    result = CliRunner().invoke(app, command)

    assert result.exit_code == 1
    assert len(tried) == 3
    assert sum(waits) <= 3.0
    lines = result.output.splitlines()
    assert lines[0] == "connecting to binance"
    assert lines[1] == "binance: NetworkError: Cannot connect to host; attempt 2 of 3 in 1 s"
    assert "binance could not be reached in 3 attempts" in lines[-1]
    assert "internet connection" in lines[-1]


def test_a_page_that_does_not_come_is_reported_while_it_is_tried_again(
    exchange: type[Scripted], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*_: Any) -> list[Candle]:
        raise ccxt.RequestTimeout("no answer in 10 s")

    exchange.answers[2] = slow

    assert_complete(download(tmp_path, progress=True))

    assert "binance: RequestTimeout: no answer in 10 s; attempt 2 of 3 in 0 s" in capsys.readouterr().err
