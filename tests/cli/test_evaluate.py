"""`backtest`, `report` and `compare` as a person meets them."""

from __future__ import annotations

import json
import math
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

import tailguard as tg
from tailguard.cli import app, main
from tailguard.config import load_config
from tailguard.errors import BarsError, BarsWarning, ConfigError, TailguardError
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.evaluate.benchmark import compare_with, compare_with_rate
from tailguard.evaluate.stress import scaled_costs
from tailguard.robust.feed import parse_feed
from tailguard.runs.runner import train

SMALL = ("data.embargo=1d", "env.num_envs=4", "env.episode_length=16", "ppo.n_steps=16", "ppo.epochs=1")
TINY = ("ppo.network.hidden=[4]", "ppo.network.lstm_size=4", "training.total_timesteps=128", "training.threads=1")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a file of bars."""
    home = tmp_path_factory.mktemp("home")
    tg.make_market(1_600, seed=1, signal=20).save(home / "bars.parquet")
    settings = [f"data.path={home / 'bars.parquet'}", "data.features=[return_24, taker_imbalance_6]", *SMALL, *TINY]
    train(load_config(overrides=settings), home / "run", Console(quiet=True))
    return home / "run"


def test_backtest_writes_what_the_python_call_gives(folder: Path, tmp_path: Path) -> None:
    shown = run(
        "backtest",
        folder,
        "--split",
        "validation",
        "--costs",
        2,
        "--delay",
        1,
        "--csv",
        tmp_path / "b.csv",
        "--json",
        tmp_path / "b.json",
    )
    assert "validation, net" in shown
    assert "buy & hold" in shown
    agent, config = tg.DistributionalPPO.load(folder / "agent"), load_config(folder / "config.yaml")
    bars = tg.split_bars(tg.load_bars(config.data.path), validation=0.15, test=0.15, embargo="1d").validation
    expected = tg.backtest(agent, bars, scaled_costs(config.market, 2), delay=1)
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["delay"] == 1
    assert written["results"]["agent"]["growth_per_year"] == expected.metrics["growth_per_year"]
    assert written["results"]["flat"]["sharpe"] is None
    np.testing.assert_allclose(pl.read_csv(tmp_path / "b.csv")["equity"].to_numpy(), expected.equity[1:])


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_read_only_folder_for_the_figures_is_one_message(
    folder: Path, open_folder: Path, unprivileged: Any, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    for name in ("run", "bars.parquet"):
        (shutil.copytree if name == "run" else shutil.copy)(folder.parent / name, open_folder / name)
    place = open_folder / "out"
    place.mkdir()
    arguments = ["backtest", open_folder / "run", "--data", open_folder / "bars.parquet", option, place / "b.csv"]
    with unprivileged(place) as lock_out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tailguard", *map(str, arguments)])
        lock_out()
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(place))
    assert "Permission denied" in line or "cannot write there" in line
    assert not list(place.iterdir())


def test_commands_warn_once_of_training_bars(folder: Path, tmp_path: Path) -> None:
    """A run's own record of its bars says it; what `tg.backtest` knows would only say it again."""
    copy = tmp_path / "copy.parquet"
    shutil.copy(folder.parent / "bars.parquet", copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BarsWarning)
        assert run("backtest", folder, "--split", "train").count("IN-SAMPLE") == 1
        assert run("backtest", folder, "--data", copy).count("IN-SAMPLE") == 1
        run("report", folder, "--out", tmp_path / "report.html")
        run("compare", folder, folder, "--out", tmp_path / "compare.html")


def test_figures_alone_can_go_to_another_program(folder: Path) -> None:
    assert json.loads(run("backtest", folder, "--json", "-"))["results"]["agent"]["total_return"] > -1


