"""The `tailguard` command: parses, calls, prints. Work is done elsewhere."""

from importlib import import_module

from tailguard.cli.application import app, main

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = ("train", "population", "evaluate", "audit", "live", "venue", "bench", "config", "data")
"""Modules of this package that register commands; their order is that of `tailguard --help`."""

for _module in COMMANDS:
    import_module(f"{__name__}.{_module}")
