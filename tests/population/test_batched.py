"""Members as one computation, behind the interface of the other executors: the same lineage as processes make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tailguard.audit.fast_paths import by_operations
from tailguard.config import RunConfig
from tailguard.errors import ConfigError
from tailguard.experiment.build import build
from tailguard.population.batched import BatchedExecutor
from tailguard.population.evolution import evolve
from tailguard.population.executor import Executor, Job
from tailguard.population.executors import default_executor
from tailguard.population.lineage import Lineage, read_lineage
from tailguard.population.local import LocalExecutor
from tailguard.population.options import PopulationSettings
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop
from tailguard.sealed import flat_tensors

BUDGET = ("risk.limit=-0.02", "risk.alpha=0.5", "risk.window=64")
SPACES: dict[str, dict[str, Any]] = {
    "pathwise": {"pathwise.learning_rate": {"log": [1e-4, 1e-1]}, "risk.limit": {"linear": [-0.04, -0.01]}},
    "ppo": {
        "ppo.learning_rate": {"log": [1e-4, 1e-2]},
        "ppo.clip_range": {"linear": [0.05, 0.4]},
        "ppo.entropy_coef": {"log": [1e-4, 1e-2]},
    },
}
SETTINGS = PopulationSettings(members=4, rounds=4, fraction=0.5)


def shop(config: RunConfig, space: SearchSpace, settings: PopulationSettings = SETTINGS) -> Workshop:
    return Workshop.of(build(config), settings, space)


def lineage_of(executor: Executor, space: SearchSpace, settings: PopulationSettings, folder: Path) -> Lineage:
    try:
        evolve(executor, space, settings, 1024, folder / "lineage.jsonl")
    finally:
        executor.close()
    return read_lineage(folder / "lineage.jsonl")


def assert_same(ours: Lineage, theirs: Lineage) -> None:
    """Decisions are equal; scores are, but for the order in which sums are taken."""
    assert len(ours.rounds) == len(theirs.rounds)
    for mine, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert mine.decision == other.decision
        assert [each.hyper for each in mine.standings] == [each.hyper for each in other.standings]
        assert [each.score for each in mine.standings] == pytest.approx(
            [each.score for each in other.standings], rel=1e-3, abs=1e-4
        )


@pytest.mark.parametrize("learner", ["pathwise", "ppo"])
@pytest.mark.parametrize("optimizer", ["copy", "reset"])
def test_the_lineage_is_that_of_local(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, learner: str, optimizer: Any
) -> None:
    changes = ("ppo.vgs.enabled=true", "ppo.optimizer=upgdw", "ppo.target_kl=0.01") if learner == "ppo" else ()
    space = SearchSpace.parse(SPACES[learner])
    settings = PopulationSettings(members=4, rounds=4, fraction=0.5, optimizer=optimizer)
    workshop = shop(tiny_config(f"learner={learner}", *BUDGET, *changes), space, settings)
    ours, theirs = tmp_path / "batched", tmp_path / "local"
    ours.mkdir()
    theirs.mkdir()
    batched = lineage_of(BatchedExecutor(workshop, ours / "members"), space, settings, ours)
    # A lone member takes shorter ways on a CPU, and fresh moments of Adam turn the last digit of a gradient into steps.
    with by_operations():
        local = lineage_of(LocalExecutor(workshop, theirs / "members", 1), space, settings, theirs)
    assert any(finished.decision.moves for finished in local.rounds)
    assert_same(batched, local)
    for standing in local.rounds[-1].standings:
        states = []
        for folder in (ours, theirs):
            learner_of = workshop.build(standing.member, standing.hyper)
            workshop.store(folder / "members", standing.member).restore(learner_of, 1024)
            states.append(dict(flat_tensors(learner_of.policy.state_dict())))
        for name, value in states[0].items():
            assert float((value - states[1][name]).abs().max()) < 1e-5, name


def test_a_population_goes_on_batched_where_local_stopped(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The two share their checkpoints: half of the rounds by each gives the lineage of either."""
    space = SearchSpace.parse(SPACES["pathwise"])
    workshop = shop(tiny_config(*BUDGET), space)

    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        if report.number == 2:
            raise Stop

    with pytest.raises(Stop):
        evolve(
            LocalExecutor(workshop, tmp_path / "members", 1), space, SETTINGS, 1024, tmp_path / "lineage.jsonl", stop
        )
    mixed = lineage_of(BatchedExecutor(workshop, tmp_path / "members"), space, SETTINGS, tmp_path)
    (tmp_path / "local").mkdir()
    local = lineage_of(LocalExecutor(workshop, tmp_path / "local" / "members", 1), space, SETTINGS, tmp_path / "local")
    assert_same(mixed, local)


