"""Checks of a run, on a small one that was really trained: they pass, and notice what is wrong with another."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tailguard.audit.auditor import AuditResult
from tailguard.audit.evidence_of_run import equal_parts, knowledge_of_order, permuted
from tailguard.audit.in_force import small_run
from tailguard.audit.subject import Subject
from tailguard.data.synthetic import make_market
from tailguard.experiment.trained_run import open_run
from tailguard.runs.runner import train

Answer = Callable[..., AuditResult]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two members, on bars with a signal."""
    place = tmp_path_factory.mktemp("audited") / "run"
    settings = ("training.members=2", "training.select=ensemble", "training.checkpoint_steps=256")
    train(small_run(Subject(), *settings), place, Console(file=io.StringIO()))
    return place


@pytest.mark.parametrize("name", ["C9", "T7", "T8", "U1", "U2", "U3", "U4", "E2"])
def test_a_run_as_it_was_trained_passes(folder: Path, answer: Answer, name: str) -> None:
    found = answer(name, Subject.of_run(open_run(folder)))
    assert found.verdict == "ok", found.measurement


def test_a_record_that_another_training_wrote_is_noticed(folder: Path, answer: Answer) -> None:
    path = folder / "members" / "0" / "metrics.jsonl"
    before = path.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    changed = [
        {name: value if "time/" in name or value is None else 1.02 * value for name, value in line.items()}
        for line in lines
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    try:
        found = answer("E2", Subject.of_run(open_run(folder)))
    finally:
        path.write_text(before)
    assert found.verdict == "fail", found.measurement
    assert found.measurement.number == pytest.approx(1 - 1 / 1.02, rel=0.05)


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
