"""What stands before live trading: a budget, keys, and a person who types a name."""

from __future__ import annotations

import getpass
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from tailguard.console import say
from tailguard.errors import ConfigError, RunError, TailguardError

if TYPE_CHECKING:
    from rich.console import Console

    from tailguard.live.opening import LiveSource, OpenedSession
    from tailguard.live.stake import LiveTerms


def read_terms(mode: str, source: LiveSource, budget: float | None, service: bool) -> LiveTerms | None:
    """Budget and keys for live trading; None in the other modes."""
    from tailguard.live.credentials import read_credentials
    from tailguard.live.stake import LiveTerms

    if mode != "live":
        if budget is not None or service:
            raise ConfigError("--budget and --service belong to --mode live")
        return None
    if source.exchange is None or budget is None:
        raise ConfigError("--mode live needs --exchange and --budget")
    if not service and not sys.stdin.isatty():
        raise ConfigError(
            "--mode live asks a person for a confirmation, and there is no terminal. Start it in a terminal once; a "
            "service then starts the same command with --service"
        )
    return LiveTerms(budget, read_credentials(source.exchange))


def confirm(opened: OpenedSession, console: Console, *, service: bool) -> None:
    """Ask a person to type the name of the exchange, or rely on the one who has; nothing in the other modes."""
    session, terms = opened.session, opened.terms
    if not terms:
        return
    if service:
        session.confirm(terms, None)
        return
    say(console, "This sends orders with real money. You can lose all of it. Nothing here promises a profit.")
    for name, value in terms.items():
        say(console, f"{name:<9} {', '.join(value) if isinstance(value, list) else value}")
    typed = typer.prompt(f"Type {terms['exchange']} to go on")
    if typed.strip() != terms["exchange"]:
        raise ConfigError(f"not confirmed: {terms['exchange']} was not typed, and nothing was sent")
    session.confirm(terms, getpass.getuser())


@contextmanager
def hidden(terms: LiveTerms | None) -> Iterator[None]:
    """Show no key in an error that nobody foresaw."""
    try:
        yield
    except (TailguardError, OSError, typer.Exit, typer.Abort):
        raise
    except Exception:
        if terms is None:
            raise
        text = terms.credentials.hide(traceback.format_exc())
        raise RunError(f"live trading ended by an error that was not foreseen:\n{text}") from None
