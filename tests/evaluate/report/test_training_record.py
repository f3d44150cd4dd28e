"""Metrics and alarms of a training, as its files tell them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tailguard.errors import ConfigError
from tailguard.evaluate.report.training_record import alarms_in, read_metrics


def test_alarms_are_read_from_their_counts() -> None:
    lines = [
        {"time/total_timesteps": 100.0, "warn/lstm_dead": 0.0, "warn/never_trades": 1.0},
        {"time/total_timesteps": 200.0, "warn/lstm_dead": 3.0, "warn/never_trades": 1.0},
        {"time/total_timesteps": 300.0, "warn/lstm_dead": 4.0, "warn/never_trades": 1.0},
    ]
    found = alarms_in(tuple(lines))
    assert [(alarm.name, alarm.step, alarm.count) for alarm in found] == [
        ("never_trades", 100, 1),
        ("lstm_dead", 200, 4),
    ]
    assert "learning_rate" in found[1].usually


def test_a_line_cut_short_by_a_kill_is_left_out_and_any_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1, "b": null}\n{"a": 2')
    (line,) = read_metrics(path)
    assert line["a"] == 1
    assert np.isnan(line["b"])
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(ConfigError, match="line 1 is not a line of metrics"):
        read_metrics(path)
    assert read_metrics(tmp_path / "none.jsonl") == ()


def test_a_run_of_several_members_shows_the_alarms_of_all_of_them() -> None:
    quiet = ({"time/total_timesteps": 10.0, "warn/lstm_dead": 0.0},)
    late = (*quiet, {"time/total_timesteps": 20.0, "warn/lstm_dead": 2.0})
    (alarm,) = alarms_in(quiet, late, late)
    assert (alarm.name, alarm.step, alarm.count) == ("lstm_dead", 20, 4)
