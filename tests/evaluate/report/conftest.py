"""Everything a report shows about a small run."""

from __future__ import annotations

import pytest

from tailguard.evaluate.report.collect import Evidence, collect
from tailguard.evaluate.standing import Budget
from tailguard.evaluate.trained import TrainedRun


@pytest.fixture(scope="session")
def evidence(trained: TrainedRun) -> Evidence:
    """With a budget of days, which the run itself has not."""
    return collect(trained, budget=Budget(-0.05, horizon="1d"))
