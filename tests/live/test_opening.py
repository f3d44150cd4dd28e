"""Sessions of a real run through the command line: shadow, paper, restart, verification, kill and release."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import tailguard as tg
from tailguard.cli import app
from tailguard.config import load_config
from tailguard.data.storage import write_frame
from tailguard.errors import ConfigError, TailguardError
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import open_run
from tailguard.live.decide import WarmUpError
from tailguard.live.display import PAUSE_S, Display, WatchedSource
from tailguard.live.journal import JournalError, read_records
from tailguard.live.opening import LiveSource, kill_switch, open_session, verify_session
from tailguard.live.screen import moment, render
from tailguard.live.session import Killed
from tailguard.live.view import session_view
from tailguard.runs.runner import train

SMALL = (
    "data.synthetic_bars=2000",
    "data.features=[bollinger_20, trend_24]",
    "data.embargo=1d",
    "data.test=70h",
    "data.validation=0.1",
    "env.num_envs=8",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=384",
    "training.threads=1",
)


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    train(load_config(overrides=SMALL), folder, Console(quiet=True))
    return folder


@pytest.fixture
def run(trained_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_folder, tmp_path / "small"))


Cli = Callable[..., str]
MAIN = "from tailguard.cli import main; main()"


@pytest.fixture
def cli() -> Cli:
    def invoke(*arguments: object, fails: str | None = None) -> str:
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        if fails is None:
            assert result.exit_code == 0, result.output + repr(result.exception)
        else:
            assert isinstance(result.exception, TailguardError)
            assert fails in str(result.exception)
        return result.output

    return invoke


def journal_of(run: Path, mode: str) -> list[dict]:
    return list(read_records(run / "live" / mode / "journal.jsonl"))


def test_a_shadow_session_of_a_run_is_its_backtest(run: Path, cli: Cli) -> None:
    shown = cli("live", run)
    records = journal_of(run, "shadow")
    decisions = [record for record in records if record["kind"] == "decision"]
    opened = open_run(run)
    expected = tg.backtest(opened.agent, opened.part("test"), progress_bar=False)
    assert len(decisions) == 70
    np.testing.assert_array_equal([each["target"] for each in decisions[:-1]], expected.targets)
    assert f"equity {expected.equity[-1]:.6f}" in shown
    verified = cli("live", run, "--verify")
    assert "verified  70 decisions" in verified
    assert records[-1]["hash"] in verified
    # A replay that has ended has nothing to add.
    cli("live", run)
    assert [record["kind"] for record in journal_of(run, "shadow")[-2:]] == ["resume", "stop"]


def test_a_paper_session_of_a_run_has_its_backtests_equity(run: Path, cli: Cli) -> None:
    cli("live", run, "--mode", "paper", "--guard", "slippage=0.1")
    decisions = [record for record in journal_of(run, "paper") if record["kind"] == "decision"]
    opened = open_run(run)
    expected = tg.backtest(opened.agent, opened.part("test"), progress_bar=False)
    np.testing.assert_allclose([each["equity"] for each in decisions], expected.equity, rtol=0, atol=1e-9)
    assert not [record for record in journal_of(run, "paper") if record["kind"] == "freeze"]
    cli("live", run, "--mode", "paper", "--verify")


def test_a_replay_of_other_bars_begins_after_the_warm_up(run: Path, cli: Cli, tmp_path: Path) -> None:
    bars = tg.make_market(120, seed=4).bars
    write_frame(bars.frame.drop("segment"), tmp_path / "bars.parquet")
    cli("live", run, "--data", tmp_path / "bars.parquet")
    records = journal_of(run, "shadow")
    decisions = [record for record in records if record["kind"] == "decision"]
    warmup = 120 - len(decisions)
    assert not any(record["flat"] for record in decisions)
    assert decisions[0]["bar"] == bars.panel().time[warmup]
    assert warmup == 24


def test_a_session_that_is_stopped_goes_on_where_it_was(run: Path) -> None:
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count > 20

    for _ in range(5):
        count = 0
        opened = open_session(run, "paper", LiveSource(), {"slippage": 0.1})
        opened.session.start()
        opened.session.run(opened.source, stop=stop)
        opened.session.ledger.journal.close()
    decisions = [record for record in journal_of(run, "paper") if record["kind"] == "decision"]
    once = open_run(run)
    expected = tg.backtest(once.agent, once.part("test"), progress_bar=False)
    np.testing.assert_allclose([each["equity"] for each in decisions], expected.equity, rtol=0, atol=1e-9)


def test_a_kill_by_command_stops_and_a_release_goes_on(run: Path, cli: Cli) -> None:
    cli("kill", run)
    cli("live", run, "--mode", "paper", fails="tailguard kill, by")
    assert not [record for record in journal_of(run, "paper") if record["kind"] == "intent"]
    cli("live", run, "--mode", "paper", fails="--release")
    assert "released" in cli("live", run, "--mode", "paper", "--release", "--guard", "slippage=0.1")
    assert [record for record in journal_of(run, "paper") if record["kind"] == "intent"]


def test_the_command_says_what_the_session_has_answered(run: Path, cli: Cli) -> None:
    """Of a session in another process: its orders, its position, and how to go on."""
    shown = cli("kill", run)
    assert f"no session answered, as none is running. To go on: tailguard live {run} --release" in unwrapped(shown)
    command = [sys.executable, "-c", MAIN, "live", str(run), "--mode", "paper", "--release", "--seconds", "0.05"]
    with subprocess.Popen([*command, "--guard", "slippage=0.1"], stdout=subprocess.DEVNULL) as process:
        path, deadline = run / "live" / "paper" / "journal.jsonl", time.monotonic() + 120
        while not path.exists() or path.read_text().count('"kind":"order"') < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        shown = unwrapped(cli("kill", run))
        assert process.wait(60) == 1
    held = [record for record in journal_of(run, "paper") if record["kind"] == "settled"][-1]["positions"]
    place = ", ".join(f"{symbol} {size}" for symbol, size in held.items())
    assert f"paper: 0 orders cancelled, 0 in flight, position left at {place} (flatten with --flatten" in shown
    assert f"To go on: tailguard live {run} --mode paper --release" in shown
    last = [record["kind"] for record in journal_of(run, "paper")]
    assert "intent" not in last[last.index("kill") :]


def unwrapped(text: str) -> str:
    """Without the line breaks of a narrow terminal."""
    return " ".join(text.split())


def test_a_release_of_one_mode_is_none_of_another(run: Path, cli: Cli) -> None:
    """Everything is stopped while no session runs; paper is released, and the others still are not."""
    cli("kill", run)
    cli("live", run, "--mode", "paper", "--release", "--guard", "slippage=0.1")
    cli("live", run, fails="tailguard kill, by")
    opened = open_session(run, "paper", LiveSource())
    with opened.session.ledger.journal:
        assert not opened.session.kill.is_tripped()
    assert kill_switch(RunLayout(run), "live").is_tripped()
    cli("live", run, "--release")
    # A session that ends itself stops no other.
    kill_switch(RunLayout(run), "shadow").trip("drawdown")
    assert not kill_switch(RunLayout(run), "paper").is_tripped()
    # Any file in the common place still stops all.
    (run / "live" / "KILL").touch()
    cli("live", run, "--mode", "paper", fails="KILL is there")


def test_a_signal_trips_the_switch(run: Path) -> None:
    import os

    from tailguard.cli.live import _signals, _Stopping

    opened = open_session(run, "paper", LiveSource(), {})
    stopping = _Stopping()
    with _signals(stopping, opened.session.kill):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.asked
        assert not opened.session.kill.is_tripped()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert opened.session.kill.message() == "the signal SIGUSR1"
    with pytest.raises(Killed):
        opened.session.start()
    opened.session.ledger.journal.close()


def test_what_was_tampered_with_is_found(run: Path, cli: Cli) -> None:
    cli("live", run)
    path = run / "live" / "shadow" / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    content = json.loads(lines[100])
    content["time"] += 1
    path.write_text("".join([*lines[:100], json.dumps(content, separators=(",", ":")) + "\n", *lines[101:]]))
    with pytest.raises(JournalError, match="line 101 was changed"):
        verify_session(run, "shadow")
    path.write_text("".join(lines))
    verify_session(run, "shadow")
    lead_in = run / "live" / "shadow" / "lead_in.parquet"
    lead_in.write_bytes(lead_in.read_bytes()[:-1] + b"x")
    cli("live", run, "--verify", fails="changed since the session began")


def test_a_forged_decision_with_a_fitting_chain_is_found(run: Path, cli: Cli) -> None:
    """Whoever can write the file can write a chain that fits, but not decisions that the agent would make."""
    from tailguard.live.journal import Journal

    cli("live", run)
    records = journal_of(run, "shadow")
    path = run / "live" / "shadow" / "journal.jsonl"
    path.unlink()
    with Journal(path, sync=False) as journal:
        for record in records:
            content = {key: value for key, value in record.items() if key not in ("kind", "time", "previous", "hash")}
            if record["kind"] == "decision" and record["memory"]["count"] == 47:
                content["target"] = [content["target"][0] + 1e-12]
            journal.append(record["kind"], record["time"], **content)
    with pytest.raises(WarmUpError, match="in a replay and"):
        verify_session(run, "shadow")


def test_another_agent_cannot_take_over_a_session(run: Path, cli: Cli) -> None:
    cli("live", run)
    manifest = next((run / "agent").glob("*.json"))
    manifest.write_text(manifest.read_text() + " ")
    cli("live", run, fails="its agent has changed since the session began")


def test_options_that_make_no_sense_are_refused(run: Path, cli: Cli, tmp_path: Path) -> None:
    cli("live", run, "--mode", "paper", "--exchange", "binance", fails="tailguard venue")
    cli("live", run, "--guard", "drawdwn=1", fails="--guard drawdwn: unknown; there are order_notional")
    cli("live", run, "--guard", "drawdown", fails="write a name and a number")
    cli("live", run, "--verify", "--mode", "paper", fails="no session in the mode paper")
    cli("kill", tmp_path / "nowhere", fails="no run here")
    cli("live", run, "--mode", "live", fails="--mode live needs --exchange and --budget")
    cli("live", run, "--orders", "twap", "--spread", "400", fails="--spread 400: a bar is fresh for 360 s")
    cli("live", run, "--budget", "100", fails="--budget and --service belong to --mode live")
    cli("live", run, "--exchange", "binance", "--data", run, fails="--data replays bars and an exchange has its own")
    cli("live", run, "--venue", "http://example.org:80", fails="write the address that tailguard venue prints")
    cli("live", run, "--mode", "paper", "--venue", "http://127.0.0.1:9", fails="no paper venue answers at 127.0.0.1:9")
    cli("live", run, "--venue", "http://127.0.0.1:9", "--exchange", "kraken", fails="--venue stands for binanceusdm")


def test_the_page_of_a_process_shows_its_session_until_it_ends(run: Path) -> None:
    """A real process with --page: its address is printed, its numbers are those of the journal."""
    command = [sys.executable, "-c", MAIN, "live", str(run), "--seconds", "0.05", "--page", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        address = process.stdout.readline().split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        view = None
        while view is None or len(view.get("curve", ())) < 5:
            assert process.poll() is None
            with urllib.request.urlopen(f"{address}state.json", timeout=60) as answer:
                view = json.loads(answer.read())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    decided = {record["bar"]: record for record in journal_of(run, "shadow") if record["kind"] == "decision"}
    for closed, equity, low, high in view["curve"]:
        assert equity == low == high == decided[closed - 3_600_000]["equity"]
    assert view["positions"][0]["target"] == decided[view["closed_ms"] - 3_600_000]["target"][0]
    assert view["state"] == "trading"
    assert f"{run} --mode shadow --release" in view["command"]


def test_what_is_drawn_before_a_wait_is_the_last_decision(run: Path) -> None:
    """A bar, its decision and its explanation come within milliseconds: the first of them must not hide the others
    until the next bar."""
    opened = open_session(run, "shadow", LiveSource(seconds_per_bar=1.2 * PAUSE_S))
    session, views = opened.session, []
    display = Display(session, "tailguard live RUN --release", [views.append])
    session.ledger.listeners.append(display.hear)
    source = WatchedSource(opened.source, display.before_waiting)
    session.start()
    for _ in range(3):
        bar = source.next_bar()  # draws, waits, and gives the bar
        session.on_bar(bar)
        display.before_waiting()
        assert views[-1]["closed_ms"] == bar.close_ms(3_600_000)
        assert views[-1]["age_s"] == 0
        assert views[-1]["moved"]
    drawn = len(views)
    for _ in range(20):
        display.before_waiting()
    assert len(views) == drawn  # at full speed not every bar is drawn
    session.ledger.journal.close()


def test_alerts_of_a_run_reach_a_command(run: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "told.jsonl"
    program = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read() + chr(10))"
    command = shlex.join([sys.executable, "-c", program])
    cli("live", run, "--mode", "paper", "--guard", "order_notional=1e-6", "--alert-command", command)
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["kind"] for each in told] == ["watching", "freeze", "stop"]
    assert told[1]["guard"] == "order_notional"
    cli("live", run, "--alert-webhook", "NO_SUCH_VARIABLE", fails="the environment has no such variable")


def test_the_screen_shows_account_guards_and_alarms(run: Path) -> None:
    opened = open_session(run, "paper", LiveSource(), {"order_notional": 1e-6, "slippage": 0.1})
    session = opened.session
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(session_view(session, "tailguard live RUN --release")))
    session.start()
    for _ in range(3):
        session.on_bar(opened.source.next_bar())
    small = Console(width=80, record=True, file=io.StringIO())
    small.print(render(session_view(session, "tailguard live RUN --release")))
    lines = small.export_text().splitlines()
    assert len(lines) <= 23  # a terminal of 80 x 24 shows it all
    assert "increases are frozen" in lines[0]
    session.ledger.record("alarm", guard="clock", message="the venue's clock is +9.0 s from ours")
    console.print(render(session_view(session, "tailguard live RUN --release")))
    session.ledger.journal.close()
    shown = console.export_text()
    assert re.search(r"state +frozen", shown)
    assert f"{moment(session.clock.now())} UTC  clock: the venue's clock is +9.0 s from ours" in shown
    decision = session.ledger.state.last_decision
    assert "waiting for the first bar" in shown
    assert f"{decision['target'][0]:+.4f}" in shown
    assert "order_notional:" in shown
    tripped = next(record for record in journal_of(run, "paper") if record["kind"] == "freeze")["time"]
    assert f"(since {moment(tripped)} UTC)" in unwrapped(shown).replace(" │", "")
    assert "increases are frozen" in shown
    assert "closed 0 s ago" in shown
    with pytest.raises(ConfigError):
        open_session(run, "paper", LiveSource(exchange="binance"))
