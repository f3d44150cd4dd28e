"""A run of a second, to look at from all sides, and a real browser to look with."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from rich.console import Console

from tailguard.config import load_config
from tailguard.experiment.trained_run import TrainedRun, open_run
from tailguard.runs.runner import train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
AVAILABLE = CHROMIUM is not None and CHROMEDRIVER is not None
SMALL = (
    "data.synthetic_bars=2000",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "data.validation=0.1",
    "env.num_envs=8",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.gamma=0.95",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=384",
    "training.threads=1",
)


@pytest.fixture(scope="session")
def train_small() -> Callable[..., Path]:
    """Train a small run in a folder, with changes such as `ppo.gamma=0.9`, and return the folder."""

    def small(folder: Path, *changes: str) -> Path:
        train(load_config(overrides=[*SMALL, *changes]), folder, Console(quiet=True))
        return folder

    return small


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, train_small: Callable[..., Path]) -> Path:
    return train_small(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, train_small: Callable[..., Path]) -> Path:
    """The same market, learned from with another discount."""
    return train_small(tmp_path_factory.mktemp("runs") / "other", "ppo.gamma=0.9")


@pytest.fixture(scope="session")
def trained(run_folder: Path) -> TrainedRun:
    return open_run(run_folder)


class Browser:
    """One headless window, driven over WebDriver's plain HTTP, which says what a page logged and what it fetched."""

    def __init__(self, width: int, height: int, dark: bool = False) -> None:
        self.width, self.height, self.dark = width, height, dark
        self.driver: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        assert CHROMEDRIVER is not None
        self.driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            started = re.search(r"on port (\d+)", line)
            if started and int(started[1]):
                break
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
        self.address = f"http://127.0.0.1:{started[1]}"
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{session['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self.driver is not None
        if "/session/" in self.address:
            self._call("DELETE", "")
        self.driver.terminate()
        self.driver.wait()

    def open(self, path: Path, seconds: float = 60) -> None:
        """Load a file and wait until all its charts are drawn."""
        if self.dark:
            feature = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
            self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": feature})
        self._call("POST", "/url", {"url": path.resolve().as_uri()})
        end = time.monotonic() + seconds
        while self.run("return document.documentElement.dataset.charts") is None:
            assert time.monotonic() < end, f"charts were not drawn in {seconds} s: {self.log('browser')}"
            time.sleep(0.1)

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


@pytest.fixture(scope="session")
def browser() -> type[Browser]:
    """The browser; tests that need it are skipped where there is none."""
    if not AVAILABLE:
        pytest.skip("needs chromium and chromedriver")
    return Browser
