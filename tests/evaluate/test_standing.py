"""Where an agent stands: the run's own budget is the question, and every policy answers it."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.evaluate.baselines import BuyAndHold, Flat
from tailguard.evaluate.bootstrap import interval, paired_difference, sharpe_statistic
from tailguard.evaluate.standing import Budget, Standing, judge_budget, own_budget, standing


@pytest.fixture(scope="module")
def results(bars: Bars):
    return {"agent": tg.backtest(BuyAndHold(0.5), bars), "flat": tg.backtest(Flat(), bars)}


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("episode", Budget(-0.1, 0.2, 256, "return")),
        ("drawdown", Budget(-0.1, 0.2, 256, "drawdown")),
        ("bar", Budget(-0.1, 0.2, 1, "return")),
    ],
)
def test_the_budget_of_a_run_is_judged_in_its_own_units(measure: str, expected: Budget) -> None:
    settings = ["risk.limit=-0.1", "risk.alpha=0.2", f"risk.measure={measure}"]
    assert own_budget(load_config(overrides=settings)) == expected
    assert own_budget(load_config(overrides=["risk.penalty=0.5"])) is None


def test_every_result_has_its_interval_and_answers_the_budget(results) -> None:
    found = standing(results, Budget(-0.04, horizon="1d"))
    own, statistic = results["agent"], sharpe_statistic(results["agent"].bars_per_year)
    assert found.sharpes["agent"] == interval(own.net, statistic, np.random.default_rng(0))
    assert set(found.beaten) == {"flat"}
    expected = paired_difference(own.net, results["flat"].net, statistic, np.random.default_rng(0))
    assert found.beaten["flat"].estimate == pytest.approx(expected.estimate, nan_ok=True)
    assert found.budgets["flat"].verdict == "kept"
    assert found.budgets["agent"].horizon == 24
    assert isinstance(found, Standing)
    assert standing(results).budgets == {}


def test_a_record_with_too_few_windows_is_not_judged(results) -> None:
    assert judge_budget(results["agent"], Budget(-0.04, horizon="60d")) is None
    assert judge_budget(results["agent"], Budget(-0.04, horizon=1)) is not None
