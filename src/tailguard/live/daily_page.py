"""The report of a day as Markdown and as one HTML file without scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

LABELS = {
    "return": "return",
    "turnover": "turnover",
    "exposure": "exposure",
    "slippage": "slippage",
    "cvar": "tail of the windows",
    "drift": "drift of the features",
}
HEAD = ("", "today", "backtest's days", "days below", "p today", "mean so far", "p so far")
Content = Mapping[str, Any]
Table = list[Sequence[str]]


def verdict(content: Content) -> str:
    """The comparison in a sentence."""
    if content["same_bars"]:
        return "These bars are in the backtest itself: the comparison says nothing about new bars."
    known = [check["name"] for check in content["checks"] if check["adjusted"] is not None]
    unknown = [LABELS[check["name"]] for check in content["checks"] if check["adjusted"] is None]
    rest = f" Nothing can be said yet of: {', '.join(unknown)}." if unknown else ""
    if not known:
        return "There are too few days to compare." + rest
    if content["outside"]:
        names = ", ".join(LABELS[name] for name in content["outside"])
        return f"Outside what the backtest led to expect: {names}. Find out why before you go on." + rest
    return (
        f"Inside what the backtest led to expect, in {len(known)} checks that together are wrong on one day in "
        f"{1 / content['level']:.0f}." + rest
    )


def account_table(content: Content) -> Table:
    return [_cells(LABELS[row["name"]], row, _percent) for row in content["rows"]]


def feature_table(content: Content) -> Table:
    return [_cells(row["name"].removeprefix("feature:"), row, _plain) for row in content["features"]]


def _cells(label: str, row: Content, text: Any) -> Sequence[str]:
    band = "–" if row["low"] is None else f"{text(row['low'])} to {text(row['high'])}"
    return (
        label,
        text(row["value"]),
        band,
        "–" if row["below"] is None else f"{row['below']:.0%}",
        _probability(row["probability"]),
        text(row["recent"]),
        _probability(row["recent_probability"]),
    )


def tail_text(content: Content) -> str:
    tail = content["tail"]
    if tail["value"] is None:
        return "No window of the budget is finished."
    limit = f" The budget is {_percent(tail['limit'])}." if tail["limit"] < 0 else ""
    return (
        f"The worst {tail['alpha']:.0%} of {tail['windows']} finished windows returned {_percent(tail['value'])} on "
        f"average; of the backtest's {tail['reference_windows']}, {_percent(tail['expected'])}; "
        f"p {_probability(tail['probability'])}.{limit}"
    )


def notes(content: Content) -> list[str]:
    return [
        f"The backtest is that of the run's test part, with {content['reference_days']} complete UTC days. Its days' "
        "5 % and 95 % quantiles are shown, and the share of them below today.",
        f"“So far” is the mean of the last {content['span']} of {content['days']} complete days, compared with "
        "stretches of as many days. p is the probability of a value so far from the mean, or of a tail so bad, "
        "if live and backtest come from one distribution.",
        "Nothing here says that an agent earns anything.",
    ]


def as_markdown(content: Content) -> str:
    """Tables for a terminal, a chat or a repository."""
    lines = [f"# {content['day']} · {content['mode']} · {_inert(content['run'])}", "", f"**{verdict(content)}**", ""]
    for title, rows in (("Account", account_table(content)), ("Features that moved the most", feature_table(content))):
        lines += [f"## {title}", "", f"| {' | '.join(HEAD)} |", "|---" + "|---:" * (len(HEAD) - 1) + "|"]
        lines += [f"| {' | '.join(_inert(cell) for cell in row)} |" for row in rows]
        lines.append("")
    lines += ["## Tail", "", tail_text(content), "", "## Events", ""]
    lines += [
        f"- {each['time']} {each['kind']} {each['guard']}: {_inert(each['message'])}" for each in content["events"]
    ]
    lines += [] if content["events"] else ["None."]
    return "\n".join([*lines, "", *(f"{note}\n" for note in notes(content))])


def as_html(content: Content) -> str:
    """One file that loads nothing."""
    style = resources.files("tailguard.live").joinpath("live_page.css").read_text(encoding="utf-8")
    tone = "bad" if content["outside"] else ""
    parts = [
        f"<h1>{_escape(content['day'])}</h1><p class='soft'>{_escape(content['mode'])} · {_escape(content['run'])}</p>",
        f"<p class='notice {tone}'><strong>{_escape(verdict(content))}</strong></p>",
        "<h2>Account</h2>" + _html_table(account_table(content)),
        f"<h2>Tail</h2><p>{_escape(tail_text(content))}</p>",
        "<h2>Features that moved the most</h2>" + _html_table(feature_table(content)),
        "<h2>Events</h2>",
        "".join(
            f"<p><span class='soft'>{_escape(each['time'])} {_escape(each['kind'])} {_escape(each['guard'])}</span><br>"
            f"{_escape(each['message'])}</p>"
            for each in content["events"]
        )
        or "<p>None.</p>",
        "".join(f"<p class='soft'>{_escape(note)}</p>" for note in notes(content)),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
        f"<title>{_escape(content['day'])} {_escape(content['run'])}</title><style>{style}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _html_table(rows: Table) -> str:
    head = "".join(f"<th>{_escape(name)}</th>" for name in HEAD)
    body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3f} %"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:+.3f}"


def _probability(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _escape(text: object) -> str:
    return html.escape(str(text))


def _inert(text: str) -> str:
    """Text that is not Markdown."""
    return "".join(f"\\{each}" if each in "|<>[]`*_#" else each for each in str(text).replace("\n", " "))
