"""Downloads from an exchange that misbehaves: a local server answers ccxt's Binance client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import ccxt
import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.data.fetch import Fetched, FetchError, Retry, fetch, parse_time
from tailguard.data.sources import load_bars
from tailguard.errors import BarsError, ConfigError, MissingExtraError

HOUR = 3_600_000
FIRST = int(datetime(2021, 3, 1, tzinfo=UTC).timestamp() * 1000)
BARS = 2_600
Kline = list[Any]
"""As Binance sends it: open time, then open, high, low, close and volume as text, …"""


def make_klines(bars: int = BARS) -> list[Kline]:
    rng = np.random.default_rng(1)
    closes = 50_000 * np.exp(np.cumsum(rng.normal(0, 0.01, bars)))
    opens = np.concatenate([[50_000.0], closes[:-1]])
    return [
        [FIRST + i * HOUR, *(f"{x:.8f}" for x in (o, max(o, c) * 1.001, min(o, c) * 0.999, c, v))]
        for i, (o, c, v) in enumerate(zip(opens, closes, rng.lognormal(5, 1, bars), strict=True))
    ]


class Exchange(ThreadingHTTPServer):
    """Binance's public routes. `faults` names what goes wrong at the n-th request for klines, counted from 1."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.klines = make_klines()
        self.now = FIRST + (BARS - 1) * HOUR + HOUR // 2  # the last bar is still forming
        self.faults: dict[int, str] = {}
        self.always: str | None = None
        self.windowed = False
        """Answer with what lies within `limit` bars of the start, as some exchanges do, even if that is nothing."""
        self.asked: list[int] = []
        """Start time of each request for klines."""
        self.hold = threading.Event()

    @property
    def complete(self) -> list[Kline]:
        return self.klines[:-1]

    def settings(self) -> dict[str, Any]:
        return {
            "urls": {"api": {"public": f"http://127.0.0.1:{self.server_address[1]}/api/v3"}},
            "options": {"fetchMarkets": {"types": ["spot"]}},
            "has": {"fetchCurrencies": False},
            "rateLimit": 1,
            "timeout": 2_000,
        }


class Handler(BaseHTTPRequestHandler):
    server: Exchange

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, answer: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        if address.path == "/api/v3/time":
            self.reply({"serverTime": self.server.now})
        elif address.path == "/api/v3/exchangeInfo":
            self.reply({"symbols": [market("BTC", "USDT"), market("ETH", "USDT")]})
        elif address.path == "/api/v3/klines":
            self.answer_klines(int(query["startTime"]), int(query["limit"]))
        else:
            self.reply({"code": -1, "msg": f"no route {address.path}"}, 404)

    def answer_klines(self, since: int, limit: int) -> None:
        exchange = self.server
        exchange.asked.append(since)
        fault = exchange.always or exchange.faults.get(len(exchange.asked))
        rows = [row for row in exchange.klines if row[0] >= since][:limit]
        if exchange.windowed:
            rows = [row for row in rows if row[0] < since + limit * HOUR]
        match fault:
            case "429":
                self.reply({"code": -1003, "msg": "Too many requests"}, 429, {"Retry-After": "0"})
                return
            case "unavailable":
                self.reply({"code": -1000, "msg": "Down"}, 503)
                return
            case "dropped":
                self.close_connection = True
                return
            case "cut":
                self.send_response(200)
                self.send_header("Content-Length", "100000")
                self.end_headers()
                self.wfile.write(b"[[16145568")
                self.close_connection = True
                return
            case "hangs":
                exchange.hold.wait(20)
            case "overlap":
                rows = [row for row in exchange.klines if row[0] >= since - 100 * HOUR][:limit]
            case "short":
                rows = rows[:7]
            case "shuffled":
                rows = [*reversed(rows), *rows[:20]]
            case "stuck":
                rows = exchange.klines[:10]
            case "contradicts":
                rows = [[*rows[0][:4], "1.0", rows[0][5]], *rows[1:]]
            case "incomplete":
                rows = [[*rows[0][:5], None], *rows[1:]]
        self.reply([[*row, row[0] + HOUR - 1, "0", 0, "0", "0", "0"] for row in rows])


