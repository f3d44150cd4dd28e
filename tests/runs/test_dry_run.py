"""Nothing fails after training that could have been known before: every kind of run goes through to its report."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from rich.console import Console

from tailguard.algorithm.saving import capture
from tailguard.config import RunConfig, load_config
from tailguard.data.synthetic import make_market
from tailguard.errors import BarsError, ConfigError, RunError, TailguardError
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.optimum import share_of_optimum
from tailguard.evaluate.report.collect import collect
from tailguard.evaluate.report.sections import report_page
from tailguard.experiment.build import build
from tailguard.experiment.trained_run import open_run
from tailguard.runs import dry_run, outcome, runner
from tailguard.runs.runner import train
from tailguard.sealed import flat_tensors

TINY = (
    "data.synthetic_bars=1200",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "data.validation=60h",
    "data.test=60h",
    "env.num_envs=4",
    "env.episode_length=16",
    "ppo.n_steps=8",
    "ppo.minibatch_size=16",
    "ppo.epochs=1",
    "ppo.network.hidden=[4]",
    "ppo.network.lstm_size=4",
    "ppo.network.quantiles=4",
    "pathwise.n_steps=8",
    "pathwise.minibatch_size=16",
    "pathwise.network.hidden=[4]",
    "pathwise.network.lstm_size=4",
    "pathwise.network.quantiles=4",
    "training.total_timesteps=64",
    "training.threads=1",
)
NEEDED_BESIDE = {
    "baseline=distribution": ("network.critic=quantile",),
    "upgd.step_factor=1": ("optimizer=upgd",),
    "upgd.normalisation=minmax": ("optimizer=upgd",),
    "network.twin_trunk=own": ("network.twin_critics=true",),
}
"""Settings of a learner that a choice needs beside it."""


def beside(choice: str) -> tuple[str, ...]:
    """What must be set with a choice for it to be legal and to act; a learner's choice needs that learner."""
    learner, _, own = choice.partition(".")
    if learner not in ("ppo", "pathwise"):
        return ()
    return (f"learner={learner}", *(f"{learner}.{setting}" for setting in NEEDED_BESIDE.get(own, ())))


def choices(kind: type, prefix: str = "") -> list[str]:
    """Every boolean and every choice of the settings, both values or all of them, as overrides."""
    found = []
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint, name = hints[item.name], f"{prefix}{item.name}"
        if dataclasses.is_dataclass(hint):
            found += choices(hint, f"{name}.")
        elif hint is bool:
            found += [f"{name}=true", f"{name}=false"]
        else:
            options = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
            found += [f"{name}={value}" for each in options if get_origin(each) is Literal for value in get_args(each)]
    return found


CHOICES = choices(RunConfig)
EDGES = [
    ("market.leverage=125", "market.maintenance_margin=0.005"),
    ("market.leverage=20",),
    ("market.leverage=0.001",),
    ("market.allow_short=false", "market.leverage=3"),
    ("market.fee=0.05", "market.half_spread=0.05"),
    ("market.participation=1e-9",),
    ("risk.limit=-0.02", "risk.measure=drawdown"),
    ("risk.limit=-0.02", "risk.measure=bar"),
    ("risk.penalty=1",),
    ("env.shield_shock=0.5",),
    ("data.test=3h", "data.validation=3h"),
    ("data.synthetic_signal=0",),
    ("env.episode_length=1",),
]


def to_the_report(tmp_path: Path, *changes: str) -> str:
    """Train, judge and report; returns "refused" if that was said before the first step."""
    overrides = [*TINY, *changes]
    for change in changes:
        overrides += beside(change)
    folder = tmp_path / "run"
    try:
        result = train(load_config(overrides=overrides), folder, Console(quiet=True))
    except TailguardError:
        metrics = folder / "metrics.jsonl"
        assert not metrics.exists(), "refused after the run had begun"
        return "refused"
    assert result.agent.num_timesteps > 0
    opened = open_run(folder)
    if len(opened.split.test.symbols) > 1 and result.agent.spec.accounts == "per_symbol":
        opened = opened.select(opened.split.test.symbols[0])
    assert "</html>" in report_page(collect(opened)).html("report")
    return "reported"


