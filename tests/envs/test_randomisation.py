"""Randomised training episodes: each option changes what it says by the amount it says, and evaluations never."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.envs.randomisation import Randomisation, Variation
from tailguard.errors import ConfigError
from tailguard.evaluate.held_out import episodes_on
from tailguard.market import step


def make(bars: Any, num_envs: int = 400, **options: Any) -> tg.TradingEnv:
    settings = {"episode_length": 20, "dtype": torch.float64} | {
        name: options.pop(name) for name in ("episode_length", "seed", "stagger") if name in options
    }
    return tg.TradingEnv(bars, num_envs=num_envs, randomisation=Randomisation(**options), **settings)


def test_costs_are_multiplied_by_a_factor_that_stays_for_the_episode(make_panel, prepare_panel) -> None:
    env = make(prepare_panel(make_panel(200)), costs=1.0)
    env.reset(seed=0)
    factor = env.state.cost_factor
    # Log-uniform between 1/2 and 2: its mean is (2 − 1/2) / (2 log 2).
    assert 0.5 <= float(factor.min()) < 0.52
    assert 1.95 < float(factor.max()) <= 2
    spread = math.sqrt((4 - 0.25) / (4 * math.log(2)) - (1.5 / (2 * math.log(2))) ** 2)
    assert float(factor.mean()) == pytest.approx(1.5 / (2 * math.log(2)), abs=4 * spread / 20)
    for index in range(19):
        before, action = env.state.market, torch.full((400, 1), (-1.0) ** index * 0.5)
        _, plain = step(env.task.market, before, action.double())
        outcome = env.step(action).outcome
        for kind in ("fee", "spread", "impact"):
            torch.testing.assert_close(outcome[kind], plain.costs[kind] * factor)
        # What is due at the close is due on what the position is worth, whatever it cost to enter.
        torch.testing.assert_close(outcome["funding"], plain.costs["funding"])
        dearer = sum(plain.costs[kind] for kind in ("fee", "spread", "impact")) * (factor - 1)
        torch.testing.assert_close(outcome["net"].double(), plain.net - dearer, atol=1e-7, rtol=0)
        assert torch.equal(env.state.cost_factor, factor)
    env.step(torch.zeros(400, 1))
    assert not torch.equal(env.state.cost_factor, factor)


def test_missed_orders_leave_the_position_as_it_is(make_panel, prepare_panel) -> None:
    env = make(prepare_panel(make_panel(200)), delay=0.25)
    env.reset(seed=0)
    missed = 0
    for index in range(19):
        before, action = env.state.market, torch.full((400, 1), 0.5 - 0.05 * index)
        outcome = env.step(action).outcome
        held = outcome["turnover"] == 0
        _, still = step(env.task.market, before, action.double(), torch.ones(400, 1, dtype=torch.bool))
        torch.testing.assert_close(outcome["net"][held].double(), still.net[held], atol=1e-7, rtol=0)
        _, traded = step(env.task.market, before, action.double())
        torch.testing.assert_close(outcome["net"][~held].double(), traded.net[~held], atol=1e-7, rtol=0)
        missed += int(held.sum())
    error = math.sqrt(0.25 * 0.75 / (19 * 400))
    assert missed / (19 * 400) == pytest.approx(0.25, abs=4 * error)


def test_paths_are_put_together_from_blocks_of_the_asked_length(make_panel, prepare_panel) -> None:
    env = make(prepare_panel(make_panel(400)), block=8)
    env.reset(seed=0)
    jumps, steps = 0, 0
    for _ in range(19):
        before = env.state
        result = env.step(torch.full((400, 1), 0.5))
        jumped = env.state.market.row != before.market.row + 1
        jumps, steps = jumps + int(jumped.sum()), steps + 400
        # The account goes on with what it holds; it sees the bar at which it has arrived.
        assert torch.equal(env.state.age, before.age + 1)
        _, expected = step(env.task.market, before.market, torch.full((400, 1), 0.5, dtype=torch.float64))
        torch.testing.assert_close(
            env.state.market.equity, before.market.equity * (1 + expected.net), atol=1e-12, rtol=0
        )
        assert torch.equal(result.obs[:, :3], env.task.features[env.state.market.row])
        assert torch.equal(result.obs, result.final_obs)
        assert torch.isin(env.state.market.row[jumped], env.starts).all()
    assert jumps / steps == pytest.approx(1 / 8, abs=4 * math.sqrt(7 / 64 / steps))


def test_no_path_comes_near_what_is_left_out(make_panel, prepare_panel) -> None:
    env = make(prepare_panel(make_panel(400)), block=4)
    env.starts = torch.cat([torch.arange(0, 100), torch.arange(250, 380)])
    env.reset(seed=0)
    seen = []
    for _ in range(60):
        env.step(torch.zeros(400, 1))
        seen.append(env.state.market.row)
    rows = torch.cat(seen)
    assert not ((rows > 99 + 20) & (rows < 250)).any()


def test_the_end_of_an_episode_is_its_own_bar(make_panel, prepare_panel) -> None:
    env = make(prepare_panel(make_panel(400)), block=2)
    env.reset(seed=0)
    for _ in range(19):
        env.step(torch.zeros(400, 1))
    last = env.state.market.row + 1
    result = env.step(torch.zeros(400, 1))
    assert result.truncated.all()
    assert torch.equal(result.final_obs[:, :3], env.task.features[last])


ALL = {"costs": 0.5, "delay": 0.2, "block": 6}


def test_a_saved_state_goes_on_exactly(bars) -> None:
    env = make(bars, 8, **ALL, episode_length=7)
    env.reset(seed=3)
    for _ in range(10):
        env.step(torch.full((8, 1), 0.7))
    saved = {name: value.clone() for name, value in env.state_dict().items()}
    actions = [torch.full((8, 1), (-1.0) ** index * 0.4) for index in range(20)]
    expected = [env.step(action) for action in actions]
    other = make(bars, 8, **ALL, episode_length=7, seed=99)
    other.load_state_dict(saved)
    for action, wanted in zip(actions, expected, strict=True):
        found = other.step(action)
        assert torch.equal(found.obs, wanted.obs)
        assert torch.equal(found.reward, wanted.reward)
    plain = tg.TradingEnv(bars, num_envs=8, episode_length=7)
    with pytest.raises(ConfigError, match=r"another env\.randomisation"):
        plain.load_state_dict(saved)


def test_the_random_stream_does_not_depend_on_what_happened(bars) -> None:
    env = make(bars, 8, **ALL)
    env.reset(seed=1)
    env.step(torch.zeros(8, 1))
    first = env.generator.get_state()
    env.reset(seed=1)
    env.step(torch.ones(8, 1))
    assert torch.equal(env.generator.get_state(), first)


def test_switched_off_nothing_is_drawn_for_it(bars) -> None:
    env, plain = make(bars, 8), tg.TradingEnv(bars, num_envs=8, episode_length=20)
    assert env.randomisation is None
    env.reset(seed=1)
    plain.reset(seed=1)
    assert env.draw().shape == (8,)
    assert torch.equal(env.generator.get_state(), (plain.draw(), plain.generator.get_state())[1])
    assert env.state.cost_factor is None


def test_a_variation_is_one_tensor_for_recorded_steps(bars) -> None:
    drawn = make(bars, 8, **ALL).draw()
    assert drawn.shape == (4, 8)
    assert drawn.dtype == torch.float64
    assert ((Variation(*drawn).jump >= 0) | (Variation(*drawn).jump == -1)).all()


def test_the_gradient_goes_through_dearer_orders(make_panel, prepare_panel) -> None:
    """d net / d target contains −factor · (fee + half-spread): compared with central differences."""
    env = make(prepare_panel(make_panel(200)), 6, costs=3.0)
    env.reset(seed=0)
    state, drawn = env.state, env.draw()

    def earned(target: torch.Tensor) -> torch.Tensor:
        return env.transition(state, target, drawn)[0].market.equity

    target = torch.full((6, 1), 0.3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(earned(target).sum(), target)
    with torch.no_grad():
        around = (earned(target + 1e-5) - earned(target - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope[:, 0], around, rtol=1e-6)


def test_evaluations_are_without_it(bars) -> None:
    """Held-out episodes of an agent that was trained in randomised ones are those of any other agent."""
    env = make(bars, 8, **ALL, stagger=10)
    learner = tg.PathwiseLearner(env, seed=0, n_steps=10)
    plain = tg.PathwiseLearner(tg.TradingEnv(bars, num_envs=8, episode_length=20, stagger=10), seed=0, n_steps=10)
    assert learner.spec.to_dict() == plain.spec.to_dict()
    (first,), (second,) = (episodes_on(agent.spec, bars) for agent in (learner, plain))
    one, two = first.trade(learner), second.trade(learner)
    assert torch.equal(one.measured, two.measured)
    assert torch.equal(one.measured, first.trade(learner).measured)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"costs": -0.1}, "env.randomisation.costs"),
        ({"delay": 1.0}, "env.randomisation.delay"),
        ({"block": 1}, "blocks of 1 bar"),
        ({"volatility": (0.0,)}, "env.randomisation.volatility"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Randomisation(**settings)
