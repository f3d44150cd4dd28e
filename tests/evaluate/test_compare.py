"""Runs side by side: paired where they met the same bars, honest where they did not."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tailguard.errors import ConfigError
from tailguard.evaluate.bootstrap import paired_difference, sharpe_statistic
from tailguard.evaluate.compare import Comparison, compare_runs, comparison_page, print_comparison
from tailguard.evaluate.significance import backtest_overfitting


@pytest.fixture(scope="module")
def comparison(run_folder: Path, other_folder: Path, other_market: Path) -> Comparison:
    begun: list[str] = []
    found = compare_runs([run_folder, other_folder, other_market], before_each=begun.append)
    assert begun == [run_folder.name, other_folder.name, other_market.name]
    return found


@pytest.fixture(scope="module")
def other_market(tmp_path_factory: pytest.TempPathFactory, train_small) -> Path:
    """Another seed, which also makes another market."""
    return train_small(tmp_path_factory.mktemp("runs") / "market", "training.seed=5")


def test_runs_on_the_same_bars_are_paired_and_others_are_not(comparison: Comparison) -> None:
    first, second, third = comparison.entries
    assert first.ahead is None
    assert third.ahead is None
    statistic = sharpe_statistic(first.result.bars_per_year)
    expected = paired_difference(second.result.net, first.result.net, statistic, np.random.default_rng(0))
    assert second.ahead is not None
    assert second.ahead.estimate == pytest.approx(expected.estimate)
    assert second.ahead.low == pytest.approx(expected.low, abs=1.0 + abs(expected.low))
    assert "other bars than the first" in comparison.notes()[0]


def test_the_settings_that_differ_are_shown_and_no_others(comparison: Comparison) -> None:
    assert comparison.differing == {"ppo.gamma": ("0.95", "0.9", "0.95"), "training.seed": ("0", "0", "5")}
    assert comparison.seeds is None
    assert "corrects for all trials on its bars" in comparison.notes()[1]


def test_seeds_alone_give_an_interquartile_mean(run_folder: Path, other_market: Path) -> None:
    found = compare_runs([run_folder, other_market])
    assert found.seeds is not None
    assert found.seeds.iqm == pytest.approx(np.mean([entry.sharpe.estimate for entry in found.entries]))
    assert "fewer than five seeds" in found.notes()[1]


def test_choosing_the_best_of_runs_on_the_same_bars_is_judged(
    run_folder: Path, other_folder: Path, comparison: Comparison
) -> None:
    found = compare_runs([run_folder, other_folder])
    returns = np.stack([entry.result.net for entry in found.entries], axis=1)
    assert found.overfitting is not None
    assert found.overfitting.probability == backtest_overfitting(returns).probability
    assert found.notes()[-1].startswith(
        f"Probability of backtest overfitting: {100 * found.overfitting.probability:.0f}"
    )
    assert comparison.overfitting is None  # one of the three met other bars


def test_the_terminal_shows_every_run_with_its_interval(comparison: Comparison) -> None:
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=200))
    lines = {line[:22].strip(): line[22:] for line in text.getvalue().splitlines()}
    assert lines["test, net of costs"].split() == [entry.name for entry in comparison.entries]
    for entry in comparison.entries:
        assert f"{entry.sharpe.estimate:.2f} [{entry.sharpe.low:.2f}" in lines["Sharpe [95 % interval]"]
    assert ["training.seed", "0", "0", "5"] in [line.split() for line in text.getvalue().splitlines()]


def test_the_page_lays_the_curves_over_each_other(comparison: Comparison, tmp_path: Path, browser) -> None:
    path = tmp_path / "compare.html"
    path.write_text(comparison_page(comparison), encoding="utf-8")
    with browser(390, 900) as window:
        window.open(path)
        assert window.log("browser") == []
        assert window.run("return document.querySelectorAll('.legend .traces').length") == 3


def test_one_run_alone_is_refused(run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least two runs"):
        compare_runs([run_folder])
