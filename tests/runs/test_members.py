"""Several agents as one run: each leaves out its fold, the mean is calibrated on what none has seen, and it resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble, load_agent
from tailguard.cli import app
from tailguard.config import RunConfig, load_config
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import AGENT
from tailguard.evaluate.report.training_record import read_metrics
from tailguard.experiment.build import build, split_market
from tailguard.experiment.trained_run import open_run
from tailguard.risk.cvar import cvar_from_samples
from tailguard.risk.exposure import cvar_bound
from tailguard.risk.throttle import Throttle
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Members, combine, train_members
from tailguard.runs.outcome import describe_agent
from tailguard.runs.runner import resume_run, train
from tailguard.runs.validation import Validation

PATHWISE = (
    "learner=pathwise",
    "pathwise.network.hidden=[8]",
    "pathwise.network.lstm_size=8",
    "risk.limit=-0.02",
    "risk.alpha=0.2",
    "training.members=3",
)
"""Three members, each of three iterations on 8 whole episodes of 32 bars."""


@pytest.fixture
def config(small_config: Any) -> RunConfig:
    return small_config(*PATHWISE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_config: Any) -> tuple[Any, str]:
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115 (lives as long as the console)
    result = train(small_config(*PATHWISE), tmp_path_factory.mktemp("runs") / "three", console)
    return result, console.export_text()


def test_each_member_trains_without_its_own_fold(config: RunConfig) -> None:
    bars = tg.make_market(2_500, seed=0, signal=30).bars
    members = Members.on(config, split_market(config, bars).train, seed=4)
    folds, seeds = [], []
    for number in range(3):
        member = members.build(number)
        env: Any = member.agent.env
        time = env.prepared.panel.time
        first, last = member.fold.first_ms, member.fold.last_ms
        begin, end = time[env.starts], time[env.starts + 32]
        assert ((end < first) | (begin > last)).all()
        held = member.held_out()
        assert held.overlap == 8
        assert (time[held.starts] >= first).all()
        assert (time[held.starts + 32] <= last).all()
        folds.append((first, last))
        seeds.append(member.agent.seed)
    assert seeds == [4, 5, 6]
    assert sorted(folds) == folds
    assert all(one[1] < two[0] for one, two in pairwise(folds))


def test_the_exposure_keeps_the_limit_on_what_no_member_has_seen(tmp_path: Path, small_config: Any) -> None:
    """Trade every held-out episode again, and compute the tail and its bound from their outcomes."""
    config = small_config(*PATHWISE, "pathwise.learning_rate=0.1", "training.total_timesteps=2560")
    bars = tg.make_market(2_500, seed=0, signal=30).bars
    split = split_market(config, bars)
    members = Members.on(config, split.train, seed=0)
    validation = Validation(members.first, split.validation)
    agent = train_members(
        members, RunFolder(tmp_path), validation, Console(quiet=True), resume=False, again="", ask=lambda _: False
    )
    assert isinstance(agent, Ensemble)
    found = agent.calibration
    held = [members.build(number).held_out() for number in range(3)]

    def outcomes(exposure: float) -> torch.Tensor:
        own = [part.trade(Ensemble([one], exposure)) for part, one in zip(held, agent.members, strict=True)]
        own += [part.trade(Ensemble(agent.members, exposure)) for part in validation.parts]
        return torch.cat([each.measured for each in own])

    assert found.uncalibrated == pytest.approx(float(cvar_from_samples(outcomes(1.0).flatten(), 0.2)))
    assert found.cvar == pytest.approx(float(cvar_from_samples(outcomes(agent.exposure).flatten(), 0.2)))
    assert found.bound == pytest.approx(cvar_bound(outcomes(agent.exposure), 0.2, 0.9, block=16))
    assert -0.02 <= found.bound < -0.0197 or agent.exposure == 3.0
    assert found.tail_episodes == pytest.approx(0.2 * len(outcomes(1.0)) / 8)


def test_copies_of_a_market_are_no_evidence_of_their_own(small_config: Any) -> None:
    """Four symbols with the same bars, each in an account of its own: bound, count and factor are those of one."""
    market = tg.make_market(2_500, seed=0, signal=30).bars
    frame = market.frame.drop("segment")
    copies = tg.load_bars(pl.concat([frame.with_columns(symbol=pl.lit(name)) for name in "ABCD"]))
    found = []
    for bars in (market, copies):
        config = small_config(*PATHWISE, "env.accounts=per_symbol", "risk.limit=-0.01")
        split = split_market(config, bars)
        members = Members.on(config, split.train, seed=0)
        built = [members.build(number) for number in range(3)]
        for member in built:
            member.agent.policy.action_head.linear.bias.data.fill_(0.5)  # an exposure that binds
        agent = combine(built, Validation(members.first, split.validation), config, Console(quiet=True))
        found.append((asdict(agent.calibration), sum(len(member.held_out()) for member in built)))
    (one, episodes), (four, more) = found
    assert more == 4 * episodes
    assert one["factor"] < 2
    assert four == pytest.approx(one, rel=1e-4)  # features are scaled in float32


def test_the_throttle_follows_from_the_limit_alone(tmp_path: Path, finished: Any, small_config: Any) -> None:
    """With and without a calibration, after the run and after it is loaded."""
    result, _ = finished
    assert result.agent.make_throttle() == Throttle(-0.02, 0.2)
    assert open_run(result.folder).agent.make_throttle() == Throttle(-0.02, 0.2)
    config = small_config(*PATHWISE, "risk.confidence=0", "training.members=1")
    first = Members.on(config, split_market(config, tg.make_market(2_500, seed=0, signal=30).bars).train, 0).build(0)
    for settings in (config, replace(config, risk=replace(config.risk, confidence=0.9))):
        agent = combine([first], None, settings, Console(quiet=True))  # without validation nothing is held out
        assert agent.calibration is None
        assert agent.make_throttle() == Throttle(-0.02, 0.2)
    agent.save(tmp_path / "agent")
    assert load_agent(tmp_path / "agent").make_throttle() == Throttle(-0.02, 0.2)
    for off in ("risk.throttle=false", "risk.measure=drawdown", "risk.limit=null"):
        settings = small_config(*PATHWISE, "risk.confidence=0", "training.members=1", off)
        assert combine([first], None, settings, Console(quiet=True)) is first.agent
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    off = train(small_config(*PATHWISE, "risk.throttle=false"), tmp_path / "off", console)
    assert off.agent.make_throttle() is None
    assert "risk.bound=pivotal is wider and holds more often" in console.export_text()


def test_a_run_ends_with_the_ensemble_and_says_why_its_exposure_is_what_it_is(finished: Any) -> None:
    result, text = finished
    assert isinstance(result.agent, Ensemble)
    assert len(result.agent.members) == 3
    for number in (1, 2, 3):
        assert f"{number} of 3, trained without" in text
    assert f"exposure ×{result.agent.exposure:.2f}: as learned, the worst 20 % of held-out episodes made" in text
    assert "with a nominal 90 % bound of" in text
    assert "a 90 % bound holds in about three of four cases, not in nine of ten; the throttle acts" in text
    # What an update will see is said before the first member is trained, and after each whether its limit was kept.
    assert text.index("an update sees 1.6 tail episodes, fewer than 5: too few") < text.index("1 of 3, trained without")
    for number in range(3):
        lines = (result.folder / "members" / str(number) / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["time/total_timesteps"] == 768
    opened = open_run(result.folder)
    assert isinstance(opened.agent, Ensemble)
    again = tg.backtest(opened.agent, opened.part("test"))
    np.testing.assert_array_equal(again.equity, result.results[AGENT].equity)


def test_defaults_say_what_an_update_sees_and_what_to_set_for_more() -> None:
    """512 episodes an update, a twentieth of them in the tail: 26, and 50 with twice as many accounts."""
    config = load_config(overrides=["risk.limit=-0.02", "env.episode_length=192", "data.synthetic_bars=3000"])
    learner = build(config).learner
    assert "an update sees 26 tail episodes (env.num_envs=1000 shows 50)" in describe_agent(learner)
    wide = load_config(base=config, overrides=["env.num_envs=1000"])
    assert describe_agent(build(wide).learner).endswith("an update sees 50 tail episodes")


def test_each_member_says_at_its_end_whether_the_limit_was_kept_in_training(tmp_path: Path, small_config: Any) -> None:
    """Once the window holds enough of the tail: 20 outcomes, half of one iteration here."""
    said = {}
    for limit in (-0.5, -1e-5):
        console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
        settings = [*PATHWISE, f"risk.limit={limit}", "risk.alpha=0.5", "env.num_envs=40", "training.members=2"]
        train(small_config(*settings), tmp_path / f"run{limit}", console)
        said[limit] = [line for line in console.export_text().splitlines() if "in training: CVaR" in line]
    assert len(said[-0.5]) == len(said[-1e-5]) == 2
    assert all("kept in training: CVaR" in line and "limit −50.0 %" in line for line in said[-0.5])
    assert all(re.search(r"broken, [\d.]+ times in training: CVaR −0", line) for line in said[-1e-5])


def test_exposure_is_above_one_where_the_budget_is_not_used_up_and_within_the_leverage(
    tmp_path: Path, small_config: Any
) -> None:
    result = train(small_config(*PATHWISE, "risk.limit=-0.9"), tmp_path / "run", Console(quiet=True))
    agent = result.agent
    assert agent.exposure == pytest.approx(3.0)
    assert agent.calibration.bound > -0.9
    plain = tg.backtest(Ensemble(agent.members), open_run(result.folder).part("test"))
    scaled = tg.backtest(agent, open_run(result.folder).part("test"))
    assert np.abs(scaled.targets).max() <= 1  # the leverage
    small = np.abs(plain.targets[0]) < 1 / 3  # from a flat account, where both see the same
    np.testing.assert_allclose(scaled.targets[0][small], 3 * plain.targets[0][small], rtol=1e-5)
    assert np.abs(scaled.targets).mean() > 1.5 * np.abs(plain.targets).mean()


def test_ensemble_is_a_choice_of_what_the_result_is(tmp_path: Path, small_config: Any) -> None:
    """The mean of several agents, without a limit as well; each of them at its last state."""
    config = small_config("training.select=ensemble", "risk.limit=null")
    assert (config.members, config.select) == (4, "last")
    result = train(
        small_config("training.select=ensemble", "training.members=2"), tmp_path / "two", Console(quiet=True)
    )
    assert isinstance(result.agent, Ensemble)
    assert [member.num_timesteps for member in result.agent.members] == [768, 768]
    assert result.agent.exposure == 1
    with pytest.raises(ConfigError, match=r"training\.select: ensemble is the mean of several agents"):
        small_config("training.select=ensemble", "training.members=1")


def test_every_command_takes_an_ensemble(finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = finished
    monkeypatch.chdir(tmp_path)  # where pages are written
    for arguments in (
        ["report", str(result.folder), "--out", str(tmp_path / "report.html")],
        ["backtest", str(result.folder)],
        ["compare", str(result.folder), str(result.folder)],
    ):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code in (0, 2), found.output
        assert "Traceback" not in found.output
        assert found.exception is None or isinstance(found.exception, SystemExit)
    assert (tmp_path / "report.html").is_file()


def test_a_backtest_of_a_run_may_be_without_its_throttle(finished: Any, tmp_path: Path) -> None:
    result, _ = finished
    folder = shutil.copytree(result.folder, tmp_path / "run")
    shutil.rmtree(folder / AGENT)
    Ensemble(result.agent.members, 3.0, throttled=Throttle(-1e-4, 0.2)).save(folder / AGENT)
    found = {}
    for switch in ("--throttle", "--no-throttle"):
        made = CliRunner().invoke(app, ["backtest", str(folder), switch, "--json", str(tmp_path / switch)])
        assert ("its losses throttled it" in made.output) == (switch == "--throttle")
        found[switch] = json.loads((tmp_path / switch).read_text())["results"][AGENT]
    assert found["--throttle"]["throttled"] > 0.05
    assert found["--no-throttle"]["throttled"] == 0
    free = tg.backtest(open_run(folder).agent, open_run(folder).part("test"), throttle=False)
    assert found["--no-throttle"]["total_return"] == pytest.approx(free.metrics["total_return"])
    refused = CliRunner().invoke(app, ["backtest", str(folder), "--no-throttle", "--feed", "late:1"])
    assert refused.exit_code != 0


def test_an_interrupted_run_resumes_with_the_member_that_was_interrupted(
    finished: Any, tmp_path: Path, small_config: Any
) -> None:
    """Stopped in the second of three members; the ensemble is that of the run that nobody disturbed, bit by bit."""
    result, _ = finished
    folder = tmp_path / "stopped"
    config = small_config(*PATHWISE)
    second = folder / "members" / "1" / "metrics.jsonl"

    class StopsLater(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*objects, **options)
            if any("2 of 3" in str(item) for item in objects):
                os.kill(os.getpid(), signal.SIGTERM)  # caught by Python's handler before training sets its own

    previous = signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))
    try:
        with pytest.raises(SystemExit):
            train(config, folder, StopsLater(quiet=False, file=open("/dev/null", "w")))  # noqa: SIM115
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not (folder / AGENT).exists()
    assert (folder / "members" / "0" / "checkpoints").is_dir()
    assert not second.exists()
    resumed = resume_run(folder, Console(quiet=True))
    assert resumed.agent.exposure == result.agent.exposure
    for one, two in zip(resumed.agent.members, result.agent.members, strict=True):
        for name, weights in one.policy.state_dict().items():
            assert torch.equal(weights, two.policy.state_dict()[name]), name


def test_without_a_limit_one_agent_is_trained_on_all_bars(tmp_path: Path, small_config: Any) -> None:
    config = small_config(*PATHWISE, "risk.limit=null", "training.members=0")
    assert config.members == 1
    result = train(config, tmp_path / "one", Console(quiet=True))
    assert isinstance(result.agent, tg.PathwiseLearner)
    assert (result.folder / "metrics.jsonl").read_text()
    assert small_config("risk.limit=-0.02").members == 4


def test_one_member_with_a_limit_is_calibrated_on_the_validation_part(tmp_path: Path, small_config: Any) -> None:
    config = small_config(*PATHWISE, "training.members=1")
    result = train(config, tmp_path / "one", Console(quiet=True))
    assert isinstance(result.agent, Ensemble)
    assert result.agent.calibration.bound >= -0.02
    off = train(
        small_config(*PATHWISE, "training.members=1", "risk.confidence=0"), tmp_path / "off", Console(quiet=True)
    )
    assert (off.agent.exposure, off.agent.calibration) == (1.0, None)


def test_too_many_members_for_the_bars_are_refused_before_training(tmp_path: Path, small_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"training\.members: 60 folds"):
        train(small_config(*PATHWISE, "training.members=60"), tmp_path / "run", Console(quiet=True))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_new_run_removes_the_members_of_the_old_one(tmp_path: Path, config: RunConfig, small_config: Any) -> None:
    train(config, tmp_path / "run", Console(quiet=True))
    train(small_config(), tmp_path / "run", Console(quiet=True), replace=True)
    assert not (tmp_path / "run" / "members").exists()


def test_the_exposure_keeps_the_limit_under_every_feed_that_it_was_trained_for(
    tmp_path: Path, small_config: Any
) -> None:
    """A fee that is paid in spikes of the funding rate: the held-out tail under it decides, not the clean one."""
    feeds = "robust.feed=[late:1, funding:0.02@0.2]"
    config = small_config(*PATHWISE, "pathwise.learning_rate=0.1", "training.total_timesteps=2560", feeds)
    split = split_market(config, tg.make_market(2_500, seed=0, signal=30).bars)
    members = Members.on(config, split.train, seed=0)
    validation = Validation(members.first, split.validation)
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    agent = train_members(
        members, RunFolder(tmp_path), validation, console, resume=False, again="", ask=lambda _: False
    )
    assert isinstance(agent, Ensemble)
    bounds = []
    # The clean feed, late:1, and the first of two draws of the spikes.
    for number, draws in enumerate([None, *config.robust.feeds()]):
        held = [members.build(fold).held_out(number) for fold in range(3)]
        own = [part.trade(Ensemble([one], agent.exposure)) for part, one in zip(held, agent.members, strict=True)]
        parts = validation.parts if draws is None else validation.parts_under(draws[0])
        own += [part.trade(agent) for part in parts]
        bounds.append(cvar_bound(torch.cat([each.measured for each in own]), 0.2, 0.9, block=16))
    assert min(bounds) >= -0.02
    assert bounds[2] == pytest.approx(agent.calibration.bound)
    assert bounds[2] < bounds[0]
    assert "with the feed funding:0.02@0.2" in console.export_text()


@pytest.mark.parametrize("learner", ["ppo", "pathwise"])
def test_members_are_trained_against_attacks_and_an_adversary_under_a_budget(
    tmp_path: Path, small_config: Any, learner: str
) -> None:
    """Each member has its own attacks and its own adversary, and the mean of them is calibrated."""
    turns = ("robust.adversary=alternate", "robust.adversary_every=1", "robust.adversary_rollouts=1")
    robust = ("robust.coef=1", "robust.epsilon=0.3", "robust.schedule=constant", *turns)
    config = small_config(*PATHWISE, f"learner={learner}", "training.members=2", *robust)
    agent = train(config, tmp_path / "run", Console(quiet=True)).agent
    assert isinstance(agent, Ensemble)
    streams, adversaries = [], []
    for number, member in enumerate(agent.members):
        assert member.robust == config.robust
        rows = read_metrics(tmp_path / "run" / "members" / str(number) / "metrics.jsonl")
        assert rows[-1]["robust/action_shift"] > rows[-1]["robust/noise_shift"] > 0
        assert rows[-1]["robust/epsilon"] == 0.3
        assert member.smoothness is not None
        assert member.alternation is not None
        assert member.alternation.turns == len(rows) - 1
        streams.append(member.smoothness.generator.get_state())
        adversaries.append(torch.cat([each.flatten() for each in member.alternation.learner.policy.parameters()]))
    assert not torch.equal(*streams)
    assert not torch.allclose(*adversaries)
    assert agent.calibration is not None
    assert agent.calibration.limit == -0.02