def test_the_market_is_in_memory_once_and_the_members_stay(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    space = SearchSpace.parse(SPACES["pathwise"])
    workshop = shop(tiny_config(*BUDGET), space)
    executor = BatchedExecutor(workshop, tmp_path)
    hyper = {"pathwise.learning_rate": 1e-2, "risk.limit": -0.02}
    executor.run([Job(member, hyper, member, 0, 256) for member in range(3)])
    batch = executor._batch
    assert batch is not None
    learners = list(batch.together.learners)
    tables = {learner.env.task.market.table.data_ptr() for learner in learners}  # type: ignore[attr-defined]
    assert len(tables) == 1
    places = {name: value.data_ptr() for name, value in batch.together.stacked.items()}
    new = {"pathwise.learning_rate": 2e-2, "risk.limit": -0.03}
    executor.run([Job(0, hyper, 0, 256, 512), Job(1, new, 0, 256, 512, streams=5), Job(2, hyper, 2, 256, 512)])
    assert executor._batch is batch
    assert places == {name: value.data_ptr() for name, value in batch.together.stacked.items()}
    rates = [float(learner.optimizer.param_groups[0]["lr"]) for learner in learners]
    # The schedule falls to a tenth; the last iteration began after 384 of 1,024 steps.
    assert rates == pytest.approx([0.6625e-2, 2 * 0.6625e-2, 0.6625e-2])
    taker = learners[1]
    assert taker.risk is not None
    assert (float(taker.risk.constraint.limit), taker.risk.config.limit) == (-0.03, -0.03)
    restored = workshop.build(1, new)
    workshop.store(tmp_path, 1).restore(restored, 512)
    assert restored.risk is not None
    assert float(restored.risk.constraint.limit) == -0.03


def test_a_member_that_fails_is_replaced_and_the_others_go_on(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    space = SearchSpace.parse(SPACES["pathwise"])
    workshop = shop(tiny_config(*BUDGET), space)
    hyper = {"pathwise.learning_rate": 1e-2, "risk.limit": -0.02}
    executor = BatchedExecutor(workshop, tmp_path)
    executor.run([Job(member, hyper, member, 0, 256) for member in range(3)])
    assert executor._batch is not None
    with torch.no_grad():
        next(executor._batch.together.learners[1].policy.parameters()).fill_(torch.nan)
    outcomes = executor.run([Job(member, hyper, member, 256, 512) for member in range(3)])
    assert [outcome.score == -torch.inf for outcome in outcomes] == [False, True, False]
    assert outcomes[1].failure is not None
    assert "not finite" in outcomes[1].failure
    jobs = [Job(0, hyper, 0, 512, 768), Job(1, hyper, 2, 512, 768, streams=3), Job(2, hyper, 2, 512, 768)]
    assert all(outcome.failure is None for outcome in executor.run(jobs))


def test_fewer_members_go_on_from_their_checkpoints(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    space = SearchSpace.parse(SPACES["pathwise"])
    settings = PopulationSettings(members=4, rounds=4, strategy="halving", eta=2)
    workshop = shop(tiny_config(*BUDGET), space, settings)
    lineages = []
    for name in ("batched", "local"):
        folder = tmp_path / name
        folder.mkdir()
        made = (
            BatchedExecutor(workshop, folder / "m") if name == "batched" else LocalExecutor(workshop, folder / "m", 1)
        )
        lineages.append(lineage_of(made, space, settings, folder))
    assert len(lineages[0].rounds[-1].standings) < 4
    assert_same(*lineages)


def test_a_space_that_cannot_be_one_computation_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pathwise.max_grad_norm: members that train as one.*--executor local"):
        BatchedExecutor(workshop, tmp_path)
    assert default_executor("cuda", workshop.searched) == "local"
    assert default_executor("cuda", ("ppo.clip_range", "risk.limit")) == "batched"
    assert default_executor("cpu", ("ppo.clip_range",)) == "local"
    assert default_executor("cuda", ("risk.critic_learning_rate",)) == "local"  # a number, not the critics' tensor


def test_a_weight_of_zero_that_takes_its_term_out_is_refused(
    tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    space = SearchSpace.parse({"ppo.entropy_coef": {"choice": [0.0, 0.01]}})
    workshop = shop(tiny_config("learner=ppo"), space)
    jobs = [Job(member, {"ppo.entropy_coef": weight}, member, 0, 256) for member, weight in enumerate((0.0, 0.01))]
    with pytest.raises(ConfigError, match=r"entropy_coef is 0.01 for member 1 and 0.0 for member 0"):
        BatchedExecutor(workshop, tmp_path).run(jobs)
