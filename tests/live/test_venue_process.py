"""The paper venue as the process that `tailguard venue` starts: killed, restarted, and followed by a run's session."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import tailguard as tg
from tailguard.cli import app
from tailguard.errors import ConfigError
from tailguard.experiment.trained_run import open_run
from tailguard.live.journal import read_records
from tailguard.live.opening import LiveSource, open_session
from tailguard.live.paper_client import PaperAddress
from tailguard.live.paper_exchange.open_exchange import fault_rates
from tailguard.live.paper_exchange.replayed_exchange import ExchangeConfig, PaperExchange
from tailguard.market import MarketConfig

from .conftest import HOUR, LOOSE
from .serving import served, trading
from .test_opening import run, trained_folder  # noqa: F401 (fixtures)

Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `tailguard venue`; gives the process and the address that it prints."""
    with ExitStack() as stack:

        def begin(*arguments: object) -> tuple[subprocess.Popen[str], str]:
            command = [sys.executable, "-u", "-c", "from tailguard.cli import main; main()", "venue"]
            process = subprocess.Popen(
                [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            line = process.stdout.readline()
            assert line.startswith("venue     http://127.0.0.1:"), line + process.stdout.read()
            return process, line.split()[1]

        yield begin


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_session_survives_the_venues_death_and_has_the_backtests_equity(run: Path, start: Start) -> None:  # noqa: F811
    """The venue is killed by SIGKILL after ten bars, and the session waits for the one that follows it."""
    port = free_port()
    venue, address = start(run, "--port", port)
    assert address == f"http://127.0.0.1:{port}"
    opened = open_session(run, "paper", LiveSource(venue=address), {"slippage": 0.1})
    session, source = opened.session, opened.source
    with session.ledger.journal:
        session.start()
        for _ in range(10):
            session.on_bar(source.next_bar())
        venue.kill()
        venue.wait()
        again, _ = start(run, "--port", port)
        session.run(source)
    assert PaperAddress.parse(address).status()["ended"]
    again.send_signal(signal.SIGTERM)
    assert again.wait(120) == 0
    records = list(read_records(run / "live" / "paper" / "journal.jsonl"))
    decisions = [record for record in records if record["kind"] == "decision"]
    trained = open_run(run)
    begin = pl.Series([decisions[0]["bar"]]).cast(pl.Datetime("ms", "UTC"))[0]
    expected = tg.backtest(trained.agent, replace(trained.part("test"), first=begin), progress_bar=False)
    assert len(decisions) == len(expected.equity) > 20
    np.testing.assert_allclose([each["equity"] for each in decisions], expected.equity, rtol=0, atol=1e-9)
    assert np.ptp(expected.equity) > 1e-4
    assert not [record for record in records if record["kind"] in ("freeze", "adopt")]
    assert os.path.exists(run / "live" / "exchange.sqlite")


def test_time_that_runs_by_itself(tmp_path: Path) -> None:
    """Four bars a second. Whatever the machine does meanwhile, books stay the venue's and nothing is doubled."""
    panel = tg.make_market(30, seed=3).bars.panel("portfolio")
    exchange = PaperExchange(panel, MarketConfig(), int(panel.time[10]), ExchangeConfig(speed=4 * 3600.0))
    symbols = ("SYN01/USDT:USDT",)
    with served(exchange) as address:
        with trading(address, tmp_path, symbols, guards=replace(LOOSE, bar_age=1e6)) as (session, source):
            source.nap_s, source.poll_s = 1_000, 600
            session.start()
            session.run(source)
            state = session.ledger.state
        decisions = [each for each in read_records(tmp_path / "journal.jsonl") if each["kind"] == "decision"]
        assert len(decisions) == len({each["bar"] for each in decisions}) >= 15
        assert exchange.venue.clock.now() >= panel.time[-1] + HOUR
    sends = [name for _, name in exchange.venue.sends]
    assert len(set(sends)) == len(sends) > 0
    if not state.open_intents:
        assert state.ours[symbols[0]] == exchange.venue.books.positions["SYN01"]


def test_options_that_make_no_sense_are_refused(run: Path, tmp_path: Path) -> None:  # noqa: F811
    def fails(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["venue", str(run), *arguments])
        assert isinstance(result.exception, ConfigError)
        return str(result.exception)

    assert "--fault replies_lost: unknown; similar names: reply_lost" in fails("--fault", "replies_lost=0.1")
    assert "--fault reply_lost" in fails("--fault", "reply_lost=1.5")
    assert "write a name and a number, such as reply_lost=0.1" in fails("--fault", "reply_lost")
    assert "speed" in fails("--speed", "-1")
    short = tg.make_market(60, seed=4).bars
    short.frame.drop("segment").write_parquet(tmp_path / "short.parquet")
    assert "60 bars, and the agent needs" in fails("--data", str(tmp_path / "short.parquet"))


def test_faults_are_told_apart_by_what_they_are_drawn_for() -> None:
    rates, of_bars = fault_rates({"reply_lost": 0.1, "bar_gap": 0.2})
    assert (rates.reply_lost, rates.rejected, of_bars.bar_gap, of_bars.liquidation) == (0.1, 0.0, 0.2, 0.0)
