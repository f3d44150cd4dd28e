"""The former place of `tailguard.monitor.callbacks`; its names are found here until version 0.3."""

from __future__ import annotations

import warnings
from typing import Any

from tailguard.monitor import callbacks


def __getattr__(name: str) -> Any:
    value = getattr(callbacks, name)
    warnings.warn(
        f"tailguard.algorithm.callbacks.{name} is now tailguard.monitor.callbacks.{name}", DeprecationWarning, 2
    )
    return value
