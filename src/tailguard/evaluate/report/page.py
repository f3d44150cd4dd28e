"""The page: one self-contained HTML file. All text that comes from a run goes through `escape`."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs


def escape(text: object) -> str:
    """Text as HTML shows it."""
    return html.escape(str(text))


def prose(text: object) -> str:
    """A sentence as HTML, in which a number and its percent sign stay on one line."""
    return escape(text).replace(" %", "&nbsp;%")


@dataclass
class Page:
    """HTML under construction, and the number of charts in it."""

    parts: list[str] = field(default_factory=list)
    charts: int = 0
    downloads: int = 0

    def add(self, markup: str) -> None:
        """Append HTML."""
        self.parts.append(markup)

    def heading(self, anchor: str, text: str) -> None:
        """Start a section."""
        self.add(f'<h2 id="{escape(anchor)}">{escape(text)}</h2>')

    def paragraph(self, text: str, style: str = "") -> None:
        self.add(f'<p class="{escape(style)}">{prose(text)}</p>' if style else f"<p>{prose(text)}</p>")

    def chart(self, chart: go.Figure, caption: str, title: str = "") -> None:
        """Add a chart; `caption` describes it, also for screen readers."""
        self.charts += 1
        name = f"chart-{self.charts}"
        head = f"<h3>{escape(title)}</h3>" if title else ""
        foot = f"<figcaption>{prose(caption)}</figcaption>" if caption else ""
        self.add(
            f'<figure>{head}<div class="plot" id="{name}" role="img" aria-label="{escape(caption or title)}" '
            f'style="height:{chart.layout.height or 400}px"></div>{foot}</figure>'
            f'<script type="application/json" id="{name}-data">{as_data(chart)}</script>'
        )

    def table(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        own: str | None = None,
        caption: str = "",
        sentences: bool = False,
    ) -> None:
        """A table whose first column names the rows; the row named `own` stands out. `sentences`: cells wrap."""
        if caption:
            self.paragraph(caption, "soft")
        head = "".join(f'<th scope="col">{prose(text)}</th>' for text in headings)
        body = "".join(
            f"<tr{' class=own' if own is not None and row[0] == own else ''}>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in rows
        )
        self._put_table(head, body, ' class="sentences"' if sentences else "")

    def heatmap(
        self, headings: Sequence[str], rows: Iterable[tuple[str, Sequence[float | None]]], *, caption: str = ""
    ) -> None:
        """A table of signed fractions in percent, shaded by size; the last column is a total and has no shade."""
        rows = list(rows)
        if caption:
            self.paragraph(caption, "soft")
        largest = max((abs(value) for _, values in rows for value in values[:-1] if value is not None), default=0.0)
        head = "".join(f'<th scope="col">{prose(text)}</th>' for text in headings)
        body = "".join(
            f"<tr><td>{escape(name)}</td>{''.join(_shaded(value, largest) for value in values[:-1])}"
            f"{_shaded(values[-1], math.inf)}</tr>"
            for name, values in rows
        )
        self._put_table(head, body, ' class="heatmap"')

    def _put_table(self, head: str, body: str, attributes: str = "") -> None:
        """A table that scrolls inside its box, by touch and by keyboard, where the page is narrower."""
        self.add(
            f'<div class="wide" tabindex="0"><table{attributes}><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def download(self, name: str, text: str, label: str) -> None:
        """A button that saves a text as a file; the text is in the page."""
        self.downloads += 1
        anchor = f"download-{self.downloads}"
        self.add(
            f'<button type="button" class="download" data-text="{anchor}" data-name="{escape(name)}">{escape(label)}'
            f'</button><script type="application/json" id="{anchor}">{as_text(json.dumps(text))}</script>'
        )

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Names and texts of any length."""
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts)
        self.add(f'<table class="facts"><tbody>{rows}</tbody></table>')

    def html(self, title: str) -> str:
        """The whole document. Its content security policy allows only its own scripts and no requests."""
        scripts = (*([get_plotlyjs()] if self.charts else []), read("page.js"))
        allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        )
        return "\n".join(
            [
                '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(title)}</title>",
                f"<style>{read('page.css')}</style>\n</head>\n<body>",
                '<button type="button" id="theme" aria-label="Switch between light and dark">◐ theme</button>',
                "<noscript><p>The charts of this page need JavaScript; all words and tables are here.</p></noscript>",
                *self.parts,
                *(f"<script>{script}</script>" for script in scripts),
                "</body>\n</html>\n",
            ]
        )


def as_data(chart: go.Figure) -> str:
    """A chart as JSON that cannot end its enclosing script element."""
    return as_text(chart.to_json())


def as_text(text: str) -> str:
    """JSON in which nothing can be read as markup."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _shaded(value: float | None, largest: float) -> str:
    """A cell of a heatmap: green above zero, red below, stronger for larger values."""
    if value is None:
        return "<td></td>"
    strength = abs(value) / largest if largest > 0 else 0.0
    colour = "0, 158, 115" if value > 0 else "213, 94, 0"
    return f'<td style="background: rgba({colour}, {0.55 * strength:.2f})">{100 * value:+.1f}&nbsp;%</td>'


def read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    # A browser hashes what it parsed, in which every line ends with a line feed alone.
    plain = script.replace("\r\n", "\n").replace("\r", "\n")
    return base64.b64encode(hashlib.sha256(plain.encode()).digest()).decode()
