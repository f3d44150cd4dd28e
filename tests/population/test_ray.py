"""Members in the actors of a Ray cluster: the lineage of one process, though workers, nodes and the driver die."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tailguard.config import RunConfig
from tailguard.errors import CheckpointError, ConfigError, MissingExtraError, RunError
from tailguard.experiment.build import build
from tailguard.population import judge
from tailguard.population.checkpoint_storage import CheckpointStorage
from tailguard.population.evolution import evolve
from tailguard.population.executor import Executor, Job
from tailguard.population.executors import ExecutorOptions, make_executor
from tailguard.population.local import LocalExecutor
from tailguard.population.options import PopulationSettings
from tailguard.population.ray_executor import HERE, OWN_CLUSTER, RayExecutor
from tailguard.population.ray_worker import TOKEN, MemberWorker, WorkPlace
from tailguard.population.shared import take_arrays_out
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop

from .conftest import SMALL, is_alive

SPACE: dict[str, Any] = {
    "pathwise.learning_rate": {"log": [1e-4, 1e-1]},
    "pathwise.max_grad_norm": {"linear": [0.1, 2.0]},
}
HYPER = {"pathwise.learning_rate": 1e-2, "pathwise.max_grad_norm": 1.0}
STALLING = '''
import os
import signal
import time
from pathlib import Path

from tailguard.population.judge import measure

PLACE = Path({place!r})


@measure("stalling")
def stalling(agent, result):
    """Growth; the first member that is judged after step 512 waits until its process is killed."""
    import ray

    if agent.num_timesteps > 512 and (PLACE / "deadly").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if agent.num_timesteps > 512 and not (PLACE / "stalled").exists():
        where = f"{{os.getpid()}} {{ray.get_runtime_context().get_node_id()}}"
        (PLACE / "new").write_text(where)
        (PLACE / "new").rename(PLACE / "stalled")
        time.sleep(3600)
    return result.growth
'''
PLACED = '''
import os
from pathlib import Path

from tailguard.population import measure


@measure("placed")
def placed(agent, result):
    """Growth; each worker leaves its node and its GPU in a file."""
    import ray

    if ray.is_initialized():
        where = f"{{ray.get_runtime_context().get_node_id()}} {{' '.join(map(str, ray.get_gpu_ids()))}}"
        (Path({place!r}) / f"{{os.getpid()}}.place").write_text(where)
    return result.growth
'''
DRIVER = """
import sys
from pathlib import Path

from tailguard.config import load_config
from tailguard.experiment.build import build
from tailguard.population.evolution import evolve
from tailguard.population.options import PopulationSettings
from tailguard.population.ray_executor import RayExecutor
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop

