"""The agent and its baselines on the same bars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from tailguard.evaluate.baselines import AGENT, OPTIMUM
from tailguard.evaluate.with_baselines import backtest_run
from tailguard.runs.runner import resume_run


def test_the_results_are_those_that_the_training_showed(run_folder: Path, trained) -> None:
    shown = resume_run(run_folder, Console(quiet=True)).results
    mine = backtest_run(trained, trained.split.test)
    assert list(mine) == list(shown)
    assert list(mine)[:2] == [AGENT, OPTIMUM]
    for name, result in mine.items():
        np.testing.assert_array_equal(result.equity, shown[name].equity, err_msg=name)
