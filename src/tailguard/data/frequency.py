"""Bar lengths as people write them: `1m`, `15m`, `1h`, `1d`."""

from __future__ import annotations

import re
from datetime import timedelta

from tailguard.errors import BarsError

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def parse_frequency(text: str) -> timedelta:
    """The length that `text` names: a whole number and one of s, m, h, d, w. Months have no fixed length."""
    match = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if match is None or int(match[1]) == 0:
        raise BarsError(f"frequency {text!r} is not a bar length; write a number and s, m, h, d or w, like 15m or 1h")
    return timedelta(seconds=int(match[1]) * _SECONDS[match[2]])


def frequency_label(frequency: timedelta) -> str:
    """The shortest text that `parse_frequency` reads as `frequency`: 1h rather than 60m."""
    milliseconds = frequency // timedelta(milliseconds=1)
    if milliseconds % 1_000:
        return f"{milliseconds}ms"
    unit = next(unit for unit in reversed(_SECONDS) if milliseconds % (_SECONDS[unit] * 1_000) == 0)
    return f"{milliseconds // (_SECONDS[unit] * 1_000)}{unit}"
