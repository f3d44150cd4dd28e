"""Console output: literal text, in lines that the terminal may wrap but this program does not break."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LOST = (errno.EPIPE, errno.EIO)
"""Errors when the reader is gone: a closed pipe, a closed terminal."""


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line that may hold names and paths of the user: [red] is not markup, :x: is not an emoji."""
    console.print(line, style=style, soft_wrap=True, markup=False, emoji=False, highlight=False)


class SteadyOutput(io.TextIOWrapper):
    """A stream that keeps working when its reader is gone, as after `| head -5`: later output is dropped.

    A run of several days must not end because its output is closed.
    """

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._drop_stream(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._drop_stream(error)

    def _drop_stream(self, error: OSError) -> None:
        if error.errno not in LOST:
            raise error
        # Buffered output is dropped too, so no later flush raises the error again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def steady_output() -> Iterator[None]:
    """Context in which standard output and error survive closed readers, and a terminal without ✓ shows ?."""
    before = sys.stdout, sys.stderr
    steady: list[SteadyOutput] = []
    for name, stream in (("stdout", before[0]), ("stderr", before[1])):
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            own = SteadyOutput(
                stream.buffer, encoding=stream.encoding, errors="replace", line_buffering=stream.line_buffering
            )
            steady.append(own)
            setattr(sys, name, own)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for own in steady:
            own.flush()
            own.detach()
