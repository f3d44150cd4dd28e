"""Settings: defaults, YAML, overrides, and mistakes that are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from tailguard.config import RunConfig, load_config, to_dict, to_yaml
from tailguard.errors import ConfigError
from tailguard.field_docs import field_docs


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
        ("ppo.gamma=high", r"ppo\.gamma: 'high' is not a number"),
        ("ppo.network.critic=gaussian", r"network\.critic: 'gaussian' is not one of"),
        ("env.num_envs=-1", r"env\.num_envs: -1 is out of range"),
        ("env.num_envs=2.5", r"env\.num_envs: 2\.5 is not a whole number"),
        ("ppo=3", "ppo: this is a section"),
        ("ppo.gamma", "section.key=value"),
        ("training.seed=hello", "training.seed: 'hello' is not a whole number"),
        ("risk.limit=low", "risk.limit: 'low' is not a number"),
        ("risk.throttle=maybe", "risk.throttle: 'maybe' is not true or false"),
        ("learner=dqn", "learner: 'dqn' is not 'ppo' or 'pathwise'"),
        ("data.features=return_1", "data.features: 'return_1' is not a list"),
    ],
)
def test_mistakes_are_named_with_the_way_out(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=r"run\.yaml: no such file\. To begin with all defaults: tailg"):
        load_config(path)
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read: not a plain file"):
        load_config(path)
    path.rmdir()
    path.write_text("a: [1, 2")
    with pytest.raises(ConfigError, match="not readable as YAML"):
        load_config(path)
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="not list"):
        load_config(path)


def bomb(depth: int) -> str:
    """Ten of the line before on every line: 10^depth values in a few hundred bytes."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    return "\n".join(lines) + f"\nppo: *a{depth - 1}\n"


@pytest.mark.parametrize("depth", [2, 7])
def test_aliases_are_refused_before_they_are_expanded(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(bomb(depth))
    with pytest.raises(
        ConfigError, match=r"aliases \(\*a0\) are not allowed; write the value out\s+in .*line 2"
    ) as refused:
        load_config(path)
    assert len(str(refused.value)) < 500
    with pytest.raises(ConfigError, match="aliases"):
        load_config(overrides=["data.symbols=[&a x, *a]"])


def test_a_file_too_large_for_settings_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("ppo: [" + "1, " * 200_000 + "1]")
    with pytest.raises(ConfigError, match=r"run\.yaml: 600,\d+ bytes; a config has at most 262,144"):
        load_config(path)


@pytest.mark.parametrize("override", ["ppo=", "ppo.gamma=", "data.symbols="])
def test_a_long_value_is_shortened_in_the_message(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=[override + "{a: " + "x" * 50_000 + "}"])
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("text", ["a: 2021-13-45", "a: " + "9" * 5_000, "[" * 3_000, "a: \x01"])
def test_values_that_yaml_cannot_build_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not readable as YAML|nested too deeply") as refused:
        load_config(path)
    assert len(str(refused.value)) < 1_000


def test_whole_numbers_in_scientific_notation_are_counts(tmp_path: Path) -> None:
    assert load_config(overrides=["training.total_timesteps=1e6"]).training.total_timesteps == 1_000_000
    (tmp_path / "run.yaml").write_text("training: {total_timesteps: 2e6}\n")
    assert load_config(tmp_path / "run.yaml").training.total_timesteps == 2_000_000
    with pytest.raises(ConfigError, match=r"total_timesteps: '1\.5e0' is not a whole number"):
        load_config(overrides=["training.total_timesteps=1.5e0"])


def test_a_wrong_override_is_named_and_not_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("ppo: {gamma: 0.9}\n")
    with pytest.raises(ConfigError, match=r"^--set env\.num_envs=-1: env\.num_envs: -1 is out of range"):
        load_config(path, ["ppo.epochs=2", "env.num_envs=-1", "ppo.n_steps=8"])
    path.write_text("ppo: {gamma: 2}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: ppo\.gamma: 2 is out of range"):
        load_config(path, ["ppo.epochs=2"])
    # Wrong by itself, right with what comes after it.
    path.write_text("risk: {limit: -0.1, penalty: 1}\n")
    assert load_config(path, ["risk.penalty=0"]).risk.limit == -0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {embargo: 2021-13-40}\n", "not readable as YAML"),
        (f"training: {{seed: {'9' * 5000}}}\n", "not readable as YAML"),
        ("a: " + "[" * 5000, "nested too deeply|not readable"),
        ("a: &a [1, 1]\nppo: *a\n", r"aliases \(\*a\) are not allowed; write the value out"),
        ("x" * 2_000_000, "at most 262,144"),
        (f"ppo: {{gamma: {'x' * 100_000}}}\n", "characters"),
    ],
)
def test_odd_yaml_is_one_short_message(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as found:
        load_config(path)
    assert len(str(found.value)) < 1_000
    with pytest.raises(ConfigError):
        load_config(overrides=[f"ppo.gamma={text.partition(':')[2]}"])


def test_off_is_a_choice_and_no_boolean(tmp_path: Path) -> None:
    assert load_config(overrides=["ppo.value_clip=off"]).ppo.value_clip == "off"
    (tmp_path / "run.yaml").write_text("ppo: {normalise_advantages: off}\nmarket: {allow_short: no}\n")
    config = load_config(tmp_path / "run.yaml", ["market.observed_funding=False"])
    assert config.ppo.normalise_advantages == "off"
    assert config.market.allow_short is False
    assert config.market.observed_funding is False
    assert load_config(overrides=["data.path=true.parquet"]).data.path == "true.parquet"
