"""Available memory, and a clear message when it is not enough."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tailguard.errors import ConfigError

_SAID = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Numbers of glibc's `mallopt`."""
_LARGEST_KEPT, _KEPT_IN_ALL = 32 * 2**20, 256 * 2**20
"""Bytes. glibc allows no more for a single block, unless no block has a mapping of its own."""
_MOST_KEPT, _SHARE_KEPT = 2**30, 1 / 8
"""Bytes, and share of the free memory, that are kept where that is more."""
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


def format_bytes(size: float) -> str:
    """Bytes in readable units: 61.3 GB."""
    power = min(int(math.log10(max(size, 1)) // 3), len(_UNITS) - 1)
    shown = size / 1000**power
    places = 0 if power == 0 or shown >= 100 else 1
    return f"{shown:,.{places}f} {_UNITS[power]}"


def keep_freed_memory() -> bool:
    """Let this process keep freed blocks for reuse; returns whether that is enabled.

    glibc gives larger blocks back to the system at once. An iteration allocates and frees the same tensors again and
    again, a hundred thousand pages, and the kernel clears every page that it hands out again. With many assets single
    tensors exceed the largest block that glibc keeps: where memory is ample, no block gets a mapping of its own. Where
    there is no glibc, or the user has set its thresholds in the environment, nothing is changed.
    """
    names = ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")
    if any(f"MALLOC_{name}_" in os.environ for name in names):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # Windows, macOS, musl
        return False
    kept = int(min(_MOST_KEPT, _SHARE_KEPT * free_memory()))
    if kept > _KEPT_IN_ALL:
        return bool(set_option(_MMAP_MAX, 0) and set_option(_TRIM_THRESHOLD, kept))
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST_KEPT) and set_option(_TRIM_THRESHOLD, _KEPT_IN_ALL))


def free_memory(device: str = "cpu") -> float:
    """Bytes that are free on the device; infinite where this is unknown.

    On the CPU the smallest of the machine's free memory and the limits of the process (`ulimit`) and its container.
    """
    if device.startswith("cuda"):
        import torch

        return float(torch.cuda.mem_get_info(device)[0])
    return min(_machine(), _process(), _container())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: Python's own, or PyTorch's on a CPU or a GPU."""
    text = str(error).lower()
    said = any(words in text for words in _SAID)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and said)


@contextlib.contextmanager
def explain_out_of_memory(way_out: str) -> Iterator[None]:
    """Turn an allocation that fails inside into a `ConfigError` that gives the requested size and a remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        wanted = re.search(r"(?:allocate|Unable to allocate) ([\d.]+ ?[KMGTP]?i?[Bb]\w*)", str(error))
        asked = f" when allocating {wanted[1]}" if wanted else ""
        raise ConfigError(f"out of memory{asked}. {way_out}") from error


def _machine() -> float:
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def _process() -> float:
    try:
        import resource
    except ImportError:  # not on this system
        return math.inf
    free = math.inf
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed = resource.getrlimit(limit)[0]
        if allowed != resource.RLIM_INFINITY:
            taken = _kilobytes(Path("/proc/self/status"), used)
            free = min(free, max(0.0, allowed - (0.0 if math.isinf(taken) else taken)))
    return free


def _container() -> float:
    """Free memory of the control group; the page cache is reclaimable, so it does not count."""
    group = Path("/sys/fs/cgroup")
    try:
        allowed = (group / "memory.max").read_text().strip()
        if allowed == "max":
            return math.inf
        used = int((group / "memory.current").read_text())
        files = int(re.search(r"^file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)[1])  # type: ignore[index]
        return max(0.0, float(allowed) - used + files)
    except (OSError, ValueError, TypeError):
        return math.inf


def _kilobytes(path: Path, name: str) -> float:
    """The bytes of a line such as `MemAvailable:  123 kB`; infinite where there is none."""
    with contextlib.suppress(OSError):
        match = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
        if match:
            return 1024.0 * int(match[1])
    return math.inf
