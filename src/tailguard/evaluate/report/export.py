"""Export a page as PDF or PNG with an installed browser, which draws the charts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tailguard.errors import ConfigError, RunError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge", "brave-browser")
WIDTH = 1280
TALLEST = 16_000
"""Pixels; browsers do not support taller screenshots."""
SECONDS = 180


def find_browser() -> str:
    """The first browser of `BROWSERS` on the path."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise ConfigError(
        "--pdf and --png need a browser, and none was found. Install chromium or google-chrome (looked for: "
        f"{', '.join(BROWSERS)}), or open the report and print it"
    )


def save_pdf(page: Path, path: Path) -> None:
    """Print a page on A4."""
    _browse(page, f"--print-to-pdf={path.resolve()}", "--no-pdf-header-footer")
    _check_made(path)


def save_png(page: Path, path: Path) -> None:
    """Take a full-page screenshot."""
    drawn = _browse(page, "--dump-dom", f"--window-size={WIDTH},1000")
    height = re.search(r'<html[^>]* data-height="(\d+)"', drawn)
    if height is None:
        raise RunError(f"{page}: the browser did not draw its charts; open the page itself to see why")
    tall = min(int(height[1]), TALLEST)
    _browse(page, f"--screenshot={path.resolve()}", f"--window-size={WIDTH},{tall}")
    _check_made(path)


def _browse(page: Path, *options: str) -> str:
    """Open a page in a headless browser, let its scripts finish, and return the browser's output."""
    with tempfile.TemporaryDirectory(prefix="tailguard-browser-", ignore_cleanup_errors=True) as profile:
        command = [
            find_browser(),
            "--headless=new",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=20000",  # milliseconds of the page's own clock
            # Browsers refuse to isolate pages for the superuser, as in a container; the page can fetch nothing anyway.
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            *options,
            page.resolve().as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{command[0]}: could not open {page}: {error}") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunError(f"{command[0]}: ended with status {done.returncode} on {page}: {last}")
        return done.stdout


def _check_made(path: Path) -> None:
    if not path.is_file() or not path.stat().st_size:
        raise RunError(f"{path}: the browser did not write it")
