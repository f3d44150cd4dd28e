"""Sealed folders: tensors and plain values, written atomically, that cannot execute code when read.

A sealed folder holds one safetensors file for each part and `manifest.json`, which holds the size and the SHA-256 of
every file and a SHA-256 of itself. It is written next to its destination, flushed to disk, read back, and then renamed.
A reader sees the old folder or the new one, never a partial one.

A part is a nested dict of tensors, numbers, text, booleans, None and lists. Its tensors are named by their path
(`optimizer/moments/…`); everything else is one JSON text in the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from tailguard.errors import CheckpointError
from tailguard.places import new_folder, put_in_place, recover, sync_folder, write_synced

FORMAT = 3
"""Version of the layout; a reader refuses every other one."""
MANIFEST = "manifest.json"
VALUES = "values"
"""Metadata key of everything in a part that is not a tensor."""
LARGEST_MANIFEST = 16 * 2**20
LARGEST_FILE = 8 * 2**30
"""Files beyond these sizes are refused before a byte of them is read."""

State = Mapping[str, Any]


def write_sealed(folder: Path, parts: Mapping[str, State], about: Mapping[str, Any]) -> None:
    """Write `parts` and the description `about` (JSON) to `folder`; an existing sealed folder is replaced.

    Raises OSError if it cannot be written; an existing folder is then unchanged.
    """
    files = {file_name(name): _encode(part) for name, part in parts.items()}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "files": {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in files.items()},
        "about": dict(about),
    }
    manifest["sha256"] = _digest(_canonical(manifest))
    files[MANIFEST] = (json.dumps(manifest, indent=2) + "\n").encode()
    _check_replaceable(folder, files)
    with new_folder(folder) as partial:
        for name, data in files.items():
            write_synced(partial / name, data)
        sync_folder(partial)
        verify_sealed(partial, parts)
        put_in_place(partial, folder)


def read_sealed(folder: Path, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The description and the parts by name; raises `CheckpointError` naming whatever is wrong with the folder."""
    manifest = _read_manifest(folder, names)
    parts = {}
    for name in names:
        path = folder / file_name(name)
        parts[name] = _decode(path, _read_checked(path, manifest["files"][path.name]))
    return manifest["about"], parts


def read_about(folder: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """The description alone; the parts are not read. `names`: of the parts; None: whatever parts there are."""
    about: dict[str, Any] = _read_manifest(folder, names)["about"]
    return about


def verify_sealed(folder: Path, names: Collection[str]) -> None:
    """Raise `CheckpointError` unless every file exists, byte for byte as written."""
    manifest = _read_manifest(folder, names)
    for name in names:
        path = folder / file_name(name)
        _read_checked(path, manifest["files"][path.name])


def file_name(part: str) -> str:
    return f"{part}.safetensors"


# --- files ----------------------------------------------------------------------------------------------------------


def read_regular(path: Path, largest: int) -> bytes:
    """The bytes of a plain file; links, pipes and devices are refused, and sizes beyond `largest`."""
    try:
        # A pipe would block the opening, and a link could point anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from error
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path}: a symbolic link; links are not followed") from error
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a plain file")
        if status.st_size > largest:
            raise CheckpointError(f"{path}: {status.st_size:,} bytes; at most {largest:,} are read")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            # Not `largest`: read() would allocate that much memory first, however small the file is.
            return file.read(status.st_size + 1)
    finally:
        os.close(descriptor)


