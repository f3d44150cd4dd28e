"""What a report shows is what the backtests and the run's files say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.report.collect import (
    Evidence,
    alarms_in,
    collect,
    read_figures,
    training_folders,
    work_ahead,
)
from tailguard.evaluate.standing import standing
from tailguard.evaluate.stress import scaled_costs


def test_every_result_is_an_ordinary_backtest_of_the_test_part(evidence: Evidence, trained) -> None:
    test, agent = trained.split.test, trained.agent
    np.testing.assert_array_equal(evidence.agent.equity, tg.backtest(agent, test).equity)
    stress = dict(evidence.stress)
    assert list(stress)[:4] == ["costs ×0", "costs ×1, as assumed", "costs ×2", "costs ×3"]
    doubled = tg.backtest(agent, test, scaled_costs(trained.config.market, 2))
    np.testing.assert_array_equal(stress["costs ×2"].equity, doubled.equity)
    np.testing.assert_array_equal(evidence.validation.equity, tg.backtest(agent, trained.split.validation).equity)
    closes = test.frame["close"].to_numpy()[-len(evidence.prices) :]
    np.testing.assert_array_equal(evidence.prices[:, 0], closes)
    assert evidence.budget is not None
    assert evidence.budget.horizon == 24
    mine, best = np.log(evidence.agent.equity[-1]), np.log(evidence.results["planted optimum"].equity[-1])
    assert evidence.captured == pytest.approx(mine / best)


def test_progress_counts_every_backtest_and_the_seed_decides_everything(evidence: Evidence, trained) -> None:
    begun: list[str] = []
    again = collect(trained, before_each=begun.append)
    assert len(begun) == work_ahead(trained)
    assert begun[0] == "agent"
    assert again.sharpes["agent"] == evidence.sharpes["agent"]
    assert again.beaten["random timing"] == evidence.beaten["random timing"]
    assert again.budget is None
    begun.clear()
    known = standing(again.results)
    taken = collect(trained, known=known, before_each=begun.append)
    assert len(begun) == work_ahead(trained, known)
    assert taken.sharpes["agent"] == evidence.sharpes["agent"]


def test_facts_are_those_of_the_manifest(evidence: Evidence, run_folder: Path) -> None:
    manifest = json.loads((run_folder / "agent" / "manifest.json").read_text())
    weights = manifest["files"]["weights.safetensors"]["sha256"]
    assert evidence.facts["SHA-256 of agent/weights.safetensors"] == weights
    assert "torch" in evidence.facts["trained with"]
    assert len(evidence.facts["SHA-256 of the training bars"]) == 64


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
    (line,) = read_figures(path)
    assert line["a"] == 1
    assert np.isnan(line["b"])
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(ConfigError, match="line 1 is not a line of metrics"):
        read_figures(path)
    assert read_figures(tmp_path / "none.jsonl") == ()


def test_a_run_of_several_members_shows_the_alarms_of_all_of_them(tmp_path: Path) -> None:
    quiet = ({"time/total_timesteps": 10.0, "warn/lstm_dead": 0.0},)
    late = (*quiet, {"time/total_timesteps": 20.0, "warn/lstm_dead": 2.0})
    (alarm,) = alarms_in(quiet, late, late)
    assert (alarm.name, alarm.step, alarm.count) == ("lstm_dead", 20, 4)
    for name in ("10", "2", "notes"):
        (tmp_path / "members" / name).mkdir(parents=True)
    assert [path.name for path in training_folders(tmp_path)] == ["2", "10"]
    assert training_folders(tmp_path / "elsewhere") == [tmp_path / "elsewhere"]
