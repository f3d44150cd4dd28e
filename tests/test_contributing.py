"""The examples of CONTRIBUTING.md as a reader runs them: each registers a part, and the parts work together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tailguard as tg
from tailguard.audit.auditor import audit
from tailguard.audit.subject import Subject
from tailguard.cli import app
from tailguard.data.features import FEATURES
from tailguard.evaluate.baselines import BuyAndHold, standard_baselines
from tailguard.market.costs import COSTS, Fill
from tailguard.models.critics import CRITICS, LossSettings
from tailguard.monitor.health import OWN_RULES

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def parts(own_tables: None) -> dict[str, dict[str, Any]]:  # noqa: ARG001
    """What each section's example defines, by the section."""
    text = PAGE.read_text(encoding="utf-8").split("\n## Adding a part\n")[1]
    found: dict[str, dict[str, Any]] = {}
    for section in text.split("\n### ")[1:]:
        (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        heading = section.partition("\n")[0]
        found[heading] = {"__name__": f"contributing_{len(found)}"}
        exec(compile(code, f"{PAGE.name}: {heading}", "exec", dont_inherit=True), found[heading])
    return found


def test_there_is_an_example_for_every_kind_of_part_in_the_architecture(parts: dict[str, Any]) -> None:
    page = PAGE.with_name("ARCHITECTURE.md").read_text(encoding="utf-8")
    anchors = re.findall(r"\(CONTRIBUTING\.md#([a-z-]+)\)", page)
    assert sorted(anchors) == sorted(heading.lower().replace(" ", "-") for heading in parts)
    assert len(anchors) == 10


@pytest.mark.usefixtures("parts")
def test_a_learner_runs_with_all_of_them(bars: tg.Bars) -> None:
    env = tg.TradingEnv(bars, num_envs=4, episode_length=16, features=("momentum_48", "return_1"))
    agent = tg.DistributionalPPO(
        env, n_steps=16, hidden=(4,), lstm_size=4, quantiles=8, critic="downside_quantile", optimizer="momentum",
        loss_terms={"action_size": 0.01}, learning_rate=1e-3,
    )  # fmt: skip
    for _ in range(3):
        metrics = agent.iterate()
    assert metrics["own/reward_max"] == float(agent.snapshot.rollout.rewards.max())
    assert metrics["data/stamp_duty"] > 0
    assert metrics["train/action_size_loss"] > 0
    assert metrics["warn/idle"] == 0
    state = agent.optimizer.state[agent.policy.action_head.linear.weight]
    assert bool(state["momentum_buffer"].any())


def test_the_examples_compute_what_they_say(parts: dict[str, dict[str, Any]]) -> None:
    order = torch.tensor([[0.5, -0.2]])
    fill: Any = Fill(None, None, 1.0, order, order.abs(), order.abs().sum())  # type: ignore[arg-type]
    assert COSTS["stamp_duty"].amount(torch.tensor(0.005), fill)[0].tolist() == pytest.approx([0.0025, 0.0])
    assert FEATURES["momentum_48"].warmup == 48
    assert standard_baselines(0.8)["half invested"] == BuyAndHold(0.4)
    idle = OWN_RULES["idle"].check
    assert idle({"data/exposure": 0.005}, {}) == "the mean exposure is 0.005."
    assert idle({"data/exposure": 0.5}, {}) is None
    assert idle({}, {}) is None
    critic: Any = CRITICS["downside_quantile"](3, 4)  # type: ignore[call-arg]
    output, targets = torch.randn(2, 4), torch.randn(2, 5).sort(-1).values
    expected = []
    for q, y in zip(output.tolist(), targets.tolist(), strict=True):
        losses = [
            (2 if i < 2 else 1) * max((i + 0.5) / 4 * (one - q[i]), ((i + 0.5) / 4 - 1) * (one - q[i]))
            for i in range(4)
            for one in y
        ]
        expected.append(sum(losses) / len(losses))
    assert critic.loss(output, targets, LossSettings()).tolist() == pytest.approx(expected, rel=1e-5)
    assert set(parts["An optimiser"]) >= {"Momentum", "make_momentum"}


@pytest.mark.usefixtures("parts")
def test_the_audit_asks_the_check() -> None:
    (result,) = audit(Subject(), fast=True, only=["desk.fee"]).results
    assert (result.verdict, result.measurement.number, result.measurement.bound) == ("ok", 0.0005, "≥ 0.0004")


@pytest.mark.usefixtures("parts")
def test_the_command_prints_the_steps_of_a_run(tmp_path: Path) -> None:
    for step in (64, 128):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    done = CliRunner().invoke(app, ["steps", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, "[64, 128]\n")
