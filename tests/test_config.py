"""Settings: defaults, YAML, overrides, and mistakes that are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from tailguard.config import RunConfig, field_docs, load_config, to_dict, to_yaml
from tailguard.errors import ConfigError


def test_the_printed_defaults_read_back_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(RunConfig()))
    assert load_config(path) == RunConfig()
    assert yaml.safe_load(path.read_text()) == to_dict(RunConfig())


def test_every_setting_has_a_sentence() -> None:
    def check(kind: type, config: object) -> None:
        for item in dataclasses.fields(kind):
            assert len(field_docs(kind)[item.name]) > 10, f"{kind.__name__}.{item.name}"
            if dataclasses.is_dataclass(value := getattr(config, item.name)):
                check(type(value), value)

    check(RunConfig, RunConfig())


def test_a_file_changes_what_it_names_and_overrides_come_last(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("ppo: {gamma: 0.9, network: {lstm_size: 32}}\nmarket: {fee: 0.001}\n")
    config = load_config(path, ["ppo.gamma=0.5", "ppo.learning_rate=linear:1e-3:0", "data.symbols=[BTC, ETH]"])
    assert config.ppo.gamma == 0.5
    assert config.ppo.network.lstm_size == 32
    assert config.market.fee == 0.001
    assert config.ppo.learning_rate == "linear:1e-3:0"
    assert config.data.symbols == ("BTC", "ETH")
    assert config.env == RunConfig().env


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert load_config(overrides=["market.fee=5e-4"]).market.fee == 5e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.gama=0.9", r"ppo\.gama: no such setting\. Did you mean ppo\.gamma\?"),
        ("pppo.gamma=0.9", r"pppo: no such setting\. Did you mean ppo\?"),
        ("ppo.network.lstm_sise=3", r"Did you mean ppo\.network\.lstm_size\?"),
        ("ppo.gamma=1.5", r"ppo\.gamma: 1\.5 is out of range"),
        ("ppo.gamma=high", r"ppo\.gamma.*not 'high'"),
        ("ppo.network.critic=gaussian", r"ppo\.network\.critic.*not 'gaussian'"),
        ("env.num_envs=0", r"env\.num_envs: 0 is out of range"),
        ("env.num_envs=2.5", r"env\.num_envs.*not 2\.5"),
        ("ppo=3", "ppo: this is a section"),
        ("ppo.gamma", "section.key=value"),
    ],
)
def test_mistakes_are_named_with_the_way_out(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text("a: [1, 2")
    with pytest.raises(ConfigError, match="not readable as YAML"):
        load_config(path)
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="not list"):
        load_config(path)
