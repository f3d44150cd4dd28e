"""Checks that look at a run: its own agent decides in a session as in its backtest, at its calibrated exposure."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
from rich.console import Console

from tailguard.algorithm.ensemble import Ensemble
from tailguard.audit.auditor import AuditResult
from tailguard.audit.subject import Subject
from tailguard.config import load_config
from tailguard.experiment.trained_run import TrainedRun, open_run
from tailguard.live.decide import LiveDecider
from tailguard.runs.runner import train

SMALL = (
    "data.synthetic_bars=2500", "data.features=[return_24, taker_imbalance_6]", "data.embargo=1d", "env.num_envs=8",
    "env.episode_length=32", "pathwise.n_steps=16", "pathwise.network.hidden=[8]", "pathwise.network.lstm_size=8",
    "training.total_timesteps=256", "training.threads=1", "training.members=1", "risk.limit=-0.03",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("audited") / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        train(load_config(overrides=SMALL), folder, Console(quiet=True))
    return open_run(folder)


@pytest.mark.slow
def test_the_runs_own_agent_decides_as_in_its_backtest(run: TrainedRun, answer: Callable[..., AuditResult]) -> None:
    found = answer("P7", Subject.of_run(run))
    assert found.verdict == "ok", found.measurement


def test_an_exposure_that_is_not_the_calibrated_one_is_found(
    run: TrainedRun, answer: Callable[..., AuditResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(run.agent, Ensemble)
    monkeypatch.setattr(run.agent, "exposure", run.agent.exposure + 0.25)
    found = answer("P7", Subject.of_run(run))
    assert found.verdict == "fail"
    assert "exposure in force" in found.measurement.measured
    assert found.measurement.number == pytest.approx(0.25)


@pytest.mark.slow
def test_a_session_that_decides_otherwise_is_found_on_the_runs_own_agent(
    run: TrainedRun, answer: Callable[..., AuditResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = LiveDecider.decide

    def doubled(self: LiveDecider, account: object) -> object:
        decision = decide(self, account)  # type: ignore[arg-type]
        if self.agent is run.agent:
            decision.target[0] += 0.01
        return decision

    monkeypatch.setattr(LiveDecider, "decide", doubled)
    found = answer("P7", Subject.of_run(run))
    assert found.verdict == "fail"
    assert "this run's agent" in found.measurement.measured
