"""Live mode, rehearsed at the paper exchange: confirmation, budget, keys that nobody sees, guards and kill switch."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import select
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keyring
import keyring.backend
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.cli.live_terms import confirm, hidden
from tailguard.errors import ConfigError, RunError, TailguardError
from tailguard.experiment.layout import RunLayout
from tailguard.live.credentials import Credentials, read_credentials, variables
from tailguard.live.faults import FaultRates
from tailguard.live.journal import read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.opening import LiveSource, OpenedSession, open_session
from tailguard.live.paper_client import EXCHANGE
from tailguard.live.paper_exchange.open_exchange import ExchangeOptions, open_exchange
from tailguard.live.paper_exchange.replayed_exchange import PaperExchange
from tailguard.live.session import Killed
from tailguard.live.stake import LiveTerms
from tailguard.live.venue import OutcomeUnknown

from .serving import served
from .test_opening import run, trained_folder  # noqa: F401 (fixtures)

SECRETS = Credentials("key-5f0c1a9e77", "secret/with+odd=chars-93d2")
KEY_NAME, SECRET_NAME, _ = variables(EXCHANGE)
Serve = Callable[..., tuple[PaperExchange, str]]


@pytest.fixture
def serve(run: Path) -> Iterator[Serve]:  # noqa: F811 (a fixture)
    """Start the run's paper exchange, whose account has the secrets of this file."""
    with ExitStack() as stack:

        def start(**options: Any) -> tuple[PaperExchange, str]:
            exchange = open_exchange(run, LiveSource(), ExchangeOptions(**options))
            exchange.config = replace(exchange.config, key=SECRETS.key, secret=SECRETS.secret)
            address = stack.enter_context(served(exchange))
            return exchange, f"http://{address.host}:{address.port}"

        yield start


def opened(run: Path, address: str, budget: float = 50_000.0, **guards: float) -> OpenedSession:  # noqa: F811
    limits = {"slippage": 0.1, **guards}
    return open_session(run, "live", LiveSource(venue=address), limits, terms=LiveTerms(budget, SECRETS))


@contextmanager
def session_of(
    run: Path,  # noqa: F811
    address: str,
    person: str | None = None,
    budget: float = 50_000.0,
) -> Iterator[OpenedSession]:
    """A session that is confirmed, by somebody or as before."""
    session = opened(run, address, budget)
    with session.session.ledger.journal:
        session.session.confirm(session.terms, person)
        yield session


def traded(session: OpenedSession, bars: int) -> None:
    """Start and trade so many bars."""
    session.session.start()
    bars_of(session, bars)


def bars_of(session: OpenedSession, bars: int) -> None:
    for _ in range(bars):
        bar = session.source.next_bar()
        assert bar is not None
        session.session.on_bar(bar)


def journal_of(run: Path) -> list[dict[str, Any]]:  # noqa: F811
    return list(read_records(RunLayout(run).journal_path("live")))


# --- confirmation -----------------------------------------------------------------------------------------------------


def test_nothing_is_sent_without_a_confirmation_of_these_terms(run: Path, serve: Serve) -> None:  # noqa: F811
    exchange, address = serve()
    first = opened(run, address)
    with first.session.ledger.journal:
        assert first.terms["exchange"] == EXCHANGE
        assert first.terms["budget"] == 50_000
        with pytest.raises(ConfigError, match="live trading needs a confirmation"):
            first.session.start()
        with pytest.raises(ConfigError, match="nobody has confirmed these terms"):
            first.session.confirm(first.terms, None)
        with pytest.raises(ConfigError, match="live trading needs a confirmation"):
            first.session.start()
        first.session.confirm(first.terms, "somebody")
        traded(first, 2)
    assert len(exchange.venue.sends) == 2
    again = opened(run, address)
    with again.session.ledger.journal:
        with pytest.raises(ConfigError, match="nobody has confirmed these terms"):
            again.session.confirm({**again.terms, "leverage": 3.0}, None)
        again.session.confirm(again.terms, None)
        traded(again, 1)
    assert len(exchange.venue.sends) == 3
    confirmed = [record for record in journal_of(run) if record["kind"] == "confirm"]
    assert [(record["by"], record["terms"]) for record in confirmed] == [("somebody", first.terms)]