folder, address = Path(sys.argv[1]), sys.argv[2]
space = SearchSpace.parse({space!r})
settings = PopulationSettings(members=4, rounds=4, fraction=0.5, metric="stalling")
workshop = Workshop.of(build(load_config(overrides={overrides!r})), settings, space)
executor = RayExecutor(workshop, folder / "members", address)
evolve(executor, space, settings, 1024, folder / "lineage.jsonl")
executor.close()
"""


needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'tailguard[ray]'"
)


def lineage_of(executor: Executor, folder: Path, metric: str = "score", **options: Any) -> str:
    settings = PopulationSettings(members=4, rounds=4, fraction=0.5, metric=metric)
    try:
        evolve(executor, SearchSpace.parse(SPACE), settings, 1024, folder / "lineage.jsonl", **options)
    finally:
        executor.close()
    return (folder / "lineage.jsonl").read_text()


# --- on one machine ---------------------------------------------------------------------------------------------------


@needs_ray
def test_two_actors_make_the_lineage_of_one_process(workshop: Workshop, tmp_path: Path) -> None:
    """Checkpoints go through a storage, as those of a worker on another node must."""
    alone, ours = tmp_path / "alone", tmp_path / "actors"
    alone.mkdir()
    ours.mkdir()
    reference = lineage_of(LocalExecutor(workshop, alone / "members", 1), alone)
    executor = RayExecutor(workshop, ours / "members", HERE, storage=f"file://{tmp_path}/storage", workers=2)
    assert lineage_of(executor, ours) == reference
    for member in range(4):
        executor.collect(member, 1024)
        for name in ("weights", "state"):
            file = f"members/{member}/checkpoints/step_1024/{name}.safetensors"
            assert (ours / file).read_bytes() == (alone / file).read_bytes()
        stored = tmp_path / "storage" / "actors" / str(member) / "checkpoints"
        assert sorted(path.name for path in stored.iterdir()) == ["step_1024", "step_768"]
    assert not (ours / "members" / TOKEN).exists()


@needs_ray
@pytest.mark.slow
def test_workers_of_a_node_read_the_same_memory_and_refuse_a_folder_that_is_not_shared(
    workshop: Workshop, tmp_path: Path
) -> None:
    import ray

    executor = RayExecutor(workshop, tmp_path / "members", HERE, workers=1)
    executor._connect()
    try:
        bars = [ray.put(take_arrays_out(workshop))]
        place = WorkPlace(tmp_path, "token", None, 1, (), batched=False)
        workers = [MemberWorker(place, bars), MemberWorker(place, bars)]
        with pytest.raises(ConfigError, match=r"does not see .* with --storage"):
            workers[0].begin()
        (tmp_path / TOKEN).write_text("another run's")
        with pytest.raises(ConfigError, match=r"does not see"):
            workers[0].begin()
        (tmp_path / TOKEN).write_text("token")
        places = set()
        for worker in workers:
            worker.begin()
            assert worker.workshop is not None
            features = worker.workshop.bars.features
            assert not features.flags.writeable
            places.add(features.__array_interface__["data"][0])
        assert len(places) == 1
    finally:
        executor.close()


@needs_ray
@pytest.mark.slow
def test_batches_of_members_make_the_same_lineage(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Two actors with two members each, as on two GPUs: a member may exploit one of the other batch."""
    space = {"pathwise.learning_rate": {"log": [1e-4, 1e-1]}}
    settings = PopulationSettings(members=4, rounds=4, fraction=0.5)
    workshop = Workshop.of(build(tiny_config()), settings, SearchSpace.parse(space))
    rounds = []
    for name in ("batches", "alone"):
        folder = tmp_path / name
        folder.mkdir()
        executor: Executor = (
            RayExecutor(workshop, folder / "members", HERE, workers=2, batch=2)
            if name == "batches"
            else LocalExecutor(workshop, folder / "members", 1)
        )
        try:
            pbt = evolve(executor, SearchSpace.parse(space), settings, 1024, folder / "lineage.jsonl")
        finally:
            executor.close()
        rounds.append(pbt.lineage.rounds)
    moves = [move for finished in rounds[0] for move in finished.decision.moves]
    assert any(move.member // 2 != move.parent // 2 for move in moves)
    for ours, theirs in zip(*rounds, strict=True):
        assert ours.decision == theirs.decision
        scores = ([each.score for each in finished.standings] for finished in (ours, theirs))
        assert next(scores) == pytest.approx(next(scores), rel=1e-3, abs=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_ray_it_says_how_to_install_it(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"--executor ray needs Ray.*pip install 'tailguard\[ray\]'"):
        make_executor("ray", workshop, tmp_path, ExecutorOptions())


@pytest.mark.parametrize(
    ("executor", "options", "message"),
    [
        ("local", {"storage": "s3://bucket"}, "--storage: only the ray executor has it, and this one is local"),
        ("auto", {"worker_members": 4}, "--worker-members: only the ray executor has it, and this one is local"),
        ("ray", {"worker_cpus": 0.0}, "--worker-cpus: 0 is out of range"),
        ("ray", {"worker_gpus": -1.0}, "--worker-gpus: -1 is out of range"),
        ("ray", {"worker_members": 0}, "--worker-members: 0"),
    ],
)
def test_options_that_have_no_effect_or_no_meaning_are_refused(
    workshop: Workshop, tmp_path: Path, executor: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_executor(executor, workshop, tmp_path, ExecutorOptions(**options))


@needs_ray
def test_members_that_cannot_be_one_computation_are_no_batch(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pathwise.max_grad_norm: members that train as one"):
        RayExecutor(workshop, tmp_path, batch=2)


@needs_ray
def test_a_gpu_that_no_worker_takes_is_refused(
    workshop: Workshop, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    on_gpu = dataclasses.replace(workshop, config=tiny_config("training.device=cuda"))
    assert RayExecutor(on_gpu, tmp_path).gpus == 1
    assert RayExecutor(on_gpu, tmp_path, gpus=0.25).gpus == 0.25
    with pytest.raises(ConfigError, match=r"--worker-gpus 0: training.device is cuda"):
        RayExecutor(on_gpu, tmp_path, gpus=0.0)


# --- the storage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["{}/shared", "file://{}/shared", "memory://shared"])
def test_a_checkpoint_comes_back_from_the_storage_as_it_was(workshop: Workshop, tmp_path: Path, url: str) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'tailguard[ray]'")
    for until in (128, 256):
        workshop.perform(Job(3, HYPER, 3, until - 128, until), tmp_path / "here")
    storage = CheckpointStorage(url.format(tmp_path))
    for step in (128, 256, 256):  # a second time, as after a worker that died
        storage.publish(tmp_path / "here", 3, step)
    storage.fetch(tmp_path / "there", 3, 256)
    ours, theirs = (tmp_path / name / "3" / "checkpoints" / "step_256" for name in ("here", "there"))
    files = sorted(path.name for path in ours.iterdir())
    assert files == sorted(path.name for path in theirs.iterdir())
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in files)
    storage.keep(3, {256})
    assert (storage.has(3, 128), storage.has(3, 256)) == (False, True)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step_128"):
        storage.fetch(tmp_path / "there", 3, 128)


def test_a_checkpoint_that_is_half_written_or_changed_is_not_one(workshop: Workshop, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'tailguard[ray]'")
    workshop.perform(Job(0, HYPER, 0, 0, 128), tmp_path / "here")
    storage = CheckpointStorage(str(tmp_path / "shared"))
    storage.publish(tmp_path / "here", 0, 128)
    weights = tmp_path / "shared" / "0" / "checkpoints" / "step_128" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        storage.fetch(tmp_path / "there", 0, 128)
    (weights.parent / "manifest.json").unlink()
    assert not storage.has(0, 128)


def test_a_storage_of_an_unknown_kind_is_refused() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'tailguard[ray]'")
    with pytest.raises(ConfigError, match=r"--storage nowhere://bucket: .*nowhere"):
        CheckpointStorage("nowhere://bucket")


# --- a cluster of three nodes -----------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without cores, and three nodes with one core each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in OWN_CLUSTER.items():
            patch.setenv(name, value)
        small = {"object_store_memory": 100 * 2**20}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small}, shutdown_at_exit=False)
        try:
            for _ in range(3):
                made.add_node(num_cpus=1, **small)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def stalling(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_parts: None
) -> tuple[RunConfig, Workshop]:
    """Members that are judged by a plugin; the first one of the third round stalls until its process is killed."""
    del own_parts
    monkeypatch.setattr(judge, "MEASURES", dict(judge.MEASURES))
    plugin = tmp_path / "stalling.py"
    plugin.write_text(STALLING.format(place=str(tmp_path)))
    config = tiny_config(f"plugins=[{plugin}]")
    settings = PopulationSettings(members=4, rounds=4, fraction=0.5, metric="stalling")
    return config, Workshop.of(build(config), settings, SearchSpace.parse(SPACE))


def expected(workshop: Workshop, folder: Path) -> str:
    """The lineage of one process, in which nobody stalls."""
    (folder / "stalled").touch()
    (folder / "alone").mkdir()
    reference = lineage_of(LocalExecutor(workshop, folder / "alone" / "members", 1), folder / "alone", "stalling")
    (folder / "stalled").unlink()
    return reference


class WhenStalled(threading.Thread):
    """Does something with the process and the node of the member that stalls, as soon as one does."""

    def __init__(self, folder: Path, action: Callable[[int, str], None]) -> None:
        super().__init__(daemon=True)
        self.folder, self.action, self.process = folder, action, 0
        self.start()

    def run(self) -> None:
        if within(300, (self.folder / "stalled").exists):
            process, node = (self.folder / "stalled").read_text().split()
            self.process = int(process)
            self.action(self.process, node)

    def done(self) -> int:
        """The process that stalled, once the action is done."""
        self.join(300)
        assert self.process, "no member stalled"
        return self.process


def within(seconds: float, happens: Callable[[], bool]) -> bool:
    """Whether something is so within this time."""
    deadline = time.monotonic() + seconds
    while not (so := happens()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return so


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("dies", ["worker", "node"])
def test_a_worker_or_a_node_dies_under_way_and_the_population_goes_on(
    cluster: Any, stalling: tuple[RunConfig, Workshop], tmp_path: Path, dies: str
) -> None:
    _, workshop = stalling
    reference = expected(workshop, tmp_path)

    def kill(process: int, node: str) -> None:
        if dies == "worker":
            os.kill(process, signal.SIGKILL)
            return
        victim = next(each for each in cluster.worker_nodes if each.node_id == node)
        cluster.remove_node(victim, allow_graceful=False)

    killer = WhenStalled(tmp_path, kill)
    executor = RayExecutor(workshop, tmp_path / "members", cluster.address)
    assert lineage_of(executor, tmp_path, "stalling") == reference
    assert not is_alive(killer.done())


@needs_ray
@pytest.mark.slow
def test_the_driver_dies_under_way_and_another_one_goes_on(
    cluster: Any, stalling: tuple[RunConfig, Workshop], tmp_path: Path
) -> None:
    config, workshop = stalling
    reference = expected(workshop, tmp_path)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(space=SPACE, overrides=[*SMALL, f"plugins=[{config.plugins[0]}]"]))
    command = [sys.executable, str(script), str(tmp_path), cluster.address]
    first = subprocess.Popen(command)
    worker = WhenStalled(tmp_path, lambda *_: first.kill()).done()
    assert first.wait() == -signal.SIGKILL
    assert within(60, lambda: not is_alive(worker))  # it would train beside its successor
    assert len((tmp_path / "lineage.jsonl").read_text().splitlines()) == 3  # its head, and two of four rounds
    subprocess.run(command, check=True)
    assert (tmp_path / "lineage.jsonl").read_text() == reference


@needs_ray
@pytest.mark.slow
def test_shares_of_a_gpu_put_several_workers_on_it_and_none_on_nodes_without_one(
    cluster: Any,
    tiny_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_parts: None,
) -> None:
    """The GPU is a number to Ray alone, as it is to its scheduler: the members train on the CPU."""
    del own_parts
    monkeypatch.setattr(judge, "MEASURES", dict(judge.MEASURES))
    (tmp_path / "placed.py").write_text(PLACED.format(place=str(tmp_path)))
    (tmp_path / "alone").mkdir()
    settings = PopulationSettings(members=4, rounds=4, fraction=0.5, metric="placed")
    config = tiny_config(f"plugins=[{tmp_path / 'placed.py'}]")
    workshop = Workshop.of(build(config), settings, SearchSpace.parse(SPACE))
    reference = lineage_of(LocalExecutor(workshop, tmp_path / "alone" / "members", 1), tmp_path / "alone", "placed")
    node = cluster.add_node(num_cpus=4, num_gpus=1, object_store_memory=100 * 2**20)
    executor = RayExecutor(workshop, tmp_path / "members", cluster.address, gpus=0.5)
    assert lineage_of(executor, tmp_path, "placed") == reference
    places = [path.read_text().split() for path in tmp_path.glob("*.place")]
    # There are seven cores on four nodes, and four members.
    assert places == [[node.node_id, "0"], [node.node_id, "0"]]


@needs_ray
@pytest.mark.slow
def test_a_member_whose_worker_dies_again_and_again_ends_the_population(
    cluster: Any, stalling: tuple[RunConfig, Workshop], tmp_path: Path
) -> None:
    _, workshop = stalling
    (tmp_path / "deadly").touch()
    executor = RayExecutor(workshop, tmp_path / "members", cluster.address)
    with pytest.raises(RunError, match=r"the worker of member \d died 3 times before its round was done"):
        lineage_of(executor, tmp_path, "stalling")
    assert len((tmp_path / "lineage.jsonl").read_text().splitlines()) == 3
