"""The report of a UTC day of a session, beside what the backtest led to expect.

The expectation is the backtest of the agent on the run's test part, which neither training nor calibration has seen.
A day is compared with its days, all days so far with its stretches of as many days, and the finished windows of the
budget with its windows. The claim is always that live and backtest come from one distribution.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailguard.envs.spec import task_for
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.metrics import cvar
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import open_run
from tailguard.live.bar_history import BarHistory, LiveBar
from tailguard.live.daily_page import as_html, as_markdown
from tailguard.live.day_tests import block_means, cvar_probability, holm, lower_share, prediction_probability
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import read_records
from tailguard.live.opening import Mode, guard_config, read_lead_in
from tailguard.live.session_state import DAY_MS
from tailguard.live.traded_bars import ACCOUNT, Float, TradedBars, of_backtest, of_journal
from tailguard.places import replace_synced

LEVEL = 0.01
"""Chance of a report that finds something where nothing is."""
BLOCKS = 10
"""Reference stretches that a comparison of several days keeps, at least."""
DRIFTED = 5
"""Features that are shown: those that moved the most."""
EVENTS = ("freeze", "kill", "alarm", "release")


@dataclass(frozen=True)
class Expectation:
    """What the backtest of the test part led to expect."""

    bars: TradedBars
    windows: Float
    """Returns of its windows of the budget."""
    alpha: float
    limit: float
    """The budget; 0 without one."""


def daily_content(day: int, live: TradedBars, expected: Expectation, window: int) -> dict[str, Any]:
    """The comparison of a complete UTC day, which starts at `day`, and of all complete days up to it."""
    until = live.time < day + DAY_MS
    days = live.complete_days
    count = int((days <= day).sum())
    today, lived, reference = live.of_day(day), live.by_day(), expected.bars.by_day()
    span = max(1, min(count, len(reference["return"]) // BLOCKS))
    rows = {name: _row(name, today[name], lived[name][:count], reference[name], span) for name in reference}
    windows = _first(live, until).windows(window)
    tail = _tail(windows, expected)
    features = [rows[name] for name in reference if name.startswith("feature:")]
    checks = {name: _smaller(rows[name]) for name in ACCOUNT}
    checks["cvar"] = tail["probability"]
    # Features are many: together they are one check.
    drift = [each for each in (_smaller(row) for row in features) if each is not None]
    checks["drift"] = min(holm(drift)) if drift else None
    known = {name: value for name, value in checks.items() if value is not None}
    adjusted = dict(zip(known, holm(list(known.values())), strict=True))
    features.sort(key=lambda row: 1.0 if _smaller(row) is None else _smaller(row) or 0.0)
    overlap = bool(np.isin(live.time[until], expected.bars.time).any())
    return {
        "day": datetime.fromtimestamp(day / 1000, UTC).strftime("%Y-%m-%d"),
        "days": count,
        "span": span,
        "reference_days": len(reference["return"]),
        "same_bars": overlap,
        "rows": [rows[name] for name in ACCOUNT],
        "tail": tail,
        "features": features[:DRIFTED],
        "checks": [
            {"name": name, "probability": value, "adjusted": adjusted.get(name)} for name, value in checks.items()
        ],
        "outside": [name for name, value in adjusted.items() if value < LEVEL],
        "level": LEVEL,
    }


def _row(name: str, value: float, lived: Float, reference: Float, span: int) -> dict[str, Any]:
    """A statistic of the day and of the last `span` days beside the backtest's."""
    known = reference[np.isfinite(reference)]
    recent = lived[-span:][np.isfinite(lived[-span:])]
    blocks = block_means(known, span) if len(known) >= span else known[:0]
    is_known = bool(np.isfinite(value)) and len(known) > 0
    return {
        "name": name,
        "value": value if np.isfinite(value) else None,
        "mean": float(known.mean()) if len(known) else None,
        "low": float(np.quantile(known, 0.05)) if len(known) else None,
        "high": float(np.quantile(known, 0.95)) if len(known) else None,
        "below": lower_share(value, known) if is_known else None,
        "probability": prediction_probability(value, known) if is_known else None,
        "recent": float(recent.mean()) if len(recent) else None,
        "recent_probability": prediction_probability(float(recent.mean()), blocks)
        if span > 1 and len(recent) == span
        else None,
    }


