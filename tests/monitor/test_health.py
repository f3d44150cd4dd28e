"""Every alarm is provoked on the real learner, and none sounds in a healthy run."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from stable_baselines3.common.callbacks import EvalCallback
from torch import Tensor, nn

import tailguard as tg
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.config import load_config
from tailguard.envs.protocol import Box, Step
from tailguard.monitor.health import (
    EVERY_RULE,
    HealthMonitor,
    Rule,
    gradient_exploding,
    quantile_crossing,
    risk_infeasible,
)

SMALL: dict[str, Any] = {
    "n_steps": 8,
    "minibatch_size": 64,
    "epochs": 2,
    "hidden": (8,),
    "lstm_size": 8,
    "quantiles": 8,
    "learning_rate": 3e-4,
}


@pytest.fixture(scope="module")
def bars() -> Any:
    return tg.make_market(1_500, seed=0).bars


def make(bars: Any, market: tg.MarketConfig | None = None, **options: Any) -> DistributionalPPO:
    env = tg.TradingEnv(bars, market, num_envs=16, episode_length=32, stagger=8)
    return DistributionalPPO(env, **(SMALL | options))


def run(learner: DistributionalPPO, iterations: int) -> dict[str, float]:
    for _ in range(iterations):
        metrics = learner.iterate()
    return metrics


def raised(learner: DistributionalPPO) -> list[str]:
    return [alarm.name for alarm in learner.alarms]


def scale_gradients(module: nn.Module, factor: float) -> None:
    """As a fault in the network would: what reaches the parameters is `factor` times what should."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: factor * gradient)


def test_a_healthy_run_is_silent(bars: Any) -> None:
    """Twin quantile critics, value clip, entropy bonus, LSTM: forty iterations of trading, not one alarm."""
    learner = make(
        bars, twin_critics=True, value_clip="mean_only", entropy_coef=1e-3, learning_rate=3e-3, log_std_init=-0.5
    )
    metrics = run(learner, 40)
    assert learner.alarms == []
    counts = {name: value for name, value in metrics.items() if name.startswith("warn/")}
    assert counts.keys() >= {f"warn/{rule.name}" for rule in EVERY_RULE}
    assert set(counts.values()) == {0}


# --- the critics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_a_critic_that_has_stopped_learning(bars: Any, trunk: str) -> None:
    learner = make(bars, twin_critics=True, twin_trunk=trunk)
    scale_gradients(learner.policy.critics[1], 0.0)
    if trunk == "own":
        scale_gradients(learner.policy.trunks[2], 0.0)
    metrics = run(learner, 6)
    assert metrics["critic/grad_norm_2"] == 0
    assert metrics["critic/grad_norm_1"] > 0
    (alarm,) = [alarm for alarm in learner.alarms if alarm.name == "critic_vanished"]
    assert "critic 2's gradient norm is 0.0e+00" in alarm.what
    assert metrics["warn/critic_vanished"] == 2  # bad from the first iteration on, patience 5


def test_critics_a_hundred_times_apart(bars: Any) -> None:
    learner = make(bars, twin_critics=True)
    scale_gradients(learner.policy.critics[0], 1e-3)
    metrics = run(learner, 6)
    assert raised(learner) == ["critic_imbalanced"]
    assert metrics["critic/grad_ratio"] == pytest.approx(1000, rel=0.3)


def test_critics_ten_times_apart_are_left_alone(bars: Any) -> None:
    learner = make(bars, twin_critics=True)
    scale_gradients(learner.policy.critics[0], 0.1)
    run(learner, 6)
    assert learner.alarms == []


def test_quantiles_that_stay_out_of_order(bars: Any) -> None:
    learner = make(bars, distribution_coef=0.0)
    head = learner.policy.each_critic()[0].distribution
    assert head is not None
    with torch.no_grad():
        head.layer.bias.copy_(torch.linspace(1, -1, 8))
    metrics = run(learner, 31)
    assert metrics["critic/quantile_crossing"] > 0.9
    # The distribution's loss has no weight: its gradient is gone, which is said too.
    assert "quantile_crossing" in raised(learner)


