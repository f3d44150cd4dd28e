"""The commands `data check`, `data prepare`, `data make` and `data fetch`."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tailguard.cli.application import data
from tailguard.cli.common import path_setting
from tailguard.console import say
from tailguard.places import check_writable_place

if TYPE_CHECKING:
    from tailguard.config import DataConfig
    from tailguard.data.findings import Report
    from tailguard.data.readiness import TrainingNeeds

HELD_IN_MEMORY = 2**27
"""Bytes that bars take in memory at least; larger ones are checked in pieces."""


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
        str | None,
        typer.Option(help="When the market trades: 24/7, auto (default), fx, a name of exchange_calendars, or a file."),
    ] = None,
    gaps: Annotated[
        Literal["error", "split"] | None,
        typer.Option(help="Missing bars: an error, or the start of a new segment. Default: error."),
    ] = None,
    volume_unit: Annotated[
        Literal["base", "quote"] | None,
        typer.Option(help="What the volume column counts: coins (base, the default) or money (quote)."),
    ] = None,
    adjust: Annotated[
        Literal["none", "splits", "dividends", "all"] | None,
        typer.Option(help="Adjust prices for splits, dividends or both before the checks. Default: none."),
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="File of dividends and splits; default: columns of the bars.")
    ] = None,
    universe: Annotated[
        Literal["common", "ragged"] | None,
        typer.Option(help="Times that all symbols have (common, the default), or members that come and go."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Kind of market: crypto_perpetual (default), crypto_spot, equity, futures or fx."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of the run that will use the bars, as for train."),
    ] = None,
    plugins: Annotated[
        list[str] | None,
        typer.Option("--plugin", metavar="NAME", help="Module or Python file with features of your own; it runs code."),
    ] = None,
) -> None:
    """Check that bars are valid and sufficient for training, with default settings or those of --set.

    The other options are short for settings: --calendar for data.calendar, --preset for market.preset.
    Exit status 0: yes; 1: a check failed; 2: the files cannot be read.
    """
    from rich.console import Console

    from tailguard.config import load_config
    from tailguard.data.check_report import print_report
    from tailguard.data.readiness import TrainingNeeds
    from tailguard.data.windows import parse_size
    from tailguard.envs.prepared_market import is_prepared_market, open_market
    from tailguard.plugins import load_plugins

    load_plugins(plugins or [])
    if len(files) == 1 and is_prepared_market(files[0]):
        open_market(files[0]).verify()
        typer.echo(f"{files[0]}: a prepared market; all files are intact")
        return
    short = {
        "data.calendar": calendar,
        "data.gaps": gaps,
        "data.volume_unit": volume_unit,
        "data.adjust": adjust,
        "data.events": None if events is None else str(events),
        "data.universe": universe,
        "market.preset": preset,
    }
    named = [f"{name}={json.dumps(value)}" for name, value in short.items() if value is not None]
    run = load_config(None, [*named, *(overrides or [])])
    needs = TrainingNeeds(
        validation=parse_size(run.data.validation),
        test=parse_size(run.data.test),
        embargo=run.data.embargo,
        episode_length=run.env.episode_length,
        features=run.data.features or None,
        accounts=run.env.accounts,
        funding_rate=run.market.funding_rate,
        uses_volume=run.market.impact > 0 or math.isfinite(run.market.participation),
        perpetual=run.market.preset == "crypto_perpetual",
    )
    report = _checked(files, symbol, frequency, run.data, needs)
    print_report(report, Console())
    raise typer.Exit(1 if report.errors else 0)


def _checked(
    files: list[Path], symbol: str | None, frequency: str | None, chosen: DataConfig, needs: TrainingNeeds
) -> Report:
    """The report on files: in memory, or in pieces where they are large and nothing needs all of them at once."""
    from tailguard.data.disk.check_on_disk import check_on_disk
    from tailguard.data.disk.read_pieces import readable_in_pieces
    from tailguard.data.frequency import parse_frequency
    from tailguard.data.readers import files_of, least_memory
    from tailguard.data.readiness import ready_report
    from tailguard.data.sources import bars_of, check_source, read_source, with_adjusted

    path = files if len(files) > 1 else files[0]
    in_pieces = symbol is None and chosen.universe == "common" and chosen.adjust == "none"
    found = files_of(path)
    if in_pieces and least_memory(found) > HELD_IN_MEMORY and all(map(readable_in_pieces, found)):
        return check_on_disk(
            path,
            needs,
            symbols=chosen.symbols,
            frequency=parse_frequency(frequency) if frequency else None,
            calendar=chosen.calendar,
            gaps=chosen.gaps,
            volume_unit=chosen.volume_unit,
        )
    source = with_adjusted(read_source(path, symbol=symbol), chosen.adjust, chosen.events)
    report = check_source(
        source,
        frequency=frequency,
        calendar=chosen.calendar,
        gaps=chosen.gaps,
        volume_unit=chosen.volume_unit,
        universe=chosen.universe,
    )
    if report.errors:
        return report
    bars = bars_of(source, report, chosen.volume_unit, chosen.universe, chosen.delistings or None)
    return ready_report(report, bars.select(*chosen.symbols) if chosen.symbols else bars, needs)


@data.command("prepare")
def data_prepare(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; train on it with --data OUT.")],
    config: Annotated[Path | None, typer.Argument(help="YAML settings of the runs that will use it.")] = None,
    bars: Annotated[Path | None, typer.Option("--data", help="File or folder of bars; short for data.path.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, as for train.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Bars in the memory of each process at a time. Default: 262,144.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes, each with a symbol at a time; 0: one for each core.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace an existing prepared market.")] = False,
) -> None:
    """Check bars, split them and compute features once, for training from disk on bars larger than memory.

    The split, the features and the volume-dependent costs come from the settings; runs must use the same ones.
    """
    from rich.console import Console
    from rich.markup import escape

    from tailguard.config import load_config
    from tailguard.data.disk.import_bars import ROWS
    from tailguard.data.disk.workers import cores
    from tailguard.runs.prepare_market import prepare_market
    from tailguard.validate import check_count

    size = ROWS if rows is None else rows
    check_count("--rows", size, low=1_000)
    check_count("--jobs", jobs, low=0)
    settings = load_config(config, [*(overrides or []), *([] if bars is None else [path_setting(bars)])])
    console = Console()
    with console.status("") as status:
        market = prepare_market(
            settings, out, rows=size, jobs=jobs or cores(), replace=yes, say=lambda line: status.update(escape(line))
        )
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
