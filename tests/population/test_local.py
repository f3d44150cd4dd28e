"""Whole populations on one machine: several processes as one, resumed as if never stopped, judged on validation."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailguard.config import RunConfig
from tailguard.errors import CheckpointError, ConfigError, RunError
from tailguard.experiment.build import Experiment, build
from tailguard.monitor.health import OWN_RULES, Rule
from tailguard.population import judge
from tailguard.population.evolution import evolve
from tailguard.population.executor import Job
from tailguard.population.lineage import read_lineage
from tailguard.population.local import LocalExecutor
from tailguard.population.options import PopulationSettings
from tailguard.population.shared import put_arrays_back, share, take_arrays_out
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop
from tailguard.runs.validation import Validation

SETTINGS = PopulationSettings(members=4, rounds=4, fraction=0.5)


def lineage_of(workshop: Workshop, space: SearchSpace, folder: Path, processes: int = 1, **options: Any) -> str:
    executor = LocalExecutor(workshop, folder / "members", processes)
    try:
        evolve(executor, space, SETTINGS, 1024, folder / "lineage.jsonl", **options)
    finally:
        executor.close()
    return (folder / "lineage.jsonl").read_text()


@pytest.fixture(scope="module")
def reference(
    workshop: Workshop, two_settings: SearchSpace, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("alone")
    return lineage_of(workshop, two_settings, folder), folder


def test_two_processes_make_the_lineage_of_one_and_share_the_bars(
    workshop: Workshop, two_settings: SearchSpace, tmp_path: Path, reference: tuple[str, Path]
) -> None:
    assert lineage_of(workshop, two_settings, tmp_path, processes=2) == reference[0]
    for member in range(4):
        ours, theirs = (folder / "members" / str(member) / "checkpoints" for folder in (tmp_path, reference[1]))
        assert sorted(path.name for path in ours.iterdir()) == ["step_1024", "step_768"]
        for name in ("weights", "state"):
            file = f"step_1024/{name}.safetensors"
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    assert not (tmp_path / "members" / ".bars").exists()


def test_a_population_that_is_stopped_goes_on_exactly(
    workshop: Workshop, two_settings: SearchSpace, tmp_path: Path, reference: tuple[str, Path]
) -> None:
    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        if report.number == 2:
            raise Stop

    with pytest.raises(Stop):
        lineage_of(workshop, two_settings, tmp_path, on_round=stop)
    # Half of the next round is done when it is killed.
    workshop.perform(
        Job(0, {"pathwise.learning_rate": 0.1, "pathwise.max_grad_norm": 1.0}, 0, 512, 768), tmp_path / "members"
    )
    assert lineage_of(workshop, two_settings, tmp_path) == reference[0]


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_its_members_trained_again(
    workshop: Workshop, two_settings: SearchSpace, tmp_path: Path, reference: tuple[str, Path]
) -> None:
    executor = LocalExecutor(workshop, tmp_path / "members", 2)
    killed = []

    def kill(report: Any) -> None:
        if report.number == 1:
            pool = executor._pool
            assert isinstance(pool, ProcessPoolExecutor)
            victim = next(iter(pool._processes))
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)

    evolve(executor, two_settings, SETTINGS, 1024, tmp_path / "lineage.jsonl", kill)
    executor.close()
    assert killed
    assert (tmp_path / "lineage.jsonl").read_text() == reference[0]


def test_another_space_or_other_settings_do_not_resume(
    workshop: Workshop, two_settings: SearchSpace, reference: tuple[str, Path]
) -> None:
    executor = LocalExecutor(workshop, reference[1] / "members", 1)
    other = PopulationSettings(members=4, rounds=4, fraction=0.25)
    with pytest.raises(ConfigError, match="another search space or other settings"):
        evolve(executor, two_settings, other, 1024, reference[1] / "lineage.jsonl")


def test_a_checkpoint_that_is_not_here_may_be_in_the_storage_of_another_executor(
    workshop: Workshop, tmp_path: Path
) -> None:
    job = Job(0, {"pathwise.learning_rate": 0.1, "pathwise.max_grad_norm": 1.0}, 3, 512, 768)
    with pytest.raises(CheckpointError, match=r"members/3: there is no checkpoint of step 512\..*go on with the same"):
        LocalExecutor(workshop, tmp_path / "members", 1).run([job])


def test_members_are_judged_on_validation_by_the_same_budget(
    workshop: Workshop, experiment: Experiment, reference: tuple[str, Path]
) -> None:
    last = read_lineage(reference[1] / "lineage.jsonl").rounds[-1]
    for standing in last.standings:
        member = workshop.build(standing.member, standing.hyper)
        workshop.store(reference[1] / "members", standing.member).restore(member, 1024)
        result = Validation(experiment.learner, experiment.split.validation).evaluate(member)
        assert result is not None
        assert standing.score == result.growth


def test_the_budget_of_the_judge_is_not_the_searched_one(tiny_config: Callable[..., RunConfig]) -> None:
    space = SearchSpace.parse({"risk.limit": {"choice": [-0.5, -0.01]}})
    workshop = Workshop.of(build(tiny_config("risk.limit=-0.02", "risk.confidence=0")), PopulationSettings(), space)
    loose, tight = (workshop.build(0, {"risk.limit": limit}) for limit in (-0.5, -0.01))
    for each in (loose, tight):
        for weights in each.policy.parameters():
            torch.nn.init.normal_(weights, std=2.0, generator=torch.Generator().manual_seed(0))
    judged = [workshop.judge.judge(each) for each in (loose, tight)]
    assert judged[0].metrics["eval/cvar"] < -0.02  # it breaks the user's limit, and keeps its own
    assert judged[0].score == judged[1].score < judged[0].metrics["eval/growth"]


def test_a_metric_of_ones_own_judges(
    experiment: Experiment, two_settings: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "MEASURES", dict(judge.MEASURES))
    judge.measure("negative_growth")(lambda _, result: -result.growth)
    other = Workshop.of(experiment, PopulationSettings(metric="negative_growth"), two_settings)
    judged = other.judge.judge(other.build(0, {}))
    assert judged.score == -judged.metrics["eval/growth"]
    with pytest.raises(ConfigError, match=r"Did you mean 'growth'"):
        Workshop.of(experiment, PopulationSettings(metric="grwth"), two_settings)


def test_a_metric_that_is_not_a_number_ends_the_population(
    experiment: Experiment, two_settings: SearchSpace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(judge, "MEASURES", dict(judge.MEASURES))
    judge.measure("nothing")(lambda _, __: float("nan"))
    settings = PopulationSettings(members=2, rounds=2, metric="nothing")
    broken = Workshop.of(experiment, settings, two_settings)
    with pytest.raises(RunError, match="metric nothing of member 0 in round 1 is nan"):
        evolve(LocalExecutor(broken, tmp_path, 1), two_settings, settings, 1024, tmp_path / "lineage.jsonl")


def test_shared_arrays_are_those_of_the_object_and_one_that_occurs_twice_stays_one(tmp_path: Path) -> None:
    numbers = np.arange(6.0).reshape(2, 3)
    value = {"a": [numbers, torch.arange(3), "text"], "b": (numbers, None)}
    outline, arrays = take_arrays_out(value)
    assert len(arrays) == 2
    back = put_arrays_back(outline, arrays)
    assert back["a"][0] is back["b"][0]
    opened = share(value, tmp_path / "arrays").open()
    assert np.array_equal(opened["a"][0], numbers)
    assert torch.equal(opened["a"][1], torch.arange(3))
    assert not opened["a"][0].flags.writeable


def test_a_workshop_in_shared_memory_trains_to_the_same_bytes(workshop: Workshop, tmp_path: Path) -> None:
    job = Job(0, {"pathwise.learning_rate": 1e-2, "pathwise.max_grad_norm": 1.0}, 0, 0, 256)
    opened = share(workshop, tmp_path / "bars").open()
    assert not opened.bars.features.flags.owndata
    assert not opened.bars.features.flags.writeable
    outcomes = [each.perform(job, tmp_path / name) for each, name in ((workshop, "a"), (opened, "b"))]
    assert outcomes[0].score == outcomes[1].score


def test_an_alarm_names_the_member_that_it_is_about(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = Rule("always", lambda metrics, past: "5 % of it", "a test.", patience=1)  # noqa: ARG005
    monkeypatch.setitem(OWN_RULES, "always", always)
    hyper = {"pathwise.learning_rate": 0.01, "pathwise.max_grad_norm": 1.0}
    with caplog.at_level(logging.WARNING, "tailguard"):
        LocalExecutor(workshop, tmp_path / "members", 1).run([Job(each, hyper, each, 0, 128) for each in (3, 5)])
        logging.getLogger("tailguard").warning("of nobody")
    said = [record.getMessage().splitlines()[0] for record in caplog.records]
    expected = [f"member {member}: alarm always at 128 steps: 5 % of it" for member in (3, 5)]
    assert [line for line in said if "always" in line or "nobody" in line] == [*expected, "of nobody"]