def market(base: str, quote: str) -> dict[str, Any]:
    return {
        "symbol": base + quote,
        "status": "TRADING",
        "baseAsset": base,
        "quoteAsset": quote,
        "baseAssetPrecision": 8,
        "quotePrecision": 8,
        "isSpotTradingAllowed": True,
        "filters": [],
        "permissions": ["SPOT"],
    }


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    server = Exchange()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def download(exchange: Exchange, tmp_path: Path) -> Callable[..., Fetched]:
    def run(**changes: Any) -> Fetched:
        settings: dict[str, Any] = {
            "exchange": "binance",
            "symbol": "BTC/USDT",
            "timeframe": "1h",
            "out": tmp_path / "btc.parquet",
            "start": "2021-03-01",
            "retry": Retry(attempts=3, wait=0.001),
            "settings": exchange.settings(),
        }
        return fetch(**(settings | changes))

    return run


def assert_same(path: Path, klines: list[Kline]) -> None:
    """The file holds exactly these bars, bit for bit."""
    frame = pl.read_parquet(path)
    assert frame["open_time"].dt.epoch("ms").to_list() == [row[0] for row in klines]
    for place, name in enumerate(("open", "high", "low", "close", "volume"), start=1):
        assert frame[name].to_list() == [float(row[place]) for row in klines]
    assert frame["symbol"].unique().to_list() == ["BTC/USDT"]


def test_pages_make_one_complete_file_without_the_forming_bar(
    download: Callable[..., Fetched], exchange: Exchange
) -> None:
    fetched = download()
    assert_same(fetched.path, exchange.complete)
    assert (fetched.bars, fetched.added, fetched.missing) == (BARS - 1, BARS - 1, 0)
    assert fetched.last == datetime.fromtimestamp(exchange.complete[-1][0] / 1000, UTC)
    # Pages of 1,000, each beginning with the last bar of the one before.
    assert exchange.asked == [FIRST, FIRST + 999 * HOUR, FIRST + 1_998 * HOUR]


@pytest.mark.parametrize("fault", ["429", "unavailable", "dropped", "cut", "overlap", "short", "shuffled"])
@pytest.mark.parametrize("request_number", [1, 2, 3])
def test_a_fault_on_the_way_leaves_no_trace(
    download: Callable[..., Fetched], exchange: Exchange, fault: str, request_number: int
) -> None:
    exchange.faults = {request_number: fault}
    assert_same(download().path, exchange.complete)
    assert len(exchange.asked) >= 3


def test_all_faults_in_one_download(download: Callable[..., Fetched], exchange: Exchange) -> None:
    names = ["429", "short", "dropped", "429", "overlap", "cut", "shuffled", "short", "unavailable", "dropped"]
    exchange.faults = dict(enumerate(names, start=1))
    assert_same(download().path, exchange.complete)
    assert len(exchange.asked) > len(names)


def test_an_exchange_that_stays_away_ends_with_a_clear_error(
    download: Callable[..., Fetched], exchange: Exchange, tmp_path: Path
) -> None:
    exchange.always = "429"
    with pytest.raises(FetchError, match=r"binance did not answer in 3 attempts.*DDoSProtection.*the same command"):
        download()
    assert len(exchange.asked) == 3
    assert not (tmp_path / "btc.parquet").exists()


def test_waiting_doubles_from_one_attempt_to_the_next(download: Callable[..., Fetched], exchange: Exchange) -> None:
    exchange.always = "dropped"
    began = time.monotonic()
    with pytest.raises(FetchError, match="in 4 attempts"):
        download(retry=Retry(attempts=4, wait=0.05))
    assert 0.35 <= time.monotonic() - began < 3  # 0.05 + 0.1 + 0.2


def test_a_failed_download_continues_where_it_stopped(download: Callable[..., Fetched], exchange: Exchange) -> None:
    exchange.faults = dict.fromkeys(range(3, 6), "unavailable")
    with pytest.raises(FetchError):
        download()
    exchange.asked.clear()
    exchange.faults = {}
    fetched = download()
    assert_same(fetched.path, exchange.complete)
    assert fetched.added == BARS - 1 - 1_999
    assert exchange.asked == [FIRST + 1_998 * HOUR]


