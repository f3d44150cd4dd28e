"""The settings of a run on disk: edits and damage are noticed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from pathlib import Path

import pytest

from tailguard.config import RunConfig, to_yaml
from tailguard.errors import ConfigError
from tailguard.experiment.settings import edited_settings, load_run_config, seal_settings


def test_settings_of_a_run_are_compared_with_those_it_was_begun_with(tmp_path: Path) -> None:
    path, seal = tmp_path / "config.yaml", tmp_path / "settings.json"
    path.write_text(to_yaml(RunConfig()))
    seal.write_bytes(seal_settings(RunConfig()))
    assert load_run_config(path) == RunConfig()
    path.write_text(to_yaml(RunConfig()).replace("gamma: 0.99", "gamma: 0.5", 1))
    with pytest.raises(ConfigError, match=r"changed since the run started \(ppo\.gamma was 0\.99 and is 0\.5\)"):
        load_run_config(path)
    path.write_text(to_yaml(RunConfig()).replace("total_timesteps: 2000000", "total_timesteps: 3000000"))
    config = load_run_config(path)
    assert config.training.total_timesteps == 3_000_000
    assert edited_settings(path, config) == {
        "training.total_timesteps": "training.total_timesteps was 2000000 and is 3000000"
    }


def test_a_run_from_before_a_setting_existed_had_its_default(tmp_path: Path) -> None:
    """A whole section and a single setting are missing in the seal; another value than the default is an edit."""
    path, seal = tmp_path / "config.yaml", tmp_path / "settings.json"
    settings = json.loads(seal_settings(RunConfig()))["settings"]
    del settings["robust"], settings["risk"]["throttle"]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    seal.write_text(json.dumps({"settings": settings, "sha256": digest}))
    path.write_text(to_yaml(RunConfig()))
    assert load_run_config(path) == RunConfig()
    path.write_text(to_yaml(RunConfig()).replace("throttle: true", "throttle: false"))
    with pytest.raises(ConfigError, match=r"risk\.throttle was True and is False"):
        load_run_config(path)


def test_no_flipped_bit_changes_a_setting_unseen(tmp_path: Path) -> None:
    """Every bit of config.yaml in turn: an error, an edit that is named, or the same settings."""
    path = tmp_path / "config.yaml"
    config = RunConfig()
    lines = [line for line in to_yaml(config, "risk").splitlines() if "#" not in line]
    whole = "\n".join(lines).encode()
    (tmp_path / "settings.json").write_bytes(seal_settings(config))
    for place in random.Random(0).sample(range(8 * len(whole)), 60):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            assert load_run_config(path) == config
    seal = (tmp_path / "settings.json").read_bytes()
    path.write_bytes(whole)
    (tmp_path / "settings.json").write_bytes(seal.replace(b'"gamma": 0.99', b'"gamma": 0.98'))
    with pytest.raises(ConfigError, match="does not match its own SHA-256"):
        load_run_config(path)
