"""Settings of a run on disk: sealed when it starts, so that an edited or damaged config.yaml is noticed."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailguard.config import RunConfig, differing_settings, load_config, to_dict
from tailguard.errors import ConfigError
from tailguard.experiment.layout import SEAL
from tailguard.places import read_plain
from tailguard.plugins import changed_plugins, plugin_hashes

MAY_CHANGE = (
    "data.path",
    *(f"training.{name}" for name in ("total_timesteps", "patience", "device", "threads")),
    *(f"training.{name}" for name in ("checkpoint_steps", "checkpoint_minutes", "keep_checkpoints")),
)
"""Settings that may be edited after a run has started: data location, length, device and checkpoints."""


def recorded_settings(config: RunConfig) -> dict[str, Any]:
    """The settings as a run records them: each plugin with the SHA-256 of its code; no entry where there are none."""
    settings = to_dict(config)
    del settings["plugins"]
    return settings | ({"plugins": plugin_hashes(config.plugins)} if config.plugins else {})


def seal_settings(config: RunConfig) -> bytes:
    """The settings as a run stores them, to detect an edited or damaged config.yaml."""
    settings = recorded_settings(config)
    return (json.dumps({"settings": settings, "sha256": _digest(settings)}, indent=1) + "\n").encode()


def load_run_config(path: Path, *, trust_plugins: bool = False) -> RunConfig:
    """The settings in a run's config.yaml; raises if they differ from those that the run was started with.

    `trust_plugins`: run the plugins that they name; else they are refused, unless this process has run them already.
    """
    config = load_config(path, trust_plugins=trust_plugins)
    edited = edited_settings(path, config)
    refused = [difference for key, difference in edited.items() if key not in MAY_CHANGE]
    if refused:
        shown = "; ".join(refused)
        raise ConfigError(
            f"{path}: changed since the run started ({shown}). Restore these settings; to train with others, start a "
            f"new run: tailguard train {shlex.quote(str(path))} --name NEW"
        )
    return config


def edited_settings(path: Path, config: RunConfig) -> dict[str, str]:
    """Differences from the settings that the run of this config.yaml was started with, by name.

    Plugins are compared by their code, by `changed_since`; their files may have moved.
    """
    begun = _read_seal(path)
    if begun is None:
        return {}
    now = recorded_settings(config)
    # A setting that did not exist when the run began had the effect of today's default.
    begun = _completed(begun, to_dict(RunConfig()))
    before, after = (list(settings.pop("plugins", {})) for settings in (begun, now))
    differing = differing_settings(begun, now)
    if len(before) != len(after):
        differing["plugins"] = f"plugins was {before} and is {after}"
    return differing


def changed_since(path: Path, config: RunConfig) -> list[str]:
    """Plugins whose code has changed since the run of this config.yaml was started, in words."""
    begun = _read_seal(path) or {}
    return changed_plugins(begun.get("plugins", {}), plugin_hashes(config.plugins)) if begun else []


def _completed(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, and the defaults of sections and settings that they do not have; plugins stay as they are."""
    missing = {name: value for name, value in defaults.items() if name not in given and name != "plugins"}
    return {
        name: _completed(value, defaults[name])
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
        else value
        for name, value in given.items()
    } | missing


def _read_seal(path: Path) -> dict[str, Any] | None:
    """The settings sealed beside this config.yaml; None where a run of an earlier version has none."""
    seal = path.with_name(SEAL)
    if not seal.exists():
        return None
    way_out = f"If {path.name} has not changed since the run started, delete {seal} and try again"
    try:
        sealed = json.loads(read_plain(seal))
        begun, stated = sealed["settings"], sealed["sha256"]
        plugins = begun.get("plugins", {}) if isinstance(begun, dict) else None
        is_whole = isinstance(plugins, dict) and stated == _digest(begun)
    except OSError as error:
        raise ConfigError(f"{seal}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{seal}: damaged: {error!r}. {way_out}") from error
    if not is_whole:
        raise ConfigError(f"{seal}: damaged: its content does not match its own SHA-256. {way_out}")
    return dict(begun)


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
