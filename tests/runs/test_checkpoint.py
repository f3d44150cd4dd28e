"""Checkpoints: the newest complete one is always known, damage is named, and what need not be kept goes."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tailguard.algorithm.saving import PARTS, capture
from tailguard.data.bars import Bars
from tailguard.data.synthetic import make_market
from tailguard.errors import CheckpointError
from tailguard.runs.checkpoint import CheckpointStore, DamagedCheckpointError, data_hashes
from tailguard.runs.validation import BestScore, ValidationResult
from tailguard.sealed import FORMAT, flat_tensors, read_sealed, write_sealed

STEP = 48
"""Steps of one iteration of `make_agent`'s learner."""


def same_state(left: Any, right: Any) -> bool:
    """Bit by bit, so that a NaN which marks an empty place equals itself."""
    mine, other = (
        {name: tensor.numpy().tobytes() for name, tensor in flat_tensors(capture(agent))} for agent in (left, right)
    )
    return mine == other


@pytest.fixture
def agent(make_agent: Any) -> Any:
    return make_agent(seed=1)


@pytest.fixture
def store(tmp_path: Path, agent: Any) -> CheckpointStore:
    return CheckpointStore(tmp_path, data_hashes(agent.env))


def save_steps(store: CheckpointStore, agent: Any, scores: list[float | None]) -> None:
    for score in scores:
        agent.iterate()
        store.save(agent, None if score is None else ValidationResult(score, None, score))


