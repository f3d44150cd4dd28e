"""Where an agent stands: the run's own budget is the question, and every policy answers it."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.data.bars import Bars
from tailguard.evaluate.baselines import BuyAndHold, Flat
from tailguard.evaluate.bootstrap import interval, paired_difference, sharpe_statistic
from tailguard.evaluate.budget import Budget
from tailguard.evaluate.summary import EvaluationSummary, summarise


@pytest.fixture(scope="module")
def results(bars: Bars):
    return {"agent": tg.backtest(BuyAndHold(0.5), bars), "flat": tg.backtest(Flat(), bars)}


def test_every_result_has_its_interval_and_answers_the_budget(results) -> None:
    found = summarise(results, Budget(-0.04, horizon="1d"))
    own, statistic = results["agent"], sharpe_statistic(results["agent"].bars_per_year)
    assert found.sharpes["agent"] == interval(own.net, statistic, np.random.default_rng(0))
    assert set(found.beaten) == {"flat"}
    expected = paired_difference(own.net, results["flat"].net, statistic, np.random.default_rng(0))
    assert found.beaten["flat"].estimate == pytest.approx(expected.estimate, nan_ok=True)
    assert found.budgets["flat"].verdict == "kept"
    assert found.budgets["agent"].horizon == 24
    assert isinstance(found, EvaluationSummary)
    assert summarise(results).budgets == {}