def _check_replaceable(folder: Path, files: Mapping[str, bytes]) -> None:
    """Refuse a place that holds anything but an earlier sealed folder: replacing it would delete what is there."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder}: exists and is not a folder; choose another name")
    present = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
    others = sorted(present - set(files) - _sealed_files(folder))
    if others:
        raise CheckpointError(f"{folder}: the folder holds other files ({', '.join(others[:3])}); choose a new folder")


def _sealed_files(folder: Path) -> set[str]:
    """Names of the files that the folder's own manifest lists, and the manifest's; none if it has no intact one."""
    try:
        return {*_read_manifest(folder, None)["files"], MANIFEST}
    except (CheckpointError, OSError):
        return set()


# --- contents -------------------------------------------------------------------------------------------------------


def _read_manifest(folder: Path, names: Collection[str] | None) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.exists():
        recover(folder)
    manifest: dict[str, Any] = parse_json(path, read_regular(path, LARGEST_MANIFEST))
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise CheckpointError(f"{path}: format {version!r}; this version of Tailguard reads format {FORMAT}")
    stated = manifest.pop("sha256", None)
    if stated != _digest(_canonical(manifest)):
        raise CheckpointError(f"{path}: its content does not match its own SHA-256; the file has been changed")
    files = manifest.get("files")
    expected = {file_name(name) for name in names or ()}
    if not isinstance(files, dict) or (names is not None and set(files) != expected):
        shown = ", ".join(sorted(files)) if isinstance(files, dict) else repr(files)
        raise CheckpointError(f"{path}: lists the files {shown}; expected {', '.join(sorted(expected))}")
    well_formed = all(
        isinstance(entry, dict)
        and set(entry) == {"bytes", "sha256"}
        and isinstance(entry["bytes"], int)
        and isinstance(entry["sha256"], str)
        for entry in files.values()
    )
    if not well_formed or not isinstance(manifest.get("about"), dict):
        raise CheckpointError(f"{path}: not a manifest written by Tailguard")
    return manifest


def _read_checked(path: Path, entry: Mapping[str, Any]) -> bytes:
    """The file's bytes, verified against the manifest; hashed and used from a single read."""
    data = read_regular(path, LARGEST_FILE)
    if len(data) != entry["bytes"]:
        raise CheckpointError(f"{path}: {len(data):,} bytes long; {entry['bytes']:,} were written")
    if _digest(data) != entry["sha256"]:
        raise CheckpointError(
            f"{path}: its SHA-256 differs from the manifest; the file has changed since it was written"
        )
    return data


def _encode(part: State) -> bytes:
    tensors: dict[str, Tensor] = {}
    values = _split(part, (), tensors)
    # Copies, since safetensors refuses tensors that share memory, as the equities of a fresh account do.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return bytes(save_tensors(copies, metadata={VALUES: json.dumps(values)}))


def _split(part: State, path: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Collect the tensors by path; returns the rest, with every dict of the original in it, empty ones too."""
    values: dict[str, Any] = {}
    for name, value in part.items():
        here = (*path, name)
        if isinstance(value, Tensor):
            if any("/" in folder for folder in here):
                raise ValueError(f"tensor {here}: its path is ambiguous because a name in it contains '/'")
            tensors["/".join(here)] = value
        elif isinstance(value, Mapping):
            values[name] = _split(value, here, tensors)
        else:
            values[name] = value
    return values


def _decode(path: Path, data: bytes) -> dict[str, Any]:
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors: {error}") from error
    header = parse_json(path, data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    text = metadata.get(VALUES, "null") if isinstance(metadata, dict) else "null"
    part = parse_json(path, str(text).encode())
    if not isinstance(part, dict):
        raise CheckpointError(f"{path}: safetensors, but not a part written by Tailguard")
    for name, tensor in tensors.items():
        *folders, last = name.split("/")
        place: Any = part
        for folder in folders:
            place = place.get(folder) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last in place:
            raise CheckpointError(f"{path}: the tensor {name} does not fit the state stored with it")
        place[last] = tensor
    return part


def parse_json(path: Path, data: bytes) -> Any:
    """JSON, or a `CheckpointError` that names the file; JSON that is nested too deeply is refused too."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error


def flat_tensors(part: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state with its path."""
    for name, value in part.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Mapping):
            yield from flat_tensors(value, f"{prefix}{name}/")


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
