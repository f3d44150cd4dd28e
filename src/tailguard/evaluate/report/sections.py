"""The sections of a report, in the order of a sceptical reader's questions."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np

from tailguard.evaluate import metrics
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.report import charts, tables
from tailguard.evaluate.report.collect import Evidence
from tailguard.evaluate.report.page import Page, escape, prose
from tailguard.evaluate.report.training_charts import training_charts
from tailguard.evaluate.report.verdict import Judgement, budget_in_words, share, verdict, window_in_words
from tailguard.evaluate.table import (
    budget_cell,
    growth_column,
    growth_of,
    number,
    p_value,
    percent,
    tail_column,
    with_interval,
)

SECTIONS = {
    "equity": "Did it grow?",
    "risk": "How much can it lose?",
    "stress": "Would it survive?",
    "behaviour": "What does it do?",
    "training": "How was it trained?",
    "repeat": "How to reproduce it",
}
MOODS = {
    Judgement.SKILL: "good",
    Judgement.EXPOSURE: "doubtful",
    Judgement.NO_SKILL: "doubtful",
    Judgement.IDLE: "doubtful",
    Judgement.LOSS: "bad",
    Judgement.RUIN: "bad",
}
RESULTS_CAPTION = (
    "Test period, net of all costs. Agent ahead: one-sided test of the Sharpe ratio; a small p is unlikely to be noise."
)
SHOWN_ASSETS = 4
"""Most assets with their own chart."""
SHOWN_TRADES = 5
"""Best and worst trades that are listed."""
EMBEDDED_TRADES = 10_000
"""Most trades that the page itself holds, about 1.5 MB."""
ENOUGH_WINDOWS = 26
"""Windows, counted without overlap, below which a shorter horizon is shown."""


def report_page(evidence: Evidence) -> Page:
    """The whole report."""
    page = Page()
    for section in (_opening, _growth, _risk, _stress, _behaviour, _training, _repeat):
        section(page, evidence)
    return page


def _opening(page: Page, evidence: Evidence) -> None:
    judged = verdict(evidence)
    page.add(f"<h1>{escape(evidence.name)}</h1>")
    page.paragraph(evidence.market, "soft")
    parts = (
        f'<span class="together">{escape(name)} {escape(period)}</span>' for name, period in evidence.periods.items()
    )
    page.add(f'<p class="soft">{" · ".join(parts)}</p>')
    headline = judged.judgement[0].upper() + judged.judgement[1:]
    lead, *rest = judged.sentences
    page.add(
        f'<div class="verdict {MOODS[judged.judgement]}"><strong>{escape(headline)}</strong>{prose(lead)}'
        + (f"<ul>{''.join(f'<li>{prose(sentence)}</li>' for sentence in rest)}</ul>" if rest else "")
        + "</div>"
    )
    links = "".join(f'<a href="#{anchor}">{escape(title)}</a>' for anchor, title in SECTIONS.items())
    page.add(f"<nav>{links}</nav>")


def _growth(page: Page, evidence: Evidence) -> None:
    page.heading("equity", SECTIONS["equity"])
    page.chart(
        charts.equity_chart(evidence.results),
        "Equity on the test period, net of all costs, and its drawdown. The agent never saw these "
        "bars. Click a name to hide or show a line.",
    )
    how_long, grown = growth_column(evidence.results)
    heading, tails = tail_column(evidence.results, evidence.budgets)
    rows = []
    for name, result in evidence.results.items():
        figures, difference = result.metrics, evidence.beaten.get(name)
        judged = evidence.budgets.get(name)
        rows.append(
            (
                name,
                grown[name],
                with_interval(evidence.sharpes[name]),
                percent(figures["max_drawdown"]),
                tails.get(name, "–"),
                *(["–" if judged is None else budget_cell(judged)] if evidence.budgets else []),
                percent(figures["volatility"], sign=False),
                f"{figures['turnover_per_day']:.2f}",
                percent(costs_per_year(result), sign=False),
                "–" if difference is None else p_value(difference.p_value),
            )
        )
    headings = ["policy", how_long, "Sharpe [95 % interval]", "max drawdown", heading]
    headings += [*(["budget"] if evidence.budgets else []), "volatility/yr", "turnover/day", "costs/yr", "agent ahead"]
    page.table(
        headings,
        rows,
        own="agent",
        caption=RESULTS_CAPTION,
    )
    page.paragraph(
        "Random timing is the agent's own trades moved along the bars: same turnover, same exposure, no relation to "
        f"the prices. Before costs the agent earned {percent(evidence.timing.earned)} of equity a year; "
        f"{share(evidence.timing.p_value)} of all other times would have earned as much.",
        "soft",
    )
    for note in evidence.notes:
        page.paragraph(f"{note[0].upper()}{note[1:]}.", "soft")
    page.paragraph(trials_in_words(evidence), "soft")
    _months(page, evidence)
    _seen_and_unseen(page, evidence)


def _months(page: Page, evidence: Evidence) -> None:
    page.add("<h3>Monthly returns</h3>")
    page.heatmap(
        ("year", *tables.MONTHS, "total"),
        tables.month_rows(evidence.agent),
        caption="The agent's net returns by calendar month, UTC. The first and the last month may be partial.",
    )
    page.download("months.csv", tables.months_csv(evidence.agent), "Download the months as CSV")


def trials_in_words(evidence: Evidence) -> str:
    """The number of trials, its source, and the correction for multiple trials."""
    tried, skill = evidence.trials, evidence.skill
    words = f"Trials: {tried.count} ({tried.source})."
    if tried.count == 1 or math.isnan(skill.best_by_luck):
        return f"{words} No correction for multiple trials is applied."
    spread = (
        f"the spread of their Sharpe ratios (standard deviation {float(tried.sharpes.std(ddof=1)):.2f})"
        if skill.measured_spread
        else "the spread that noise alone gives, because too few are known"
    )
    return (
        f"{words} Without any skill the best of so many would show a Sharpe ratio of {skill.best_by_luck:.2f}, with "
        f"{spread}; the deflated Sharpe ratio tests against this value."
    )


def _seen_and_unseen(page: Page, evidence: Evidence) -> None:
    rows = [
        (
            name,
            period,
            growth_of(result),
            number(result.metrics["sharpe"]),
            percent(result.metrics["max_drawdown"]),
        )
        for name, period, result in (
            ("validation", evidence.periods["validation"], evidence.validation),
            ("test", evidence.periods["test"], evidence.agent),
        )
    ]
    page.table(
        ("part", "period", "growth", "Sharpe", "max drawdown"),
        rows,
        own="test",
        caption="The agent on the validation part, where checkpoints were scored, and on the test part.",
    )


def _risk(page: Page, evidence: Evidence) -> None:
    page.heading("risk", SECTIONS["risk"])
    own = evidence.agent
    if evidence.budget is not None:
        page.paragraph(budget_in_words(evidence.budget, own.bars_per_year))
    else:
        page.paragraph("No risk budget was set for this run. --limit -0.04 judges it by one.", "soft")
    falls = evidence.budget is not None and evidence.budget.outcome == "drawdown"
    horizon = shown_horizon(evidence)
    windows = window_in_words(horizon, own.bars_per_year)
    page.chart(
        charts.returns_chart(evidence.results, horizon, evidence.budget),
        f"{'Maximum drawdowns within' if falls else 'Returns over'} all {windows}, overlapping. VaR is the threshold "
        "of the tail, CVaR the mean beyond it.",
    )
    rolling = charts.rolling_chart(evidence.results)
    if rolling is not None:
        page.chart(rolling, "Volatility and mean of the worst 5 % of bars, over the last 30 days at each time.")
    names = [f"{100 * level:g} %" for level in metrics.TAIL_LEVELS]
    rows = [
        (
            f"{kind.upper().replace('CVAR', 'CVaR').replace('VAR', 'VaR')}, {span}",
            *(percent(own.metrics[f"{kind}_{100 * level:g}_{span}"]) for level in metrics.TAIL_LEVELS),
        )
        for span in metrics.horizons(own.bars_per_year)
        for kind in ("var", "cvar")
        if f"{kind}_1_{span}" in own.metrics
    ]
    page.table(("agent", *names), rows, caption="Losses at the worst 1, 5 and 10 % of bars, days and weeks.")
    falls_of_agent = tables.drawdown_rows(own)
    if falls_of_agent:
        page.add("<h3>Worst drawdowns</h3>")
        page.table(tables.DRAWDOWN_HEADINGS, falls_of_agent, caption="The agent's deepest drawdowns, UTC.")
        page.download("drawdowns.csv", tables.drawdowns_csv(own), "Download all drawdowns as CSV")
    _foreseen(page, evidence)


def _foreseen(page: Page, evidence: Evidence) -> None:
    found = evidence.calibration
    if found is None:
        return
    lowest, *_, highest = (100 * float(share_in_bin) for share_in_bin in found.histogram)
    agree = "agree within noise" if found.p_value > 0.05 else "do not agree"
    page.add("<h3>Were the predictions calibrated?</h3>")
    page.paragraph(
        f"Predicted and realised returns {agree} ({p_value(found.p_value)}; effective sample size "
        f"{found.effective:,.0f}). The lowest {100 / len(found.histogram):g} % of the predictions "
        f"held {lowest:.1f} % of the outcomes, the highest {highest:.1f} %."
    )
    page.add('<div class="columns">')
    page.chart(charts.pit_chart(found), "Rank of outcomes in their predictions: flat if they are calibrated.")
    page.chart(charts.coverage_chart(found), "Below the diagonal at the left: predicted losses did not occur.")
    page.add("</div>")
    page.paragraph(
        "The critics predict the discounted return of the exploring policy; the backtest trades without exploration, "
        "so outcomes slightly better than predicted are normal.",
        "soft",
    )


def shown_horizon(evidence: Evidence) -> int:
    """Bars of the budget's windows, or of a week, a day or a bar, the longest of which the record has enough."""
    if evidence.budget is not None:
        return evidence.budget.horizon
    spans = metrics.horizons(evidence.agent.bars_per_year).values()
    return max(bars for bars in spans if bars == 1 or len(evidence.agent.net) >= ENOUGH_WINDOWS * bars)