def test_a_killed_download_leaves_a_whole_file(
    download: Callable[..., Fetched], exchange: Exchange, tmp_path: Path
) -> None:
    exchange.faults = {3: "hangs"}
    program = (
        "import json, sys\nfrom tailguard.data.fetch import fetch\n"
        "fetch('binance', 'BTC/USDT', '1h', out=sys.argv[1], start='2021-03-01', save_every=1, "
        "settings=json.loads(sys.argv[2]) | {'timeout': 60_000})"
    )
    out = tmp_path / "btc.parquet"
    child = subprocess.Popen([sys.executable, "-c", program, str(out), json.dumps(exchange.settings())])
    deadline = time.monotonic() + 60
    while len(exchange.asked) < 3 and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    exchange.hold.set()
    assert_same(out, exchange.klines[:1_999])
    # What a writer that died in the middle would leave beside it is not read.
    (tmp_path / ".btc.parquet.1.partial").write_bytes(b"PAR1 half a file")
    assert_same(download().path, exchange.complete)


def test_a_finished_file_is_extended_by_new_bars_only(download: Callable[..., Fetched], exchange: Exchange) -> None:
    download(stop="2021-04-01")
    exchange.asked.clear()
    fetched = download()
    assert_same(fetched.path, exchange.complete)
    assert exchange.asked[0] == int(datetime(2021, 3, 31, 23, tzinfo=UTC).timestamp() * 1000)
    assert fetched.added == BARS - 1 - 31 * 24
    exchange.asked.clear()
    assert download().added == 0
    assert exchange.asked == []


def test_an_earlier_start_is_filled_in_front(download: Callable[..., Fetched], exchange: Exchange) -> None:
    download(start="2021-04-01")
    assert_same(download(start="2021-03-01").path, exchange.complete)


def test_a_hole_in_the_file_is_filled(download: Callable[..., Fetched], exchange: Exchange, tmp_path: Path) -> None:
    download()
    path = tmp_path / "btc.parquet"
    frame = pl.read_parquet(path)
    pl.concat([frame[:300], frame[1_700:2_000], frame[2_010:]]).write_parquet(path)
    fetched = download()
    assert_same(path, exchange.complete)
    assert fetched.added == 1_410


def test_bars_the_exchange_lacks_are_counted_not_invented(download: Callable[..., Fetched], exchange: Exchange) -> None:
    lacking = [*exchange.klines[:40], *exchange.klines[45:]]
    exchange.klines = lacking
    fetched = download()
    assert_same(fetched.path, exchange.complete)
    assert fetched.missing == 5
    assert "did not return 5 bars" in str(fetched)


def test_a_start_before_the_listing_is_searched_to_its_end(
    download: Callable[..., Fetched], exchange: Exchange
) -> None:
    fetched = download(start="2020-06-01")
    assert_same(fetched.path, exchange.complete)
    assert fetched.missing == (FIRST - parse_time("2020-06-01", 0)) // HOUR


@pytest.mark.parametrize("lacking", [998, 999, 1_000, 1_001, 1_500])
def test_empty_pages_are_stepped_over(download: Callable[..., Fetched], exchange: Exchange, lacking: int) -> None:
    exchange.windowed = True
    exchange.klines = [*exchange.klines[:40], *exchange.klines[40 + lacking :]]
    fetched = download(start="2020-06-01")
    assert_same(fetched.path, exchange.complete)
    assert fetched.missing == (FIRST - parse_time("2020-06-01", 0)) // HOUR + lacking


