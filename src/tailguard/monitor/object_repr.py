"""A short summary of an object: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping


def one_line(name: str, facts: Mapping[str, str]) -> str:
    """`Name(fact: text, …)`."""
    return f"{name}({', '.join(f'{fact}: {text}' for fact, text in facts.items())})"


def html_table(name: str, facts: Mapping[str, str]) -> str:
    """A heading and one row per fact; all texts are escaped."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(fact)}</td><td>{html.escape(text)}</td></tr>"
        for fact, text in facts.items()
    )
    return f"<div><strong>{html.escape(name)}</strong><table>{rows}</table></div>"
