"""Alerts: every alarm, guard and kill to a webhook and to a command, without making trading wait.

The session's thread only puts a record into a queue. Another thread delivers it, with time-outs and retries, and hands
back what it could not deliver. An alert says what happened in words. Keys are not in it: messages of exchanges are
stripped of the queries of addresses and of every secret in the environment.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tailguard.errors import ConfigError, TailguardError
from tailguard.live.journal import Record
from tailguard.live.session import Killed, Session
from tailguard.live.session_state import Ledger
from tailguard.validate import check_count, check_range

KINDS = ("freeze", "kill", "alarm", "flattened", "release", "stop")
"""Kinds of records that are worth an alert."""
OWN_GUARD = "alerts"
"""Guard of the alarm that an alert was not delivered; it is not itself an alert."""
WAITING = 100
"""Alerts that wait for their delivery, at most."""
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""Answers after which another attempt makes sense."""
SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|PASSPHRASE|WEBHOOK", re.IGNORECASE)
SHORTEST_SECRET = 6
KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR")
"""What a command gets of the environment; keys stay here."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AlertConfig:
    """Where alerts go, and how patiently."""

    webhook: str | None = None
    """Address that gets each alert as JSON by POST."""
    command: tuple[str, ...] = ()
    """Program with arguments that gets each alert as JSON on its standard input."""
    timeout_s: float = 5.0
    """Longest wait for the webhook's answer, and for the command's end."""
    attempts: int = 4
    pause_s: float = 1.0
    """Pause after the first failure; it doubles after each further one."""
    quiet_s: float = 300.0
    """Alarms of one guard within this time are one alert, with a count."""

    def __post_init__(self) -> None:
        check_count("alerts.attempts", self.attempts)
        for name in ("timeout_s", "pause_s", "quiet_s"):
            check_range(f"alerts.{name}", getattr(self, name), low=0, low_open=name != "quiet_s")
        if self.webhook is not None:
            check_address(self.webhook)

    @classmethod
    def of(cls, variable: str | None, command: str | None, environment: Mapping[str, str] = os.environ) -> AlertConfig:
        """From the options of the command line: the name of a variable with the webhook's address, and a command.

        The address is often a secret, and a command line can be read by every user of the machine.
        """
        address = None
        if variable is not None:
            if "/" in variable:
                raise ConfigError(
                    "--alert-webhook takes the name of an environment variable that holds the address, not the address"
                )
            address = environment.get(variable)
            if not address:
                raise ConfigError(f"--alert-webhook {variable}: the environment has no such variable; export it")
        try:
            words = tuple(shlex.split(command or ""))
        except ValueError as error:
            raise ConfigError(f"--alert-command {command}: {error}") from error
        return cls(address, words)


def check_address(address: str) -> None:
    """Refuse what is not https, but for this machine; the message does not repeat the address."""
    try:
        parts = urllib.parse.urlsplit(address)
        host = parts.hostname
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError("the webhook's address is no address; write https://…")
    if parts.scheme == "http" and host not in LOOPBACK:
        raise ConfigError(f"the webhook at {host} is asked for over http, where everybody reads along; write https://…")


class Alerter:
    """Delivers alerts of one session."""

    def __init__(self, config: AlertConfig, run: str, mode: str, environment: Mapping[str, str] = os.environ) -> None:
        self.config, self.run, self.mode = config, run, mode
        self._secrets = [
            value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET
        ]
        if config.webhook is not None:
            self._secrets.append(config.webhook)
        self._environment = {name: environment[name] for name in KEPT_ENVIRONMENT if name in environment}
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._last: dict[str, float] = {}
        self._repeats: dict[str, int] = {}
        self._thread = threading.Thread(target=self._deliver_all, name="alerts", daemon=True)
        self._thread.start()

    # --- the session's side: nothing here waits or raises -------------------------------------------------------------

    def hear(self, record: Record) -> None:
        """A listener of the ledger."""
        guard = str(record.get("guard", record["kind"]))
        if record["kind"] not in KINDS or guard == OWN_GUARD:
            return
        if record["kind"] == "alarm":
            now = time.monotonic()
            if now - self._last.get(guard, -1e9) < self.config.quiet_s:
                self._repeats[guard] = self._repeats.get(guard, 0) + 1
                return
            self._last[guard] = now
        message = str(record.get("message") or record.get("by") or "")
        self._put(record["kind"], guard, message, record["time"], self._repeats.pop(guard, 0))

    def announce(self, time_ms: int) -> None:
        """Say that the session is watched: whoever gets this gets the alarms, too."""
        self._put("watching", "watching", "alerts of this session arrive here", time_ms, 0)

    def failed(self, error: Exception, time_ms: int) -> None:
        """Say that the session has ended by an error: what a line of the journal cannot say any more."""
        kind = type(error).__name__
        # The text of an error that nobody foresaw may hold anything.
        told = str(error) if isinstance(error, TailguardError) else kind
        self._put("failed", "failed", f"the session has ended: {told}", time_ms, 0)

    def _put(self, kind: str, guard: str, message: str, time_ms: int, repeats: int) -> None:
        text = redacted(message, self._secrets)
        told = f" ({repeats} more like the last one since)" if repeats else ""
        moment = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
        label = kind if guard == kind else f"{kind} {guard}"
        alert = {
            "run": self.run,
            "mode": self.mode,
            "kind": kind,
            "guard": guard,
            "message": text,
            "time": moment,
            "repeats": repeats,
            "text": f"{self.run}: {label}: {text}{told}",
        }
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self._failures.put(f"{label}: {WAITING} alerts wait already")

    def report(self, ledger: Ledger) -> None:
        """Journal what could not be delivered. The session's own thread calls it."""
        while not self._failures.empty():
            ledger.record("alarm", guard=OWN_GUARD, message=self._failures.get())

    def close(self, patience_s: float = 30.0) -> None:
        """Deliver what waits, for so long at most."""
        self._closing.set()
        try:
            self._waiting.put(None, timeout=patience_s)
        except queue.Full:
            return
        self._thread.join(patience_s)

    # --- the other thread ---------------------------------------------------------------------------------------------

    def _deliver_all(self) -> None:
        while (alert := self._waiting.get()) is not None:
            body = json.dumps(alert).encode()
            for name, deliver, wanted in (
                ("webhook", self._post, self.config.webhook is not None),
                ("command", self._run_command, bool(self.config.command)),
            ):
                problem = self._try(deliver, body) if wanted else None
                if problem is not None:
                    what = alert["kind"] if alert["kind"] == alert["guard"] else f"{alert['kind']} {alert['guard']}"
                    self._failures.put(f"{what} did not reach the {name}: {redacted(problem, self._secrets)}")

    def _try(self, deliver: Any, body: bytes) -> str | None:
        """Deliver with retries; returns the problem where none worked."""
        pause = self.config.pause_s
        for attempt in range(self.config.attempts):
            found: tuple[str | None, bool] = deliver(body)
            problem, again = found
            if problem is None or not again:
                return problem
            if attempt + 1 < self.config.attempts:
                time.sleep(pause)
                pause *= 2
        return f"{problem}, {self.config.attempts} times"

    def _post(self, body: bytes) -> tuple[str | None, bool]:
        """The problem, None where there is none, and whether it may pass."""
        assert self.config.webhook is not None
        host = urllib.parse.urlsplit(self.config.webhook).hostname
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if host in LOOPBACK:
            handlers.append(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.config.webhook, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=self.config.timeout_s):
                return None, False
        except urllib.error.HTTPError as error:
            error.close()
            return f"{host} answered {error.code}", error.code in TRANSIENT
        except (OSError, ValueError) as error:
            return f"{host}: {getattr(error, 'reason', error)}", True
        except Exception as error:  # an answer that is not HTTP must not end this thread
            return f"{host}: {type(error).__name__}", True

    def _run_command(self, body: bytes) -> tuple[str | None, bool]:
        program = self.config.command[0]
        try:
            process = subprocess.Popen(
                self.config.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            return f"{program}: {error.strerror}", False
        try:
            process.communicate(body, timeout=self.config.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{program} did not end within {self.config.timeout_s:g} s", True
        except OSError as error:
            return f"{program}: {error.strerror}", True
        return (None, False) if process.returncode == 0 else (f"{program} ended with {process.returncode}", True)


@contextmanager
def alerting(config: AlertConfig, session: Session) -> Iterator[Alerter]:
    """Alerts of the session while it runs; at its end those that wait are delivered first."""
    alerter = Alerter(config, session.config.run, session.config.mode)
    session.ledger.listeners.append(alerter.hear)
    alerter.announce(session.clock.now())
    try:
        yield alerter
    except Killed:
        raise  # the record of the kill was an alert
    except Exception as error:
        alerter.failed(error, session.clock.now())
        raise
    finally:
        session.ledger.listeners.remove(alerter.hear)
        alerter.close()
        alerter.report(session.ledger)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An alert goes where it was meant to go, or nowhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def redacted(text: str, secrets: list[str]) -> str:
    """The text without secrets, and without the queries of addresses, in which exchanges' clients sign requests."""
    for secret in secrets:
        text = text.replace(secret, "[removed]")
    return re.sub(r"(https?://[^\s?\"']+)\?[^\s\"']*", r"\1?[removed]", text)