def _stress(page: Page, evidence: Evidence) -> None:
    page.heading("stress", SECTIONS["stress"])
    page.chart(
        charts.stress_chart(evidence.stress, evidence.sharpes["agent"]),
        "The same agent on the same bars, with one condition made worse. The grey band is the 95 % interval of the "
        "unstressed ratio: a difference inside it is within noise.",
    )
    rows = [
        (
            scenario.name,
            growth_of(scenario.result),
            number(scenario.result.metrics["sharpe"]),
            percent(scenario.result.metrics["max_drawdown"]),
            percent(costs_per_year(scenario.result), sign=False),
            f"{scenario.result.metrics['turnover_per_day']:.2f}",
        )
        for scenario in evidence.stress
    ]
    page.table(
        ("stress", "growth", "Sharpe", "max drawdown", "costs/yr", "turnover/day"),
        rows,
        own=evidence.stress[1].name,
        caption="Noise is in standard deviations of each feature, one draw.",
    )


def _behaviour(page: Page, evidence: Evidence) -> None:
    page.heading("behaviour", SECTIONS["behaviour"])
    result = evidence.agent
    for asset, symbol in enumerate(result.symbols[:SHOWN_ASSETS]):
        page.chart(
            charts.price_chart(result, evidence.prices, asset),
            f"{symbol}: price with the largest trades, and the position as a share of equity.",
        )
    if len(result.symbols) > SHOWN_ASSETS:
        others = ", ".join(result.symbols[SHOWN_ASSETS:])
        page.paragraph(f"Without a chart: {others}. tailguard backtest RUN --csv FILE has all positions.", "soft")
    page.chart(
        charts.activity_chart(result),
        "Gross exposure and turnover by day, and cumulative costs by kind, as shares of equity.",
    )
    figures = result.metrics
    page.add('<div class="columns">')
    page.table(
        ("trading", ""),
        [
            ("time in market", percent(figures["time_in_market"], sign=False)),
            ("exposure, gross", percent(figures["exposure"], sign=False)),
            ("exposure, net", percent(figures["net_exposure"])),
            ("turnover a day, of equity", percent(figures["turnover_per_day"], sign=False)),
            ("unfilled a day, of equity", percent(figures["unfilled_per_day"], sign=False)),
            ("bars at which the shield acted", percent(figures["shielded"], sign=False)),
            ("bars with a gain", percent(figures["hit_rate"], sign=False)),
            ("profit factor", number(figures["profit_factor"])),
            ("longest time below a peak", f"{figures['longest_drawdown_days']:,.0f} days"),
        ],
    )
    page.table(
        ("costs a year", "of equity"),
        [
            (name.removeprefix("cost_").removesuffix("_per_year"), percent(value, sign=False))
            for name, value in figures.items()
            if name.startswith("cost_")
        ],
    )
    page.table(
        ("shape of the returns", ""),
        [
            (name.replace("_", " "), number(figures[name]))
            for name in ("sortino", "calmar", "sharpe_autocorrelated", "skewness", "kurtosis", "tail_ratio")
        ],
    )
    page.add("</div>")
    _trades(page, evidence)


