"""What the files in benchmarks/ compute, beside what they time."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailguard.bench.own_learner import Shape, trading_env
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.data.synthetic import make_market

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CORE_ALONE = f"""
import sys
for name in ("polars", "gymnasium", "pydantic", "typer", "rich", "yaml", "pandas", "scipy", "sb3_contrib"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
sys.path.insert(0, {str(BENCHMARKS)!r})
import scaling
case = scaling.replace(scaling.BASE["cpu"], envs=4, steps=8, hidden=8, bars=600)
curve = scaling.measure("quantiles", (2, 4), case, "cpu", rounds=1)
assert len(curve.seconds) == 2 and min(curve.seconds) > 0
"""


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    """Import a benchmark by name, as those that share code import each other."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def prepared() -> PreparedBars:
    return prepare(make_market(2_000, seed=0).bars)


def test_scaling_needs_torch_and_numpy_only() -> None:
    run = subprocess.run([sys.executable, "-c", CORE_ALONE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_exponent_of_a_power_law_is_found(load: Any) -> None:
    sizes = (10, 20, 40, 80)
    curve = load("scaling").Curve("envs", sizes, [3e-4 * size**1.5 for size in sizes])
    assert curve.exponent == pytest.approx(1.5)
    bent = load("scaling").Curve("envs", sizes, [1.0, 1.0, 1.0, 2.0])
    assert bent.last_exponent == pytest.approx(1.0)
    assert bent.exponent == pytest.approx(0.3)  # least squares on 0, 0, 0, 1 against 0, 1, 2, 3


@pytest.mark.parametrize("stagger", [1, 16])
def test_the_loop_by_hand_sees_again_what_it_did(load: Any, prepared: PreparedBars, stagger: int) -> None:
    """Log-probabilities and values of whole sequences are those of acting step by step, restarts included."""
    shape = Shape(48, 16, 128)
    learner = load("plain_ppo").PlainPPO(trading_env(prepared, shape.envs, stagger), shape)
    learner.collect()
    actor, critic = learner.states
    rollout = learner.collect()
    obs, starts = rollout["obs"], rollout["starts"][:-1]
    assert bool(starts[1:].any()) == (stagger == 1)
    mean, _ = learner.actor(obs, actor, starts)
    value, _ = learner.critic(obs, critic, starts)
    log_prob = torch.distributions.Normal(mean, learner.log_std.exp()).log_prob(rollout["actions"]).sum(-1)
    torch.testing.assert_close(log_prob, rollout["log_probs"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value[..., 0], rollout["values"][:-1], rtol=1e-4, atol=1e-5)


def test_the_loop_by_hand_estimates_advantages_as_the_sum_says(load: Any, prepared: PreparedBars) -> None:
    shape = Shape(48, 12, 128)
    learner = load("plain_ppo").PlainPPO(trading_env(prepared, shape.envs, 1), shape, gamma=0.9, gae_lambda=0.7)
    rollout = learner.collect()
    found = learner.advantages(rollout)
    rewards, values, starts = rollout["rewards"], rollout["values"], rollout["starts"]
    for env in range(shape.envs):
        for first in range(shape.steps):
            total, weight = 0.0, 1.0
            for row in range(first, shape.steps):
                ends = bool(starts[row + 1, env])
                after = 0.0 if ends else 0.9 * float(values[row + 1, env])
                total += weight * (float(rewards[row, env]) + after - float(values[row, env]))
                weight *= 0.9 * 0.7
                if ends:
                    break
            assert float(found[first, env]) == pytest.approx(total, abs=1e-5)


def test_the_optimum_holds_its_own_share_and_a_flat_account_none(load: Any) -> None:
    target = load("target")
    task = target.make_task(0)
    flat = target.mean_growth(task.evaluation, lambda obs, _: torch.zeros(len(obs), 1))
    long = target.mean_growth(task.evaluation, lambda obs, _: torch.ones(len(obs), 1))
    assert flat == 0.0
    assert task.best > max(flat, long)


def test_the_fitted_tail_is_that_of_the_law_it_assumes(load: Any) -> None:
    """Exponential losses: the mean beyond the 95 % quantile is 1 + log 20. Student-t₃: 3.874 beyond 2.353 (SciPy)."""
    from scipy import stats

    pareto_cvar = load("interval_coverage").pareto_cvar
    draw = np.random.default_rng(0)
    losses = draw.exponential(size=(4, 200_000))
    np.testing.assert_allclose(pareto_cvar(-losses), -(1 + math.log(20)), rtol=0.02)
    heavy = stats.t(3)
    expected = heavy.expect(lambda x: x, lb=heavy.ppf(0.95)) / 0.05
    np.testing.assert_allclose(pareto_cvar(heavy.rvs(size=(4, 200_000), random_state=1)), -expected, rtol=0.03)


def test_differences_of_regularisations_are_paired_by_seed(load: Any) -> None:
    """An option that adds 0.1 to every seed's growth has that difference without any spread."""
    regularisation = load("regularisation")
    draw = np.random.default_rng(0)
    cases = []
    for seed in range(8):
        growth = float(draw.uniform(0.5, 2.0))
        for option, more in ((regularisation.DEFAULT, 0.0), ("dropout 0.2", 0.1)):
            judged = [
                {"cvar": -0.03 * factor, "growth": (growth + more) * factor, "throttled_growth": growth + more}
                for factor in (1.0, 1.3)
            ]
            cases.append({"option": option, "seed": seed, "limit": -0.04, "true": judged})
    # Linear in the exposure: at the limit, which is 4/3 of it, growth is 4/3 as large.
    assert regularisation.measures(cases[0])[0] == pytest.approx(4 / 3 * cases[0]["true"][0]["growth"])
    rows = list(zip(*(column.cells for column in regularisation.table(cases).columns), strict=True))
    assert [row[:2] for row in rows] == [(regularisation.DEFAULT, "8"), ("dropout 0.2", "8")]
    assert rows[1][2:5] == ("+0.13 (+0.13 to +0.13)", "+0.00 (+0.00 to +0.00)", "+0.10 (+0.10 to +0.10)")


def test_preparing_is_scaled_by_its_serial_part_its_share_and_its_exponent(load: Any) -> None:
    large = load("large_data")
    assert large.exponent((10, 20, 40), [2 * size**1.25 for size in (10, 20, 40)]) == pytest.approx(1.25)
    # 4 s of one process and 96 s of many: on 16 cores 10 s. 500 symbols are 62.5 times 8, linear where the measured
    # exponent is below 1; 600,000 bars of each are 4 times 150,000, to the power of 1.5 eightfold.
    one = large.Prepared(bars=8 * 150_000, jobs=2, parent=4.0, workers=96.0)
    assert large.scaled_seconds(one, 0.9, 1.5) == pytest.approx(10 * 62.5 * 8)
    assert large.scaled_seconds(one, 2.0, 1.0) == pytest.approx(10 * 62.5**2 * 4)


def test_many_pendulums_are_those_of_gymnasium(load: Any) -> None:
    """Step by step from the same states, with torques beyond the limits too; and the episodes' ends."""
    gymnasium = pytest.importorskip("gymnasium")
    many, single = load("pendulum").Pendulums(3), [gymnasium.make("Pendulum-v1") for _ in range(3)]
    many.reset(seed=1)
    for index, env in enumerate(single):
        env.reset(seed=index)
        env.unwrapped.state = np.array((many.angle[index], many.speed[index]))
    draw = np.random.default_rng(2)
    for step in range(200):
        torque = draw.uniform(-2.5, 2.5, (3, 1)).astype(np.float32)
        obs, reward, terminated, truncated, infos = many.step(torque)
        for index, env in enumerate(single):
            expected = env.step(torque[index])
            seen = infos["final_obs"][index] if truncated[index] else obs[index]
            np.testing.assert_allclose(seen, expected[0], atol=1e-6)
            assert reward[index] == pytest.approx(expected[1], abs=1e-6)
            assert (terminated[index], truncated[index]) == expected[2:4] == (False, step == 199)


def test_a_planned_adversary_of_a_pendulum_takes_what_it_says_and_more_than_another(load: Any) -> None:
    """Without a ball it is the return; a linear controller loses what pushing it outwards at every step costs."""
    pendulum = load("pendulum")
    env, total = pendulum.Pendulums(400), 0.0
    obs, _ = env.reset(seed=3)
    for _ in range(200):
        obs, reward, *_ = env.step(pendulum.by_hand(obs)[:, None])
        total += float(reward.mean())
    assert pendulum.Planner(pendulum.by_hand, (0.0, 0.0, 0.0)).mean_return() == pytest.approx(total, abs=15)

    def soft(seen: Any) -> Any:
        return np.clip(-12.0 * seen[:, 1] - 3.0 * seen[:, 2], -2.0, 2.0)

    def reached(attack: Any) -> float:
        env.reset(seed=4)
        earned = 0.0
        for _ in range(200):
            seen = pendulum.observed(env.angle, env.speed)
            earned += float(env.step(soft(seen + attack(seen))[:, None])[1].mean())
        return earned

    radius = np.array((0.0, 0.08, 0.4))
    planner = pendulum.Planner(soft, radius)
    clean, planned = reached(np.zeros_like), reached(lambda seen: radius * planner.choice(seen))
    # Against the side on which it is falling already.
    pushed = reached(lambda seen: -np.sign(seen[:, 2:] + 4.0 * seen[:, 1:2]) * radius)
    assert planned == pytest.approx(planner.mean_return(), abs=25)
    assert planned < pushed
    assert planned < clean - 100
