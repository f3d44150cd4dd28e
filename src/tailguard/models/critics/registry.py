"""The table of critics that `network.critic` names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from tailguard.errors import ConfigError
from tailguard.models.critics.base import Critic

CRITICS: dict[str, type[Critic]] = {}
"""Every registered critic by name."""

Kind = TypeVar("Kind", bound=type[Critic])


def register_critic(name: str, *, replace: bool = False) -> Callable[[Kind], Kind]:
    """Register a class as the critic `name`: it can then be named in `network.critic`, and trains with every learner.

    The scalar value is learned in any case, so a critic from outside is a `DistributionalCritic`.
    `replace`: allow a name that is already registered, as when a notebook cell runs twice.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"critic {name!r}: use lower case letters, digits and underscores, starting with a letter")
    if name in CRITICS and not replace:
        raise ConfigError(f"critic {name!r} is registered already; choose another name, or pass replace=True")

    def register(kind: Kind) -> Kind:
        if not kind.predicts_distribution and name != "scalar":
            raise ConfigError(
                f"critic {name!r}: {kind.__name__} predicts no distribution; derive it from DistributionalCritic"
            )
        known = next((other for other, one in CRITICS.items() if one is kind and other != name), None)
        if known is not None:
            raise ConfigError(
                f"critic {name!r}: {kind.__name__} is registered as {known!r} already; derive a class from it"
            )
        missing = sorted(getattr(kind, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"critic {name!r}: {kind.__name__} does not define {', '.join(missing)}")
        kind.kind = name
        CRITICS[name] = kind
        return kind

    return register
