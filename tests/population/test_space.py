"""Ranges and their moves, and messages for search spaces that cannot be used."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailguard.config import RunConfig
from tailguard.errors import ConfigError
from tailguard.population.hyper import apply, check_space, scaled_schedule
from tailguard.population.space import SearchSpace

FACTORS = (0.8, 1.25)


def one(**given: Any) -> Any:
    return SearchSpace.parse({"x": given}).dimensions[0]


def test_first_values_are_uniform_on_their_scale() -> None:
    random = np.random.default_rng(0)
    drawn = np.log10([one(log=[1e-5, 1e-1]).draw(random) for _ in range(4000)])
    assert drawn.mean() == pytest.approx(-3, abs=0.06)  # standard error 4/√12/√4000 = 0.018
    assert drawn.std() == pytest.approx(4 / math.sqrt(12), abs=0.03)
    linear = np.array([one(linear=[-1, 3]).draw(random) for _ in range(4000)])
    assert linear.mean() == pytest.approx(1, abs=0.06)
    whole = [one(integer=[1, 3]).draw(random) for _ in range(3000)]
    assert np.bincount(whole)[1:] / 3000 == pytest.approx([1 / 3] * 3, abs=0.04)
    negative = [one(log=[-0.1, -0.001]).draw(random) for _ in range(1000)]
    assert min(negative) >= -0.1
    assert max(negative) <= -0.001
    assert np.median(negative) == pytest.approx(-0.01, rel=0.2)


def test_a_perturbed_value_is_multiplied_by_one_of_the_factors_and_stays_inside() -> None:
    random, log = np.random.default_rng(0), one(log=[1e-4, 1e-2])
    assert {round(log.perturb(1e-3, FACTORS, random) / 1e-3, 12) for _ in range(50)} == {0.8, 1.25}
    assert {log.perturb(1e-2, FACTORS, random) for _ in range(50)} == {8e-3, 1e-2}
    limit = one(linear=[-0.08, -0.02])
    assert {round(limit.perturb(-0.04, FACTORS, random), 12) for _ in range(50)} == {-0.032, -0.05}


def test_small_whole_numbers_move_by_one_and_a_zero_is_drawn_anew() -> None:
    random = np.random.default_rng(0)
    assert {one(integer=[1, 8]).perturb(2, FACTORS, random) for _ in range(50)} == {1, 3}
    assert {one(integer=[1, 8]).perturb(1, FACTORS, random) for _ in range(50)} == {1, 2}
    assert len({one(linear=[0, 1]).perturb(0.0, FACTORS, random) for _ in range(50)}) == 50


def test_a_choice_of_numbers_moves_to_a_neighbour_and_one_of_names_is_drawn() -> None:
    random = np.random.default_rng(0)
    assert {one(choice=[1, 2, 4, 8]).perturb(2, FACTORS, random) for _ in range(50)} == {1, 4}
    assert {one(choice=[1, 2, 4, 8]).perturb(8, FACTORS, random) for _ in range(50)} == {4, 8}
    assert {one(choice=["a", "b", "c"]).perturb("a", FACTORS, random) for _ in range(50)} == {"a", "b", "c"}


def test_start_is_a_value_or_a_range() -> None:
    random = np.random.default_rng(0)
    assert {one(log=[1e-5, 1], start=1e-5).first(random) for _ in range(5)} == {1e-5}
    drawn = [one(log=[1e-5, 1], start=[1e-5, 1e-4]).first(random) for _ in range(200)]
    assert 1e-5 <= min(drawn) < 2e-5
    assert 5e-5 < max(drawn) <= 1e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no settings to search"),
        ({"x": 3}, "x: 3 is no range"),
        ({"x": {"logg": [1, 2]}}, "Did you mean log?"),
        ({"x": {"log": [1, 2], "linear": [1, 2]}}, "one kind of range is needed, and there are 2"),
        ({"x": {"log": [0, 1]}}, "must not touch 0"),
        ({"x": {"log": [2, 1]}}, "low < high"),
        ({"x": {"linear": [1]}}, "two numbers"),
        ({"x": {"integer": [1, 2.5]}}, "not whole numbers"),
        ({"x": {"choice": ["a", "a"]}}, "two or more different values"),
        ({"x": {"log": [1, 2], "start": 3}}, "start 3 is outside log"),
        ({"x": {"linear": "wide"}}, "not a list of values"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchSpace.parse(given, "space.yaml")
    assert "space.yaml" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("pathwise.learnin_rate", {"log": [1e-4, 1e-2]}, "Did you mean pathwise.learning_rate?"),
        ("ppo.clip_range", {"linear": [0.1, 0.3]}, "no effect, because the learner is pathwise"),
        ("env.num_envs", {"integer": [8, 16]}, "fixed when an agent is made"),
        ("pathwise.network.lstm_size", {"integer": [8, 16]}, "fixed when an agent is made"),
        ("pathwise.n_steps", {"integer": [8, 16]}, "do not end together"),
        ("risk.limit", {"linear": [-0.1, -0.01]}, "risk.limit is not set"),
        ("pathwise.dropout", {"linear": [0.1, 0.95]}, "0.95"),
        ("pathwise.max_grad_norm", {"choice": ["big", "small"]}, "'big' is not a number"),
        ("pathwise.vgs", {"choice": [1, 2]}, "no such setting"),
    ],
)
def test_a_setting_that_cannot_be_searched_is_refused(
    tiny_config: Callable[..., RunConfig], name: str, given: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_space(tiny_config(), SearchSpace.parse({name: given}))
    assert name in str(caught.value)
    assert message in str(caught.value)


def test_a_file_with_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("pathwise.learning_rate: {log: [1e-4, 1e-1]}\nrisk.ki: {choice: [0.1, 0.2], start: 0.1}\n")
    space = SearchSpace.read(path)
    assert space.to_dict() == {
        "pathwise.learning_rate": {"log": [1e-4, 1e-1]},
        "risk.ki": {"choice": [0.1, 0.2], "start": 0.1},
    }
    assert SearchSpace.parse(space.to_dict()) == space


def test_a_schedule_keeps_its_shape_and_begins_at_the_value(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config("pathwise.learning_rate=linear:2e-2:2e-3", "pathwise.critic_learning_rate=3e-4")
    changed = apply(config, {"pathwise.learning_rate": 1e-2, "pathwise.critic_learning_rate": 1e-3})
    assert changed.pathwise.learning_rate == "linear:0.01:0.001"
    assert changed.pathwise.critic_learning_rate == 1e-3
    assert scaled_schedule("points:4:2:1", 2.0) == "points:2.0:1.0:0.5"
    assert config.pathwise.learning_rate == "linear:2e-2:2e-3"


def test_settings_that_are_valid_only_together_are_set_together(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config("learner=ppo", "ppo.target_kl=0.01", "ppo.vgs.enabled=true")
    changed = apply(config, {"ppo.target_kl": 0.02, "ppo.vgs.alpha": 0.5, "ppo.clip_range": 0.1})
    assert (changed.ppo.target_kl, changed.ppo.vgs.alpha, changed.ppo.clip_range) == (0.02, 0.5, 0.1)
    assert changed.ppo.vgs.enabled
