"""A walk forward to read: the figures of the folds are those of their own accounts."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

import tailguard as tg
from tailguard.config import load_config
from tailguard.evaluate.formatting import percent
from tailguard.evaluate.report.walk_forward_page import fold_gains, fold_rows, print_walk_forward, walk_forward_page
from tailguard.evaluate.walk_forward_results import WalkForwardPlan, WalkForwardResults
from tailguard.runs.walk_forward import run_walk_forward

SETTINGS = (
    "data.features=[return_24]",
    "data.embargo=1d",
    "env.num_envs=4",
    "env.episode_length=16",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.epochs=1",
    "ppo.network.hidden=[4]",
    "ppo.network.memory=none",
    "training.total_timesteps=64",
    "risk.limit=-0.5",
)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> WalkForwardResults:
    bars = tg.make_market(1_500, seed=4).bars
    folder = tmp_path_factory.mktemp("walk") / "run"
    config, plan = load_config(overrides=list(SETTINGS)), WalkForwardPlan(folds=2, seeds=2, train=900)
    return run_walk_forward(config, bars, folder, plan, Console(quiet=True))


def test_every_fold_is_shown_beside_holding_over_the_same_bars(walked: WalkForwardResults) -> None:
    own, held = fold_gains(walked)
    assert own.shape == (2, 2)
    for place, fold in enumerate(walked.folds):
        result = walked.results[0][place]
        panel = fold.test.panel()
        rows = np.searchsorted(panel.time, result.time)
        price = panel.close[rows[-1], 0] / panel.close[rows[0] - 1, 0] - 1
        # Holding pays funding and, in the first fold, the trade that begins it.
        assert held[place] == pytest.approx(price, abs=0.01)
        cells = fold_rows(walked)[place]
        assert cells[2:5] == tuple(
            percent(float(value)) for value in (np.median(own[:, place]), *np.sort(own[:, place]))
        )


def test_terminal_and_page_tell_the_same(walked: WalkForwardResults) -> None:
    text = io.StringIO()
    print_walk_forward(walked, Console(file=text, width=160))
    page = walk_forward_page(walked, "<b>run", "gamma: 0.99")
    for cell in (cell for row in fold_rows(walked) for cell in row):
        assert cell in text.getvalue()
        assert f"<td>{cell}</td>" in page
    assert "agent, seed 2 of 2" in text.getvalue()
    assert "of 2 folds and did better than buy &amp; hold in" in page
    assert "fewer than five seeds" in page
    assert "Probability of backtest overfitting: " in page
    assert "after 2 trials" in page
    assert "all folds of a seed are one trial" in page
    assert "tail windows without overlap): the " in page
    assert "limit holds" in page
    assert "<b>run" not in page
