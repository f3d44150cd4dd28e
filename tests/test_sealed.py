"""Sealed folders: every damage is named, nothing hostile is followed, executed or allocated, none is ever half."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailguard.errors import CheckpointError
from tailguard.places import replace_synced
from tailguard.sealed import FORMAT, file_name, read_about, read_sealed, verify_sealed, write_sealed

NAMES = ("weights", "state")
PARTS: dict[str, dict[str, Any]] = {
    "weights": {"layer.weight": torch.arange(6.0).reshape(2, 3), "layer.bias": torch.zeros(2)},
    "state": {
        "moments": {"mean": torch.tensor(1.5, dtype=torch.float64), "seen": torch.tensor([True, False])},
        "empty": {},
        "counts": {"a/b": 3, "c": 0.1 + 0.2, "d": None, "e": "text", "f": [1, {"g": -math.inf}], "h": True},
    },
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and left == right


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sealed(tmp_path / "kept", PARTS, {"step": 7})
    return tmp_path / "kept"


def test_what_is_written_is_read_back_bit_by_bit(folder: Path) -> None:
    about, parts = read_sealed(folder, NAMES)
    assert about == read_about(folder, NAMES) == {"step": 7}
    assert same(parts, PARTS)
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]  # nothing is left beside it


def test_a_sealed_folder_of_other_parts_is_replaced_and_what_is_not_its_own_is_kept(folder: Path) -> None:
    write_sealed(folder, {"weights_0": PARTS["weights"]}, {"step": 8})
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", file_name("weights_0")]

    notes = folder / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(CheckpointError, match=r"other files \(notes.txt\)"):
        write_sealed(folder, PARTS, {"step": 9})
    notes.unlink()
    (folder / "manifest.json").write_text("{}")  # it no longer says which files are its own
    with pytest.raises(CheckpointError, match=re.escape(f"other files ({file_name('weights_0')})")):
        write_sealed(folder, PARTS, {"step": 9})


def test_tensors_that_share_memory_or_are_not_contiguous_are_written_as_they_are(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    parts = {"state": {"a": whole, "b": whole, "turned": whole.T, "part": whole[1:, ::2]}}
    write_sealed(tmp_path / "kept", parts, {})
    assert same(read_sealed(tmp_path / "kept", ("state",))[1], parts)


def test_a_tensor_whose_path_could_not_be_told_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a name in it contains '/'"):
        write_sealed(tmp_path / "kept", {"state": {"a/b": torch.zeros(1)}}, {})


tensors = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape).to(dtype))
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
names = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1)
states = st.dictionaries(
    names, st.recursive(plain | st.lists(plain) | tensors, lambda inner: st.dictionaries(names, inner), max_leaves=8)
)


@given(state=states)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nested_state_makes_the_journey(tmp_path: Path, state: dict[str, Any]) -> None:
    write_sealed(tmp_path / "kept", {"state": state}, {})
    assert same(read_sealed(tmp_path / "kept", ("state",))[1], {"state": state})


# --- damage ---------------------------------------------------------------------------------------------------------


def flip(name: str, place: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        (folder / name).write_bytes(data)

    return apply


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def edit_manifest(**changes: Any) -> Callable[[Path], None]:
    """Change the manifest and give it the SHA-256 that belongs to it now, as a stranger would."""

    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text()) | changes
        manifest.pop("sha256")
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return apply


def forge(name: str, data: bytes) -> Callable[[Path], None]:
    """Put other bytes in a file's place, with a manifest that vouches for them."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(data)
        files = json.loads((folder / "manifest.json").read_text())["files"]
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        edit_manifest(files=files)(folder)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            flip("weights.safetensors", 0.0),
            r"weights.safetensors: its SHA-256 differs from the manifest",
        ),
        (
            flip("weights.safetensors", 1.0),
            r"weights.safetensors: its SHA-256 differs from the manifest",
        ),
        (
            flip("state.safetensors", 0.5),
            r"state.safetensors: its SHA-256 differs from the manifest; the file has changed",
        ),
        (cut("weights.safetensors"), r"weights.safetensors: \d+ bytes long; \d+ were written"),
        (cut("manifest.json"), "manifest.json: not readable as JSON"),
        (lambda folder: (folder / "state.safetensors").unlink(), "kept: state.safetensors is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "kept: manifest.json is missing"),
        (edit_manifest(format=0), f"manifest.json: format 0; this version of Tailguard reads format {FORMAT}"),
        (edit_manifest(format=99), f"manifest.json: format 99; this version of Tailguard reads format {FORMAT}"),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), "format None"),
        (edit_manifest(about=[]), "not a manifest written by Tailguard"),
        (edit_manifest(files={"weights.safetensors": 1, "state.safetensors": 2}), "not a manifest written by"),
        (edit_manifest(files=[]), r"lists the files \[\]"),
    ],
)
def test_each_kind_of_damage_is_named(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    for read in (read_sealed, verify_sealed):
        with pytest.raises(CheckpointError, match=message):
            read(folder, NAMES)


def test_a_flipped_bit_anywhere_in_any_file_is_found(folder: Path) -> None:
    """Also in the manifest, also in the description that no file's hash covers."""
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
            with pytest.raises(CheckpointError):
                verify_sealed(folder, NAMES)
        path.write_bytes(whole)
    verify_sealed(folder, NAMES)


# --- hostility ------------------------------------------------------------------------------------------------------


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def bomb() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights", bytes(50_000_000))
    return data.getvalue()


def header(**tensors: Any) -> bytes:
    text = json.dumps({"__metadata__": {"values": "{}"}} | tensors).encode()
    return struct.pack("<Q", len(text)) + text


def declared(shape: list[int], offsets: list[int], dtype: str = "F32") -> bytes:
    return header(x={"dtype": dtype, "shape": shape, "data_offsets": offsets}) + bytes(16)


NESTED = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "zip bomb": bomb(),
    "header longer than the file": struct.pack("<Q", 2**62) + b"{}",
    "gigantic shape": declared([2**40], [0, 2**42]),
    "gigantic shape, honest offsets": declared([2**40], [0, 16]),
    "overflowing shape": declared([2**62, 2**62], [0, 16]),
    "negative shape": declared([-4], [0, 16]),
    "overlapping tensors": header(
        x={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        y={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    )
    + bytes(16),
    "unknown type": declared([4], [0, 16], "OBJ"),
    "not JSON": struct.pack("<Q", 4) + b"\x80\x04.." + bytes(8),
    "nested values": struct.pack("<Q", 40 + 2 * len(NESTED))
    + json.dumps({"__metadata__": {"values": "[" * 100_000}}).encode().ljust(40 + 2 * len(NESTED)),
    "path out of the folder": header(**{"../x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}) + bytes(16),
    "empty": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_and_nothing_large_is_allocated(folder: Path, data: bytes) -> None:
    forge("weights.safetensors", data)(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        read_sealed(folder, NAMES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # kilobytes
    assert {path.name for path in folder.parent.iterdir()} == {"kept"}


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_a_pickle_in_disguise_runs_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "pwned"
    payload = pickle.dumps(Payload(target))
    if name == "manifest.json":
        (folder / name).write_bytes(payload)
    else:
        forge(name, payload)(folder)
    with pytest.raises(CheckpointError, match=name):
        read_sealed(folder, NAMES)
    assert not target.exists()
    pickle.loads(payload)
    assert target.exists()  # the payload was a real one


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "weights.safetensors/../x"])
def test_a_manifest_cannot_name_files_elsewhere(folder: Path, name: str) -> None:
    entry = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    edit_manifest(files={name: entry, "state.safetensors": entry})(folder)
    with pytest.raises(CheckpointError, match="lists the files"):
        read_sealed(folder, NAMES)


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_links_pipes_and_folders_are_not_read(folder: Path, tmp_path: Path, name: str) -> None:
    path, elsewhere = folder / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=f"{name}: a symbolic link; links are not followed"):
        read_sealed(folder, NAMES)
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever
    with pytest.raises(CheckpointError, match=f"{name}: not a plain file"):
        read_sealed(folder, NAMES)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{name}: not a plain file"):
        read_sealed(folder, NAMES)


@pytest.mark.parametrize(("name", "limit"), [("weights.safetensors", 8 * 2**30), ("manifest.json", 16 * 2**20)])
def test_a_file_beyond_the_limit_is_refused_unread(folder: Path, name: str, limit: int) -> None:
    os.truncate(folder / name, limit + 1)  # a sparse file: it costs its sender nothing
    with pytest.raises(CheckpointError, match=f"{limit + 1:,} bytes; at most {limit:,} are read"):
        read_sealed(folder, NAMES)


# --- atomicity ------------------------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_more_leaves_the_old_folder_and_no_rubbish(folder: Path) -> None:
    """The kernel refuses writes beyond a file size, as a full disk refuses them beyond its space."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    large = PARTS | {"weights": {"x": torch.zeros(100_000)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_sealed(folder, large, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    for text in (b"step_1\n", b"step_22\n"):
        replace_synced(path, text)
        assert path.read_bytes() == text
    assert [found.name for found in tmp_path.iterdir()] == ["latest"]


def test_file_names() -> None:
    assert [file_name(name) for name in NAMES] == ["weights.safetensors", "state.safetensors"]