def test_quantiles_that_stand_close_may_change_places() -> None:
    """As Pendulum's do once it is solved: 30 % out of order, by 0.04 standard deviations of the return in all."""
    assert quantile_crossing({"critic/quantile_crossing": 0.3, "critic/quantile_crossing_depth": 0.04}, {}) is None
    assert quantile_crossing({"critic/quantile_crossing": 0.3, "critic/quantile_crossing_depth": 0.4}, {}) is not None


# --- memory ----------------------------------------------------------------------------------------------------------


def test_an_lstm_that_says_nothing(bars: Any) -> None:
    learner = make(bars, learning_rate=1e-12)
    with torch.no_grad():
        for parameter in learner.policy.each_trunk()[0].memory.parameters():
            parameter.zero_()
    run(learner, 6)
    (alarm,) = learner.alarms
    assert alarm.name == "lstm_dead"
    assert "actor_0" in alarm.what


def test_an_lstm_that_no_gradient_reaches(bars: Any) -> None:
    learner = make(bars)
    scale_gradients(learner.policy.each_trunk()[1].memory, 0.0)
    run(learner, 6)
    (alarm,) = learner.alarms
    assert alarm.name == "lstm_dead"
    assert "gradient norm of LSTM layer critic_0 is 0.0e+00" in alarm.what


def test_an_lstm_at_its_limits(bars: Any) -> None:
    learner = make(bars, learning_rate=1e-12)
    (cell,) = learner.policy.each_trunk()[1].memory.cells  # type: ignore[union-attr]
    with torch.no_grad():
        cell.bias_ih.fill_(20.0)  # all gates open, the cell grows by one a step
    metrics = run(learner, 6)
    assert "lstm_saturated" in raised(learner)
    assert metrics["lstm/critic_0_saturated"] > 0.9
    assert metrics["lstm/actor_0_saturated"] < 0.1


# --- the policy ------------------------------------------------------------------------------------------------------


def test_log_ratios_that_must_be_clamped(bars: Any) -> None:
    learner = make(bars, log_ratio_limit=1e-3, learning_rate=1e-2)
    run(learner, 1)
    (alarm,) = learner.alarms
    assert alarm.name == "ratio_clamped"
    assert re.search(r"\d+\.\d % of the log-ratios", alarm.what)


def test_a_policy_that_no_longer_explores(bars: Any) -> None:
    learner = make(bars, log_std_init=-4.9)
    metrics = run(learner, 5)
    assert raised(learner) == ["entropy_collapsed"]
    assert metrics["train/entropy_margin"] == pytest.approx(-4.9 + 4.605, abs=0.05)


class Constant:
    """Pays the same whatever happens; its observations can be made to grow."""

    observation_size = 2

    def __init__(self, reward: float = 1.0, growth: float = 1.0, sizes: Any = None) -> None:
        self.num_envs, self.device = 8, torch.device("cpu")
        self.action_space = sizes or Box(torch.tensor([-1.0]), torch.tensor([1.0]))
        self.reward, self.growth, self.level = reward, growth, 1.0
        self.draw = torch.Generator().manual_seed(0)

    def observe(self) -> Tensor:
        self.level *= self.growth
        return self.level * (1 + 0.1 * torch.randn(self.num_envs, 2, generator=self.draw))

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        return self.observe()

    def step(self, action: Tensor) -> Step:  # noqa: ARG002
        obs, never = self.observe(), torch.zeros(self.num_envs, dtype=torch.bool)
        reward = torch.randn(self.num_envs, generator=self.draw) if self.growth > 1 else torch.zeros(self.num_envs)
        return Step(obs, reward, never, never, obs, ~never)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