def test_a_checkpoint_brings_the_agent_back(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    assert store.newest() is None
    save_steps(store, agent, [None, None])
    assert store.steps() == [STEP, 2 * STEP]
    assert store.newest() == 2 * STEP
    assert (store.run / "latest").read_text() == f"step_{2 * STEP}\n"
    other = make_agent(seed=99)
    assert not same_state(agent, other)
    assert store.restore(other, 2 * STEP) == {}
    assert same_state(agent, other)
    manifest = json.loads((store.folder / f"step_{STEP}" / "manifest.json").read_text())
    assert manifest["about"]["versions"]["torch"] == str(torch.__version__)
    assert manifest["about"]["data"] == data_hashes(agent.env)


def test_an_agent_that_has_learned_more_goes_back(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    save_steps(store, agent, [None])
    earlier = make_agent(seed=99)
    store.restore(earlier, STEP)
    agent.iterate()
    agent.health.counts["lstm_saturated"] = 1  # an alarm that the checkpoint does not know of
    agent.health.past["train/loss"] = [0.5]
    store.restore(agent, STEP)
    assert same_state(agent, earlier)


def test_the_last_k_and_the_best_are_kept(store: CheckpointStore, agent: Any) -> None:
    store.keep = 2
    save_steps(store, agent, [0.1, 0.9, None, 0.3, float("nan"), 0.2])
    assert store.best() == 2 * STEP
    assert store.steps() == [2 * STEP, 5 * STEP, 6 * STEP]
    save_steps(store, agent, [1.5, 0.0])
    assert store.steps() == [7 * STEP, 8 * STEP]
    assert sorted(path.name for path in store.folder.iterdir()) == [f"step_{7 * STEP}", f"step_{8 * STEP}"]


def test_the_first_of_equal_scores_is_the_best(store: CheckpointStore, agent: Any) -> None:
    save_steps(store, agent, [0.1, 0.9, 0.9])
    assert store.best() == 2 * STEP


def test_a_checkpoint_tells_what_it_was_worth_and_how_long_ago_the_best_was(store: CheckpointStore, agent: Any) -> None:
    worth = ValidationResult(growth=1.5, cvar=-0.06, score=-1.0)
    agent.iterate()
    store.save(agent, worth)
    agent.iterate()
    store.save(agent, None, since_best=4)
    assert store.evaluation(STEP) == worth
    assert store.evaluation(2 * STEP) is None
    assert store.best_before(2 * STEP) == BestScore(score=-1.0, since=4)


def test_a_restore_tells_what_has_changed_since(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    save_steps(store, agent, [None])
    folder = store.folder / f"step_{STEP}"
    about, parts = read_sealed(folder, PARTS)
    about["versions"] |= {"torch": "1.0", "threads": 64}
    write_sealed(folder, parts, about)
    changed = store.restore(make_agent(), STEP)
    assert changed["torch"] == ("1.0", str(torch.__version__))
    assert changed["threads"] == (64, torch.get_num_threads())
    assert len(changed) == 2


# --- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped byte": (lambda step: flip(step / "weights.safetensors"), "weights.safetensors: its SHA-256 differs"),
    "flipped manifest": (lambda step: flip(step / "manifest.json"), "manifest.json: (its content|not readable)"),
    "truncated": (lambda step: os.truncate(step / "state.safetensors", 100), "100 bytes long; .* were written"),
    "missing file": (lambda step: (step / "state.safetensors").unlink(), "state.safetensors is missing"),
    "missing": (lambda step: shutil.rmtree(step), "latest names step_144, which does not exist"),
    "link": (lambda step: (step.rename(step.parent / "x"), step.symlink_to("x")), "symbolic link"),
    "older format": (
        lambda step: (step / "manifest.json").write_text('{"format": 0}'),
        f"format 0; this version of Tailguard reads format {FORMAT}",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_the_newest_intact_checkpoint_offered(
    store: CheckpointStore, agent: Any, make_agent: Any, damage: Callable[[Path], Any], message: str
) -> None:
    save_steps(store, agent, [None, None, None])
    os.truncate(store.folder / "step_96" / "weights.safetensors", 7)  # so that the offer has to look further
    damage(store.folder / "step_144")
    fresh = make_agent(seed=1)
    with pytest.raises(DamagedCheckpointError, match=message + ".*; the newest intact checkpoint is step_48") as found:
        store.restore(fresh, store.newest() or 0)
    assert found.value.intact == 48
    assert store.restore(fresh, 48) == {}
    assert store.forget_after(48) == [step for step in (96, 144) if step in (96,) or damage is not DAMAGE["missing"][0]]
    assert store.newest() == 48


def test_when_nothing_is_intact_it_says_so(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    save_steps(store, agent, [None])
    flip(store.folder / "step_48" / "weights.safetensors")
    with pytest.raises(DamagedCheckpointError, match="no other checkpoint is intact"):
        store.restore(make_agent(), 48)


@pytest.mark.parametrize("text", ["../../elsewhere", "step_-1", "step_1/../../x", "", "step_9" * 50, "\x80\x04."])
def test_latest_can_name_nothing_but_a_checkpoint(store: CheckpointStore, agent: Any, text: str) -> None:
    save_steps(store, agent, [None])
    (store.run / "latest").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"latest: .*(is not the name of a checkpoint; the newest intact|at most 100)"
    ):
        store.newest()
    (store.run / "latest").unlink()
    (store.run / "latest").symlink_to("checkpoints")
    with pytest.raises(CheckpointError, match="symbolic link"):
        store.newest()


def test_a_kill_between_the_two_renames_loses_nothing(store: CheckpointStore, agent: Any) -> None:
    save_steps(store, agent, [None, None])
    (store.run / "latest").write_text("step_48\n")
    assert store.newest() == 96
    (store.run / "latest").unlink()
    assert store.newest() == 96


def test_leftovers_of_killed_writers_are_not_checkpoints_and_are_cleaned(store: CheckpointStore, agent: Any) -> None:
    save_steps(store, agent, [None])
    for name in (".step_96.77.partial", ".step_48.77.old", ".step_12.removed"):
        shutil.copytree(store.folder / "step_48", store.folder / name)
    (store.folder / "notes").mkdir()
    assert store.steps() == [48]
    store.clean()
    assert sorted(path.name for path in store.folder.iterdir()) == ["notes", "step_48"]


def test_a_full_disk_leaves_the_last_checkpoint(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    """The kernel refuses writes beyond a file size, as a full disk refuses them beyond its space."""
    save_steps(store, agent, [None])
    agent.iterate()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.save(agent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in store.folder.iterdir()] == ["step_48"]
    assert store.newest() == store.newest_intact() == 48
    store.restore(make_agent(), 48)


# --- what does not belong to this run -------------------------------------------------------------------------------


def test_other_data_is_refused(store: CheckpointStore, agent: Any, make_agent: Any, bars: Bars) -> None:
    save_steps(store, agent, [None])
    other = make_agent(make_market(1_200, seed=12).bars)
    with pytest.raises(
        CheckpointError, match=r"step_48: saved with different bars: their SHA-256 was \w{12}… and is \w{12}…"
    ):
        CheckpointStore(store.run, data_hashes(other.env)).restore(other, 48)
    assert data_hashes(make_agent(bars).env) == data_hashes(agent.env)
    changed = data_hashes(agent.env) | {"features": "0" * 64}
    with pytest.raises(CheckpointError, match="saved with different features"):
        CheckpointStore(store.run, changed).restore(agent, 48)


def test_one_changed_price_or_feature_is_other_data(make_agent: Any) -> None:
    env = make_agent().env
    prepared, before = env.prepared, data_hashes(env)
    close = prepared.panel.close.copy()
    close[700] *= 1 + 1e-15
    env.prepared = replace(prepared, panel=replace(prepared.panel, close=close))
    assert data_hashes(env)["bars"] != before["bars"]
    assert data_hashes(env)["features"] == before["features"]
    features = prepared.features.copy()
    features[500, 0] += 1e-6
    env.prepared = replace(prepared, features=features)
    assert data_hashes(env)["bars"] == before["bars"]
    assert data_hashes(env)["features"] != before["features"]


def test_other_shapes_are_refused_by_name(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    save_steps(store, agent, [None])
    for options, message in (
        ({"lstm_size": 6}, r"weights/\S+ has shape .*; this agent needs"),
        ({"twin_critics": True}, r"weights/\S+ is missing"),
        ({"optimizer": "upgd"}, r"state/optimizer/generators\S* is missing|does not fit"),
    ):
        with pytest.raises(CheckpointError, match=message):
            store.restore(make_agent(**options), 48)


def test_a_checkpoint_under_another_name_is_refused(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    save_steps(store, agent, [None])
    os.rename(store.folder / "step_48", store.folder / "step_480")
    with pytest.raises(CheckpointError, match="step_480: holds the state of step 48"):
        store.restore(make_agent(), 480)


def test_cursors_outside_the_market_are_refused(store: CheckpointStore, agent: Any, make_agent: Any) -> None:
    save_steps(store, agent, [None])
    about, parts = read_sealed(store.folder / "step_48", PARTS)
    parts["state"]["env"]["row"][0] = 10**9
    write_sealed(store.folder / "step_48", parts, about)
    with pytest.raises(CheckpointError, match="row"):
        store.restore(make_agent(), 48)


def test_a_link_in_place_of_the_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="checkpoints: a symbolic link"):
        CheckpointStore(tmp_path, {})
