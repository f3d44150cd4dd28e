"""The sections of a report, in the order of a sceptical reader's questions."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np

from tailguard.evaluate import metrics
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.formatting import growth_of, number, p_value, percent, with_interval
from tailguard.evaluate.report import charts, record_tables
from tailguard.evaluate.report.audit_record import add_audit
from tailguard.evaluate.report.charts import training_charts
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.report.feed_section import add_certificates, add_feed_section
from tailguard.evaluate.report.page import Page, escape, prose
from tailguard.evaluate.report.verdict import Judgement, budget_in_words, share, verdict, window_in_words
from tailguard.evaluate.results_table import budget_cell, growth_column, tail_column

SECTIONS = {
    "equity": "Did it grow?",
    "risk": "How much can it lose?",
    "stress": "Would it survive?",
    "feed": "Would it survive a bad feed?",
    "behaviour": "What does it do?",
    "training": "How was it trained?",
    "audit": "Was it audited?",
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


def report_page(data: ReportData) -> Page:
    """The whole report."""
    page = Page()
    for section in (_opening, _growth, _risk, _stress, _feed, _behaviour, _training, _audit, _repeat):
        section(page, data)
    return page


def _opening(page: Page, data: ReportData) -> None:
    judged = verdict(data)
    page.add(f"<h1>{escape(data.name)}</h1>")
    page.paragraph(data.market, "soft")
    parts = (f'<span class="together">{escape(name)} {escape(period)}</span>' for name, period in data.periods.items())
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


def _growth(page: Page, data: ReportData) -> None:
    page.heading("equity", SECTIONS["equity"])
    page.chart(
        charts.equity_chart(data.results, beside=data.benchmark_path),
        "Equity on the test period, net of all costs, and its drawdown. The agent never saw these "
        "bars. Click a name to hide or show a line.",
    )
    how_long, grown = growth_column(data.results)
    heading, tails = tail_column(data.results, data.budgets)
    rows = []
    for name, result in data.results.items():
        own_metrics, difference = result.metrics, data.beaten.get(name)
        judged = data.budgets.get(name)
        rows.append(
            (
                name,
                grown[name],
                with_interval(data.sharpes[name]),
                percent(own_metrics["max_drawdown"]),
                tails.get(name, "–"),
                *(["–" if judged is None else budget_cell(judged)] if data.budgets else []),
                percent(own_metrics["volatility"], sign=False),
                f"{own_metrics['turnover_per_day']:.2f}",
                percent(costs_per_year(result), sign=False),
                "–" if difference is None else p_value(difference.p_value),
            )
        )
    headings = ["policy", how_long, "Sharpe [95 % interval]", "max drawdown", heading]
    headings += [*(["budget"] if data.budgets else []), "volatility/yr", "turnover/day", "costs/yr", "agent ahead"]
    page.table(
        headings,
        rows,
        own="agent",
        caption=RESULTS_CAPTION,
    )
    page.paragraph(
        "Random timing is the agent's own trades moved along the bars: same turnover, same exposure, no relation to "
        f"the prices. Before costs the agent earned {percent(data.timing.earned)} of equity a year; "
        f"{share(data.timing.p_value)} of all other times would have earned as much.",
        "soft",
    )
    for note in data.notes:
        page.paragraph(f"{note[0].upper()}{note[1:]}.", "soft")
    page.paragraph(trials_in_words(data), "soft")
    if data.relative is not None:
        page.paragraph(f"The agent {data.relative.describe()}.")
    _months(page, data)
    _validation(page, data)


def _months(page: Page, data: ReportData) -> None:
    page.add("<h3>Monthly returns</h3>")
    page.heatmap(
        ("year", *record_tables.MONTHS, "total"),
        record_tables.month_rows(data.agent),
        caption="The agent's net returns by calendar month, UTC. The first and the last month may be partial.",
    )
    page.download("months.csv", record_tables.months_table(data.agent).csv(), "Download the months as CSV")


def trials_in_words(data: ReportData) -> str:
    """The number of trials, its source, and the correction for multiple trials."""
    tried, skill = data.trials, data.skill
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


def _validation(page: Page, data: ReportData) -> None:
    rows = [
        (
            name,
            period,
            growth_of(result),
            number(result.metrics["sharpe"]),
            percent(result.metrics["max_drawdown"]),
        )
        for name, period, result in (
            ("validation", data.periods["validation"], data.validation),
            ("test", data.periods["test"], data.agent),
        )
    ]
    page.table(
        ("part", "period", "growth", "Sharpe", "max drawdown"),
        rows,
        own="test",
        caption="The agent on the validation part, where checkpoints were scored, and on the test part.",
    )


def _risk(page: Page, data: ReportData) -> None:
    page.heading("risk", SECTIONS["risk"])
    own = data.agent
    if data.budget is not None:
        page.paragraph(budget_in_words(data.budget, own.pace))
    else:
        page.paragraph("No risk budget was set for this run. --limit -0.04 judges it by one.", "soft")
    falls = data.budget is not None and data.budget.outcome == "drawdown"
    horizon = shown_horizon(data)
    windows = window_in_words(horizon, own.pace)
    page.chart(
        charts.returns_chart(data.results, horizon, data.budget),
        f"{'Maximum drawdowns within' if falls else 'Returns over'} all {windows}, overlapping. VaR is the threshold "
        "of the tail, CVaR the mean beyond it.",
    )
    rolling = charts.rolling_chart(data.results)
    if rolling is not None:
        page.chart(rolling, "Volatility and mean of the worst 5 % of bars, over the last 30 days at each time.")
    names = [f"{100 * level:g} %" for level in metrics.TAIL_LEVELS]
    rows = [
        (
            f"{kind.upper().replace('CVAR', 'CVaR').replace('VAR', 'VaR')}, {span}",
            *(percent(own.metrics[f"{kind}_{100 * level:g}_{span}"]) for level in metrics.TAIL_LEVELS),
        )
        for span in metrics.horizons(own.pace)
        for kind in ("var", "cvar")
        if f"{kind}_1_{span}" in own.metrics
    ]
    page.table(("agent", *names), rows, caption="Losses at the worst 1, 5 and 10 % of bars, days and weeks.")
    falls_of_agent = record_tables.drawdown_rows(own)
    if falls_of_agent:
        page.add("<h3>Worst drawdowns</h3>")
        page.table(record_tables.DRAWDOWN_HEADINGS, falls_of_agent, caption="The agent's deepest drawdowns, UTC.")
        page.download("drawdowns.csv", record_tables.drawdowns_table(own).csv(), "Download all drawdowns as CSV")
    _calibration(page, data)


def _calibration(page: Page, data: ReportData) -> None:
    calibration = data.calibration
    if calibration is None:
        return
    lowest, *_, highest = (100 * float(share_in_bin) for share_in_bin in calibration.histogram)
    agree = "agree within noise" if calibration.p_value > 0.05 else "do not agree"
    page.add("<h3>Were the predictions calibrated?</h3>")
    page.paragraph(
        f"Predicted and realised returns {agree} ({p_value(calibration.p_value)}; effective sample size "
        f"{calibration.effective:,.0f}). The lowest {100 / len(calibration.histogram):g} % of the predictions "
        f"held {lowest:.1f} % of the outcomes, the highest {highest:.1f} %."
    )
    page.add('<div class="columns">')
    page.chart(charts.pit_chart(calibration), "Rank of outcomes in their predictions: flat if they are calibrated.")
    page.chart(charts.coverage_chart(calibration), "Below the diagonal at the left: predicted losses did not occur.")
    page.add("</div>")
    page.paragraph(
        "The critics predict the discounted return of the exploring policy; the backtest trades without exploration, "
        "so outcomes slightly better than predicted are normal.",
        "soft",
    )


def shown_horizon(data: ReportData) -> int:
    """Bars of the budget's windows, or of a week, a day or a bar, the longest of which the record has enough."""
    if data.budget is not None:
        return data.budget.horizon
    spans = metrics.horizons(data.agent.pace).values()
    return max(bars for bars in spans if bars == 1 or len(data.agent.net) >= ENOUGH_WINDOWS * bars)


