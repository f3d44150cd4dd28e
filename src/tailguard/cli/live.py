"""The commands for trading with a finished run: `live` and `kill`."""

from __future__ import annotations

import getpass
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tailguard.cli.application import app
from tailguard.cli.common import TrustPlugins, named_numbers
from tailguard.cli.live_terms import confirm, hidden, read_terms
from tailguard.console import say
from tailguard.errors import ConfigError, RunError

if TYPE_CHECKING:
    from tailguard.live.kill import KillSwitch
    from tailguard.live.page_server import PageServer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, like runs/demo.")]


@app.command()
def live(
    run: Run,
    mode: Annotated[
        Literal["shadow", "paper", "live"],
        typer.Option(
            help="shadow: decide and log, send nothing. paper: trade at a simulated venue. live: trade with real money."
        ),
    ] = "shadow",
    data: Annotated[
        Path | None, typer.Option(help="Bars to replay: a file or a folder. Default: the run's test part.")
    ] = None,
    exchange: Annotated[
        str | None, typer.Option(help="Follow an exchange instead: its name in ccxt, like binanceusdm.")
    ] = None,
    venue: Annotated[
        str | None, typer.Option(help="Address of a paper venue that tailguard venue has started; it is the exchange.")
    ] = None,
    symbol: Annotated[
        list[str] | None, typer.Option(help="Symbols to trade. Default: those of the bars, or of the run.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Live: money of the account that the session may use. Required there.")
    ] = None,
    service: Annotated[
        bool,
        typer.Option("--service", help="Live without a terminal, by the confirmation that a person typed before."),
    ] = False,
    orders: Annotated[
        Literal["immediate", "market", "limit_then_market", "twap"],
        typer.Option(help="How orders are sent; docs/live.md says what each style does."),
    ] = "immediate",
    spread: Annotated[
        float, typer.Option(help="Seconds that limit_then_market waits, and over which a twap sends its slices.")
    ] = 60.0,
    slices: Annotated[int, typer.Option(help="Most slices of a twap.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds between two bars of a replay; 0: as fast as possible.")] = 0.0,
    guard: Annotated[
        list[str] | None, typer.Option(help="Change a limit: --guard drawdown=0.1. docs/live.md lists them.")
    ] = None,
    page: Annotated[
        int | None,
        typer.Option(help="Show the session on this port of 127.0.0.1, too, read-only; 0 takes a free port."),
    ] = None,
    alert_webhook: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Environment variable with the address that gets every alarm as JSON."),
    ] = None,
    alert_command: Annotated[
        str | None, typer.Option(help="Program that gets every alarm as JSON on its standard input.")
    ] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Go on after a kill or a freeze. Look at the account first.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the journal and replay its decisions, instead of trading.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write the reports of the days that have ended, instead of trading.")
    ] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Let a run's agent decide bar by bar: in shadow, on paper, or with real money."""
    from rich.console import Console

    from tailguard.live.alerts import AlertConfig, alerting
    from tailguard.live.daily_report import write_daily_reports
    from tailguard.live.day_end import DayEnd
    from tailguard.live.display import WatchedSource, shown
    from tailguard.live.opening import LiveSource, open_session, verify_session
    from tailguard.live.orders import OrderConfig
    from tailguard.live.screen import line
    from tailguard.live.session import Killed

    console = Console()
    if verify:
        count, head = verify_session(run, mode, trust_plugins=trust_plugins)
        say(console, f"verified  {count:,} decisions, replayed bit for bit")
        say(console, f"head      {head}")
        return
    if report:
        for path in write_daily_reports(run, mode, trust_plugins=trust_plugins):
            say(console, f"report    {path}")
        return
    stopping = _Stopping()
    source = LiveSource(data, exchange, tuple(symbol or ()), seconds, venue)
    terms = read_terms(mode, source, budget, service)
    limits = named_numbers("--guard", guard or [], "drawdown=0.1")
    alerts = AlertConfig.of(alert_webhook, alert_command)
    with hidden(terms), _server(page) as server:
        opened = open_session(
            run,
            mode,
            source,
            limits,
            terms=terms,
            orders=OrderConfig(orders, spread, slices),
            stop=stopping.is_asked,
            trust_plugins=trust_plugins,
        )
        session, command = opened.session, f"tailguard live {run} --mode {mode} --release"
        with session.ledger.journal:
            confirm(opened, console, service=service)
            if server is not None:
                say(console, f"page      {server.url}")
            with shown(session, command, console, server) as display, alerting(alerts, session) as alerter:
                day_end = DayEnd(("live", str(run), "--mode", mode, "--report", *["--trust-plugins"] * trust_plugins))
                if exchange is not None or venue is not None or seconds > 0:  # a replay at full speed has no days
                    session.ledger.listeners.append(day_end.hear)

                def beat() -> None:
                    display.before_waiting()
                    alerter.report(session.ledger)
                    day_end.beat()

                # A source that waits asks again and again whether to stop: the age of the last bar stays true.
                stopping.beat = beat
                if release:
                    session.release(getpass.getuser())
                    say(
                        console,
                        f"released  guards and kill switch of {mode} are reset; each mode has its own",
                    )
                with _signals(stopping, session.kill):
                    try:
                        session.start()
                        session.run(WatchedSource(opened.source, beat), stop=stopping.is_asked)
                    except Killed as error:
                        raise RunError(f"{run}: {error}") from None
        say(console, line(session))
        say(console, f"journal   {session.ledger.journal.path}")


@app.command()
def kill(
    run: Run,
    flatten: Annotated[bool, typer.Option("--flatten", help="Close the positions of the session, too.")] = False,
) -> None:
    """Stop a run's trading now. Nothing more is sent until a person runs `tailguard live RUN --release`."""
    from rich.console import Console

    from tailguard.experiment.layout import RunLayout
    from tailguard.live.stopping import stop_run

    layout = RunLayout(run)
    if not layout.is_run():
        raise ConfigError(f"{run}: no run here: {layout.config_path.name} is missing. Give the folder of a run")
    for line in stop_run(run, f"tailguard kill, by {getpass.getuser()}", flatten=flatten):
        say(Console(), f"stopped   {line}")


class _Stopping:
    """Whether a clean end was asked for."""

    asked = False
    beat: Callable[[], None] = staticmethod(lambda: None)
    """Called whenever somebody wants to know."""

    def is_asked(self) -> bool:
        self.beat()
        return self.asked


@contextmanager
def _signals(stopping: _Stopping, switch: KillSwitch) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the session after the bar, with its positions kept; SIGUSR1 trips the kill switch."""

    def stop(*_: Any) -> None:
        stopping.asked = True

    handlers = {
        signal.SIGINT: stop,
        signal.SIGTERM: stop,
        signal.SIGUSR1: lambda *_: switch.trip("the signal SIGUSR1"),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _server(port: int | None) -> Iterator[PageServer | None]:
    """The page's server, where one is asked for."""
    from tailguard.live.page_server import PageServer

    if port is None:
        yield None
        return
    with PageServer(port) as server:
        yield server
