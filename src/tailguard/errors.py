"""Errors a user can act on. The command line prints them as one message and exits with status 2, or 1 for a run."""

from __future__ import annotations


class TailguardError(Exception):
    """Something the user gave cannot be used; the message names it, its value and the way out."""


class BarsError(TailguardError):
    """Market data that cannot be trusted; the message names file, row, time and values."""


class ConfigError(TailguardError):
    """A setting that is unknown, of the wrong type or out of range."""


class CheckpointError(TailguardError):
    """A saved agent or checkpoint that is damaged, of another kind, or not trustworthy; the message names the fault."""


class RunError(TailguardError):
    """A run that could not continue with valid settings, as on a full disk; the command line exits with 1."""


class MissingExtraError(TailguardError):
    """A feature needs an optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed. Install it with: pip install 'tailguard[{extra}]'"
        )


class BarsWarning(UserWarning):
    """Market data that is usable but looks suspicious; the message names file, row, time and values."""