def _stress(page: Page, data: ReportData) -> None:
    page.heading("stress", SECTIONS["stress"])
    page.chart(
        charts.stress_chart(data.stress, data.sharpes["agent"]),
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
        for scenario in data.stress
    ]
    page.table(
        ("stress", "growth", "Sharpe", "max drawdown", "costs/yr", "turnover/day"),
        rows,
        own=data.stress[1].name,
        caption="Noise is in standard deviations of each feature, one draw.",
    )


def _feed(page: Page, data: ReportData) -> None:
    page.heading("feed", SECTIONS["feed"])
    add_feed_section(page, data.feeds, data.capital, data.feed_notes)
    add_certificates(page, data.certificates, data.not_certified)


def _behaviour(page: Page, data: ReportData) -> None:
    page.heading("behaviour", SECTIONS["behaviour"])
    result = data.agent
    for asset, symbol in enumerate(result.symbols[:SHOWN_ASSETS]):
        page.chart(
            charts.price_chart(result, data.prices, asset),
            f"{symbol}: price with the largest trades, and the position as a share of equity.",
        )
    if len(result.symbols) > SHOWN_ASSETS:
        others = ", ".join(result.symbols[SHOWN_ASSETS:])
        page.paragraph(f"Without a chart: {others}. tailguard backtest RUN --csv FILE has all positions.", "soft")
    page.chart(
        charts.activity_chart(result),
        "Gross exposure and turnover by day, and cumulative costs by kind, as shares of equity.",
    )
    own_metrics = result.metrics
    page.add('<div class="columns">')
    page.table(
        ("trading", ""),
        [
            ("time in market", percent(own_metrics["time_in_market"], sign=False)),
            ("exposure, gross", percent(own_metrics["exposure"], sign=False)),
            ("exposure, net", percent(own_metrics["net_exposure"])),
            ("turnover a day, of equity", percent(own_metrics["turnover_per_day"], sign=False)),
            ("unfilled a day, of equity", percent(own_metrics["unfilled_per_day"], sign=False)),
            ("bars at which the shield acted", percent(own_metrics["shielded"], sign=False)),
            ("bars with a gain", percent(own_metrics["hit_rate"], sign=False)),
            ("profit factor", number(own_metrics["profit_factor"])),
            ("longest time below a peak", f"{own_metrics['longest_drawdown_days']:,.0f} days"),
        ],
    )
    page.table(
        ("costs a year", "of equity"),
        [(kind, percent(amount, sign=False)) for kind, amount in result.costs_per_year.items()],
    )
    page.table(
        ("shape of the returns", ""),
        [
            (name.replace("_", " "), number(own_metrics[name]))
            for name in ("sortino", "calmar", "sharpe_autocorrelated", "skewness", "kurtosis", "tail_ratio")
        ],
    )
    page.add("</div>")
    if len(result.symbols) > 1:
        page.table(
            ("exposure by asset", "mean weight", "mean absolute weight", "time held", "net P&L"),
            [
                (symbol, percent(net), percent(gross, sign=False), percent(held, sign=False), percent(earned))
                for symbol, net, gross, held, earned in record_tables.exposures_of(result, data.trades)
            ],
            caption="Weights are shares of equity at the closes, P&L is a share of the starting capital.",
        )
    if data.groups:
        _groups(page, data)
    _trades(page, data)