def test_rows_in_any_order_are_sorted(
    download: Callable[..., Fetched], exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backwards(ccxt.binance):  # type: ignore[misc]
        def fetch_ohlcv(self, *arguments: Any) -> Any:
            return super().fetch_ohlcv(*arguments)[::-1]

    monkeypatch.setattr(ccxt, "binance", Backwards)
    assert_same(download().path, exchange.complete)


def test_a_period_without_any_bar_is_an_error(download: Callable[..., Fetched], tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"no BTC/USDT 1h bar from 2019-01-01 00:00 to 2019-02-01 00:00"):
        download(start="2019-01-01", stop="2019-02-01")
    assert not (tmp_path / "btc.parquet").exists()


def test_pages_that_do_not_advance_are_an_error(download: Callable[..., Fetched], exchange: Exchange) -> None:
    exchange.faults = dict.fromkeys(range(2, 100), "stuck")
    with pytest.raises(FetchError, match="its pages have gaps"):
        download()
    assert len(exchange.asked) == 4  # the first page, and the second one three times


def test_a_bar_that_changed_is_an_error(download: Callable[..., Fetched], exchange: Exchange) -> None:
    exchange.faults = {2: "contradicts"}
    with pytest.raises(FetchError, match=r"two different bars at 2021-04-11 15:00"):
        download()


def test_a_bar_without_a_value_is_an_error(download: Callable[..., Fetched], exchange: Exchange) -> None:
    exchange.faults = {1: "incomplete"}
    with pytest.raises(FetchError, match=r"bar at 2021-03-01 00:00 is incomplete"):
        download()


def test_the_file_of_another_market_is_refused(download: Callable[..., Fetched], tmp_path: Path) -> None:
    download(stop="2021-03-03")
    before = (tmp_path / "btc.parquet").read_bytes()
    with pytest.raises(BarsError, match=r"holds BTC/USDT, not ETH/USDT"):
        download(symbol="ETH/USDT")
    with pytest.raises(BarsError, match=r"1:00:00 apart, not 0:15:00"):
        download(timeframe="15m")
    assert (tmp_path / "btc.parquet").read_bytes() == before
    (tmp_path / "btc.parquet").write_bytes(b"not parquet")
    with pytest.raises(BarsError, match="not a readable Parquet file"):
        download()
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "btc.parquet")
    with pytest.raises(BarsError, match="was not written by"):
        download()


def test_the_file_is_ready_to_train_on(download: Callable[..., Fetched]) -> None:
    bars = load_bars(download().path)
    assert bars.symbols == ("BTC/USDT",)
    assert len(bars) == BARS - 1


def test_unknown_names_are_answered_with_near_ones(download: Callable[..., Fetched]) -> None:
    with pytest.raises(ConfigError, match=r"exchange: 'binence' is unknown; similar names: .*binance"):
        download(exchange="binence")
    with pytest.raises(ConfigError, match=r"binance symbol: 'BTC/USD' is unknown; similar names: BTC/USDT"):
        download(symbol="BTC/USD")
    with pytest.raises(ConfigError, match=r"binance timeframe: '60m' is unknown; similar names: .*30m"):
        download(timeframe="60m")


def test_wrong_periods_and_names_are_refused(download: Callable[..., Fetched], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete 1h bar between"):
        download(start="2021-05-01", stop="2021-04-01")
    with pytest.raises(ConfigError, match="'yesterday' is not a time"):
        download(start="yesterday")
    with pytest.raises(ConfigError, match=r"name the file btc\.parquet"):
        download(out=tmp_path / "btc.csv")


def test_a_missing_extra_says_how_to_install_it(
    download: Callable[..., Fetched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ccxt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tailguard\[live\]'"):
        download()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2021-03-01", FIRST),
        ("2021-03-01T02:00", FIRST + 2 * HOUR),
        ("2021-03-01 02:00+02:00", FIRST),
        ("now", 90 * 24 * HOUR),
        ("30d", 60 * 24 * HOUR),
        ("2h", 90 * 24 * HOUR - 2 * HOUR),
    ],
)
def test_times_are_iso_or_relative(text: str, expected: int) -> None:
    assert parse_time(text, now=90 * 24 * HOUR) == expected
    assert parse_time(datetime(2021, 3, 1), now=0) == FIRST


def test_the_command_fetches_and_reports(exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LocalBinance(ccxt.binance):  # type: ignore[misc]
        def describe(self) -> Any:
            return self.deep_extend(super().describe(), exchange.settings())

    monkeypatch.setattr(ccxt, "binance", LocalBinance)
    out = tmp_path / "btc.parquet"
    command = ["data", "fetch", "binance", "BTC/USDT", "1h", "--start", "2021-03-01", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2,599 bars, 2021-03-01 00:00 → 2021-06-17 06:00 UTC, 2,599 of them new" in result.output
    assert_same(out, exchange.complete)
    exchange.always = "stuck"
    exchange.now += 3 * HOUR
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1
    assert "its pages have gaps" in failed.output
