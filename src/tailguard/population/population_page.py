"""The page of a finished population: out of sample, the winner's schedules, and who descends from whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.bootstrap import interval, sharpe_statistic
from tailguard.evaluate.formatting import growth_of, percent, with_interval
from tailguard.evaluate.report.charts import equity_chart
from tailguard.evaluate.report.page import Page, escape
from tailguard.evaluate.report.style import BLUE, GREY, ORANGE, dress, figure
from tailguard.evaluate.report.verdict import overfitting_in_words, probability
from tailguard.evaluate.significance import overfitting_of, sharpe_evidence
from tailguard.evaluate.trials import TrialCount
from tailguard.population.lineage import Lineage
from tailguard.population.pbt import ranked
from tailguard.population.population_screen import in_words, shown

SHOWN = 24
"""Members in the tables; the best of more."""


@dataclass(frozen=True)
class PopulationData:
    """What the page shows."""

    name: str
    lineage: Lineage
    results: Mapping[str, BacktestResult]
    """The agent and the baselines on the test part."""
    members: Mapping[int, BacktestResult]
    """Members on the test part, by number."""
    kept: Sequence[int]
    """Members that are the agent."""
    trials: TrialCount
    config: str
    budget: str = ""
    """Whether the budget held on the test part, in words; empty where there is none."""
    trades_as: str = ""
    """What the agent does with the positions that its members learned, in words; empty: it trades them as they are."""


def population_page(data: PopulationData) -> str:
    """The population as one HTML file."""
    page = Page()
    page.add(f"<h1>{escape(data.name)}: population</h1>")
    for sentence in (*sentences(data), data.trades_as, data.budget):
        if sentence:
            page.paragraph(sentence)
    page.add("<h2>Out of sample</h2>")
    page.chart(equity_chart(data.results), "No member trained or was judged on the test part.")
    page.table(
        ("", "growth", "Sharpe [95 % interval]", "max drawdown"),
        [_account(name, result) for name, result in data.results.items()],
        caption="The test part, net of all costs.",
    )
    page.table(
        (
            "member",
            f"{data.lineage.settings.metric} on validation",
            "test: growth",
            "test: Sharpe",
            *data.lineage.space.names,
        ),
        _member_rows(data),
        caption="Members as they learned to trade"
        + (", without what is done to the agent's positions" if data.trades_as else "")
        + "; best on validation first, and those that stopped early last. Choosing one by its test column would use "
        "the test part up.",
    )
    page.add("<h2>Schedules</h2>")
    page.chart(
        schedule_chart(data.lineage, data.kept[0]),
        f"Values that the state of member {data.kept[0]}, the best one, was trained with, along its ancestors (line), "
        "and those of all members (points).",
    )
    page.add("<h2>Lineage</h2>")
    page.chart(
        lineage_chart(data.lineage, data.kept[0]),
        "Each line is a member; a step to another line is a state that was taken over. The ancestors of the best "
        "member are blue.",
    )
    page.chart(score_chart(data.lineage), "Every member's score after each round, and the best one.")
    page.table(
        ("round", "member", "takes over", "why", "its new values"),
        [
            (
                str(finished.number),
                str(move.member),
                str(move.parent),
                move.reason,
                in_words(sorted(move.hyper.items())),
            )
            for finished in data.lineage.rounds
            for move in finished.decision.moves
        ][-200:],
        caption="Decisions, the last 200 of them; lineage.jsonl has all.",
    )
    page.add(f"<details><summary>All settings</summary><pre>{escape(data.config)}</pre></details>")
    return page.html(f"{data.name} · Tailguard population")


def sentences(data: PopulationData) -> list[str]:
    """The result in words."""
    lineage, settings = data.lineage, data.lineage.settings
    agent = data.results["agent"]
    kept = ", ".join(map(str, data.kept))
    best = ranked(lineage.rounds[-1].standings)[0]
    found = [
        f"{settings.members} members trained for {len(lineage.rounds)} rounds ({settings.strategy}). The agent is "
        f"{'member' if len(data.kept) == 1 else 'the mean of members'} {kept}, "
        f"best on validation by {settings.metric} ({best.score:+.3f}); values of the best one at the end: "
        f"{in_words(sorted(best.hyper.items()))}.",
        f"On the test part, which had no part in any choice, it made {growth_of(agent)} net of costs.",
    ]
    skill = sharpe_evidence(agent.net, agent.bars_per_year, trials=data.trials.count, trial_sharpes=data.trials.sharpes)
    if math.isfinite(skill.deflated):
        found.append(
            f"The probability that its Sharpe ratio exceeds what luck explains is {probability(skill.deflated)}, after "
            f"{data.trials.count} trial{'s' * (data.trials.count != 1)}: every member counts "
            f"({data.trials.source})."
        )
    overfitting = overfitting_of([result.net for result in data.members.values()]) if len(data.members) > 1 else None
    if overfitting is not None:
        found.append(overfitting_in_words(overfitting, "member"))
    return found


def trades_as(agent: Learner | Ensemble) -> str:
    """What an agent does with the positions that its members learned, in words; empty: nothing."""
    if not isinstance(agent, Ensemble):
        return ""
    found = []
    if agent.calibration is not None:
        found.append(f"the agent trades ×{agent.exposure:.2f} the positions that were learned, calibrated to the limit")
    if agent.throttled:
        found.append("its throttle cuts them after losses")
    words = ", and ".join(found)
    return f"{words[:1].upper()}{words[1:]}; the members beside it do neither." if found else ""


def _account(name: str, result: BacktestResult) -> tuple[str, ...]:
    ratio = interval(result.net, sharpe_statistic(result.bars_per_year), np.random.default_rng(0))
    return name, growth_of(result), with_interval(ratio), percent(result.metrics["max_drawdown"])


def _member_rows(data: PopulationData) -> list[tuple[str, ...]]:
    rows, finished = [], len(data.lineage.rounds)
    last = sorted(data.lineage.last_standings().values(), key=lambda each: (-each[0], -each[1].score, each[1].member))
    for number, each in last[:SHOWN]:
        tested = data.members.get(each.member)
        out = ("–", "–") if tested is None else (growth_of(tested), f"{tested.metrics['sharpe']:.2f}")
        mark = " (kept)" if each.member in data.kept else f" (to round {number})" if number < finished else ""
        score = "failed" if each.failed else f"{each.score:+.3f}"
        rows.append(
            (f"{each.member}{mark}", score, *out, *(shown(each.hyper[name]) for name in data.lineage.space.names))
        )
    return rows


def schedule_chart(lineage: Lineage, winner: int) -> go.Figure:
    """Values against environment steps: those of the winner's state, and all."""
    names = lineage.space.names
    chart = make_subplots(rows=len(names), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    path = lineage.values_of(winner)
    for row, dimension in enumerate(lineage.space.dimensions, start=1):
        steps = [finished.step for finished in lineage.rounds for _ in finished.standings]
        values = [each.hyper[dimension.name] for finished in lineage.rounds for each in finished.standings]
        chart.add_scatter(
            x=steps,
            y=values,
            mode="markers",
            marker={"color": GREY, "size": 5, "opacity": 0.5},
            name="all members",
            showlegend=row == 1,
            row=row,
            col=1,
        )
        chart.add_scatter(
            x=[0, *(step for step, _ in path)],
            y=[path[0][1][dimension.name], *(hyper[dimension.name] for _, hyper in path)],
            # A value holds from the end of one round to the end of the next.
            line={"color": BLUE, "shape": "vh", "width": 2.5},
            name="the best one",
            showlegend=row == 1,
            row=row,
            col=1,
        )
        scale = "log" if dimension.scale == "log" and dimension.low > 0 else None
        chart.update_yaxes(title_text=dimension.name.partition(".")[2] or dimension.name, type=scale, row=row, col=1)
        if scale == "log":
            # Whole decades as powers: digits between them and prefixes, as 5 and 100µ, are not read as a rate.
            chart.update_yaxes(dtick=1, exponentformat="power", row=row, col=1)
    chart.update_xaxes(title_text="environment steps of a member", row=len(names), col=1)
    return dress(chart, 130 + 170 * len(names))


def lineage_chart(lineage: Lineage, winner: int) -> go.Figure:
    """Members against rounds, with an arc for every state that is taken over."""
    chart, rounds = figure(max(260, 60 + 22 * lineage.settings.members)), lineage.rounds
    line = lineage.ancestors(winner)
    for each in rounds[0].standings:
        last = max(
            finished.number for finished in rounds if any(one.member == each.member for one in finished.standings)
        )
        chart.add_scatter(
            x=[0, last],
            y=[each.member] * 2,
            mode="lines",
            line={"color": GREY, "width": 1},
            showlegend=False,
            hoverinfo="skip",
        )
    for finished in rounds:
        for move in finished.decision.moves:
            chart.add_scatter(
                x=[finished.number, finished.number + 0.4],
                y=[move.parent, move.member],
                mode="lines+markers",
                line={"color": ORANGE, "width": 1.5},
                marker={"size": [0, 5]},
                showlegend=False,
                hovertext=f"round {finished.number}: {move.member} takes over {move.parent} ({move.reason})",
                hoverinfo="text",
            )
    chart.add_scatter(
        x=list(range(len(line) + 1)),
        y=[line[0], *line],
        mode="lines+markers",
        line={"color": BLUE, "width": 3},
        name="ancestors of the best one",
    )
    chart.update_xaxes(title_text="round")
    chart.update_yaxes(title_text="member", dtick=1 if lineage.settings.members <= 24 else None)
    return chart


def score_chart(lineage: Lineage) -> go.Figure:
    """Scores of all members, and the best one, round by round."""
    chart = figure(320)
    points = [
        (finished.number, each.score) for finished in lineage.rounds for each in finished.standings if not each.failed
    ]
    chart.add_scatter(
        x=[number for number, _ in points],
        y=[score for _, score in points],
        mode="markers",
        name="all members",
        marker={"color": GREY, "size": 5, "opacity": 0.5},
    )
    best = [max((each.score for each in finished.standings), default=math.nan) for finished in lineage.rounds]
    chart.add_scatter(
        x=[finished.number for finished in lineage.rounds],
        y=best,
        line={"color": BLUE, "width": 2.5},
        name="the best one",
    )
    chart.update_xaxes(title_text="round")
    chart.update_yaxes(title_text=f"{lineage.settings.metric} on validation")
    return chart
