"""The kill switch: files. It is latched: once one is there, nothing is sent until a person releases the session.

A file works from a command, from a signal's handler, from a script, over ssh with `touch`, and survives every crash.
Each mode of a run has a file of its own, and one file stops all of them. A release is that of one mode: it passes the
common file on to the other modes before it removes it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailguard.places import replace_synced


@dataclass(frozen=True)
class KillSwitch:
    """The files that stop trading as soon as one of them exists, whatever it holds."""

    path: Path
    """The session's own."""
    common: Path | None = None
    """The one that stops every mode of the run."""
    others: tuple[Path, ...] = ()
    """Those of the other modes."""

    def is_tripped(self) -> bool:
        """Read before every send. What cannot be read counts as tripped, as does a folder that is gone."""
        return any(_may_be_there(path) for path in self._files)

    def trip(self, message: str, *, flatten: bool = False) -> None:
        """Stop this session's trading. A file that is there keeps its message; `flatten` can still be asked for."""
        _write(self.path, message, flatten=flatten)

    def message(self) -> str:
        found = [content["message"] for content in self._contents() if "message" in content]
        there = [str(path) for path in self._files if os.path.lexists(path)]
        return str(found[0]) if found else f"{there[0]} is there" if there else f"{self.path.parent} cannot be read"

    def wants_flat(self) -> bool:
        return any(content.get("flatten") is True for content in self._contents())

    def release(self) -> None:
        """Go on with this session alone: what was tripped for all modes stays so for the others."""
        if self.common is not None and os.path.lexists(self.common):
            content = _content(self.common)
            message = str(content.get("message", f"{self.common} was there"))
            for path in self.others:
                _write(path, message, flatten=content.get("flatten") is True)
            self.common.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @property
    def _files(self) -> tuple[Path, ...]:
        return (self.path,) if self.common is None else (self.path, self.common)

    def _contents(self) -> list[dict[str, Any]]:
        return [_content(path) for path in self._files]


def _may_be_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return not path.parent.is_dir()
    except OSError:
        return True
    return True


def _write(path: Path, message: str, *, flatten: bool) -> None:
    if os.path.lexists(path) and (not flatten or _content(path).get("flatten") is True):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_synced(path, json.dumps({"message": message, "flatten": flatten}).encode())
    except OSError:
        # An empty file needs no room on a full disk, and stops as well.
        path.touch()
        if flatten:
            raise


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
