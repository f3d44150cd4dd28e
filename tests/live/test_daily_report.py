"""The report of a day: a session's days are the backtest's by the same formulas, and what differs is found."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tailguard as tg
from tailguard.cli import app
from tailguard.config import load_config
from tailguard.data.storage import write_frame
from tailguard.envs.spec import task_for
from tailguard.experiment.trained_run import open_run
from tailguard.live.daily_page import as_html, as_markdown
from tailguard.live.daily_report import Expectation, daily_content, expectation
from tailguard.live.day_tests import holm
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import read_records
from tailguard.live.traded_bars import TradedBars, of_journal
from tailguard.runs.runner import train

from .test_opening import SMALL

DAY = 86_400_000
HOUR = 3_600_000


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    changes = [each for each in SMALL if not each.startswith("data.test")]
    train(load_config(overrides=[*changes, "data.test=480h"]), folder, Console(quiet=True))
    return folder


@pytest.fixture
def run(trained_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_folder, tmp_path / "small"))


def cli(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def later_bars(folder: Path, bars: int = 24 * 4 + 30, seed: int = 4) -> Path:
    """Bars of the same kind of market, after those of the run."""
    frame = tg.make_market(bars, seed=seed).bars.frame.drop("segment")
    path = folder / "later.parquet"
    write_frame(frame.with_columns(frame["time"].dt.offset_by("2y")), path)
    return path


def journalled(run: Path, mode: str, agent, bars) -> TradedBars:
    task, _, panel = task_for(agent.spec, bars, None, torch.float64)
    rows_of = {int(time): row for row, time in enumerate(panel.time)}
    records = read_records(run / "live" / mode / "journal.jsonl")
    return of_journal(records, rows_of, task.features.double().numpy(), task.feature_names, panel.frequency_ms)


def test_the_days_of_a_shadow_session_are_the_backtests(run: Path) -> None:
    """The same bars through the session's journal and through a backtest: every statistic of every day agrees."""
    cli("live", run)
    opened = open_run(run)
    live = journalled(run, "shadow", opened.agent, opened.part("test"))
    expected = expectation(opened.agent, opened.part("test"), GuardConfig(), 32)
    np.testing.assert_array_equal(live.complete_days, expected.bars.complete_days)
    assert len(live.complete_days) >= 18
    ours, theirs = live.by_day(), expected.bars.by_day()
    assert np.abs(ours["turnover"]).min() > 0
    for name in ours:
        if name != "slippage":
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(live.windows(32), expected.windows, rtol=1e-9)
    result = tg.backtest(opened.agent, opened.part("test"), progress_bar=False)
    day = int(live.complete_days[3])
    rows = (result.time >= day) & (result.time < day + DAY)
    assert ours["return"][3] == pytest.approx(np.prod(1 + result.net[rows]) - 1, rel=1e-9)
    slip = sum(result.costs[kind][rows].sum() for kind in ("spread", "impact"))
    assert theirs["slippage"][3] == pytest.approx(slip / result.turnover[rows].sum(), rel=1e-9)
    windows = np.prod(1 + result.net[: len(result.net) // 32 * 32].reshape(-1, 32), axis=1) - 1
    np.testing.assert_allclose(expected.windows, windows, rtol=1e-9)


def test_slippage_of_a_paper_session_is_the_simulators(run: Path) -> None:
    """The venue fills at the simulator's prices: Σ (spread + impact) over Σ turnover, day by day."""
    cli("live", run, "--mode", "paper", "--guard", "slippage=0.1")
    opened = open_run(run)
    live = journalled(run, "paper", opened.agent, opened.part("test"))
    expected = expectation(opened.agent, opened.part("test"), GuardConfig(), 32)
    ours, theirs = live.by_day()["slippage"], expected.bars.by_day()["slippage"]
    assert np.all(ours > 0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)  # money at the open here, shares of the equity before it there


def make_days(count: int, seed: int, *, scale: float = 1.0, shift: float = 0.0, first: int = 0) -> TradedBars:
    """Days of 24 hourly bars with independent numbers."""
    draw, rows = np.random.default_rng(seed), 24 * count
    return TradedBars(
        first + HOUR * np.arange(rows, dtype=np.int64),
        scale * 0.01 * draw.standard_t(5, rows),
        draw.uniform(0.1, 0.3, rows),
        draw.uniform(0.4, 0.6, rows),
        0.0002 * draw.uniform(0.5, 1.5, rows),
        np.ones(rows),
        draw.normal(shift, 1, (rows, 3)),
        ("a", "b", "c"),
        HOUR,
    )


def content_of(live: TradedBars, reference: TradedBars, row: int = -1) -> dict:
    expected = Expectation(reference, reference.windows(24), 0.1, -0.05)
    return daily_content(int(live.complete_days[row]), live, expected, 24)


def test_numbers_of_a_report_by_hand() -> None:
    reference, live = make_days(200, 0), make_days(8, 1, first=1_000 * DAY)
    content = content_of(live, reference)
    assert content["days"] == content["span"] == 8
    row = {each["name"]: each for each in content["rows"]}["return"]
    daily = np.prod(1 + reference.net.reshape(-1, 24), axis=1) - 1
    today = np.prod(1 + live.net[-24:]) - 1
    assert row["value"] == pytest.approx(today)
    assert row["below"] == pytest.approx((daily < today).mean())
    assert (row["low"], row["high"]) == pytest.approx(tuple(np.quantile(daily, [0.05, 0.95])))
    import scipy.stats

    assert row["probability"] == pytest.approx(scipy.stats.ttest_ind([today], daily).pvalue)
    recent = (np.prod(1 + live.net.reshape(-1, 24), axis=1) - 1).mean()
    assert row["recent_probability"] == pytest.approx(
        scipy.stats.ttest_ind([recent], daily.reshape(25, 8).mean(1)).pvalue
    )
    checks = {each["name"]: each for each in content["checks"]}
    assert set(checks) == {"return", "turnover", "exposure", "slippage", "cvar", "drift"}
    assert checks["return"]["probability"] == pytest.approx(
        min(1, 2 * min(row["probability"], row["recent_probability"]))
    )
    adjusted = holm([each["probability"] for each in content["checks"]])
    assert [each["adjusted"] for each in content["checks"]] == pytest.approx(adjusted)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda bars: replace(bars, slipped=3 * bars.slipped), "slippage"),
        (lambda bars: replace(bars, turnover=1.5 * bars.turnover), "turnover"),
        (lambda bars: replace(bars, exposure=bars.exposure + 0.2), "exposure"),
        (lambda bars: replace(bars, features=bars.features + np.array([0.0, 1.5, 0.0])), "drift"),
        (lambda bars: replace(bars, net=bars.net - 0.01), "return"),
    ],
)
def test_what_changed_is_named_and_nothing_else(change, name: str) -> None:
    reference, live = make_days(200, 0), make_days(8, 1, first=1_000 * DAY)
    assert content_of(live, reference)["outside"] == []
    found = content_of(change(live), reference)["outside"]
    assert name in found
    assert set(found) <= {name, *(["cvar"] if name == "return" else [])}
    if name == "drift":
        assert content_of(change(live), reference)["features"][0]["name"] == "feature:b"


