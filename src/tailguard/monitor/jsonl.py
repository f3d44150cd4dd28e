"""`metrics.jsonl`: machine-readable metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from tailguard.monitor.recording import FigureWriter


class JsonlWriter(FigureWriter):
    """Appends one line of JSON per iteration; values that are not finite are written as null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, figures: Mapping[str, float], step: int) -> None:  # noqa: ARG002 (the figures name it)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_object(figures) + "\n")

    def add(self, figures: Mapping[str, float], step: int) -> None:  # noqa: ARG002
        """Extend the last line in place, so that a crash cannot lose what it already holds."""
        with self.path.open("rb+") as file:
            file.seek(-len("}\n"), os.SEEK_END)
            file.write(f", {_object(figures)[1:]}\n".encode())


def _object(figures: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in figures.items()})
