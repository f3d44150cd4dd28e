"""The command `audit`: checks of the installed code and of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailguard.cli.application import app
from tailguard.cli.common import TrustPlugins, shown_steps
from tailguard.console import say
from tailguard.errors import ConfigError
from tailguard.places import check_writable_place, replace_synced

if TYPE_CHECKING:
    from rich.console import Console

    from tailguard.audit.auditor import AuditReport


@app.command()
def audit(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of a run to audit, too. Default: the code alone.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Only the checks of less than a second each.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this check, or this group of checks: T1, or T.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="HTML file to write. Default: audit.html in the run.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="JSON file to write, - for output. Default: audit.json in the run.")
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option(help="SARIF 2.1.0 file to write. Default: audit.sarif in the run.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say why each check matters and what was measured.")
    ] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Measure what must hold in the installed code, and in a run. Exits with 1 if a check fails.

    Every check measures one number on the real objects and compares it with a bound.
    """
    from rich.console import Console

    from tailguard.audit.audit_page import audit_page
    from tailguard.audit.auditor import audit as run_audit
    from tailguard.audit.auditor import chosen_checks
    from tailguard.audit.sarif import to_sarif
    from tailguard.audit.subject import Subject
    from tailguard.experiment.layout import RunLayout
    from tailguard.experiment.trained_run import open_run

    console = Console(stderr=json_file == "-")
    subject, settings = Subject(), None
    if run is not None:
        subject = Subject.of_run(open_run(run, trust_plugins=trust_plugins))
        layout = RunLayout(run)
        settings = layout.config_path
        html, sarif = html or layout.audit_page_path, sarif or layout.audit_sarif_path
        json_file = json_file or str(layout.audit_path)
    checks = chosen_checks(fast=fast, of_run=run is not None, only=only or ())
    if not checks:
        raise ConfigError(f"--only {' '.join(only or ())}: these checks need a run, or are not fast; name a RUN")
    for path in (html, sarif, None if json_file in (None, "-") else Path(str(json_file))):
        if path is not None:
            check_writable_place(path)
    with shown_steps("audit", len(checks), console) as begin:
        report = run_audit(subject, fast=fast, only=only or (), before_each=begin)
    if json_file != "-":
        print_audit(report, console, verbose=verbose)
    written: list[tuple[Path, str]] = []
    if html is not None:
        written.append((html, audit_page(report)))
    if sarif is not None:
        written.append((sarif, _text(to_sarif(report, settings))))
    if json_file == "-":
        typer.echo(_text(report.to_json()), nl=False)
    elif json_file is not None:
        written.append((Path(json_file), _text(report.to_json())))
    for path, text in written:
        replace_synced(path, text.encode())
    if written:
        say(console, f"saved    {', '.join(str(path) for path, _ in written)}")
    if report.failed:
        raise typer.Exit(1)


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def print_audit(report: AuditReport, console: Console, *, verbose: bool = False) -> None:
    """A line for each check, then what failed, why it matters and what to do."""
    from rich.table import Table
    from rich.text import Text

    from tailguard.audit.audit_page import row

    styles = {"FAIL": "bold red", "ok": "green"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, side in (("id", "left"), ("question", "left"), ("number", "right"), ("bound", "left"), ("", "left")):
        table.add_column(Text(heading), justify=side, no_wrap=heading != "question")  # type: ignore[arg-type]
    for result in report.results:
        check, question, _, number, bound, verdict = row(result)
        table.add_row(*map(Text, (check, question, number, bound)), Text(verdict, style=styles.get(verdict, "")))
    console.print(table)
    shown = report.results if verbose else report.failed
    for result in shown:
        measured = result.measurement
        console.print()
        say(console, f"{result.check.id}  {result.check.question}", style="bold")
        say(console, f"    measured  {measured.measured}: {row(result)[3]}, bound {measured.bound}")
        if measured.detail:
            say(console, f"    found     {measured.detail}")
        say(console, f"    matters   {result.check.why}")
        say(console, f"    to do     {result.check.remedy}")
    console.print()
    say(console, report.summary, style="bold red" if report.failed else "bold")
