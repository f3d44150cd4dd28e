"""docs/monitoring.md lists every figure that the learner gives, and no other."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tailguard as tg
from tailguard.algorithm.bc import BehaviourCloning
from tailguard.data.bars import Bars
from tailguard.monitor.health import RULES
from tailguard.optim.config import VGSConfig
from tailguard.robust.config import RobustConfig

DOCS = Path(__file__).parents[2] / "docs"
BLANKS = {
    "<trunk>": "(actor|critic|shared|critic_1|critic_2)",
    "<layer>": "[0-9]",
    "<n>": "[12]",
    "<term>": "(bc|robust)",
}
FROM_OUTSIDE = "eval/"
"""What callbacks record; the learner itself gives none of these."""
SMALL: dict[str, Any] = {"n_steps": 16, "minibatch_size": 64, "hidden": (8,), "lstm_size": 8, "quantiles": 8}
RUNS: dict[str, dict[str, Any]] = {
    "twin quantile critics, all terms": {
        "twin_critics": True,
        "value_clip": "mean_only",
        "kl_penalty": 0.1,
        "target_kl": 0.5,
        "entropy_coef": 0.01,
        "extensions": [BehaviourCloning(beta=1.0)],
    },
    "trunks of their own, UPGD with scaling": {
        "twin_critics": True,
        "twin_trunk": "own",
        "lstm_layers": 2,
        "optimizer": "upgd",
        "vgs": VGSConfig(enabled=True),
    },
    "risk budget": {"risk": tg.RiskConfig(limit=-0.02, alpha=0.5)},
    "against attacks, in turns with an adversary": {
        "robust": RobustConfig(coef=1.0, adversary="alternate", adversary_every=1, adversary_rollouts=1)
    },
    "categorical critic, shared trunk": {"critic": "categorical", "memory": "shared"},
    "scalar critic without memory": {"critic": "scalar", "memory": "none"},
    "through the market, risk budget": {
        "learner": tg.PathwiseLearner,
        "risk": tg.RiskConfig(limit=-0.02, alpha=0.5),
        "twin_critics": True,
        "stochastic": True,
        "entropy_coef": 0.01,
    },
    "through the market, no critics": {"learner": tg.PathwiseLearner, "critic_epochs": 0},
    "through the market, against attacks": {
        "learner": tg.PathwiseLearner,
        "robust": RobustConfig(coef=1.0, critic_coef=1.0),
        "critic_epochs": 1,
    },
}


def documented() -> list[tuple[str, bool]]:
    """Names in the first column of the tables, and whether they are marked as part of monitoring."""
    rows = re.findall(r"^\| `([a-z]+/[^`]+)` \| (○ )?\S.*\. \|$", (DOCS / "monitoring.md").read_text("utf-8"), re.M)
    return [(name, bool(mark)) for name, mark in rows]


def matches(name: str, entry: str) -> bool:
    pattern = re.escape(entry)
    for blank, meaning in BLANKS.items():
        pattern = pattern.replace(re.escape(blank), meaning)
    return re.fullmatch(pattern, name) is not None


@pytest.fixture(scope="module", params=RUNS)
def emitted(request: pytest.FixtureRequest) -> tuple[set[str], set[str]]:
    """Names of all figures of a small run after two iterations, with monitoring and without."""
    return names_of(RUNS[request.param], monitor=True), names_of(RUNS[request.param], monitor=False)


@cache
def bars() -> Bars:
    return tg.make_market(800, seed=0).bars


def names_of(options: dict[str, Any], monitor: bool) -> set[str]:
    env = tg.TradingEnv(bars(), num_envs=8, episode_length=32)
    settings = SMALL | options
    learner = settings.pop("learner", tg.DistributionalPPO)
    return set(learner(env, **settings, monitor=monitor).learn(256).metrics)


def test_every_figure_is_documented_once_and_marked_if_it_needs_monitoring(emitted: tuple[set[str], set[str]]) -> None:
    full, plain = emitted
    assert plain < full
    for name in full:
        found = [marked for entry, marked in documented() if matches(name, entry)]
        assert found == [name not in plain], f"{name}: see docs/monitoring.md"


def test_every_documented_figure_exists() -> None:
    names = set().union(*(names_of(options, monitor=True) for options in RUNS.values()))
    for entry, _ in documented():
        assert entry.startswith(FROM_OUTSIDE) or any(matches(name, entry) for name in names), entry


def test_every_alarm_has_its_section() -> None:
    sections = re.findall(r"^## (\S+)$", (DOCS / "alarms.md").read_text("utf-8"), re.M)
    assert {rule.name.replace("_", "-") for rule in RULES} <= set(sections)
