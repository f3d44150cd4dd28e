"""A session's side of a paper venue in another process: its address, its clock, and how ccxt reaches it."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from tailguard.errors import ConfigError, RunError
from tailguard.live.credentials import Credentials

EXCHANGE = "binanceusdm"
"""The exchange that the paper venue looks like."""
KEYS = Credentials("paper", "paper")
PATIENCE_S = 30.0
"""Longest wait for a venue that is being restarted."""


@dataclass(frozen=True)
class PaperAddress:
    """Where a paper venue answers."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> PaperAddress:
        parts = urlsplit(text)
        if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost") or not parts.port:
            raise ConfigError(f"--venue {text}: write the address that tailguard venue prints, http://127.0.0.1:PORT")
        return cls(parts.hostname, parts.port)

    def settings(self) -> dict[str, Any]:
        """Of ccxt's client: all its addresses of the futures lead here, and it need not be slow."""
        base = f"http://{self.host}:{self.port}/fapi"
        versions = {"": "v1", "V2": "v2", "V3": "v3"}
        names = {f"fapi{side}{suffix}": each for side in ("Public", "Private") for suffix, each in versions.items()}
        return {
            "urls": {"api": {name: f"{base}/{version}" for name, version in names.items()}},
            "enableRateLimit": False,
            "has": {"fetchCurrencies": False},
        }

    def status(self) -> dict[str, Any]:
        """Its clock, its speed and its symbols."""
        try:
            return self.ask("GET", "/paper/status")
        except OSError as error:
            raise ConfigError(
                f"no paper venue answers at {self.host}:{self.port}: {error}. Start one with tailguard venue RUN"
            ) from None

    def ask(self, method: str, path: str, **given: int) -> dict[str, Any]:
        """A request that only a paper venue answers; raises `OSError` where it does not."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, urlencode(given), {"X-MBX-APIKEY": KEYS.key})
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if response.status != 200:
            raise RunError(f"the paper venue refuses {path}: {answer.get('msg', response.status)}")
        return answer


class PaperClock:
    """The clock of a paper venue: it runs at the venue's speed, or moves when the session waits."""

    def __init__(self, address: PaperAddress) -> None:
        self.address = address
        status = address.status()
        self.speed, self.receive_window_ms = float(status["speed"]), int(status["receive_window"])
        self.last_bar_ms = int(status["last_bar"])
        self._from = time.monotonic(), int(status["now"])

    def now(self) -> int:
        began, from_ms = self._from
        return from_ms + round(1000 * self.speed * (time.monotonic() - began)) if self.speed else from_ms

    def sleep(self, seconds: float) -> None:
        self.wait_until(self.now() + round(1000 * seconds))

    def wait_until(self, time_ms: int) -> None:
        if self.speed:
            time.sleep(max(0.0, (time_ms - self.now()) / 1000 / self.speed))
            return
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                status = self.address.ask("POST", "/paper/clock", until=time_ms)
                self._from = self._from[0], max(self._from[1], int(status["now"]))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunError(f"the paper venue does not answer any more: {error}") from None
                time.sleep(0.1)