def test_bars_never_seen_are_traded(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.parquet"
    tg.make_market(1_000, seed=9).save(other)
    figures = json.loads(run("backtest", folder, "--data", other, "--noise", 0.1, "--json", "-"))
    expected = tg.backtest(tg.DistributionalPPO.load(folder / "agent"), tg.load_bars(other), noise=0.1)
    assert figures["results"]["agent"]["total_return"] == pytest.approx(expected.metrics["total_return"], abs=1e-12)
    # A baseline may not trade the bars that the agent's features need to warm up.
    bars = tg.load_bars(other)
    late = replace(bars, first=bars.end_points[1] - len(expected.net) * bars.frequency)
    held = tg.backtest(BuyAndHold(), late).metrics["total_return"]
    assert figures["results"]["buy & hold"]["total_return"] == pytest.approx(held, abs=1e-12)


def test_bars_of_the_training_are_called_that_and_no_skill_is_claimed(folder: Path, tmp_path: Path) -> None:
    own = tg.load_bars(load_config(folder / "config.yaml").data.path)
    split = tg.split_bars(own, validation=0.15, test=0.15, embargo="1d")
    copy = tmp_path / "copy.parquet"
    own.frame.drop("segment").with_columns(symbol=pl.lit("BTC")).write_parquet(copy)
    traded = own.frame["time"]
    known = sum(
        ((traded >= part.start) & (traded <= part.end_points[1])).sum() for part in (split.train, split.validation)
    )
    shown = " ".join(run("backtest", folder, "--data", copy, "--trials", 1).split())
    assert f"IN-SAMPLE: {100 * known / len(own):.1f} % of these bars, {split.train.start:%Y-%m-%d %H:%M} to" in shown
    assert "were in the run's training and validation data" in shown
    assert "trained on SYN01, never on BTC" in shown
    assert "what luck explains" not in shown
    figures = json.loads(run("backtest", folder, "--data", copy, "--trials", 1, "--json", "-"))
    assert figures["deflated_sharpe"] is None
    assert figures["seen_in_training_or_validation"] == pytest.approx(known / len(own))
    assert "IN-SAMPLE" in figures["warnings"][0]
    later = tmp_path / "later.parquet"
    tg.make_market(1_000, seed=9).save(later)  # other prices under the same name
    honest = " ".join(run("backtest", folder, "--data", later, "--trials", 1).split())
    assert "WARNING" not in honest
    assert "what luck explains" in honest
    assert "IN-SAMPLE: 100.0 % of these bars" in " ".join(run("backtest", folder, "--split", "train").split())
    assert "WARNING" not in run("backtest", folder)


def test_a_disturbed_agent_stands_beside_the_clean_one(folder: Path, tmp_path: Path) -> None:
    """Table, figures and page of two feeds and two sizes of an attack; the numbers are those of the Python calls."""
    page = tmp_path / "page.html"
    options = (
        "--feed",
        "late:2",
        "--feed",
        "volume+fee:3",
        "--attack",
        "random",
        "--epsilon",
        "0.1,0.3",
        "--out",
        page,
    )
    shown = run("backtest", folder, *options)
    agent, config = tg.DistributionalPPO.load(folder / "agent"), load_config(folder / "config.yaml")
    bars = tg.split_bars(tg.load_bars(config.data.path), validation=0.15, test=0.15, embargo="1d").test
    names = ["clean", "late:2", "volume:10@0.05+fee:3", "random ε 0.1", "random ε 0.3"]
    rows = [line for line in shown.splitlines() if line.startswith(tuple(names))]
    assert len(rows) == 5
    assert f"page     {page}" in shown.replace("\n", "")
    figures = json.loads(run("backtest", folder, *options, "--json", "-"))
    assert [case["name"] for case in figures["cases"]] == names
    for case, feed in zip(figures["cases"], (None, "late:2", "volume+fee:3"), strict=False):
        expected = tg.backtest(agent, bars, feed=feed)
        assert case["metrics"]["total_return"] == pytest.approx(expected.metrics["total_return"], abs=1e-12)
        assert case["metrics"]["cost_fee_per_year"] == pytest.approx(expected.costs_per_year["fee"], abs=1e-12)
    moved = [case["position_change"] for case in figures["cases"]]
    assert moved[0] == 0
    assert moved[4] > moved[3] > 0
    text = page.read_text(encoding="utf-8")
    assert "clean and disturbed" in text
    tick = run("backtest", folder, "--feed", "bad_tick", "--feed-seed", 3, "--out", page, "--json", "-")
    drawn = tg.backtest(agent, bars, feed=parse_feed("bad_tick", seed=3))
    assert json.loads(tick)["cases"][1]["metrics"]["total_return"] == pytest.approx(drawn.metrics["total_return"])
    assert text.count('class="plot"') == 2  # the faults, and the attack against its size
    assert "https://" not in text.split("<script>")[0]


def test_the_page_of_faults_is_in_the_run_unless_a_place_is_given(folder: Path) -> None:
    run("backtest", folder, "--feed", "late:1", "--split", "validation")
    assert (folder / "robustness.html").stat().st_size < 10e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--feed", "lately:2"), "no fault 'lately'. Did you mean late?"),
        (("--feed", "late:9"), "9 is out of range (1 to 3)"),
        (("--feed", "fee:100", "--costs", "2"), "fee:100: market.fee"),
        (("--attack", "tickle"), "--attack: 'tickle'"),
        (("--attack", "pgd", "--epsilon", "much"), "--epsilon much: give numbers"),
        (("--attack", "pgd", "--epsilon", "-1"), "--epsilon: -1 is out of range"),
        (("--epsilon", "0.1"), "name one, as --attack pgd"),
        (("--feed", "late:1", "--csv", "x.csv"), "use --json"),
        (("--out", "x.html"), "--out: is the page of --feed and --attack"),
    ],
)
def test_mistakes_about_faults_and_attacks_end_with_status_2(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["tailguard", "backtest", str(folder), *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: tg.make_market(600, frequency="15m").bars.frame,
            "bars of 15 minutes; the agent was trained",
        ),
        (lambda: tg.make_market(600).bars.frame.drop("taker_buy_base", "taker_buy_quote"), "taker_imbalance_6"),
        (lambda: tg.make_market(600, assets=2).bars.frame, "choose one of SYN01, SYN02 with --symbol"),
    ],
)
def test_bars_that_do_not_fit_the_agent_are_refused_in_words(folder: Path, tmp_path: Path, change, message) -> None:
    other = tmp_path / "other.parquet"
    change().drop("segment").write_parquet(other)
    with pytest.raises(TailguardError, match=message):
        run("backtest", folder, "--data", other)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("--data", "x.parquet", "--split", "test"), ConfigError, "Choose one"),
        (("--data", "nowhere.parquet"), BarsError, "nowhere.parquet"),
        (("--symbol", "ETH"), BarsError, "no symbol 'ETH'; there are SYN01"),
        (("--csv", "bars.txt"), ConfigError, r"cannot write \.txt"),
        (("--delay", "-1"), ConfigError, "delay: -1 is out of range"),
    ],
)
def test_mistakes_are_named(folder: Path, arguments: tuple[str, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run("backtest", folder, *arguments)


def test_report_prints_the_verdict_and_where_the_page_is(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = run("report", folder, "--out", page, "--limit", "-0.02", "--horizon", "24h", "--trials", "7")
    assert shown.startswith("verdict  ")
    assert "Trials: 7 (given with --trials)" in page.read_text(encoding="utf-8")
    assert "With a limit of -2.0 %, the worst 5 % of days made" in shown
    assert f"report   {page}" in shown
    assert "tailguard train" in page.read_text(encoding="utf-8")
    for wrong in (("--limit", "0.04"), ("--trials", "0")):
        with pytest.raises(ConfigError, match="out of range"):
            run("report", folder, *wrong)


def test_report_writes_its_tables_as_csv_when_asked_to(folder: Path, tmp_path: Path) -> None:
    shown = run("report", folder, "--out", tmp_path / "page.html", "--csv")
    data = tmp_path / "page_data"
    assert f"saved    {data}" in shown
    names = ["bars", "drawdowns", "exposures", "months", "trades"]
    assert sorted(path.name for path in data.iterdir()) == [f"{name}.csv" for name in names]
    assert (data / "trades.csv").read_text().startswith("entry_time,exit_time,symbol,side,bars")


def test_a_benchmark_and_a_rate_are_compared_with_together_and_alone(folder: Path, tmp_path: Path) -> None:
    config = load_config(folder / "config.yaml")
    bars = tg.load_bars(config.data.path)
    test = tg.split_bars(bars, validation=0.15, test=0.15, embargo="1d").test
    agent = tg.DistributionalPPO.load(folder / "agent")
    result = tg.backtest(agent, test, config.market)
    file = tmp_path / "INDEX.csv"
    bars.frame.select("time", close=100 + pl.col("close").log()).write_csv(file)

    written = tmp_path / "b.json"
    both = ("--benchmark", file, "--risk-free", 0.03)
    for options, key, expected in (
        (both, "benchmark", compare_with(result, tg.load_bars(file), 0.03)),
        (both[2:], "risk_free", compare_with_rate(result, 0.03)),
        (both[:2], "benchmark", compare_with(result, tg.load_bars(file))),
    ):
        shown = run("backtest", folder, *options, "--json", written)
        assert f"relative {expected.describe()}" in shown
        assert json.loads(written.read_text())[key]["own_sharpe"] == pytest.approx(expected.own_sharpe, rel=1e-9)
    assert "relative" not in run("backtest", folder)
    run("report", folder, "--out", tmp_path / "page.html", "--csv", *both[2:])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "over a risk-free rate of 3&nbsp;% a year" in page
    assert (tmp_path / "page_data" / "relative.csv").read_text().startswith("figure,value\nrisk_free,0.03\n")
    for options in (both[:2], both[2:]):
        with pytest.raises(ConfigError, match="--benchmark and --risk-free: are for one backtest"):
            run("backtest", folder, "--feed", "late:2", *options)
    with pytest.raises(ConfigError, match="risk_free"):
        run("backtest", folder, "--risk-free", 3)


def test_each_symbol_in_accounts_of_its_own_from_training_to_the_report(tmp_path: Path) -> None:
    tg.make_market(1_200, assets=2, seed=2).save(tmp_path / "bars.parquet")
    settings = [f"data.path={tmp_path / 'bars.parquet'}", "data.features=[return_24]", "env.accounts=per_symbol"]
    result = train(load_config(overrides=[*settings, *SMALL, *TINY]), tmp_path / "run", Console(quiet=True))
    test = tg.split_bars(tg.load_bars(tmp_path / "bars.parquet"), validation=0.15, test=0.15, embargo="1d").test
    alone = [tg.backtest(result.agent, test.select(symbol)).equity for symbol in ("SYN01", "SYN02")]
    np.testing.assert_allclose(result.results["agent"].equity, np.mean(alone, axis=0), rtol=1e-12)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert math.isfinite(line["eval/growth"])
    both = json.loads(run("backtest", tmp_path / "run", "--json", "-"))["results"]
    assert both["agent"]["total_return"] == pytest.approx(np.mean(alone, axis=0)[-1] - 1)
    one = json.loads(run("backtest", tmp_path / "run", "--symbol", "SYN02", "--json", "-"))["results"]
    assert one["agent"]["total_return"] == pytest.approx(alone[1][-1] - 1)
    with pytest.raises(ConfigError, match="one symbol per account; choose one of SYN01, SYN02 with --symbol SYN01"):
        run("report", tmp_path / "run")
    assert run("report", tmp_path / "run", "--symbol", "SYN02").startswith("verdict  ")


def test_trials_come_from_the_record_unless_they_are_given(folder: Path) -> None:
    figures = json.loads(run("backtest", folder, "--json", "-"))
    assert figures["trials"] == 1
    record = folder.parent / "trials.jsonl"
    (line,) = record.read_text().splitlines()
    mine = json.loads(line)
    assert mine["sharpe"] == pytest.approx(figures["results"]["agent"]["sharpe"])
    others = [mine | {"config": f"{number:064d}", "sharpe": float(number)} for number in range(6)]
    record.write_text("".join(json.dumps(each) + "\n" for each in (mine, *others)))
    try:
        more = json.loads(run("backtest", folder, "--json", "-"))
        assert more["trials"] == 7
        assert more["deflated_sharpe"] < figures["deflated_sharpe"]
        assert json.loads(run("backtest", folder, "--json", "-", "--trials", 40))["trials"] == 40
        shown = " ".join(run("backtest", folder).split())
        assert f"trials {record} has 7 training runs tested on these bars" in shown
        # Bars that nothing was chosen by.
        assert json.loads(run("backtest", folder, "--split", "validation", "--json", "-"))["trials"] is None
    finally:
        record.write_text(line + "\n")


def test_the_probability_that_the_budget_holds_is_in_the_figures(tmp_path: Path) -> None:
    tg.make_market(1_600, seed=1, signal=20).save(tmp_path / "bars.parquet")
    settings = [f"data.path={tmp_path / 'bars.parquet'}", "data.features=[return_24]", "risk.limit=-0.02"]
    trained = train(load_config(overrides=[*settings, *SMALL, *TINY]), tmp_path / "run", Console(quiet=True))
    figures = json.loads(run("backtest", tmp_path / "run", "--json", "-"))
    budgets = trained.summary.budgets
    assert figures["budget"] == {name: str(found.verdict) for name, found in budgets.items()}
    assert figures["budget_probability"] == pytest.approx({name: each.probability for name, each in budgets.items()})
    assert 0 < figures["budget_probability"]["buy & hold"] < figures["budget_probability"]["flat"] < 1


def test_a_limit_on_falls_is_judged_in_words(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = run("report", folder, "--out", page, "--limit", "-0.3", "--horizon", "24h", "--outcome", "drawdown")
    assert "With a limit of -30.0 %, the worst 5 % of days had a maximum drawdown of -" in shown
    assert "the risk budget was kept" in shown
    assert "maximum drawdown within days" in page.read_text(encoding="utf-8")


def test_a_report_without_a_browser_says_what_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--pdf and --png need a browser, and none was found"):
        run("report", folder, "--pdf")


def test_walk_forward_is_trained_shown_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tg.make_market(1_900, seed=3).save(tmp_path / "bars.parquet")
    changes = [part for change in ("data.features=[return_24]", *SMALL, *TINY) for part in ("--set", change)]
    command = ["train", "--data", "bars.parquet", "--walk-forward", "--folds", "2", "--name", "walk", *changes]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert first.output.count("trains:") == 2
    assert "did better than buy & hold in" in first.output
    assert (tmp_path / "runs" / "walk" / "walk_forward.html").stat().st_size < 10e6
    with pytest.raises(ConfigError, match=r"runs/walk: a walk forward, which has a page of its own: .*html"):
        run("report", "runs/walk")
    with pytest.raises(
        ConfigError, match="runs/walk: a walk forward; to resume it, repeat the command that started it"
    ):
        CliRunner().invoke(app, ["train", "--resume", "runs/walk"], catch_exceptions=False)
    again = CliRunner().invoke(app, command)
    assert again.output.count("is finished:") == 2
    assert again.output.splitlines()[-5:] == first.output.splitlines()[-5:]
    with pytest.raises(ConfigError, match="require --walk-forward"):
        CliRunner().invoke(app, ["train", "--folds", "3"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="folds: 1 is out of range"):
        CliRunner().invoke(app, ["train", "--walk-forward", "--folds", "1"], catch_exceptions=False)


def test_the_commands_are_in_the_program() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(command in shown for command in ("backtest", "report", "compare"))
