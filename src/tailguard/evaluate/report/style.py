"""Colours and shapes that all charts share: the palette of Okabe & Ito, which colour-blind people can distinguish."""

from __future__ import annotations

import html
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8A8A"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY, GREY)
DASHES = ("solid", "solid", "dash", "dot", "dashdot", "longdash", "dot")
"""A second distinction besides the colour, for monochrome printers."""
POINTS = 2_000
"""Most points of a line; a screen has no more columns."""

BENCHMARK = "benchmark"
BY_NAME = {
    "agent": (BLUE, "solid"),
    "buy & hold": (ORANGE, "solid"),
    "planted optimum": (GREEN, "dash"),
    "moving-average cross": (PURPLE, "dot"),
    "volatility target": (VERMILLION, "dashdot"),
    "random timing": (SKY, "longdash"),
    "flat": (GREY, "dot"),
    BENCHMARK: (GREY, "solid"),
}


def line_of(name: str, position: int = 0) -> dict[str, Any]:
    """Colour, dash and width of a policy's line; others take the colour of their position."""
    place = position % len(PALETTE)
    colour, dash = BY_NAME.get(name, (PALETTE[place], DASHES[place]))
    if name.startswith("agent, "):
        # Several agents differ by their dashes, and from the baselines by the colour.
        colour, dash = BLUE, DASHES[place]
    return {"color": colour, "dash": dash, "width": 2.5 if name == "agent" else 1.8}


def label(text: str) -> str:
    """Text for a chart, which reads some HTML, so that it appears as it is."""
    return html.escape(text)


def figure(height: int, **layout: Any) -> go.Figure:
    """An empty chart; colours of text and grid follow the page."""
    return dress(go.Figure(), height, **layout)


def dress(chart: go.Figure, height: int, **layout: Any) -> go.Figure:
    """Give a chart the report's layout."""
    chart.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 16, "t": 28, "b": 48},
        hovermode="x unified",
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        **layout,
    )
    chart.update_xaxes(automargin=True)
    chart.update_yaxes(automargin=True, zeroline=False)
    return chart


def times(milliseconds: NDArray[np.int64]) -> NDArray[np.datetime64]:
    """Milliseconds UTC as a chart's axis takes them."""
    return milliseconds.astype("datetime64[ms]")


def thin(values: NDArray[np.float64], limit: int = POINTS) -> NDArray[np.int64]:
    """Rows that preserve the shape of a line [n]: the extremes of every small piece, the first and the last."""
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), limit // 2 + 1).astype(np.int64)
    pieces = [values[begin:end] for begin, end in pairwise(edges)]
    chosen = [edges[:-1] + [int(np.argmin(piece)) for piece in pieces]]
    chosen.append(edges[:-1] + [int(np.argmax(piece)) for piece in pieces])
    return np.unique(np.concatenate([*chosen, [0, len(values) - 1]]))


def spaced(count: int, limit: int = POINTS) -> NDArray[np.int64]:
    """At most `limit` rows of `count` in even steps, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).astype(np.int64))
