"""Range checks that name the setting, its value and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from tailguard.errors import ConfigError


def check_range(
    name: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Raise unless `low <= value <= high`; `low_open` / `high_open` leave the end point out."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: {value!r} is not a number")
    inside = (value > low if low_open else value >= low) and (value < high if high_open else value <= high)
    if not inside:  # NaN fails every comparison, so it ends here too
        left = f"{'more than' if low_open else 'at least'} {low:g}" if low > -math.inf else ""
        right = f"{'less than' if high_open else 'at most'} {high:g}" if high < math.inf else ""
        raise ConfigError(f"{name}: {value:g} is out of range; it must be {' and '.join(filter(None, (left, right)))}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(map(str, choices))}")


def check_count(name: str, value: int, low: int = 1) -> None:
    """Raise unless `value` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    if value < low:
        raise ConfigError(f"{name}: {value} is out of range; it must be at least {low}")


def check_registered(name: str, value: object, known: Iterable[str], register: str) -> None:
    """Raise unless `value` is one of the `known` names of a registry; `register` is the function that adds to it."""
    names = list(known)
    if value in names:
        return
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5) if isinstance(value, str) else []
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"{name}: {value!r} is not one of {', '.join(names) or 'those registered, of which there are none'}. {hint}"
        f"Register your own with {register}; for the command line, in a file that the setting plugins names"
    )