def test_rewards_without_any_signal() -> None:
    learner = DistributionalPPO(Constant(), **(SMALL | {"gamma": 1e-9, "value_coef": 0.0}))
    with torch.no_grad():
        learner.policy.each_critic()[0].value.layer.weight.zero_()
    metrics = run(learner, 2)
    assert "constant_advantages" in raised(learner)
    assert metrics["warn/constant_advantages"] == 2


def test_a_discrete_policy_that_no_longer_explores() -> None:
    from tailguard.envs.protocol import Discrete

    learner = DistributionalPPO(Constant(growth=1.001, sizes=Discrete((3, 2))), **SMALL)
    with torch.no_grad():
        learner.policy.action_head.linear.bias.copy_(torch.tensor([20.0, 0, 0, 20.0, 0]))  # type: ignore[union-attr, operator]
    run(learner, 5)
    assert "entropy_collapsed" in raised(learner)


# --- gradients and statistics ----------------------------------------------------------------------------------------


def test_a_gradient_that_explodes(bars: Any) -> None:
    learner = make(bars)
    run(learner, 8)
    assert learner.alarms == []
    scale_gradients(learner.policy, 1e3)
    run(learner, 1)
    assert raised(learner) == ["gradient_exploding"]


def test_observations_that_run_away() -> None:
    learner = DistributionalPPO(Constant(growth=1.2), **SMALL)
    run(learner, 9)
    assert "normaliser_drift" in raised(learner)


# --- trading ---------------------------------------------------------------------------------------------------------


def test_an_agent_that_never_trades(bars: Any) -> None:
    """Long only, actions clipped, and a policy that wants to be short: it stays flat."""
    learner = make(bars, tg.MarketConfig(allow_short=False), squash=False, learning_rate=1e-12, std="state")
    with torch.no_grad():
        learner.policy.action_head.linear.bias.copy_(torch.tensor([-50.0, 0.0]))  # type: ignore[union-attr, operator]
    metrics = run(learner, 6)
    assert "never_trades" in raised(learner)
    assert metrics["data/turnover"] == 0


def test_an_agent_that_flips_at_every_bar(bars: Any) -> None:
    """Without encoder and memory the policy is linear in what it sees; it asks for the opposite of what it holds."""
    learner = make(bars, hidden=(), memory="none", learning_rate=1e-12, normalise_observations=False, log_std_init=-2.0)
    names = learner.env.task.observation_names  # type: ignore[attr-defined]
    with torch.no_grad():
        learner.policy.action_head.linear.weight.zero_()  # type: ignore[union-attr, operator]
        learner.policy.action_head.linear.weight[0, names.index("weight")] = -100.0  # type: ignore[union-attr, index]
    metrics = run(learner, 6)
    assert "always_flips" in raised(learner)
    assert metrics["data/flips"] > 0.9