REFUSED = ["env.flat_by_close=true"]
"""The synthetic market never closes."""
QUICK = ["market.allow_short=false", "env.reward=simple", "env.reward=pnl"]


@pytest.mark.parametrize("choice", QUICK)
def test_a_choice_goes_through_to_the_report(tmp_path: Path, choice: str) -> None:
    assert choice in CHOICES
    assert to_the_report(tmp_path, choice) == "reported"


@pytest.mark.slow
@pytest.mark.parametrize("choice", [each for each in CHOICES if each not in QUICK])
def test_every_choice_goes_through_or_is_refused_before_the_first_step(tmp_path: Path, choice: str) -> None:
    outcome = to_the_report(tmp_path, choice)
    assert outcome == ("refused" if choice in REFUSED else "reported")


@pytest.mark.parametrize("changes", EDGES[:2])
def test_leverage_beyond_ruin_goes_through_to_the_report(tmp_path: Path, changes: tuple[str, ...]) -> None:
    assert to_the_report(tmp_path, *changes) == "reported"


@pytest.mark.slow
@pytest.mark.parametrize("changes", EDGES[2:], ids=" ".join)
def test_settings_at_their_ends_go_through_or_are_refused_before(tmp_path: Path, changes: tuple[str, ...]) -> None:
    assert to_the_report(tmp_path, *changes) in ("reported", "refused")


@pytest.mark.slow
@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("accounts", ["portfolio", "per_symbol"])
@pytest.mark.parametrize("short", ["true", "false"])
@pytest.mark.parametrize("leverage", ["0.5", "10"])
def test_symbols_accounts_and_limits_together(
    tmp_path: Path, assets: int, accounts: str, short: str, leverage: str
) -> None:
    make_market(1_200, assets=assets, seed=3).save(tmp_path / "bars.parquet")
    settings = (f"env.accounts={accounts}", f"market.allow_short={short}", f"market.leverage={leverage}")
    assert to_the_report(tmp_path, f"data.path={tmp_path / 'bars.parquet'}", *settings) == "reported"


def test_a_ruined_account_ends_in_a_verdict() -> None:
    def account(*equity: float) -> Any:
        return types.SimpleNamespace(equity=equity)

    agent, best = "agent", "planted optimum"
    # Half of the optimum's log-growth is the square root of its growth.
    assert share_of_optimum({agent: account(1, 2), best: account(1, 4)}) == pytest.approx(0.5)
    for ruined in (0.0, -0.2):
        assert str(share_of_optimum({agent: account(1, ruined), best: account(1, 4)})) == "nan"
        assert str(share_of_optimum({agent: account(1, 2), best: account(1, ruined)})) == "nan"


def test_what_fails_at_the_end_fails_before_the_folder_is_a_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> str:
        raise ZeroDivisionError("in the verdict")

    monkeypatch.setattr(outcome, "outcome_in_words", fail)
    with pytest.raises(RunError, match="in the verdict"):
        train(load_config(overrides=TINY), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_test_part_that_nothing_can_be_traded_on_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises((BarsError, ConfigError)):
        train(load_config(overrides=[*TINY, "data.test=1h"]), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_the_rehearsal_trades_a_few_bars_and_changes_nothing(tmp_path: Path) -> None:
    config = load_config(overrides=[*TINY, "data.test=200h"])
    quiet = Console(quiet=True)
    experiment = build(config)
    agent = experiment.learner
    run = runner.TrainedRun(tmp_path, config, agent, experiment.market, experiment.split)
    before = {name: value.clone() for name, value in flat_tensors(capture(agent))}
    short = dry_run.shorten_run(run)
    assert 20 <= len(backtest(agent, short.part("test")).net) <= 40
    runner.dry_run(run, quiet)
    after = dict(flat_tensors(capture(agent)))
    assert before.keys() == after.keys()
    for name, value in before.items():  # metrics that are not known yet are NaN
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True)
    assert list(tmp_path.iterdir()) == []
