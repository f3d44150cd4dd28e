"""Everything a report shows about a small run."""

from __future__ import annotations

import pytest

from tailguard.evaluate.budget import Budget
from tailguard.evaluate.report.collect import ReportData, collect
from tailguard.experiment.trained_run import TrainedRun


@pytest.fixture(scope="session")
def evidence(trained: TrainedRun) -> ReportData:
    """With a budget of days, which the run itself has not."""
    return collect(trained, budget=Budget(-0.05, horizon="1d"))
