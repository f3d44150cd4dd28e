"""Checks of a run, on a small one that was really trained: they pass, and notice what is wrong with another."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console
from scipy import stats

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.audit.auditor import AuditResult
from tailguard.audit.evidence_of_run import equal_parts, knowledge_of_order, permuted
from tailguard.audit.facts_of_run import student_cvar, student_quantiles
from tailguard.audit.formulas_critics import chain_cvar, chain_quantiles
from tailguard.audit.in_force import small_run
from tailguard.audit.promises_budget import tail_of_run
from tailguard.audit.subject import Subject
from tailguard.data.bars import Bars
from tailguard.data.synthetic import make_market
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import open_run
from tailguard.risk.cvar import cvar_from_quantiles
from tailguard.risk.throttle import Throttle
from tailguard.runs.runner import train

Answer = Callable[..., AuditResult]


@pytest.fixture
def folder(small_folder: Path, tmp_path: Path) -> Path:
    """A copy of the small run, to be changed."""
    return Path(shutil.copytree(small_folder, tmp_path / "run"))


@pytest.mark.parametrize("name", ["C9", "T7", "T8", "U1", "U2", "U3", "U4", "E2", "E3", "E4", "E7"])
def test_a_run_as_it_was_trained_passes(small_folder: Path, answer: Answer, name: str) -> None:
    found = answer(name, Subject.of_run(open_run(small_folder)))
    assert found.verdict == "ok", found.measurement
    assert found.of_run


def rewritten(layout: RunLayout, change: Callable[[str, float, int], float]) -> None:
    """The run's record with each metric replaced: `change` gets its name, its value and its number in the line."""
    lines = [json.loads(line) for line in layout.metrics_path.read_text().splitlines()]
    changed = [
        {name: value if value is None else change(name, value, number) for number, (name, value) in
         enumerate(line.items())} for line in lines
    ]  # fmt: skip
    layout.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def test_a_forged_record_is_noticed_however_few_metrics_are_forged(folder: Path, answer: Answer) -> None:
    layout = open_run(folder).layout.training_folders()[0]
    found = answer("E2", Subject.of_run(open_run(folder)))
    assert found.measurement.number == 0.0

    def forged(name: str, value: float, number: int) -> float:  # noqa: ARG001
        return 5 * value + 3 if name == "pathwise/earned" else value

    rewritten(layout, forged)
    found = answer("E2", Subject.of_run(open_run(folder)))
    assert found.verdict == "fail", found.measurement
    assert "pathwise/earned" in found.measurement.detail


def test_a_record_is_repeated_with_the_threads_of_the_training(small_folder: Path, answer: Answer) -> None:
    threads = []
    iterate = Learner.iterate

    def counted(self: Learner, *given: Any) -> Any:
        threads.append(torch.get_num_threads())
        return iterate(self, *given)

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "iterate", counted)
        found = answer("E2", Subject.of_run(open_run(small_folder)))
    assert found.measurement.number == 0.0
    assert threads == [2]
    assert torch.get_num_threads() == before


def test_an_evaluation_that_is_always_zero_is_noticed(folder: Path, answer: Answer) -> None:
    layout = open_run(folder).layout.training_folders()[1]
    rewritten(layout, lambda name, value, number: 0.0 if name.startswith("eval/") else value)  # noqa: ARG005
    found = answer("E4", Subject.of_run(open_run(folder)))
    assert found.verdict == "fail"
    assert "1: eval/growth is 0.0 in all 8 evaluations" in found.measurement.detail
    assert "in its checkpoint" in found.measurement.detail


def test_bars_that_are_not_those_of_the_training_are_named(small_folder: Path, answer: Answer) -> None:
    run = open_run(small_folder)
    train = run.split.train
    assert isinstance(train, Bars)
    frame = train.frame.with_columns(volume=train.frame["volume"] * 1.0001)
    other = replace(run, split=replace(run.split, train=replace(train, frame=frame)))  # type: ignore[type-var]
    found = answer("E7", Subject.of_run(other))
    assert found.verdict == "fail"
    assert "bars of step" in found.measurement.detail


def test_suspicious_bars_are_counted(small_folder: Path, answer: Answer) -> None:
    run = open_run(small_folder)
    assert answer("E8", Subject.of_run(run)).measurement.number == 0
    bars = run.market.bars
    assert isinstance(bars, Bars)
    row = pl.arange(len(bars))
    # Ten bars that repeat the one before them.
    frozen = [pl.when((row >= 500) & (row < 510)).then(pl.col(name).get(500)).otherwise(pl.col(name)).alias(name)
              for name in ("open", "high", "low", "close", "volume")]  # fmt: skip
    other = replace(run, market=replace(run.market, bars=replace(bars, frame=bars.frame.with_columns(frozen))))
    found = answer("E8", Subject.of_run(other))
    assert (found.verdict, found.measurement.number) == ("info", 1)
    assert "identical bars" in found.measurement.detail


