"""Members' checkpoints in a shared folder or in object storage, for workers that do not see the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tailguard.algorithm.saving import PARTS
from tailguard.errors import CheckpointError, ConfigError, MissingExtraError
from tailguard.experiment.layout import RunLayout, checkpoint_step
from tailguard.sealed import MANIFEST, file_name, verify_sealed

FILES = (*map(file_name, PARTS), MANIFEST)
"""Of a checkpoint. The manifest is written last: a checkpoint without one is not there."""


class CheckpointStorage:
    """A place that all workers and the driver can read and write, through fsspec.

    url: a folder, or an address as s3://bucket/folder. Checkpoints lie in it as in a run's folder of members.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, root = _file_system(url)
        self._root = root.rstrip("/")

    def has(self, member: int, step: int) -> bool:
        """Whether a complete checkpoint is there."""
        return bool(self._files.exists(f"{self._place(member, step)}/{MANIFEST}"))

    def fetch(self, members: Path, member: int, step: int) -> None:
        """Copy a checkpoint into a folder of members; raises `CheckpointError` where it is missing or damaged."""
        folder, place = RunLayout(members / str(member)).checkpoint_path(step), self._place(member, step)
        if not self.has(member, step):
            raise CheckpointError(
                f"--storage {self.url}: there is no checkpoint {place}. Give the storage that the population began with"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in FILES:
            self._files.get_file(f"{place}/{name}", str(folder / name))
        verify_sealed(folder, PARTS)

    def publish(self, members: Path, member: int, step: int) -> None:
        """Copy a checkpoint out of a folder of members."""
        folder, place = RunLayout(members / str(member)).checkpoint_path(step), self._place(member, step)
        if self.has(member, step):  # of an attempt that was lost: while files are replaced it does not count
            self._files.rm(f"{place}/{MANIFEST}")
        self._files.makedirs(place, exist_ok=True)
        for name in FILES:
            self._files.put_file(str(folder / name), f"{place}/{name}")

    def keep(self, member: int, steps: Collection[int]) -> None:
        """Remove a member's other checkpoints."""
        above = str(Path(self._place(member, 0)).parent)
        for entry in self._files.ls(above, detail=False):
            step = checkpoint_step(entry.rstrip("/").rpartition("/")[2])
            if step is not None and step not in steps:
                self._files.rm(entry, recursive=True)

    def _place(self, member: int, step: int) -> str:
        return f"{self._root}/{RunLayout(Path(str(member))).checkpoint_path(step).as_posix()}"


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ModuleNotFoundError as error:
        raise MissingExtraError("fsspec", "ray", "--storage") from error
    try:
        files, root = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:  # a protocol whose package is missing, or one that does not exist
        raise ConfigError(f"--storage {url}: {error}") from error
    return files, str(root)
