"""The command: a run's folder that the other commands take, its page, its trials, and what it refuses."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from typer.testing import CliRunner

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.cli import app
from tailguard.errors import ConfigError
from tailguard.evaluate.trials import count_trials, trial_of
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import open_run
from tailguard.population.lineage import read_lineage
from tailguard.population.population_page import schedule_chart

SMALL = (
    "data.synthetic_bars=2500",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "env.num_envs=8",
    "env.episode_length=32",
    "pathwise.n_steps=16",
    "pathwise.network.hidden=[8]",
    "pathwise.network.lstm_size=8",
    "training.total_timesteps=1024",
    "training.threads=1",
)
SPACE = "pathwise.learning_rate: {log: [1e-4, 1e-1]}\npathwise.max_grad_norm: {linear: [0.1, 2.0]}\n"


def command(*arguments: str, settings: tuple[str, ...] = SMALL) -> Any:
    given = [part for setting in settings for part in ("--set", setting)]
    return CliRunner().invoke(app, ["population", *arguments, *given])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    place = tmp_path_factory.mktemp("population")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        (place / "space.yaml").write_text(SPACE)
        result = command("--search", "space.yaml", "--members", "4", "--rounds", "4", "--keep", "2", "--processes", "1")
        assert result.exit_code == 0, result.output
    return place / "runs" / "population", result.output


def test_the_best_members_become_the_agent(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    last = read_lineage(folder / "lineage.jsonl").rounds[-1]
    best = sorted(last.standings, key=lambda each: -each.score)[:2]
    agent = open_run(folder).agent
    assert isinstance(agent, Ensemble)
    rates = [float(member.learning_rate) for member in agent.members]
    assert [member.seed for member in agent.members] == [each.member for each in best]
    # The schedule of the default, a twentieth of the last rollout before its end.
    shares = [rate / float(each.hyper["pathwise.learning_rate"]) for rate, each in zip(rates, best, strict=True)]
    assert shares == pytest.approx([1 - 0.9 * 896 / 1024] * 2)


def test_every_member_leaves_metrics_curves_and_a_trial(finished: tuple[Path, str]) -> None:
    folder, output = finished
    for place in RunLayout(folder).training_folders():
        lines = [json.loads(line) for line in place.metrics_path.read_text().splitlines()]
        assert [line["time/total_timesteps"] for line in lines] == list(range(128, 1025, 128))
        assert sum("eval/judged" in line for line in lines) == 4
        assert any(place.tensorboard_path.glob("events.out.tfevents.*"))
    assert len(RunLayout(folder).training_folders()) == 4
    assert len((folder.parent / "trials.jsonl").read_text().splitlines()) == 5
    assert "after 5 trials: every member counts" in " ".join(output.split())


def counted(folder: Path) -> int:
    """The trials that a report of the run counts."""
    return count_trials(RunLayout(folder).trials_path, [trial_of(open_run(folder), 1.0)]).count


def test_every_configuration_is_a_trial_though_it_stopped_early_or_is_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    small = ("--search", "space.yaml", "--rounds", "4", "--processes", "1")
    halved = command(*small, "--strategy", "halving", "--members", "9", "--name", "halved")
    assert halved.exit_code == 0, halved.output
    # One of nine is left, and it is the agent.
    assert "after 9 trials: every member counts" in " ".join(halved.output.split())
    (left,) = (
        each.member for each in read_lineage(tmp_path / "runs" / "halved" / "lineage.jsonl").rounds[-1].standings
    )
    lines = [json.loads(line) for line in (tmp_path / "runs" / "trials.jsonl").read_text().splitlines()]
    assert sorted(line["run"] for line in lines[1:]) == sorted(
        f"halved/members/{member}" for member in range(9) if member != left
    )
    assert all(line["sharpe"] is not None for line in lines)
    assert counted(tmp_path / "runs" / "halved") == 9
    # The settings of a member are the same, but not its population.
    other = command(*small, "--strategy", "random", "--members", "2", "--keep", "2", "--name", "other")
    assert other.exit_code == 0, other.output
    compared = CliRunner().invoke(app, ["compare", "runs/halved", "runs/other"])
    assert compared.exit_code == 0, compared.output
    assert all(name in compared.output for name in ("halved", "other"))
    assert counted(tmp_path / "runs" / "other") == counted(tmp_path / "runs" / "halved") == 9 + 2 + 1


def test_the_page_shows_schedules_lineage_and_the_test(finished: tuple[Path, str]) -> None:
    page = (finished[0] / "population.html").read_text()
    for text in ("Out of sample", "Schedules", "Lineage", "(kept)", "max_grad_norm", "which had no part in any choice"):
        assert text in page
    assert "the members beside it do neither" not in page


def test_the_page_says_what_a_limit_does_to_the_agent_and_whether_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    small = ("--search", "space.yaml", "--members", "2", "--rounds", "2", "--processes", "1")
    result = command(*small, settings=(*SMALL, "risk.limit=-0.04"))
    assert result.exit_code == 0, result.output
    page = html.unescape((tmp_path / "runs" / "population" / "population.html").read_text()).replace("\xa0", " ")
    agent = open_run(tmp_path / "runs" / "population").agent
    assert isinstance(agent, Ensemble)
    assert f"The agent trades ×{agent.exposure:.2f} the positions that were learned" in page
    assert agent.throttled
    assert "its throttle cuts them after losses; the members beside it do neither" in page
    verdict = " ".join(result.output.split("budget   ")[1].split("The probability")[0].split())
    assert verdict in page
    assert "Members as they learned to trade, without what is done to the agent's positions" in page


def test_rates_are_shown_by_whole_decades(finished: tuple[Path, str]) -> None:
    chart = schedule_chart(read_lineage(finished[0] / "lineage.jsonl"), 0)
    rate, clip = chart.layout.yaxis, chart.layout.yaxis2
    assert (rate.type, rate.dtick, rate.exponentformat) == ("log", 1, "power")
    assert (clip.type, clip.dtick) == (None, None)


def test_the_other_commands_take_the_folder(finished: tuple[Path, str]) -> None:
    result = CliRunner().invoke(app, ["backtest", str(finished[0])])
    assert result.exit_code == 0, result.output
    assert "after" in result.output or "luck" in result.output


def test_a_report_takes_the_folder_and_counts_its_trials(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = finished
    monkeypatch.chdir(folder.parents[1])
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert "5 trials" in (folder / "report.html").read_text()


def test_the_page_of_hyper_parameters_has_the_last_values_and_scores(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    for each in read_lineage(folder / "lineage.jsonl").rounds[-1].standings:
        events = EventAccumulator(str(RunLayout(folder).member_path(each.member) / "tensorboard")).Reload()
        begun = HParamsPluginData.FromString(events.PluginTagToContent("hparams")["_hparams_/session_start_info"])
        values = {name: value.number_value for name, value in begun.session_start_info.hparams.items()}
        assert values == pytest.approx(dict(each.hyper))
        assert [score.value for score in events.Scalars("population/score")] == pytest.approx([each.score])


def test_a_finished_population_gives_another_agent_without_training(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = finished
    before = (folder / "lineage.jsonl").read_bytes()
    monkeypatch.chdir(folder.parents[1])
    result = command("--resume", str(folder), "--processes", "1", settings=())
    assert result.exit_code == 0, result.output
    assert "resumed  after round 4 of 4" in result.output
    assert (folder / "lineage.jsonl").read_bytes() == before
    assert isinstance(tg.load_agent(folder / "agent"), Learner)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ([], (), "--search: none given"),
        (["--search", "space.yaml", "--keep", "9"], (), "--keep 9: give 1 to 8"),
        (["--search", "space.yaml", "--strategy", "genetic"], (), "population.strategy: 'genetic'"),
        (["--search", "space.yaml", "--executor", "cloud"], SMALL, "--executor"),
        (["--search", "space.yaml"], (*SMALL, "training.members=3"), "a population has --members"),
        (["--search", "space.yaml"], (*SMALL, "training.patience=3"), "training.patience"),
        (["--search", "other.yaml"], SMALL, "Did you mean pathwise.learning_rate?"),
        (["--search", "space.yaml", "--metric", "cvar"], SMALL, "risk.limit is not set"),
        (["--search", "space.yaml", "--rounds", "9"], SMALL, "shorter than a rollout, which takes 128 steps here"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], settings: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "other.yaml").write_text("pathwise.learnin_rate: {log: [1e-4, 1e-1]}\n")
    result = command(*arguments, settings=settings)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not (tmp_path / "runs" / "population" / "config.yaml").exists()
