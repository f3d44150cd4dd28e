"""The commands `data check`, `data prepare`, `data make` and `data fetch`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from tailguard.cli.application import data
from tailguard.cli.common import path_setting
from tailguard.console import say
from tailguard.places import check_writable_place


@data.command("check")
def data_check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="CSV, Parquet or Feather files, or a folder of them.")
    ],
    symbol: Annotated[str | None, typer.Option(help="Symbol to select, or its name if the files have none.")] = None,
    frequency: Annotated[
        str | None, typer.Option(help="Required bar length, like 1h. Default: the most common one.")
    ] = None,
    calendar: Annotated[
        str, typer.Option(help="When the market trades: 24/7, auto, fx, a name of exchange_calendars, or a file.")
    ] = "auto",
    gaps: Annotated[
        Literal["error", "split"], typer.Option(help="Missing bars: an error, or the start of a new segment.")
    ] = "error",
    volume_unit: Annotated[
        Literal["base", "quote"], typer.Option(help="What the volume column counts: coins (base) or money (quote).")
    ] = "base",
    adjust: Annotated[
        Literal["none", "splits", "dividends", "all"],
        typer.Option(help="Adjust prices for splits, dividends or both before the checks."),
    ] = "none",
    events: Annotated[
        Path | None, typer.Option(help="File of dividends and splits; default: columns of the bars.")
    ] = None,
    universe: Annotated[
        Literal["common", "ragged"], typer.Option(help="Times that all symbols have, or members that come and go.")
    ] = "common",
    preset: Annotated[
        str, typer.Option(help="Kind of market: crypto_perpetual, crypto_spot, equity, futures or fx.")
    ] = "crypto_perpetual",
    plugins: Annotated[
        list[str] | None,
        typer.Option("--plugin", metavar="NAME", help="Module or Python file with features of your own; it runs code."),
    ] = None,
) -> None:
    """Check that bars are valid and sufficient for training with default settings.

    Exit status 0: yes; 1: a check failed; 2: the files cannot be read.
    """
    from rich.console import Console

    from tailguard.config import RunConfig
    from tailguard.data.check_report import print_report
    from tailguard.data.readiness import ready_report
    from tailguard.data.sources import bars_of, check_source, read_source, with_adjusted
    from tailguard.envs.prepared_market import is_prepared_market, open_market
    from tailguard.market.config import MarketConfig
    from tailguard.plugins import load_plugins

    load_plugins(plugins or [])
    if len(files) == 1 and is_prepared_market(files[0]):
        open_market(files[0]).verify()
        typer.echo(f"{files[0]}: a prepared market; all files are intact")
        return
    market = MarketConfig.for_market(preset)  # type: ignore[arg-type]  # it refuses other names
    source = with_adjusted(read_source(files if len(files) > 1 else files[0], symbol=symbol), adjust, events)
    report = check_source(
        source, frequency=frequency, calendar=calendar, gaps=gaps, volume_unit=volume_unit, universe=universe
    )
    if not report.errors:
        run = RunConfig()
        report = ready_report(
            report,
            bars_of(source, report, volume_unit, universe),
            validation=run.data.validation,
            test=run.data.test,
            embargo=run.data.embargo,
            episode_length=run.env.episode_length,
            funding_rate=market.funding_rate,
            uses_volume=market.impact > 0 or math.isfinite(market.participation),
        )
    print_report(report, Console())
    raise typer.Exit(1 if report.errors else 0)


@data.command("prepare")
def data_prepare(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; train on it with --data OUT.")],
    config: Annotated[Path | None, typer.Argument(help="YAML settings of the runs that will use it.")] = None,
    bars: Annotated[Path | None, typer.Option("--data", help="File or folder of bars; short for data.path.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, as for train.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Bars in memory at a time. Default: 262,144.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace an existing prepared market.")] = False,
) -> None:
    """Check bars, split them and compute features once, for training from disk on bars larger than memory.

    The split, the features and the volume-dependent costs come from the settings; runs must use the same ones.
    """
    from rich.console import Console
    from rich.markup import escape

    from tailguard.config import load_config
    from tailguard.data.disk.import_bars import ROWS
    from tailguard.runs.prepare_market import prepare_market
    from tailguard.validate import check_count

    size = ROWS if rows is None else rows
    check_count("--rows", size, low=1_000)
    settings = load_config(config, [*(overrides or []), *([] if bars is None else [path_setting(bars)])])
    console = Console()
    with console.status("") as status:
        market = prepare_market(settings, out, rows=size, replace=yes, say=lambda line: status.update(escape(line)))
    say(console, f"split    {market.describe()}")
    say(console, f"prepared {len(market):,} bars in {out}")
    given = "" if config is None else f"{shlex.quote(str(config))} "
    say(console, f"next     tailguard train {given}--data {shlex.quote(str(out))}")


@data.command("make")
def data_make(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .parquet, .csv or .feather.")],
    bars: Annotated[int, typer.Option(help="Bars for each asset; 26280 hourly bars are 3 years.")] = 26_280,
    assets: Annotated[int, typer.Option(help="Number of assets.")] = 1,
    frequency: Annotated[str, typer.Option(help="Length of a bar, like 15m, 1h or 1d.")] = "1h",
    seed: Annotated[int, typer.Option(help="The same seed gives the same market.")] = 0,
    signal: Annotated[
        float, typer.Option(help="Planted signal: yearly Sharpe ratio, before costs, of a trader who sees it. 0: none.")
    ] = 0.0,
    correlation: Annotated[float, typer.Option(help="Correlation of any two assets' returns, 0 to 0.9.")] = 0.6,
) -> None:
    """Make a synthetic market with the stylised facts of crypto and an optional planted signal."""
    from tailguard.data.storage import check_writable
    from tailguard.data.synthetic import describe, make_market

    check_writable(out)
    check_writable_place(out)
    market = make_market(bars, assets=assets, frequency=frequency, seed=seed, signal=signal, correlation=correlation)
    market.save(out)
    typer.echo(f"{out}: {describe(market)}")


@data.command("fetch")
def data_fetch(
    exchange: Annotated[str, typer.Argument(help="Name of the exchange in ccxt, like binance.")],
    symbol: Annotated[str, typer.Argument(help="BTC/USDT is spot, BTC/USDT:USDT the perpetual.")],
    timeframe: Annotated[str, typer.Argument(help="Length of a bar, like 1h.")],
    out: Annotated[Path, typer.Option(help="Parquet file to create or to extend.")],
    start: Annotated[str, typer.Option(help="First bar: 2021-01-31, 2021-01-31T08:00 (UTC), or how long ago: 90d.")],
    stop: Annotated[str, typer.Option(help="End, not included: same formats, or now.")] = "now",
) -> None:
    """Fetch bars from an exchange. The same command continues an interrupted download or extends a finished one."""
    from tailguard.data.fetch import FetchError, fetch

    try:
        fetched = fetch(exchange, symbol, timeframe, out=out, start=start, stop=stop, progress=True)
    except FetchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(fetched)
