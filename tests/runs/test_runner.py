"""A run's verdict says what happened, also when it is bad; the figures go where they should."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.errors import BarsError, ConfigError
from tailguard.evaluate.baselines import AGENT, OPTIMUM, RANDOM, BuyAndHold
from tailguard.evaluate.budget import Budget
from tailguard.evaluate.formatting import growth, percent
from tailguard.evaluate.results_table import budget_cell, print_summary, summary_columns
from tailguard.evaluate.summary import summarise
from tailguard.runs.outcome import RunResult, outcome_in_words
from tailguard.runs.runner import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_config) -> tuple[RunResult, str]:
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115 (lives as long as the console)
    config = small_config("training.total_timesteps=256")
    result = train(config, tmp_path_factory.mktemp("runs") / "small", console)
    return result, console.export_text()


def test_a_run_leaves_its_agent_config_and_figures(finished) -> None:
    result, _ = finished
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["time/total_timesteps"] for line in lines] == [128, 256]
    assert lines[0]["rollout/ep_rew_mean"] is not None or lines[1]["rollout/ep_rew_mean"] is not None
    assert list((result.folder / "tensorboard").iterdir())
    loaded = tg.DistributionalPPO.load(result.folder / AGENT)
    for mine, theirs in zip(result.agent.policy.parameters(), loaded.policy.parameters(), strict=True):
        np.testing.assert_array_equal(mine.detach().numpy(), theirs.detach().numpy())


def test_the_agent_stands_beside_the_baselines_and_the_planted_optimum(finished) -> None:
    result, text = finished
    for name in (AGENT, OPTIMUM, "buy & hold", "moving-average cross", "volatility target", RANDOM, "flat"):
        assert name in result.results
        assert name in text
    lengths = {len(found.net) for found in result.results.values()}
    assert len(lengths) == 1  # all on the same bars
    mine, best = (math.log(result.results[name].equity[-1]) for name in (AGENT, OPTIMUM))
    assert result.captured == pytest.approx(mine / best)


def test_the_verdict_does_not_flatter(bars, finished) -> None:
    result, _ = finished
    losing = tg.backtest(np.where(np.arange(len(bars)) % 2, 1.0, -1.0)[:, None], bars)  # pays costs at every bar
    held = tg.backtest(BuyAndHold(), bars)
    words = outcome_in_words(RunResult(result.folder, result.agent, summarise({AGENT: losing, "buy & hold": held})))
    assert "lost" in words
    assert "do not trade it" in words
    assert "worse than buy & hold" in words
    assert "planted" not in words
    # A smaller loss than the market's is better, and still a loss.
    small = outcome_in_words(RunResult(result.folder, result.agent, summarise({AGENT: held, "buy & hold": losing})))
    assert "better than buy & hold" in small


def test_the_verdict_says_on_which_side_of_buy_and_hold_the_agent_is(bars, finished) -> None:
    """The sign of the difference and the p-value of that side: 0.9 for being ahead is 0.1 for being behind."""
    result, _ = finished
    held = tg.backtest(BuyAndHold(), bars)
    found = summarise({AGENT: tg.backtest(BuyAndHold(0.5), bars), "buy & hold": held})
    for estimate, p_value, words in (
        (
            -0.8,
            0.9,
            "Its Sharpe ratio is 0.80 below that of buy & hold, which is within noise (p = 0.1)",
        ),
        (-0.8, 0.999, "Its Sharpe ratio is 0.80 below that of buy & hold (p = 0.0015)"),
        (0.8, 0.03, "Its Sharpe ratio is 0.80 above that of buy & hold (p = 0.03)"),
        (0.8, 0.3, "Its Sharpe ratio is 0.80 above that of buy & hold, which is within noise (p = 0.3)"),
    ):
        told = replace(found.beaten["buy & hold"], estimate=estimate, p_value=p_value, resamples=2_000)
        said = outcome_in_words(RunResult(result.folder, result.agent, replace(found, beaten={"buy & hold": told})))
        assert words in said
        assert "ahead" not in said


def test_a_short_record_is_not_annualised(bars, finished) -> None:
    """1,199 hours are 50 days."""
    result, _ = finished
    held = tg.backtest(BuyAndHold(), bars)
    found = summarise({AGENT: held, "buy & hold": held})
    total = percent(held.metrics["total_return"])
    assert f"{total} in 50 days net of costs" in outcome_in_words(RunResult(result.folder, result.agent, found))
    columns = summary_columns(found)
    assert columns["growth/50d"][AGENT] == total
    assert "growth/yr" not in columns
    # 50 days have 7.1 weeks, and 0.36 of the worst 5 %.
    assert columns["CVaR 5 %/wk"][AGENT] == "too short"
    year = replace(held, bars_per_year=float(len(held.net)))
    assert summary_columns(summarise({AGENT: year}))["growth/yr"][AGENT] == total


def test_notes_stand_below_the_table(bars) -> None:
    result = tg.backtest(BuyAndHold(), bars)
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(summarise({AGENT: result}, notes=["mind [this]"]), "test", console)
    assert console.export_text().splitlines()[-1] == "note     mind [this]"


def test_a_folder_that_cannot_be_written_is_an_error_before_any_work(tmp_path: Path, small_config, quiet) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write there"):
        train(small_config(), tmp_path / "file" / "run", quiet)
    (tmp_path / "notes").write_text("mine")
    for anew in (False, True):
        with pytest.raises(ConfigError, match="exists already and holds no run"):
            train(small_config(), tmp_path, quiet, replace=anew)
    assert (tmp_path / "notes").read_text() == "mine"


def test_settings_that_cannot_be_used_do_not_claim_the_name(tmp_path: Path, small_config, quiet) -> None:
    short = "training.total_timesteps=128"
    with pytest.raises(BarsError, match="nowhere"):
        train(small_config(short, "data.path=nowhere.parquet"), tmp_path / "run", quiet)
    train(small_config(short), tmp_path / "run", quiet)
    with pytest.raises(BarsError, match="nowhere"):
        train(small_config(short, "data.path=nowhere.parquet"), tmp_path / "run", quiet, replace=True)
    assert (tmp_path / "run" / "agent").is_dir()  # the earlier run is still there


def test_numbers_as_people_write_them() -> None:
    assert percent(0.1234) == "+12.3 %"
    assert percent(-0.5) == "-50.0 %"
    assert percent(0.0) == "0.0 %"
    assert percent(math.nan) == "–"
    assert growth(0.5) == "+50.0 %"
    assert growth(40.2) == "×41.2"


def test_the_table_fits_a_terminal_of_80_columns(bars) -> None:
    result = tg.backtest(BuyAndHold(), bars)
    found = summarise({AGENT: result, "moving-average cross": result}, Budget(-0.04, horizon="3d"))
    for width, shown in ((80, False), (160, True)):
        console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
        print_summary(found, "test, net of costs", console)
        lines = console.export_text().splitlines()
        assert len(lines) == 3
        assert "…" not in "".join(lines)
        assert "CVaR 5 %/3d" in lines[0]
        assert budget_cell(found.budgets[AGENT]) in lines[1]
        assert ("agent ahead" in lines[0]) == shown


def test_a_risk_budget_and_a_shield_go_from_the_settings_into_the_run(tmp_path: Path, small_config, capsys) -> None:
    """Priced, shielded, said in words, and with the table of all figures if asked for."""
    config = small_config(
        "risk.limit=-0.001",
        "risk.alpha=0.5",
        "risk.confidence=0",
        "env.shield_shock=0.5",
        "training.members=1",
        "training.total_timesteps=1280",
    )
    console = Console(record=True, width=200)
    result = train(config, tmp_path / "run", console, verbose=True)
    assert "budget: the worst 50 % of 32-bar episodes lose ≤ 0.1 % on average" in console.export_text()
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["risk/limit"] == -0.001
    assert lines[-1]["risk/lambda"] > 0
    assert lines[-1]["data/shielded"] > 0
    assert result.results[AGENT].shielded.any()
    (member,) = Ensemble.load(result.folder / AGENT).members
    assert member.risk is not None
    assert "cvar_realised" in capsys.readouterr().out