def test_a_person_types_the_name_of_the_exchange_in_a_terminal(run: Path, serve: Serve) -> None:  # noqa: F811
    """The whole command in a pseudo-terminal, to the last bar."""
    exchange, address = serve()
    command = ["live", str(run), "--mode", "live", "--venue", address, "--budget", "50000", "--guard", "slippage=0.1"]
    shown, status = in_terminal(command, "binanceusdm\n")
    assert status == 0, shown
    assert "You can lose all of it" in shown
    assert len(exchange.venue.sends) > 30
    assert exchange.has_ended
    for secret in (SECRETS.key, SECRETS.secret):
        assert secret not in shown


def test_a_wrong_name_sends_nothing(run: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    exchange, address = serve()
    session, console = opened(run, address), Console(file=io.StringIO())
    with session.session.ledger.journal:
        for typed in ("yes\n", "binance\n"):
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
            with pytest.raises(ConfigError, match="binanceusdm was not typed, and nothing was sent"):
                confirm(session, console, service=False)
        with pytest.raises(ConfigError, match="needs a confirmation"):
            session.session.start()
    assert not exchange.venue.sends


def test_without_a_terminal_only_a_service_starts_that_a_person_confirmed(
    run: Path,  # noqa: F811
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange, address = serve()
    command = ["live", str(run), "--mode", "live", "--venue", address, "--guard", "slippage=0.1", "--budget"]

    def fails(*arguments: str) -> str:
        monkeypatch.setenv(KEY_NAME, SECRETS.key)
        monkeypatch.setenv(SECRET_NAME, SECRETS.secret)
        result = CliRunner().invoke(app, [*command, *arguments])
        assert isinstance(result.exception, ConfigError)
        return str(result.exception)

    assert "there is no terminal" in fails("50000")
    assert "nobody has confirmed these terms" in fails("50000", "--service")
    with session_of(run, address, "somebody") as session:
        traded(session, 2)
    assert "this session began with 50000" in fails("40000", "--service")
    assert len(exchange.venue.sends) == 2
    monkeypatch.setenv(KEY_NAME, SECRETS.key)
    monkeypatch.setenv(SECRET_NAME, SECRETS.secret)
    sliced = ["--orders", "twap", "--spread", "50", "--slices", "3"]
    result = CliRunner().invoke(app, [*command, "50000", "--service", *sliced])
    assert result.exit_code == 0, result.output
    parts = Counter(record["bar"] for record in journal_of(run) if record["kind"] == "intent")
    # The two bars before had one order each; a bar whose last order was refused as the market closed has one, too.
    assert sorted(set(parts.values())) == [1, 3]
    assert Counter(parts.values())[1] <= 3
    assert exchange.has_ended
    assert KEY_NAME not in os.environ
    assert SECRET_NAME not in os.environ


def environment() -> dict[str, str]:
    return {**os.environ, KEY_NAME: SECRETS.key, SECRET_NAME: SECRETS.secret, "TERM": "dumb"}


def python_command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-c", "from tailguard.cli import main; main()", *arguments]


def in_terminal(arguments: list[str], typed: str) -> tuple[str, int]:
    """Run the command in a terminal and type; what it shows, and its exit status."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        python_command(arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), close_fds=True
    )
    os.close(theirs)
    shown = b""
    asked = False
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 1.0)
        if ready:
            try:
                part = os.read(ours, 65_536)
            except OSError:
                break
            if not part:
                break
            shown += part
        elif process.poll() is not None:
            break
        if b"to go on" in shown and not asked:
            asked = True
            os.write(ours, typed.encode())
    os.close(ours)
    return shown.decode(errors="replace"), process.wait(60)


# --- budget -----------------------------------------------------------------------------------------------------------


def test_positions_are_sized_by_the_budget_and_not_by_the_account(run: Path, serve: Serve) -> None:  # noqa: F811
    """The account has 100,000 and the session 10,000: its equity starts at 1, and weight · 10,000 is bought. Money
    that comes counts as a gain, which is not put to work; money that goes counts as a loss, which is."""
    exchange, address = serve()
    session = opened(run, address, 10_000.0, drawdown=0.9, price_difference=1.0)
    with session.session.ledger.journal:
        session.session.confirm(session.terms, "somebody")
        traded(session, 4)
        exchange.venue.books.cash += 5_000
        bars_of(session, 4)
        exchange.venue.books.cash -= 8_000
        bars_of(session, 4)
    decisions = [record for record in journal_of(run) if record["kind"] == "decision"]
    intents = [record for record in journal_of(run) if record["kind"] == "intent"]
    assert decisions[0]["equity"] == 1.0
    equities = [decision["equity"] for decision in decisions]
    assert equities == pytest.approx([1.0] * 4 + [1.5] * 4 + [0.7] * 4, abs=0.01)
    held = 0.0
    for decision, intent in zip(decisions, intents, strict=True):
        sized_by = min(decision["equity"], 1.0) * 10_000
        held += float(intent["quantity"])
        # Two lots of 1e-9; a loss is measured at the price of the order, after the decision.
        slack = 2e-9 if decision["equity"] > 1.1 else 1e-3 * abs(held)
        assert held == pytest.approx(decision["target"][0] * sized_by / intent["price"], rel=0, abs=slack)
    with session_of(run, address, budget=10_000.0) as again:
        again.session.start()
        assert again.session.account.cash == pytest.approx(exchange.venue.books.cash - 90_000, rel=1e-12)
    with pytest.raises(ConfigError, match="this session began with 10000"):
        opened(run, address, 20_000.0)


def test_a_budget_beyond_the_account_is_refused(run: Path, serve: Serve) -> None:  # noqa: F811
    _, address = serve()
    with pytest.raises(ConfigError, match=r"the account holds 100,000\.00"):
        opened(run, address, 100_001.0)
    with pytest.raises(TailguardError, match="--budget"):
        LiveTerms(0.0, SECRETS)


# --- guards and kill switch -------------------------------------------------------------------------------------------


def test_guards_are_on_and_the_kill_switch_is_read_before_every_send(run: Path, serve: Serve) -> None:  # noqa: F811
    exchange, address = serve()
    session = opened(run, address)
    assert session.session.guards.config.drawdown == 0.25
    with session.session.ledger.journal:
        session.session.confirm(session.terms, "somebody")
        traded(session, 3)
        sent = len(exchange.venue.sends)
        assert sent == 3
        # Tripped between the decision and the send: at the very moment at which the intent is written.
        kill = KillSwitch(RunLayout(run).kill_path)
        record = session.session.ledger.record

        def tripping(kind: str, **content: Any) -> None:
            record(kind, **content)
            if kind == "intent":
                kill.trip("a person")

        session.session.ledger.record = tripping
        with pytest.raises(Killed, match="a person"):
            session.session.on_bar(session.source.next_bar())
    assert len(exchange.venue.sends) == sent
    assert [each["outcome"] for each in journal_of(run) if each["kind"] == "order"][-1] == "withheld: the kill switch"
    with session_of(run, address) as again, pytest.raises(Killed):
        again.session.start()
    assert len(exchange.venue.sends) == sent
    with session_of(run, address) as again:
        kill.trip("a person", flatten=True)
        with pytest.raises(Killed, match="Positions of ours: none"):
            again.session.start()
    assert not any(exchange.venue.books.positions.values())


def test_a_guard_trips_at_the_exchange_too(run: Path, serve: Serve) -> None:  # noqa: F811
    exchange, address = serve()
    session = opened(run, address, order_notional=1e-6)
    with session.session.ledger.journal:
        session.session.confirm(session.terms, "somebody")
        traded(session, 3)
        assert "order_notional" in session.session.ledger.state.frozen
    assert not exchange.venue.sends


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_come_from_the_environment_and_leave_it() -> None:
    place = {KEY_NAME: " a-key ", SECRET_NAME: "a-secret", "OTHER": "1"}
    keys = read_credentials(EXCHANGE, place)
    assert (keys.key, keys.secret) == ("a-key", "a-secret")
    assert place == {"OTHER": "1"}
    assert repr(keys) == str(keys) == "Credentials()"
    with pytest.raises(ConfigError, match=f"{SECRET_NAME} is not set, and {KEY_NAME} is"):
        read_credentials(EXCHANGE, {KEY_NAME: "a-key"})


class Ring(keyring.backend.KeyringBackend):
    """A keyring in memory."""

    priority = 1  # type: ignore[assignment]

    def __init__(self, entries: dict[tuple[str, str], str]) -> None:
        super().__init__()
        self.entries = entries

    def get_password(self, service: str, username: str) -> str | None:
        return self.entries.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.entries[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.entries[service, username]


def test_keys_come_from_the_keyring_where_the_environment_has_none() -> None:
    before = keyring.get_keyring()
    try:
        keyring.set_keyring(Ring({}))
        with pytest.raises(ConfigError, match=f"no API keys for binanceusdm: set {KEY_NAME}"):
            read_credentials(EXCHANGE, {})
        keyring.set_password("tailguard:binanceusdm", "key", "ring-key")
        keyring.set_password("tailguard:binanceusdm", "secret", "ring-secret")
        assert read_credentials(EXCHANGE, {}) == Credentials("ring-key", "ring-secret")
        assert read_credentials(EXCHANGE, {KEY_NAME: "k", SECRET_NAME: "s"}) == Credentials("k", "s")
    finally:
        keyring.set_keyring(before)


def test_keys_are_hidden_in_every_form() -> None:
    text = (
        f"GET https://fapi.example/v1/order?symbol=X&signature=abc {{'X-MBX-APIKEY': '{SECRETS.key}'}} "
        f"secret%2Fwith%2Bodd%3Dchars-93d2 {SECRETS.secret!r} signature=0123&x=1"
    )
    hidden = SECRETS.hide(text)
    for part in (SECRETS.key, SECRETS.secret, "93d2", "signature=abc", "0123"):
        assert part not in hidden
    assert "https://fapi.example/v1/order" in hidden
    assert Credentials("ab", "cd").hide("absolute cdrom") == "absolute cdrom"


def test_no_key_reaches_a_log_a_file_or_an_error(
    run: Path,  # noqa: F811
    serve: Serve,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything logs at its loudest, the venue fails in every way, and an error is raised that nobody foresaw."""
    caplog.set_level(logging.DEBUG)
    faults = {"reply_lost": 0.2, "rate_limited": 0.1, "rejected": 0.1, "unavailable": 0.1, "read_fails": 0.05}
    exchange, address = serve(faults=faults, seed=3)
    monkeypatch.setenv(KEY_NAME, SECRETS.key)
    monkeypatch.setenv(SECRET_NAME, SECRETS.secret)
    exchange.faults.rates, rates = FaultRates(), exchange.faults.rates
    session = opened(run, address)
    with session.session.ledger.journal:
        exchange.faults.rates = rates
        session.session.confirm(session.terms, "somebody")
        traded(session, 15)
        exchange.faults.stop()
        venue = session.session.venue

        def telling(*_: object) -> None:
            raise RuntimeError(f"request of {SECRETS.key} with {SECRETS.secret}")

        monkeypatch.setattr(venue.client, "fetch_order", telling)
        with pytest.raises(OutcomeUnknown, match=r"RuntimeError: request of \*\*\* with \*\*\*") as error:
            venue.find("tg", "SYN01/USDT:USDT")
        shown = "".join(traceback.format_exception(error.value))
        with pytest.raises(RunError, match="not foreseen") as unforeseen, hidden(LiveTerms(1.0, SECRETS)):
            telling()
        shown += "".join(traceback.format_exception(unforeseen.value))
    assert any(record.name.startswith("tailguard.live.ccxt_venue") for record in caplog.records)
    assert sum(exchange.faults.counts.values()) > 5
    written = "".join(path.read_text(errors="replace") for path in (run / "live").rglob("*") if path.is_file())
    printed = "".join(capfd.readouterr())
    for text in (caplog.text, written, printed, shown, json.dumps(session.terms), repr(vars(session.session))):
        assert SECRETS.key not in text
        assert SECRETS.secret not in text
