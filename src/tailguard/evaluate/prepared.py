"""The settings of a run that are fixed in a prepared market and must be the same wherever it is used."""

from __future__ import annotations

from typing import Any

from tailguard.config import RunConfig, to_dict
from tailguard.envs.mapped_market import PreparedMarket, check_same_setting

BOUND = (
    *("data.symbols", "data.gaps", "data.volume_unit", "data.validation", "data.test", "data.embargo"),
    *("data.features", "env.accounts"),
)
"""Besides those of the market's table, which the environment compares."""


def bound_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a prepared market depends on, by their names."""
    plain = to_dict(config)
    return {name: plain[name.partition(".")[0]][name.partition(".")[2]] for name in BOUND}


def check_settings(market: PreparedMarket, config: RunConfig) -> None:
    """Refuse settings that differ from those of the prepared market."""
    for name, value in bound_settings(config).items():
        check_same_setting(market.folder, name, market.settings.get(name), value)
