"""A real browser to look at pages with."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
AVAILABLE = CHROMIUM is not None and CHROMEDRIVER is not None


class Browser:
    """One headless window, driven over WebDriver's plain HTTP, which says what a page logged and what it fetched."""

    def __init__(self, width: int, height: int, dark: bool = False) -> None:
        self.width, self.height, self.dark = width, height, dark
        self.driver: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        port = next(filter(None, (self._start_driver() for _ in range(5))))
        options = {
            "binary": CHROMIUM,
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            + (["--force-dark-mode"] if self.dark else []),
            # A window has a least width; an emulated device does not.
            "mobileEmulation": {
                "deviceMetrics": {"width": self.width, "height": self.height, "pixelRatio": 1, "mobile": False}
            },
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.address = f"http://127.0.0.1:{port}"
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{session['sessionId']}"
        return self

    def _start_driver(self) -> int | None:
        """The port that the driver listens on; None where another process was faster to take it."""
        assert CHROMEDRIVER is not None
        self.driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            started = re.search(r"on port (\d+)", line)
            if started and int(started[1]):
                return int(started[1])
        self.driver.wait()
        return None

    def __exit__(self, *_: object) -> None:
        assert self.driver is not None
        if "/session/" in self.address:
            self._call("DELETE", "")
        self.driver.terminate()
        self.driver.wait()

    def open(self, page: Path | str, seconds: float = 60, *, drawn: str = "charts") -> None:
        """Load a file or an address and wait until the page says that it is drawn, by this entry of its data."""
        self.show(page)
        end = time.monotonic() + seconds
        while self.run(f"return document.documentElement.dataset.{drawn}") is None:
            assert time.monotonic() < end, f"the page was not drawn in {seconds} s: {self.log('browser')}"
            time.sleep(0.1)

    def show(self, page: Path | str) -> None:
        """Load a file or an address that needs no script."""
        if self.dark:
            feature = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
            self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": feature})
        self._call("POST", "/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._call("POST", "/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        """Addresses that the page asked for, its own file left out."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each.get("type") != "Document"]

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """What is seen, or the whole page."""
        if whole:
            taken = self._call(
                "POST",
                "/goog/cdp/execute",
                {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True}},
            )["data"]
        else:
            taken = self._call("GET", "/screenshot")
        path.write_bytes(base64.b64decode(taken))

    def pdf(self, path: Path) -> None:
        """The page as it prints on A4."""
        path.write_bytes(base64.b64decode(self._call("POST", "/print", {"page": {"width": 21, "height": 29.7}})))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]
