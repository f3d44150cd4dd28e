"""What a report shows is what the backtests and the run's files say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tailguard as tg
from tailguard.evaluate.report.collect import ReportData, collect, planned_steps
from tailguard.evaluate.stress import scaled_costs
from tailguard.evaluate.summary import summarise


def test_every_result_is_an_ordinary_backtest_of_the_test_part(evidence: ReportData, trained) -> None:
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


def test_progress_counts_every_backtest_and_the_seed_decides_everything(evidence: ReportData, trained) -> None:
    begun: list[str] = []
    again = collect(trained, before_each=begun.append)
    assert len(begun) == planned_steps(trained)
    assert begun[0] == "agent"
    assert again.sharpes["agent"] == evidence.sharpes["agent"]
    assert again.beaten["random timing"] == evidence.beaten["random timing"]
    assert again.budget is None
    begun.clear()
    known = summarise(again.results)
    taken = collect(trained, known=known, before_each=begun.append)
    assert len(begun) == planned_steps(trained, known)
    assert taken.sharpes["agent"] == evidence.sharpes["agent"]


def test_facts_are_those_of_the_manifest(evidence: ReportData, run_folder: Path) -> None:
    manifest = json.loads((run_folder / "agent" / "manifest.json").read_text())
    weights = manifest["files"]["weights.safetensors"]["sha256"]
    assert evidence.facts["SHA-256 of agent/weights.safetensors"] == weights
    assert "torch" in evidence.facts["trained with"]
    assert len(evidence.facts["SHA-256 of the training bars"]) == 64
