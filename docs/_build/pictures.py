"""Draws the pictures of the site, each for light and for dark pages: `python docs/_build/pictures.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Palette:
    text: str
    quiet: str
    line: str
    box: str
    blue: str
    orange: str
    green: str


LIGHT = Palette("#1d2733", "#5b6875", "#8a96a3", "#f3f6fa", "#1f6fb2", "#c05a00", "#2c7a3f")
DARK = Palette("#e6edf3", "#a9b4c0", "#75818d", "#262d3a", "#6cb6ff", "#ffa657", "#7ee787")


@dataclass
class Drawing:
    """SVG elements, in the order in which they are painted."""

    width: int
    height: int
    colours: Palette
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        colour: str = "",
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        colour = colour or self.colours.text
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def box(
        self, x: float, y: float, width: float, height: float, edge: str = "", fill: str = "", round_: int = 8
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_}" '
            f'fill="{fill or self.colours.box}" stroke="{edge or self.colours.line}" stroke-width="1.5"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'fill-opacity="{opacity:g}"/>'
        )

    def arrow(self, *points: tuple[float, float], colour: str = "", dashed: bool = False) -> None:
        """A line through the points, with a head at the last one."""
        colour = colour or self.colours.quiet
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        left, right = (x - 9 * dx + 5 * dy, y - 9 * dy - 5 * dx), (x - 9 * dx - 5 * dy, y - 9 * dy + 5 * dx)
        self.parts.append(
            f'<path d="M {x:g} {y:g} L {left[0]:g} {left[1]:g} L {right[0]:g} {right[1]:g} Z" fill="{colour}"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str = "", width: float = 1.5) -> None:
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{colour or self.colours.line}" '
            f'stroke-width="{width:g}"/>'
        )

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="{FONT}">\n<title>{escape(self.title)}</title>\n'
            f"{body}\n</svg>\n"
        )


def captioned(drawing: Drawing, x: float, y: float, width: float, words: Sequence[str], edge: str = "") -> None:
    """A box with a heading and lines below it."""
    drawing.box(x, y, width, 42 + 19 * (len(words) - 1), edge)
    drawing.text(x + width / 2, y + 26, words[0], bold=True)
    for k, line in enumerate(words[1:]):
        drawing.text(x + width / 2, y + 46 + 19 * k, line, 12, drawing.colours.quiet)


def flow(colours: Palette) -> Drawing:
    """From bars to a report, and which bars each step may see."""
    d = Drawing(960, 300, colours, "From bars to a verdict")
    steps = [
        ("bars", "read and checked", "never repaired"),
        ("features", "causal, checked", "for look-ahead"),
        ("simulator", "fill at next open", "all costs, margin"),
        ("learner", "LSTM, twin critics", "tail in the loss"),
        ("exposure", "scaled to keep", "the limit"),
        ("report", "against baselines", "with intervals"),
    ]
    width, gap, y = 132, 30, 40
    left = [6 + k * (width + gap) for k in range(len(steps))]
    for k, words in enumerate(steps):
        edge = colours.blue if k in (2, 3) else colours.orange if k == 4 else ""
        captioned(d, left[k], y, width, words, edge)
        if k:
            d.arrow((left[k - 1] + width + 2, y + 40), (left[k] - 3, y + 40))
    middle = left[2] + width / 2, left[3] + width / 2
    d.arrow((middle[1], y), (middle[1], 16), (middle[0], 16), (middle[0], y - 3), colour=colours.blue)
    d.text((middle[0] + middle[1]) / 2, 11, "target weights", 12, colours.blue)
    d.text(middle[0], y + 106, "gives net equity, and its gradient", 12, colours.blue)
    spans = [("training", 0.62, colours.blue), ("validation", 0.15, colours.orange), ("test", 0.15, colours.green)]
    x, top, whole = 60.0, 210, 840
    targets = {"training": middle[1], "validation": left[4] + width / 2, "test": left[5] + width / 2}
    for name, share, colour in spans:
        size = whole * share
        d.bar(x, top, size, 26, colour, 0.85)
        d.text(x + size / 2, top + 46, name, 13, colour, bold=True)
        start = min(max(targets[name], x + 14), x + size - 14)
        d.arrow((start, top - 4), (targets[name], y + 88), colour=colour, dashed=start != targets[name])
        x += size + whole * 0.04
    d.text(60, top + 46, "time →", 12, colours.quiet, "start")
    d.text(480, top + 70, "The gaps are embargoes. Test bars are used for no decision.", 12, colours.quiet)
    return d


def learner(colours: Palette) -> Drawing:
    """One iteration of the two learners."""
    d = Drawing(960, 372, colours, "One iteration of the two learners")
    d.text(6, 22, "Gradients through the market", 15, colours.blue, "start", True)
    d.text(6, 200, "PPO", 15, colours.orange, "start", True)
    rows = [
        (
            38,
            colours.blue,
            [
                ("act", "a window of bars,", "the graph is kept"),
                ("account", "J = Σ γᵗ rₜ", "+ γᵀ V(end)"),
                ("budget", "J − λ · cost of", "the worst outcomes"),
                ("one step", "along ∇J, through", "costs, fills, LSTM"),
                ("λ", "moves with the", "realised tail"),
            ],
        ),
        (
            216,
            colours.orange,
            [
                ("act", "a rollout with noise,", "no graph"),
                ("critics", "value, quantiles of", "the return"),
                ("estimate", "GAE − λ · cost,", "SR(λ) samples"),
                ("epochs", "clipped surrogate,", "critic losses"),
                ("λ", "moves with the", "realised tail"),
            ],
        ),
    ]
    width, gap = 156, 42
    for y, colour, steps in rows:
        for k, words in enumerate(steps):
            x = 6 + k * (width + gap)
            captioned(d, x, y, width, words, colour)
            if k:
                d.arrow((x - gap + 2, y + 40), (x - 3, y + 40), colour=colour)
        end, start = 6 + 4 * (width + gap) + width / 2, 6 + width / 2
        d.arrow((end, y + 82), (end, y + 106), (start, y + 106), (start, y + 84), colour=colour)
        d.text(480, y + 122, "next iteration: the accounts trade on from where they are", 12, colours.quiet)
    return d


def tail_sample(count: int = 1200) -> list[float]:
    """Outcomes of episodes with a heavy left tail, whose worst 5 % make −7.2 % on average."""
    normal = statistics.NormalDist()
    levels = [normal.inv_cdf((k + 0.5) / count) for k in range(count)]
    heavy = [z * (1.35 if z < 0 else 1.0) * (1 + 0.05 * z * z) for z in levels]
    worst = statistics.fmean(heavy[: count // 20])
    return [0.012 + x * (0.072 + 0.012) / -worst for x in heavy]


def histogram(d: Drawing, x: float, values: Sequence[float], colour: str, heading: str, below: str) -> None:
    """Outcomes from −12 % to 12 %, the worst 5 % filled, with their mean and the limit."""
    y, width, height, bins, low, high = 218, 270, 150, 40, -0.12, 0.12
    ordered = sorted(values)
    tail = ordered[: len(ordered) // 20]
    counts = [0] * bins
    for value in ordered:
        counts[min(max(int((value - low) / (high - low) * bins), 0), bins - 1)] += 1
    top = max(counts)
    for k, count in enumerate(counts):
        if count:
            edge = low + (k + 1) * (high - low) / bins
            in_tail = edge <= tail[-1] + (high - low) / bins
            size = max(height * count / top, 2)
            d.bar(x + k * width / bins, y - size, width / bins - 1, size, colour if in_tail else d.colours.line, 0.95)
    d.line(x, y, x + width, y)

    def at(value: float) -> float:
        return x + (value - low) / (high - low) * width

    mean = statistics.fmean(tail)
    d.line(at(-0.04), y - height + 8, at(-0.04), y + 6, d.colours.text, 1.5)
    d.text(at(-0.04), y - height, "limit −4 %", 12)
    d.arrow((at(mean), y + 26), (at(mean), y + 4), colour=colour)
    d.text(at(mean), y + 42, f"CVaR {100 * mean:.1f} %".replace("-", "−"), 13, colour, bold=True)
    d.text(x + width / 2, 30, heading, 15, bold=True)
    d.text(x + width / 2, y + 68, below, 12, d.colours.quiet)


def budget(colours: Palette) -> Drawing:
    """Members and their folds, their tail on held-out bars, and the exposure that keeps the limit."""
    d = Drawing(960, 310, colours, "How the exposure is calibrated")
    d.text(130, 30, "four members", 15, bold=True)
    for member in range(4):
        y = 58 + 40 * member
        d.text(18, y + 18, str(member + 1), 13, colours.quiet)
        for part in range(4):
            held = part == member
            d.bar(32 + part * 44, y, 42, 26, colours.orange if held else colours.blue, 0.95 if held else 0.45)
        d.bar(214, y, 38, 26, colours.orange, 0.95)
    d.text(120, 238, "training", 12, colours.quiet)
    d.text(233, 238, "validation", 12, colours.quiet)
    d.bar(40, 258, 14, 14, colours.blue, 0.45)
    d.text(60, 270, "learned from", 12, colours.quiet, "start")
    d.bar(150, 258, 14, 14, colours.orange, 0.95)
    d.text(170, 270, "held out", 12, colours.quiet, "start")
    d.arrow((266, 130), (300, 130), colour=colours.orange)
    sample = tail_sample()
    histogram(d, 314, sample, colours.orange, "held-out weeks, as learned", "the worst 5 % lose too much")
    d.arrow((596, 130), (664, 130), colour=colours.green)
    d.text(630, 118, "× 0.49", 14, colours.green, bold=True)
    scaled = [0.49 * value for value in sample]
    histogram(d, 678, scaled, colours.green, "the same weeks, scaled", "the 90 % bound of the tail meets the limit")
    return d


PICTURES: dict[str, Callable[[Palette], Drawing]] = {"flow": flow, "learner": learner, "budget": budget}


def draw() -> dict[str, str]:
    """Every picture by the name of its file."""
    return {
        f"{name}-{mode}.svg": make(colours).svg()
        for name, make in PICTURES.items()
        for mode, colours in (("light", LIGHT), ("dark", DARK))
    }


if __name__ == "__main__":
    for name, svg in draw().items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
        print(IMAGES / name)