def test_the_error_for_heavy_tails_is_that_of_another_library(small_folder: Path, answer: Answer) -> None:
    levels = (np.arange(32) + 0.5) / 32
    assert student_quantiles(torch.as_tensor(levels)).numpy() == pytest.approx(stats.t(3).ppf(levels), abs=1e-9)
    exact = stats.t(3).expect(lb=-np.inf, ub=stats.t(3).ppf(0.05)) / 0.05
    assert student_cvar(0.05) == pytest.approx(exact, rel=1e-6)
    found = answer("E5", Subject.of_run(open_run(small_folder)))
    estimate = float(cvar_from_quantiles(torch.as_tensor(stats.t(3).ppf(levels)), 0.05))
    assert found.measurement.number == pytest.approx(estimate / exact - 1, abs=1e-6)


def test_the_tail_that_a_low_lambda_learns_is_too_mild() -> None:
    def gap(lam: float) -> float:
        return float(cvar_from_quantiles(chain_quantiles(lam, 0, steps=32, rollout=16), 0.05)) / chain_cvar(32) - 1

    assert abs(gap(1.0)) < 0.03
    assert gap(0.8) < -0.05


@pytest.mark.slow
def test_the_tail_of_a_run_is_judged_with_its_throttle(small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(small_folder)
    assert isinstance(run.agent, Ensemble)
    assert run.synthetic is not None
    # So much exposure that the limit is broken many times over without a throttle.
    monkeypatch.setattr(run.agent, "exposure", 20 * run.agent.exposure)
    found = tail_of_run(run, run.synthetic.signal)
    assert found is not None
    assert found.verdict == "ok", found
    monkeypatch.setattr(Throttle, "observe", lambda self, outcome: None)  # noqa: ARG005
    found = tail_of_run(run, run.synthetic.signal)
    assert found is not None
    assert found.verdict == "fail", found


def test_an_agent_that_no_checkpoint_holds_is_noticed(folder: Path, answer: Answer) -> None:
    run = open_run(folder)
    members = run.agent.members  # type: ignore[union-attr]
    members[1].policy.action_head.linear.bias.data += 1e-3
    found = answer("C9", Subject.of_run(run))
    assert found.verdict == "fail"
    assert "agent 2 is in no checkpoint" in found.measurement.detail


def test_permuted_bars_have_the_same_returns_and_volumes_in_another_order() -> None:
    bars = make_market(400, seed=1, assets=2).bars
    bars = replace(bars, first=bars.frame["time"][100])
    other = permuted(bars, np.random.default_rng(0))
    for symbol in bars.symbols:
        one, two = (each.frame.filter(each.frame["symbol"] == symbol) for each in (bars, other))
        assert one["time"].equals(two["time"])
        assert one["close"][:100].to_list() == pytest.approx(two["close"][:100].to_list())
        returns = [np.diff(np.log(each["close"].to_numpy()[99:])) for each in (one, two)]
        assert not np.allclose(*returns)
        assert np.sort(returns[0]) == pytest.approx(np.sort(returns[1]))
        assert np.sort(one["volume"].to_numpy()) == pytest.approx(np.sort(two["volume"].to_numpy()))
        assert (two["high"] >= two["low"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "signal", "bars", "steps", "units", "features", "learned"),
    [
        (3, 40, 6000, 120_000, 32, "[taker_imbalance_6]", True),
        (4, 0, 1200, 400_000, 64, "[return_1, return_4, return_12, return_24, bollinger_20, trend_24]", False),
    ],
    ids=["a strong signal", "noise, for long"],
)
def test_permuted_bars_tell_memorised_from_learned(
    tmp_path: Path, seed: int, signal: int, bars: int, steps: int, units: int, features: str, learned: bool
) -> None:
    changes = (
        f"data.synthetic_signal={signal}", f"data.synthetic_bars={bars}", f"data.features={features}",
        f"training.total_timesteps={steps}", "env.num_envs=64", f"pathwise.network.hidden=[{units}]",
        f"pathwise.network.lstm_size={units}", "market.fee=0", "market.half_spread=0", "data.validation=0.2",
        "data.test=0.3", "training.select=last",
    )  # fmt: skip
    train(small_run(Subject(seed=seed), *changes), tmp_path / "run", Console(file=io.StringIO()))
    subject = Subject.of_run(open_run(tmp_path / "run"))
    known = {name: knowledge_of_order(subject.trained.agent, part, 0) for name, part in equal_parts(subject).items()}
    assert known["train"] > 8
    assert known["test"] > 8 if learned else known["test"] < 4


def test_the_agent_on_permuted_bars_is_for_information(folder: Path, answer: Answer) -> None:
    found = answer("E1", Subject.of_run(open_run(folder)))
    assert found.verdict == "info", found.measurement
    assert np.isfinite(found.measurement.number)
