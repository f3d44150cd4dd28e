"""Alerts reach a real server and a real program, in spite of faults, and trading never waits for them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tailguard.errors import ConfigError
from tailguard.live.alerts import WAITING, AlertConfig, Alerter, alerting, redacted
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import JournalError
from tailguard.live.session import Killed

from .conftest import WorldMaker
from .test_journal import files_up_to

QUICK = AlertConfig(pause_s=0.01, timeout_s=60)
Answers = Callable[..., str]


class Hook(ThreadingHTTPServer):
    """A webhook that answers with the given statuses in turn, then 200; `hang`: seconds before its answer."""

    daemon_threads = True

    def __init__(self, statuses: list[int], hang: float = 0.0) -> None:
        self.statuses, self.hang = statuses, hang
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.given_up = threading.Event()
        super().__init__(("127.0.0.1", 0), _Answer)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?token=webhook-secret"


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append(dict(self.headers))
        self.server.given_up.wait(self.server.hang)
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Callable[..., Hook]]:
    started: list[Hook] = []

    def start(*statuses: int, hang: float = 0.0) -> Hook:
        server = Hook(list(statuses), hang)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.given_up.set()
        server.shutdown()
        server.server_close()


def record(
    kind: str = "freeze", guard: str = "jump", message: str = "SYN01: close 2 after 1", time_ms: int = 0
) -> dict:
    return {"kind": kind, "guard": guard, "message": message, "time": time_ms}


def failures_of(alerter: Alerter) -> list[str]:
    found = []
    while not alerter._failures.empty():
        found.append(alerter._failures.get())
    return found


def test_guards_and_kills_of_a_session_reach_webhook_and_command(paper_world: WorldMaker, hook, tmp_path: Path) -> None:
    """A session whose guard trips, and which is killed: each of its alarms is delivered once, in their order."""
    server, out = hook(), tmp_path / "told.jsonl"
    program = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + chr(10))"
    world = paper_world(guards=GuardConfig(order_notional=1e-6))
    session = world.session()
    alerter = Alerter(replace(QUICK, webhook=server.address, command=(sys.executable, "-c", program)), "demo", "paper")
    session.ledger.listeners.append(alerter.hear)
    world.trade(session, 3)
    world.kill.trip("enough")
    with pytest.raises(Killed):
        world.trade(session, 1)
    alerter.close(120)
    records = [each for kind in ("freeze", "kill") for each in world.records(kind)]
    assert [each["kind"] for each in records] == ["freeze", "kill"]
    sent = [json.loads(body) for body in server.bodies]
    assert [(each["kind"], each["message"]) for each in sent] == [(each["kind"], each["message"]) for each in records]
    assert sent[0]["guard"] == "order_notional"
    assert sent[0]["text"] == f"demo: freeze order_notional: {records[0]['message']}"
    assert sent[1]["text"] == "demo: kill: enough"
    assert [json.loads(line) for line in out.read_text().splitlines()] == sent
    assert failures_of(alerter) == []


def test_an_end_by_an_error_is_an_alert(paper_world: WorldMaker, hook) -> None:
    """The disk is full: nothing can be journalled any more, and somebody has to know that the session is gone. What an
    error says that nobody foresaw may hold anything, and stays here."""
    server, world = hook(), paper_world()
    session = world.session()
    world.trade(session, 3)
    config = replace(QUICK, webhook=server.address)
    with pytest.raises(JournalError), alerting(config, session), files_up_to(world.journal_path.stat().st_size):
        world.trade(session, 1)
    with pytest.raises(ZeroDivisionError), alerting(config, world.session()):
        raise ZeroDivisionError("hunter2")
    with pytest.raises(Killed), alerting(config, world.session()):
        raise Killed("killed: enough")
    told = [(each["kind"], each["message"]) for each in map(json.loads, server.bodies) if each["kind"] != "watching"]
    assert [kind for kind, _ in told] == ["failed", "failed"]
    assert "the session has ended: " in told[0][1]
    assert "a line could not be written" in told[0][1]
    assert told[1][1] == "the session has ended: ZeroDivisionError"


def test_an_answer_that_may_pass_is_followed_by_another_attempt(hook) -> None:
    server = hook(503, 429, 500)
    alerter = Alerter(replace(QUICK, webhook=server.address), "demo", "paper")
    alerter.hear(record())
    alerter.close(120)
    assert len(server.bodies) == 4
    assert len(set(server.bodies)) == 1
    assert failures_of(alerter) == []


@pytest.mark.parametrize(("status", "asked"), [(503, 4), (404, 1), (302, 1), (307, 1)])
def test_what_cannot_be_delivered_is_said_without_the_address(hook, status: int, asked: int) -> None:
    server = hook(*[status] * 9)
    alerter = Alerter(replace(QUICK, webhook=server.address), "demo", "paper")
    alerter.hear(record())
    alerter.close(120)
    assert len(server.bodies) == asked
    (failure,) = failures_of(alerter)
    assert f"freeze jump did not reach the webhook: 127.0.0.1 answered {status}" in failure
    assert "secret" not in failure


def test_a_failed_alert_is_an_alarm_in_the_journal_and_not_another_alert(paper_world: WorldMaker, hook) -> None:
    server = hook(404, 404)
    world = paper_world()
    session = world.session()
    alerter = Alerter(replace(QUICK, webhook=server.address), "demo", "paper")
    session.ledger.listeners.append(alerter.hear)
    session.ledger.record("freeze", guard="jump", message="x")
    alerter.close(120)
    alerter.report(session.ledger)
    (alarm,) = world.records("alarm")
    assert alarm["guard"] == "alerts"
    assert alarm["message"] == "freeze jump did not reach the webhook: 127.0.0.1 answered 404"
    assert len(server.bodies) == 1
    alerter.report(session.ledger)
    assert len(world.records("alarm")) == 1


def test_trading_does_not_wait_for_a_webhook_that_hangs(paper_world: WorldMaker, hook) -> None:
    """The webhook answers nothing until the test lets it; 100 bars are traded meanwhile."""
    server = hook(hang=3_600)
    world = paper_world()
    session = world.session()
    alerter = Alerter(replace(QUICK, webhook=server.address, timeout_s=3_600), "demo", "paper")
    session.ledger.listeners.append(alerter.hear)
    for number in range(WAITING + 20):
        session.ledger.record("freeze", guard=f"guard{number}", message="x")
    session.release("test")
    world.trade(session, 100)
    assert len(world.records("decision")) == 100
    while not server.bodies:
        time.sleep(0.01)
    assert len(server.bodies) == 1
    lost = failures_of(alerter)
    assert len(lost) >= 20
    assert "100 alerts wait already" in lost[0]
    alerter.close(0.01)  # does not wait for it either


def test_a_time_out_is_a_failure_that_is_tried_again(hook) -> None:
    server = hook(hang=3_600)
    alerter = Alerter(replace(QUICK, webhook=server.address, timeout_s=0.2, attempts=2), "demo", "paper")
    alerter.hear(record())
    alerter.close(120)
    assert len(server.bodies) == 2
    (failure,) = failures_of(alerter)
    assert failure.endswith("timed out, 2 times")


def test_a_server_that_is_not_there_and_a_command_that_fails(tmp_path: Path, hook) -> None:
    gone = hook()
    gone.shutdown()
    gone.server_close()
    count = tmp_path / "count"
    program = f"open({str(count)!r}, 'a').write('x'); raise SystemExit(3)"
    config = replace(QUICK, webhook=gone.address, command=(sys.executable, "-c", program), attempts=2)
    alerter = Alerter(config, "demo", "paper")
    alerter.hear(record())
    alerter.close(120)
    first, second = failures_of(alerter)
    assert "Connection refused, 2 times" in first
    assert "ended with 3, 2 times" in second
    assert count.read_text() == "xx"
    absent = Alerter(replace(QUICK, command=("/no/such/program",)), "demo", "paper")
    absent.hear(record())
    absent.close(120)
    assert failures_of(absent) == ["freeze jump did not reach the command: /no/such/program: No such file or directory"]


def test_a_command_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"sleep 600 & echo $! > {child}; wait"
    alerter = Alerter(replace(QUICK, command=("sh", "-c", program), timeout_s=1.0, attempts=1), "demo", "paper")
    alerter.hear(record())
    alerter.close(120)
    (failure,) = failures_of(alerter)
    assert "did not end within 1 s" in failure
    state = Path(f"/proc/{int(child.read_text())}/stat")
    end = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_no_secret_is_in_an_alert_or_in_the_commands_environment(hook, tmp_path: Path) -> None:
    server, out = hook(), tmp_path / "env.json"
    program = f"import os, json; open({str(out)!r}, 'w').write(json.dumps(dict(os.environ)))"
    environment = {"BINANCE_API_KEY": "key-abcdef", "EXCHANGE_SECRET": "hidden-123456", "PATH": "/usr/bin:/bin"}
    config = replace(QUICK, webhook=server.address, command=(sys.executable, "-c", program))
    alerter = Alerter(config, "demo", "live", environment)
    asked = "https://fapi.example/order?symbol=A&signature=0123"
    message = f"RequestTimeout GET {asked} key-abcdef hidden-123456 {server.address}"
    alerter.hear(record(kind="alarm", guard="bars", message=message))
    alerter.close(120)
    text = server.bodies[0].decode()
    for secret in ("key-abcdef", "hidden-123456", "signature", "0123", "webhook-secret"):
        assert secret not in text
    assert "GET https://fapi.example/order?[removed]" in json.loads(text)["message"]
    seen = json.loads(out.read_text())
    assert seen["PATH"] == "/usr/bin:/bin"
    assert not {"BINANCE_API_KEY", "EXCHANGE_SECRET"} & set(seen)
    assert redacted("nothing here", ["key-abcdef"]) == "nothing here"


def test_alarms_that_repeat_are_one_alert_with_a_count(hook) -> None:
    server = hook()
    alerter = Alerter(replace(QUICK, webhook=server.address, quiet_s=3_600), "demo", "shadow")
    for _ in range(50):
        alerter.hear(record(kind="alarm", guard="bars", message="no answer"))
    alerter.hear(record(kind="alarm", guard="clock", message="4 s off"))
    alerter._last.clear()  # an hour later
    alerter.hear(record(kind="alarm", guard="bars", message="no answer"))
    alerter.close(120)
    sent = [json.loads(body) for body in server.bodies]
    assert [(each["guard"], each["repeats"]) for each in sent] == [("bars", 0), ("clock", 0), ("bars", 49)]
    assert sent[2]["text"].endswith("no answer (49 more like the last one since)")


def test_addresses_and_commands_that_make_no_sense_are_refused() -> None:
    there = {"HOOK": "https://hooks.example/x"}
    assert AlertConfig.of("HOOK", "notify 'two words'", there).command == ("notify", "two words")
    with pytest.raises(ConfigError, match="takes the name of an environment variable"):
        AlertConfig.of("https://hooks.example/secret", None, there)
    with pytest.raises(ConfigError, match="the environment has no such variable"):
        AlertConfig.of("HOOKS", None, there)
    with pytest.raises(ConfigError, match=r"hooks\.example is asked for over http"):
        AlertConfig.of("HOOK", None, {"HOOK": "http://hooks.example/secret"})
    for wrong in ("file:///etc/passwd", "hooks.example", "https://", "http://[::1"):
        with pytest.raises(ConfigError, match="no address"):
            AlertConfig.of("HOOK", None, {"HOOK": wrong})
    with pytest.raises(ConfigError, match="--alert-command"):
        AlertConfig.of(None, "notify 'open", there)