def _trades(page: Page, evidence: Evidence) -> None:
    """Best and worst round trips, and all of them as a download."""
    trades, own = evidence.trades, evidence.agent
    page.add("<h3>Trades</h3>")
    if not trades:
        page.paragraph("The agent never held a position.")
        return
    bar = timedelta(days=metrics.DAYS_PER_YEAR / own.bars_per_year)
    gains = sum(trade.pnl > 0 for trade in trades)
    held = float(np.median([trade.bars for trade in trades]))
    page.paragraph(
        f"{len(trades):,} round trips, {percent(gains / len(trades), sign=False)} of them with a gain, median "
        f"holding time {tables.duration(held * bar)}. A trade lasts while the position keeps its side; resizing it "
        "does not end it. P&L and costs are shares of the starting capital; together, the trades add up to the "
        "whole record."
    )
    order = sorted(trades, key=lambda trade: trade.pnl)
    shown = min(SHOWN_TRADES, (len(trades) + 1) // 2)
    for title, chosen in (("Best", order[::-1][:shown]), ("Worst", order[:shown])):
        page.table(
            tables.TRADE_HEADINGS, [tables.trade_row(trade, bar) for trade in chosen], caption=f"{title} trades."
        )
    if len(trades) <= EMBEDDED_TRADES:
        page.download("trades.csv", tables.trades_csv(trades), f"Download all {len(trades):,} trades as CSV")
    else:
        page.paragraph(f"All {len(trades):,} trades: tailguard report RUN --csv writes them to a file.", "soft")


def _training(page: Page, evidence: Evidence) -> None:
    page.heading("training", SECTIONS["training"])
    if not evidence.training:
        page.paragraph("The run has no metrics.jsonl, so there are no curves.")
        return
    if evidence.alarms:
        page.paragraph("Alarms, each marked in the curves at its first step by a dashed line:")
        page.facts(
            (alarm.name, f"first at {alarm.step:,} steps, {alarm.count:,} bad iterations. Usual cause: {alarm.usually}")
            for alarm in evidence.alarms
        )
    else:
        page.paragraph("No alarm was raised.")
    page.add('<div class="grid">')
    for title, chart in training_charts(evidence.training, evidence.alarms).items():
        page.chart(chart, "", title)
    page.add("</div>")


def _repeat(page: Page, evidence: Evidence) -> None:
    page.heading("repeat", SECTIONS["repeat"])
    page.add(f"<pre>{escape(evidence.command)}</pre>")
    page.facts(evidence.facts.items())
    page.add(f"<details><summary>All settings</summary><pre>{escape(evidence.config)}</pre></details>")


def costs_per_year(result: BacktestResult) -> float:
    """All costs together, as a share of equity a year."""
    return sum(value for name, value in result.metrics.items() if name.startswith("cost_"))