def _groups(page: Page, data: ReportData) -> None:
    """What groups of assets held and earned."""
    page.table(
        ("exposure by group", "assets", "mean weight", "mean gross", "largest gross", "time held", "net P&L"),
        [
            (
                *(each.name, f"{each.assets:,}", percent(each.net), percent(each.gross, sign=False)),
                *(percent(each.largest, sign=False), percent(each.held, sign=False), percent(each.earned)),
            )
            for each in record_tables.groups_of(data.agent, data.trades, data.groups)
        ],
        caption="Sums of weights at the closes; prices move them between two decisions, at which caps hold.",
    )


def _trades(page: Page, data: ReportData) -> None:
    """Best and worst round trips, and all of them as a download."""
    trades, own = data.trades, data.agent
    page.add("<h3>Trades</h3>")
    if not trades:
        page.paragraph("The agent never held a position.")
        return
    bar = timedelta(days=own.pace.bar_days)
    gains = sum(trade.pnl > 0 for trade in trades)
    held = float(np.median([trade.bars for trade in trades]))
    page.paragraph(
        f"{len(trades):,} round trips, {percent(gains / len(trades), sign=False)} of them with a gain, median "
        f"holding time {record_tables.duration(held * bar)}. A trade lasts while the position keeps its side; "
        "resizing it does not end it. P&L and costs are shares of the starting capital; together, the trades add up "
        "to the whole record."
    )
    order = sorted(trades, key=lambda trade: trade.pnl)
    shown = min(SHOWN_TRADES, (len(trades) + 1) // 2)
    for title, chosen in (("Best", order[::-1][:shown]), ("Worst", order[:shown])):
        page.table(
            record_tables.TRADE_HEADINGS,
            [record_tables.trade_row(trade, bar) for trade in chosen],
            caption=f"{title} trades.",
        )
    if len(trades) <= EMBEDDED_TRADES:
        page.download(
            "trades.csv", record_tables.trades_table(trades).csv(), f"Download all {len(trades):,} trades as CSV"
        )
    else:
        page.paragraph(f"All {len(trades):,} trades: tailguard report RUN --csv writes them to a file.", "soft")


def _training(page: Page, data: ReportData) -> None:
    page.heading("training", SECTIONS["training"])
    if not data.training:
        page.paragraph("The run has no metrics.jsonl, so there are no curves.")
        return
    if data.alarms:
        page.paragraph("Alarms, each marked in the curves at its first step by a dashed line:")
        page.facts(
            (alarm.name, f"first at {alarm.step:,} steps, {alarm.count:,} bad iterations. Usual cause: {alarm.usually}")
            for alarm in data.alarms
        )
    else:
        page.paragraph("No alarm was raised.")
    page.add('<div class="grid">')
    for title, chart in training_charts(data.training, data.alarms).items():
        page.chart(chart, "", title)
    page.add("</div>")


def _audit(page: Page, data: ReportData) -> None:
    if data.audit is not None:
        page.heading("audit", SECTIONS["audit"])
        add_audit(page, data.audit)


def _repeat(page: Page, data: ReportData) -> None:
    page.heading("repeat", SECTIONS["repeat"])
    page.add(f"<pre>{escape(data.command)}</pre>")
    page.facts(data.facts.items())
    page.add(f"<details><summary>All settings</summary><pre>{escape(data.config)}</pre></details>")


def costs_per_year(result: BacktestResult) -> float:
    """All costs together, as a share of equity a year."""
    return sum(result.costs_per_year.values())
