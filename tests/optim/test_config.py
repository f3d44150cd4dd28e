"""Settings of the optimisers' extras: each out-of-range value is named with its section."""

from __future__ import annotations

from typing import Any

import pytest

from tailguard.algorithm.config import PPOConfig
from tailguard.errors import ConfigError
from tailguard.optim.config import UPGDConfig, VGSConfig


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (UPGDConfig, {"beta_utility": 1.0}, "upgd.beta_utility"),
        (UPGDConfig, {"sigma": -1.0}, "upgd.sigma"),
        (UPGDConfig, {"step_factor": 3}, "upgd.step_factor"),
        (UPGDConfig, {"normalisation": "mean"}, "upgd.normalisation"),
        (VGSConfig, {"alpha": -0.1}, "vgs.alpha"),
        (VGSConfig, {"beta": 1.0}, "vgs.beta"),
        (VGSConfig, {"min_scale": 0.0}, "vgs.min_scale"),
        (VGSConfig, {"max_nsr": 0.0}, "vgs.max_nsr"),
        (VGSConfig, {"warmup_steps": 0}, "vgs.warmup_steps"),
        (VGSConfig, {"granularity": "layer"}, "vgs.granularity"),
        (VGSConfig, {"moments": "adam"}, "vgs.moments"),
    ],
)
def test_values_out_of_range_are_named(kind: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        kind(**options)


def test_a_config_survives_json() -> None:
    import dataclasses
    import json

    config = PPOConfig(optimizer="upgdw", weight_decay=0.01, upgd=UPGDConfig(sigma=0.5), vgs=VGSConfig(enabled=True))
    assert PPOConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config
