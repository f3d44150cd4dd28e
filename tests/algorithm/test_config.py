"""Settings of the learner: what is wrong is named with its key, and unknown names get a suggestion."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.envs.tasks import RecallEnv
from tailguard.errors import ConfigError
from tailguard.models.policy import NetworkConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_steps", 0),
        ("n_steps", 6.5),
        ("minibatch_size", 1),
        ("epochs", 0),
        ("microbatches", 0),
        ("optimizer", "sgd"),
        ("learning_rate", -1e-3),
        ("learning_rate", "linaer:1:0"),
        ("learning_rate", "linear:1e-3:-1e-3"),
        ("weight_decay", -0.1),
        ("weight_decay", 0.1),
        ("gamma", 1.01),
        ("gamma", 0.0),
        ("gae_lambda", -0.1),
        ("distribution_lambda", 1.1),
        ("distribution_target", "td"),
        ("baseline", "mean"),
        ("twin_mode", "max"),
        ("clip_range", -0.2),
        ("normalise_advantages", "batch"),
        ("value_coef", -1.0),
        ("distribution_coef", math.nan),
        ("value_clip", "quantiles"),
        ("value_clip_limit", 0.0),
        ("value_clip_sd_ratio", 0.5),
        ("huber_kappa", -0.1),
        ("entropy_coef", -0.01),
        ("entropy_coef", "linear:0.01:-0.01"),
        ("entropy_floor", -1.0),
        ("entropy_window", 2),
        ("entropy_boost", 0.5),
        ("target_kl", 0.0),
        ("kl_limit", -1.0),
        ("kl_penalty", 0.1),
        ("max_grad_norm", math.nan),
        ("log_ratio_limit", 1000.0),
        ("on_nonfinite", "ignore"),
        ("observation_clip", 0.0),
        ("return_decay", 0.0),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^ppo\.{name}: "):
        PPOConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 64),
        ("hidden", (64, 0)),
        ("activation", "gelu"),
        ("memory", "gru"),
        ("lstm_size", 0),
        ("lstm_layers", 3),
        ("lstm_layers", 1.5),
        ("std", "none"),
        ("log_std_init", 2.0),
        ("critic", "expectile"),
        ("quantiles", 1),
        ("atoms", 1),
        ("support", (1.0, -1.0)),
        ("projection", "linear"),
        ("twin_trunk", "both"),
    ],
)
def test_a_wrong_network_is_refused_with_its_key(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^network\.{name}: "):
        NetworkConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"critic": "scalar", "baseline": "distribution"}, "ppo.baseline"),
        ({"critic": "categorical", "value_clip": "per_quantile"}, "ppo.value_clip"),
        ({"memory": "shared", "twin_critics": True, "twin_trunk": "own"}, "network.twin_trunk"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig().with_options(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"critic": "categorical", "huber_kappa": 0.1},
            r"ppo\.huber_kappa: 0\.1 .*categorical; set it to 0, or network",
        ),
        ({"critic": "scalar", "huber_kappa": 0.1}, r"ppo\.huber_kappa: 0\.1 .*scalar; set it to 0"),
        ({"entropy_window": 5}, r"ppo\.entropy_window: 5 .*set ppo\.entropy_coef or ppo\.entropy_floor above 0"),
        ({"twin_trunk": "own"}, r"network\.twin_trunk: own .*set network\.twin_critics to true"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig().with_options(options)


@pytest.mark.parametrize(
    ("name", "near"), [("learning_rat", "learning_rate"), ("quantile", "quantiles"), ("twin_critic", "twin_critics")]
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: no such setting\. Did you mean {near}\?"):
        DistributionalPPO(RecallEnv(2), **{name: 1})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(ConfigError, match=r"There are .*gamma.*lstm_size") as error:
        PPOConfig().with_options({"zzz": 1})
    assert "network" not in str(error.value).split()


def test_options_reach_the_learner_and_its_network() -> None:
    given = PPOConfig(gamma=0.9, network=NetworkConfig(lstm_size=16))
    config = given.with_options({"n_steps": 7, "critic": "categorical"})
    assert (config.n_steps, config.gamma, config.network.critic, config.network.lstm_size) == (
        7,
        0.9,
        "categorical",
        16,
    )
    assert given.n_steps == 64
    assert dataclasses.replace(config) == config


def test_limits_of_the_kl() -> None:
    assert PPOConfig().kl_stopper is None
    both = PPOConfig(target_kl=0.01, kl_limit=0.012).kl_stopper
    assert both is not None
    assert (both.average_limit, both.hard_limit) == (0.012, 0.012)
    target = PPOConfig(target_kl=0.01).kl_stopper
    assert target is not None
    assert target.average_limit == pytest.approx(0.015)
    assert target.hard_limit == math.inf
    limit = PPOConfig(kl_limit=0.02).kl_stopper
    assert limit is not None
    assert (limit.average_limit, limit.hard_limit) == (0.02, 0.02)


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, False),
        ({"entropy_coef": 0.01}, True),
        ({"entropy_coef": "linear:0:0.01"}, True),
        ({"entropy_floor": 0.1}, True),
    ],
)
def test_entropy_takes_part_when_it_ever_has_a_weight(options: dict[str, Any], used: bool) -> None:
    assert PPOConfig(**options).uses_entropy == used
