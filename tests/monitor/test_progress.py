"""The line a user watches: what it says, and that it says nothing when not asked."""

from __future__ import annotations

import math

import pytest

from tailguard.monitor import progress
from tailguard.monitor.progress import BAR_SECONDS, DelayedBar, Progress, describe


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, ""),
        ({"time/fps": 523.4}, "523/s"),
        ({"time/fps": 58_312.0, "train/approx_kl": 0.0081}, "58.3 k/s  KL 0.008"),
        ({"rollout/ep_rew_mean": 203.457}, "reward 203.5"),
        ({"rollout/ep_rew_mean": 0.01, "rollout/ep_pnl_mean": 0.0052}, "P&L +0.52 %/episode"),
        ({"rollout/ep_rew_mean": math.nan, "time/fps": math.nan}, ""),
        ({"risk/cvar_realised": -0.0364, "risk/lambda": 0.2149}, "CVaR -3.64 %  λ 0.21"),
        ({"risk/cvar_realised": math.nan, "risk/lambda": 0.0}, "λ 0.00"),
        (
            {
                "warn/lstm_dead": 0.0,
                "train/approx_kl": 0.0081,
                "risk/lambda": 0.21,
                "risk/cvar_realised": 0.001,
                "rollout/ep_pnl_mean": -0.004,
                "time/fps": 58_312.0,
            },
            "58.3 k/s  P&L -0.40 %/episode  CVaR +0.10 %  λ 0.21  KL 0.008  0 alarms",
        ),
        ({"warn/skipped_nonfinite": 200, "warn/constant_advantages": 1, "warn/lstm_dead": 0}, "2 alarms"),
        ({"warn/skipped_nonfinite": 0}, "0 alarms"),
        ({"warn/skipped_nonfinite": 31}, "1 alarm"),
    ],
)
def test_figures_in_words(metrics: dict[str, float], words: str) -> None:
    assert describe(metrics) == words


def test_a_log_file_gets_plain_lines_now_and_then_and_a_last_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(4_000, label="demo") as bar:
        for done in (1_000, 2_000, 3_000, 4_000):
            clock[0] += 6.0
            bar.show(done, {"time/fps": 2_000.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "demo 1,000 / 4,000 steps  2.0 k/s",
        "demo 3,000 / 4,000 steps  2.0 k/s",
        "demo 4,000 / 4,000 steps  2.0 k/s",
    ]


def test_a_terminal_gets_one_live_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with Progress(4_000) as bar:
        bar.show(4_100, {"rollout/ep_rew_mean": 7.0})
    shown = capsys.readouterr().out
    assert "training" in shown
    assert "100%" in shown
    assert "reward 7" in shown


def test_not_shown_means_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, shown=False) as bar:
        bar.show(10, {"time/fps": 1.0})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("terminal", "shown", "seconds", "seen"),
    [
        (True, True, BAR_SECONDS + 0.1, True),
        (True, True, BAR_SECONDS - 0.1, False),
        (True, False, BAR_SECONDS + 0.1, False),
        (False, True, BAR_SECONDS + 0.1, False),
    ],
    ids=["slow", "quick", "off", "no terminal"],
)
def test_a_delayed_bar_appears_in_a_terminal_after_two_seconds(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    shown: bool,
    seconds: float,
    seen: bool,
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    clock = [100.0]
    with monkeypatch.context() as patched:
        patched.setattr(progress.time, "monotonic", lambda: clock[0])
        with DelayedBar("backtest", 1_000, shown) as bar:
            clock[0] += seconds
            bar.show(500)
            bar.show(750)
    printed = capsys.readouterr().out
    assert ("backtest" in printed) == seen
    assert ("75%" in printed) == seen
