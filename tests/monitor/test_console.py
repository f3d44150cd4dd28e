"""The table on the console, character by character."""

from __future__ import annotations

import io
import math

import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.monitor.callbacks import EveryIteration
from tailguard.monitor.writers import ConsoleTable, number, table


def test_figures_are_grouped_and_aligned() -> None:
    metrics = {
        "train/loss": 0.123456,
        "rollout/ep_rew_mean": -21.5,
        "train/n_updates": 12.0,
        "time/total_timesteps": 1_048_576,
        "alone": 3.0,
    }
    assert table(metrics).splitlines() == [
        "-----------------------------------",
        "|                     |           |",
        "|     alone           |         3 |",
        "| rollout/            |           |",
        "|     ep_rew_mean     |     -21.5 |",
        "| time/               |           |",
        "|     total_timesteps | 1,048,576 |",
        "| train/              |           |",
        "|     loss            |    0.1235 |",
        "|     n_updates       |        12 |",
        "-----------------------------------",
    ]


def test_of_the_alarms_only_those_that_were_raised() -> None:
    assert table({"warn/a": 0.0, "warn/b": 0.0}).splitlines()[1:-1] == ["| warn/ | none |"]
    assert table({"warn/a": 0.0, "warn/b": 7.0}).splitlines()[1:-1] == ["| warn/ |   |", "|     b | 7 |"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.2, "-0.2"),
        (3e-4, "0.0003"),
        (0.000123456, "0.0001235"),
        (0.0000123456, "1.235e-05"),
        (0.99996, "1"),
        (-31.4159, "-31.42"),
        (58_312.4, "58,312"),
        (12_345_678.5, "1.235e+07"),
        (12_345_678.0, "12,345,678"),
        (10.0, "10"),
        (1e30, "1.000e+30"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_have_four_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_tables_come_every_so_many_iterations_at_the_end_and_for_evaluations() -> None:
    def evaluate(agent: tg.DistributionalPPO) -> None:
        if agent.state.iteration == 3:
            agent.logger.record("eval/mean_reward", 9.5)

    agent = tg.DistributionalPPO("CartPole-v1", num_envs=2, n_steps=8, memory="none", hidden=(8,))
    out = io.StringIO()
    agent.learn(5 * 16, callback=[ConsoleTable(2, out), EveryIteration(evaluate)])
    shown = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    steps = [line for line in shown if "total_timesteps" in line]
    assert steps == [f"| total_timesteps | {step} |" for step in (32, 48, 64, 80)]
    scores = [index for index, line in enumerate(shown) if line == "| mean_reward | 9.5 |"]
    assert len(scores) == 1
    assert shown[scores[0] - 2].startswith("---")
    assert shown.count(f"| loss | {number(agent.metrics['train/loss'])} |") == 1


def test_the_last_table_is_not_shown_twice() -> None:
    agent = tg.DistributionalPPO("CartPole-v1", num_envs=2, n_steps=8, memory="none", hidden=(8,))
    out = io.StringIO()
    agent.learn(4 * 16, callback=ConsoleTable(2, out))
    assert out.getvalue().count("total_timesteps") == 2


def test_it_prints_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    agent = tg.DistributionalPPO("CartPole-v1", num_envs=2, n_steps=8, memory="none", hidden=(8,))
    agent.learn(16, callback=ConsoleTable())
    assert "| rollout/ " in capsys.readouterr().out


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="every"):
        ConsoleTable(0)
