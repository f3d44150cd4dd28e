"""The command that starts a paper venue as a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailguard.cli.application import app
from tailguard.cli.common import TrustPlugins, named_numbers
from tailguard.console import say
from tailguard.errors import MissingExtraError


@app.command()
def venue(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run: its bars and its costs.")],
    data: Annotated[
        Path | None, typer.Option(help="Bars to replay: a file or a folder. Default: the run's test part.")
    ] = None,
    symbol: Annotated[list[str] | None, typer.Option(help="Symbols to offer. Default: all of the bars.")] = None,
    port: Annotated[int, typer.Option(help="Port on localhost; 0: any free one.", min=0, max=65535)] = 0,
    speed: Annotated[
        float,
        typer.Option(help="Seconds of the market in one of ours. 0: time moves as fast as the session asks."),
    ] = 0.0,
    fault: Annotated[
        list[str] | None, typer.Option(help="Probability of a fault: --fault reply_lost=0.1. docs/live.md lists them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0,
    books: Annotated[
        Path | None, typer.Option(help="File of the account, which goes on from it. Default: in the run's folder.")
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Start a paper venue on localhost: replayed bars behind an interface like that of Binance's futures."""
    from rich.console import Console

    try:
        import aiohttp  # noqa: F401 (asked for here, so that the error names the extra)
    except ImportError:
        raise MissingExtraError("aiohttp", "live", "A paper venue as a process") from None
    from tailguard.live.opening import LiveSource
    from tailguard.live.paper_exchange.open_exchange import ExchangeOptions, open_exchange
    from tailguard.live.paper_exchange.process import serve

    options = ExchangeOptions(speed, named_numbers("--fault", fault or [], "reply_lost=0.1"), seed, books)
    exchange = open_exchange(run, LiveSource(data, symbols=tuple(symbol or ())), options, trust_plugins=trust_plugins)
    console = Console()

    def announce(address: str) -> None:
        say(console, f"venue     {address}")
        say(console, f"symbols   {', '.join(f'{ours} is {theirs}' for ours, theirs in exchange.ids.items())}")
        say(console, f"keys      key {exchange.config.key}, secret {exchange.config.secret}")

    serve(exchange, port, announce)
