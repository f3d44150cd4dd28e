"""The kill switch: a file. It is latched: once there, nothing is sent until a person removes it.

A file works from a command, from a signal's handler, from a script, over ssh with `touch`, and survives every crash.
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
    """The file that stops trading as soon as it exists, whatever it holds."""

    path: Path

    def is_tripped(self) -> bool:
        """Read before every send."""
        return os.path.lexists(self.path)

    def trip(self, message: str, *, flatten: bool = False) -> None:
        """Stop trading. A switch that is tripped keeps its message; `flatten` can still be asked for."""
        if self.is_tripped() and (not flatten or self.wants_flat()):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(self.path, json.dumps({"message": message, "flatten": flatten}).encode())

    def message(self) -> str:
        return str(self._content().get("message", "the file is there"))

    def wants_flat(self) -> bool:
        return self._content().get("flatten") is True

    def release(self) -> None:
        self.path.unlink(missing_ok=True)

    def _content(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