def test_an_evaluation_that_never_moves() -> None:
    """SB3's own evaluation callback on an environment whose every episode scores the same."""

    class AlwaysOne(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        action_space = gymnasium.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed, options=options)
            self.age = 0
            return self.observation_space.sample(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
            self.age += 1
            return self.observation_space.sample(), 1.0, False, self.age == 4, {}

    learner = DistributionalPPO([AlwaysOne] * 2, **SMALL)
    watch = EvalCallback(AlwaysOne(), eval_freq=1, n_eval_episodes=2, verbose=0)
    learner.learn(2 * 16, callback=watch, reset_num_timesteps=False)  # type: ignore[arg-type]
    assert "constant_evaluation" not in raised(learner)
    learner.learn(16, callback=watch, reset_num_timesteps=False)  # type: ignore[arg-type]
    assert "constant_evaluation" in raised(learner)


def test_an_evaluation_that_moves_is_left_alone() -> None:
    monitor = HealthMonitor()
    for score in (1.0, 1.0, 2.0, 2.0, 1.0):
        assert monitor.evaluated({"eval/mean_reward": score}, 0) == []


def test_growth_that_is_only_there_in_training() -> None:
    """Twice in a row, more than three times that of validation; a gap of ordinary size is left alone."""
    monitor = HealthMonitor()
    assert monitor.evaluated({"eval/growth": 2.0, "eval/gap": 4.1}, 100) == []
    (alarm,) = monitor.evaluated({"eval/growth": 2.1, "eval/gap": 5.0}, 200)
    assert (alarm.name, alarm.step) == ("memorised", 200)
    assert "+7.1 a year on the training bars and +2.1 on validation bars" in alarm.what
    assert monitor.metrics()["warn/memorised"] == 1
    for growth, gap in ((3.0, 1.5), (1.1, 1.2), (2.0, 3.9), (0.1, 1.9), (2.0, -3.0)):
        healthy = HealthMonitor()
        for step in range(4):
            assert healthy.evaluated({"eval/growth": growth, "eval/gap": gap}, step) == []


# --- risk ------------------------------------------------------------------------------------------------------------


def test_a_limit_that_cannot_be_met(bars: Any) -> None:
    """A hundredth of a per cent, and hardly any price allowed for it: said with what was reached; the run goes on."""
    risk = tg.RiskConfig(limit=-1e-4, alpha=0.5, lambda_max=0.01)
    learner = make(bars, risk=risk, n_steps=32)  # eight outcomes of the tail an update
    metrics = run(learner, 25)
    (alarm,) = [alarm for alarm in learner.alarms if alarm.name == "risk_infeasible"]
    assert metrics["risk/lambda"] == pytest.approx(0.01)
    assert re.search(
        r"cap of 0.01, and the CVaR of recent outcomes is -\d+\.\d\d ± \d+\.\d\d % \(mean [+-]\d", alarm.what
    )
    assert re.search(r"against a limit of -0\.01 %; the best it reached there is -\d+\.\d\d %", alarm.what)
    assert alarm.what.endswith("So far training has not met the limit.")


def test_a_limit_broken_within_the_error_of_the_measurement_is_not_called_infeasible() -> None:
    """CVaR −4.4 % against −4 %: broken by 10 %, which an error of 0.3 % explains and one of 0.1 % does not."""
    metrics = {
        "risk/at_cap": 1.0, "risk/violation": 0.1, "risk/lambda": 10.0, "risk/cvar_realised": -0.044,
        "risk/mean_realised": 0.01, "risk/limit": -0.04, "risk/tail_outcomes": 50.0,
    }  # fmt: skip
    assert risk_infeasible(metrics | {"risk/cvar_error": 0.003}, {}) is None
    assert "-4.40 ± 0.10 %" in (risk_infeasible(metrics | {"risk/cvar_error": 0.001}, {}) or "")


def test_the_alarm_of_a_limit_that_cannot_be_met_says_the_best_that_was_reached() -> None:
    """λ at its cap in ten updates, the CVaR between −9 and −6 %. An agent that did not trade yet had none."""
    monitor, alarms = HealthMonitor(), []
    tails = [-0.001] * 10 + [-0.09, -0.08, -0.06, -0.07, -0.08, -0.08, -0.09, -0.08, -0.07, -0.09]
    for number, tail in enumerate(tails):
        metrics = {
            "risk/at_cap": float(number >= 10), "risk/violation": max(0.0, tail / -0.02 - 1), "risk/lambda": 10.0,
            "risk/cvar_realised": tail, "risk/mean_realised": 0.01, "risk/limit": -0.02, "risk/tail_outcomes": 50.0,
            "risk/cvar_error": 0.001,
        }  # fmt: skip
        alarms += monitor.check(metrics, 1_000 * (number + 1))
    (alarm,) = [alarm for alarm in alarms if alarm.name == "risk_infeasible"]
    assert alarm.step == 20_000
    assert "-9.00 ± 0.10 %" in alarm.what
    assert "the best it reached there is -6.00 %" in alarm.what


def test_a_limit_that_the_market_makes_impossible_is_said_in_a_run_as_short_as_the_default(bars: Any) -> None:
    """An account that must be invested to 80 %: said after a quarter of 21 updates, before λ is at its cap for long."""
    config = load_config(overrides=["risk.limit=-0.02", "env.episode_length=192"])
    steps = config.num_envs * config.chosen.n_steps
    assert math.ceil(config.training.total_timesteps / steps) == 21
    env = tg.TradingEnv(
        bars, num_envs=40, episode_length=8, features=["return_24"], constraints=tg.Constraints(net_min=0.8)
    )
    said = {}
    for limit in (-0.001, -0.5):
        learner = tg.PathwiseLearner(
            env, risk=tg.RiskConfig(limit=limit, alpha=0.5), n_steps=8, hidden=(6,), lstm_size=5
        )
        learner.learn(21 * 40 * 8)
        said[limit] = {alarm.name: alarm for alarm in learner.alarms}
    assert said[-0.5] == {}
    assert "risk_infeasible" not in said[-0.001]
    alarm = said[-0.001]["limit_broken"]
    assert 6 * 40 * 8 <= alarm.step <= 7 * 40 * 8  # in the first, few episodes may have ended
    assert re.search(
        r"against a limit of -0\.10 %; in the last updates that broke it the best is -\d\.\d\d %", alarm.what
    )


def test_a_limit_that_is_broken_for_a_while_is_no_alarm_but_at_the_end_it_is() -> None:
    """A run of 21 updates converges from above, or breaks the limit in its last one alone."""

    def said(tails: list[float], updates: int) -> list[tuple[str, int, str]]:
        monitor, alarms = HealthMonitor(updates=updates), []
        for number, tail in enumerate(tails):
            metrics = {
                "risk/at_cap": 0.0, "risk/violation": max(0.0, tail / -0.02 - 1), "risk/cvar_realised": tail,
                "risk/lambda": float(tail < -0.02), "risk/mean_realised": 0.01, "risk/limit": -0.02,
                "risk/tail_outcomes": 50.0, "risk/cvar_error": 0.001, "train/n_updates": 1.0,
            }  # fmt: skip
            alarms += monitor.check(metrics, number + 1)
        return [(alarm.name, alarm.step, alarm.what) for alarm in alarms]

    assert said([-0.01] * 5 + [-0.06, -0.06, -0.06, -0.06, -0.06] + [-0.015] * 11, 21) == []
    assert said([-0.01] * 5 + [-0.026, -0.028, -0.028, -0.026, -0.025, -0.024, -0.023] + [-0.015] * 9, 21) == []
    above = [-0.01] * 5 + [-0.08, -0.075, -0.07, -0.065, -0.06, -0.055, -0.05, -0.045, -0.04, -0.035, -0.03, -0.025]
    assert said([*above, -0.02, -0.02, -0.02, -0.02], 21) == []
    ((name, step, _),) = said([-0.01] * 9 + above[5:], 21)  # it ends before it is there
    assert (name, step) == ("limit_broken", 21)
    ((name, step, what),) = said([-0.001] * 5 + [-0.06, -0.05, -0.04, -0.03, -0.04, -0.05] + [-0.015] * 10, 21)
    assert (name, step) == ("limit_broken", 11)
    assert "-5.00 ± 0.10 % (mean +1.00 %) against a limit of -2.00 %" in what
    assert "the best is -3.00 %, and λ is 1." in what
    ((name, step, _),) = said([-0.01] * 20 + [-0.03], 21)
    assert (name, step) == ("limit_broken", 21)
    assert said([-0.01] * 20 + [-0.0205], 21) == []  # within 5 %
    assert [step for _, step, _ in said([-0.03] * 400, 400)] == [100]
    assert said([-0.03] * 40, 0) == []  # iterations of a loop of one's own, whose end nobody knows


def test_a_tail_that_was_predicted_too_mild(bars: Any) -> None:
    """A critic that cannot learn and promises ten standard deviations more than there are."""
    learner = make(bars, risk=tg.RiskConfig(limit=-0.5, alpha=0.2), distribution_coef=0.0)
    head = learner.policy.each_critic()[0].distribution
    assert head is not None
    with torch.no_grad():
        head.layer.bias.add_(10.0)
    metrics = run(learner, 121)
    assert metrics["risk/tail_share"] > 0.6
    assert "tail_mispredicted" in raised(learner)


def test_a_budget_in_a_healthy_run_is_silent(bars: Any) -> None:
    learner = make(bars, risk=tg.RiskConfig(limit=-0.02, alpha=0.5), learning_rate=1e-3)
    metrics = run(learner, 40)
    assert metrics["risk/window_filled"] == 1
    assert learner.alarms == []


# --- how alarms are raised -------------------------------------------------------------------------------------------


def scripted(patience: int, after: int = 0) -> HealthMonitor:
    check: Callable[..., str | None] = lambda metrics, past: "bad" if metrics["x"] else None  # noqa: E731, ARG005
    return HealthMonitor((Rule("scripted", check, "…", patience, after),))


def test_an_alarm_is_said_once_and_counted_from_then_on() -> None:
    monitor = scripted(patience=3, after=1)
    said = [len(monitor.check({"x": x}, step)) for step, x in enumerate([1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1])]
    #          ignored ─┘  └ 2 in a row    3 in a row ┘  └ 4                       3 in a row ┘
    assert said == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert monitor.metrics()["warn/scripted"] == 3


def test_a_saved_monitor_goes_on() -> None:
    first = scripted(patience=3)
    first.check({"x": 1}, 0)
    first.check({"x": 1}, 1)
    second = scripted(patience=3)
    second.load_state_dict(first.state_dict())
    assert len(second.check({"x": 1}, 2)) == 1


def test_learn_says_it_in_words(bars: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = make(bars, log_std_init=-4.9)
    with caplog.at_level(logging.WARNING, "tailguard"):
        learner.learn(8 * 16 * 8)
    (record,) = caplog.records
    assert record.message.startswith("alarm entropy_collapsed at 640 steps: the policy's entropy has fallen to")
    assert "Usually:" in record.message
    assert record.message.endswith("See docs/alarms#entropy-collapsed")


def test_every_alarm_has_its_place_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert headings == [rule.name.replace("_", "-") for rule in EVERY_RULE]


def test_an_agent_that_has_stopped_learning_says_so() -> None:
    """Every observation of one environment is NaN: all rollouts are skipped, and after three of them it is said."""

    class Blind(Constant):
        def observe(self) -> Tensor:
            found = super().observe()
            found[2] = torch.nan
            return found

    learner = DistributionalPPO(Blind(growth=1.001), **(SMALL | {"on_nonfinite": "skip"}))
    run(learner, 2)
    assert "learning_stopped" not in raised(learner)
    metrics = run(learner, 2)
    (alarm,) = [alarm for alarm in learner.alarms if alarm.name == "learning_stopped"]
    assert "no optimiser step was taken" in alarm.what
    assert metrics["warn/learning_stopped"] == 2
    assert metrics["warn/skipped_nonfinite"] == 4


# --- gradients through the market ------------------------------------------------------------------------------------


def through_the_market(bars: Any, market: tg.MarketConfig | None = None, **options: Any) -> tg.PathwiseLearner:
    env = tg.TradingEnv(bars, market, num_envs=32, episode_length=32, stagger=8)
    settings: dict[str, Any] = {"n_steps": 8, "minibatch_size": 64, "hidden": (8,), "lstm_size": 8, "quantiles": 8}
    return tg.PathwiseLearner(env, **(settings | options))


@pytest.mark.parametrize("risk", [None, tg.RiskConfig(limit=-0.05, alpha=0.5)])
def test_a_healthy_run_through_the_market_is_silent(bars: Any, risk: tg.RiskConfig | None) -> None:
    learner = through_the_market(bars, twin_critics=True, risk=risk)
    metrics = run(learner, 40)
    assert learner.alarms == []
    assert {value for name, value in metrics.items() if name.startswith("warn/")} == {0}


class Amplifier:
    """x ← 4x + a, rewarded by x: after T steps the first action counts 4^(T − 1) times as much as the last."""

    num_envs, observation_size, device, differentiable = 4, 1, torch.device("cpu"), True
    action_space = Box(torch.tensor([-1.0]), torch.tensor([1.0]))

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.state = torch.zeros(4)

    def draw(self) -> Tensor:
        return torch.zeros(4)

    def reset(self, seed: int | None = None) -> Tensor:  # noqa: ARG002
        self.state = torch.zeros(4)
        return torch.zeros(4, 1)

    def transition(self, before: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Step]:  # noqa: ARG002
        after = (4 * before + action[:, 0]).clamp(-1e6, 1e6)
        never, obs = torch.zeros(4, dtype=torch.bool), torch.zeros(4, 1)
        return after, Step(obs, after, never, never, obs, ~never)

    def step(self, action: Tensor) -> Step:
        self.state, step = self.transition(self.state, action, self.draw())
        return step

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state = state["state"]

    def close(self) -> None:
        pass


def test_a_gradient_that_explodes_on_its_way_back() -> None:
    learner = tg.PathwiseLearner(Amplifier(), n_steps=8, memory="none", hidden=(), critic="scalar", learning_rate=1e-6)
    learner.state.rollout_state = learner._begin()
    ratios = []
    for _ in range(6):
        learner.env.reset()
        ratios.append(learner.iterate()["pathwise/slope_ratio"])
    # The reward of every later step counts too: Σ 4^k·γ^k over the eight steps of the window.
    assert ratios[0] == pytest.approx(sum((4 * 0.99) ** k for k in range(8)) / 0.99**7, rel=0.01)
    assert "gradient_through_time" in raised(learner)


def test_a_policy_at_its_bounds(bars: Any) -> None:
    learner = through_the_market(bars, learning_rate=1e-6)
    learner.policy.action_head.linear.bias.data.fill_(10.0)  # type: ignore[operator, union-attr]
    metrics = run(learner, 11)
    assert metrics["pathwise/saturated"] == 1.0
    assert "policy_saturated" in raised(learner)


def test_a_clipped_policy_beyond_its_box(bars: Any) -> None:
    """A raw action of 1.5, clipped to 1, does not move at all; one of 0.995 moves freely."""
    learner = through_the_market(bars, squash=False, learning_rate=1e-6)
    learner.policy.action_head.linear.bias.data.fill_(0.995)  # type: ignore[operator, union-attr]
    learner.policy.action_head.linear.weight.data.zero_()  # type: ignore[operator, union-attr]
    metrics = run(learner, 1)
    assert metrics["pathwise/saturated"] == 0.0
    assert metrics["train/grad_norm"] > 0
    learner.policy.action_head.linear.bias.data.fill_(1.5)  # type: ignore[operator, union-attr]
    metrics = run(learner, 12)
    assert metrics["pathwise/saturated"] == 1.0
    assert metrics["train/grad_norm"] == 0
    assert {"policy_saturated", "gradient_vanished"} <= set(raised(learner))


def test_orders_that_are_all_beyond_the_volume_cap(bars: Any) -> None:
    """An account of 100 billion, whatever it orders, trades the cap: no order has a slope in its target.

    The first gradient after that is not an explosion.
    """
    learner = through_the_market(bars, tg.MarketConfig(capital=1e11))
    norms = [learner.iterate()["train/grad_norm"] for _ in range(14)]
    assert sum(norm == 0 for norm in norms) >= 8  # now and then one order is small enough
    (alarm,) = learner.alarms
    assert alarm.name == "gradient_vanished"
    assert re.search(r"Orders of 0\.\d+ of equity a bar are not filled .* 0 % of the actions are at", alarm.what)
    assert gradient_exploding({"train/grad_norm": 12.0}, {"train/grad_norm": [0.0] * 20}) is None
    assert gradient_exploding({"train/grad_norm": 12.0}, {"train/grad_norm": [0.1] * 20}) is not None