def _smaller(row: Mapping[str, Any]) -> float | None:
    """The probability of a statistic: of its two, the smaller one, times two."""
    both = [row[name] for name in ("probability", "recent_probability") if row[name] is not None]
    return min(1.0, len(both) * min(both)) if both else None


def _tail(windows: Float, expected: Expectation) -> dict[str, Any]:
    return {
        "alpha": expected.alpha,
        "limit": expected.limit,
        "windows": len(windows),
        "reference_windows": len(expected.windows),
        "value": float(cvar(windows, expected.alpha)) if len(windows) else None,
        "expected": float(cvar(expected.windows, expected.alpha)) if len(expected.windows) else None,
        "probability": cvar_probability(windows, expected.windows, expected.alpha),
    }


def _first(bars: TradedBars, rows: np.ndarray) -> TradedBars:
    columns = ("time", "net", "turnover", "exposure", "slipped", "filled", "features")
    return replace(bars, **{name: getattr(bars, name)[rows] for name in columns})


def write_daily_reports(run: Path, mode: Mode, *, trust_plugins: bool = False) -> list[Path]:
    """Write the reports of all complete UTC days that have none; returns their pages. It reads the journal alone."""
    layout = RunLayout(run)
    path = layout.journal_path(mode)
    if not path.exists():
        raise ConfigError(f"{run}: no session in the mode {mode}: {path} is missing")
    records = list(read_records(path, may_be_torn=True))
    opened = open_run(run, trust_plugins=trust_plugins)
    live = _lived(layout, mode, opened.agent, records)
    missing = [
        int(day)
        for day in live.complete_days
        if not layout.daily_path(mode, _name(int(day))).with_suffix(".json").exists()
    ]
    if not missing:
        return []
    guards = guard_config({}, opened.agent)
    window = int(records[0]["window"])
    expected = expectation(opened.agent, opened.part("test"), guards, window)
    written = []
    for day in missing:
        content = daily_content(day, live, expected, window)
        content |= {"run": records[0]["run"], "mode": mode, "events": list(_events(records, day))}
        place = layout.daily_path(mode, content["day"])
        place.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in (
            (".html", as_html(content)),
            (".md", as_markdown(content)),
            # Last: it says that the day is done.
            (".json", json.dumps(content, indent=1, allow_nan=False)),
        ):
            replace_synced(place.with_suffix(suffix), text.encode())
        written.append(place.with_suffix(".html"))
    return written


def expectation(agent: Any, bars: Any, guards: GuardConfig, window: int) -> Expectation:
    """The agent's backtest on bars that neither training nor calibration has seen."""
    result = backtest(agent, bars, progress_bar=False, warn_in_sample=False)
    task, _, panel = task_for(agent.spec, bars, None, torch.float64)
    rows_of = {int(time): row for row, time in enumerate(panel.time)}
    traded = of_backtest(result, rows_of, task.features.double().numpy(), task.feature_names)
    return Expectation(traded, traded.windows(window), guards.cvar_alpha, guards.cvar_limit)


def _lived(layout: RunLayout, mode: str, agent: Any, records: list[dict[str, Any]]) -> TradedBars:
    start = next(record for record in records if record["kind"] == "start")
    history = BarHistory(read_lead_in(layout, mode, start), int(start["first"]))
    bars = history.extend(*(LiveBar.from_dict(record) for record in records if record["kind"] == "bar"))
    task, _, panel = task_for(agent.spec, bars, None, torch.float64)
    rows_of = {int(time): row for row, time in enumerate(panel.time)}
    return of_journal(records, rows_of, task.features.double().numpy(), task.feature_names, panel.frequency_ms)


def _events(records: list[dict[str, Any]], day: int) -> Iterator[dict[str, Any]]:
    for record in records:
        if record["kind"] in EVENTS and day <= record["time"] < day + DAY_MS:
            moment = datetime.fromtimestamp(record["time"] / 1000, UTC).strftime("%H:%M:%S")
            message = str(record.get("message") or record.get("by") or "")
            yield {"time": moment, "kind": record["kind"], "guard": record.get("guard", ""), "message": message}


def _name(day: int) -> str:
    return datetime.fromtimestamp(day / 1000, UTC).strftime("%Y-%m-%d")