def test_reports_of_alike_days_find_something_as_rarely_as_they_say(monkeypatch) -> None:
    """150 sessions of five days beside 100 of the same kind, at a level of 10 %: at most 10 %, and 4 sd of chance."""
    monkeypatch.setattr("tailguard.live.day_tests.PERMUTATIONS", 199)
    monkeypatch.setattr("tailguard.live.daily_report.LEVEL", 0.1)
    found = [
        bool(content_of(make_days(5, 2 * seed, first=1_000 * DAY), make_days(100, 2 * seed + 1))["outside"])
        for seed in range(150)
    ]
    assert np.mean(found) < 0.1 + 4 * np.sqrt(0.1 * 0.9 / 150)


def test_reports_are_written_once_for_every_complete_day(run: Path, tmp_path: Path) -> None:
    cli("live", run, "--data", later_bars(tmp_path))
    before = (run / "live" / "shadow" / "journal.jsonl").read_bytes()
    shown = cli("live", run, "--report")
    folder = run / "live" / "shadow" / "daily"
    days = sorted(path.stem for path in folder.glob("*.json"))
    decided = [
        record["bar"]
        for record in read_records(run / "live" / "shadow" / "journal.jsonl")
        if record["kind"] == "decision"
    ]
    traded = np.array(decided[1:]) // DAY
    expected = [day for day, count in zip(*np.unique(traded, return_counts=True), strict=True) if count == 24]
    assert days == [datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d") for day in expected]
    assert len(days) >= 3
    assert shown.count("report ") == len(days)
    assert cli("live", run, "--report") == ""
    assert (run / "live" / "shadow" / "journal.jsonl").read_bytes() == before
    content = json.loads((folder / f"{days[-1]}.json").read_text())
    assert content["days"] == len(days)
    assert not content["same_bars"]
    text = (folder / f"{days[-1]}.md").read_text()
    value = next(row["value"] for row in content["rows"] if row["name"] == "return")
    assert f"| return | {100 * value:.3f} % |" in text
    assert "slippage" in text.split("Nothing can be said yet of:")[1].split(".")[0]  # a shadow session has no fills


def test_a_session_that_takes_its_time_has_the_report_of_a_day_when_the_next_begins(
    run: Path, tmp_path: Path, monkeypatch
) -> None:
    """Another process writes it, without the keys of this one; the journal is that of a session without reports."""
    monkeypatch.setenv("EXCHANGE_SECRET", "hidden-123456")
    started: list[dict] = []
    start = subprocess.Popen

    def seen(*arguments, **settings):
        started.append(settings["env"])
        return start(*arguments, **settings)

    monkeypatch.setattr("tailguard.live.day_end.subprocess.Popen", seen)
    cli("live", run, "--data", later_bars(tmp_path), "--seconds", 0.001)
    folder, end = run / "live" / "shadow" / "daily", time.monotonic() + 240
    while not list(folder.glob("*.json")):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert started
    assert all("EXCHANGE_SECRET" not in environment for environment in started)
    kinds = {record["kind"] for record in read_records(run / "live" / "shadow" / "journal.jsonl")}
    assert kinds == {"start", "bar", "decision", "explanation", "stop"}


def test_a_replay_of_the_expectations_own_bars_says_so(run: Path) -> None:
    cli("live", run)
    cli("live", run, "--report")
    path = sorted((run / "live" / "shadow" / "daily").glob("*.md"))[-1]
    assert "These bars are in the backtest itself" in path.read_text()


def test_a_line_that_is_being_written_is_left_out(run: Path, tmp_path: Path) -> None:
    cli("live", run, "--data", later_bars(tmp_path))
    with (run / "live" / "shadow" / "journal.jsonl").open("ab") as file:
        file.write(b'{"kind":"deci')
    assert "report " in cli("live", run, "--report")


def test_the_events_of_a_day_are_those_between_its_midnights(run: Path, tmp_path: Path) -> None:
    cli("live", run, "--data", later_bars(tmp_path), "--guard", "jump=0.001")
    cli("live", run, "--report")
    records = list(read_records(run / "live" / "shadow" / "journal.jsonl"))
    kinds = [record for record in records if record["kind"] == "freeze"]
    assert len(kinds) == 1
    listed = [json.loads(path.read_text()) for path in (run / "live" / "shadow" / "daily").glob("*.json")]
    day = datetime.fromtimestamp(kinds[0]["time"] / 1000, UTC).strftime("%Y-%m-%d")
    for content in listed:
        assert [each["message"] for each in content["events"]] == [kinds[0]["message"]] * (content["day"] == day)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_a_report_in_a_browser(tmp_path: Path, browser, width: int, dark: bool) -> None:
    reference, live = make_days(200, 0), make_days(8, 1, first=1_000 * DAY)
    live = replace(live, slipped=3 * live.slipped)
    event = {"time": "13:00:00", "kind": "freeze", "guard": "jump", "message": "<img src=x onerror=alert(1)> | moved"}
    content = content_of(live, reference) | {"run": "demo:paper", "mode": "paper", "events": [event]}
    path = tmp_path / "report.html"
    path.write_text(as_html(content))
    with browser(width, 900, dark) as window:
        window.show(path)
        assert window.run("return document.documentElement.scrollWidth") <= width
        assert window.run("return document.querySelectorAll('table').length") == 2
        assert window.run("return document.querySelectorAll('img').length") == 0
        assert window.log("browser") == []
        assert [url for url in window.requests() if not url.startswith("data:")] == []
        text = window.run("return document.body.innerText")
        window.screenshot(tmp_path / "report.png", whole=True)
    assert event["message"] in text
    assert "Outside what the backtest led to expect: slippage." in text
    assert "\\<img src=x onerror=alert(1)\\> \\| moved" in as_markdown(content)
