"""The section on a bad feed says in words what the numbers say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tailguard.evaluate.certificates import Certificate
from tailguard.evaluate.report.collect import ReportData, collect
from tailguard.evaluate.report.feed_section import add_certificates, add_feed_section, feed_in_words
from tailguard.evaluate.report.page import Page
from tailguard.evaluate.report.robustness_charts import attack_chart, fault_chart
from tailguard.evaluate.report.sections import report_page
from tailguard.evaluate.report.verdict import verdict
from tailguard.evaluate.robustness import ONE_OF_EACH, Disturbed
from tailguard.experiment.trained_run import open_run
from tailguard.robust.feed import parse_feed


def test_the_report_has_a_feed_of_every_kind(evidence: ReportData) -> None:
    assert [case.name for case in evidence.feeds] == ["clean", *(str(parse_feed(text)) for text in ONE_OF_EACH)]
    assert evidence.feeds[0].result is evidence.agent
    html = report_page(evidence).html("report")
    assert "Would it survive a bad feed?" in html
    assert '<a href="#feed">' in html
    for case in evidence.feeds:
        assert f"<td>{case.name}</td>" in html
    assert len(evidence.certificates) == 2
    assert "How far can a decision move?" in html


def test_sentences_name_the_costliest_fault_and_the_dearest_error(evidence: ReportData) -> None:
    clean, *rest = evidence.feeds
    cases = [clean, replace(rest[0], lost_per_year=0.1, price_error_bp=50.0, flips=0.02)]
    cases += [replace(rest[1], lost_per_year=0.3, price_error_bp=600.0, flips=0.07)]
    text = " ".join(feed_in_words(cases, 100_000))
    assert f"costliest fault was {rest[1].name}: it lost 30,000 a year on a capital of 100,000, 30.0 % of it" in text
    # 0.1 · 100,000 / 50 = 200 against 0.3 · 100,000 / 600 = 50.
    assert f"cost at most 200 a year ({rest[0].name}, whose error is 50.0 basis points" in text
    assert (
        f"At most 7.0 % of its positions were on the other side of the market than with a clean feed ({rest[1].name}"
        in text
    )
    assert "No fault cost money" in " ".join(feed_in_words([clean, replace(rest[0], lost_per_year=-0.1)], 1.0))


def test_a_broken_budget_is_named_with_its_faults(evidence: ReportData) -> None:
    clean, first, second, *_ = evidence.feeds
    assert clean.budget is not None
    broken = replace(clean.budget, verdict="broken", cvar=replace(clean.budget.cvar, estimate=-0.09))  # type: ignore[arg-type]
    kept = replace(clean.budget, verdict="kept", cvar=replace(clean.budget.cvar, estimate=-0.01))  # type: ignore[arg-type]
    cases = [replace(clean, budget=kept), replace(first, budget=broken), replace(second, budget=kept)]
    assert (
        f"with faults -9.0 % to -1.0 %; the limit is -5.0 %. The risk budget was broken under {first.name}."
        in (feed_in_words(cases, 1.0)[0])
    )


def test_a_fault_that_loses_money_is_in_the_verdict(evidence: ReportData) -> None:
    won = replace(evidence.agent, equity=evidence.agent.equity * 0 + 1.5)
    lost = replace(evidence.agent, equity=evidence.agent.equity * 0 + 0.5)
    feeds = (evidence.feeds[0], replace(evidence.feeds[1], result=lost))
    data = replace(evidence, results=dict(evidence.results) | {"agent": won}, feeds=feeds, stress=())
    assert "It does not survive the feed late:2." in str(verdict(data))


def test_a_fault_that_cannot_be_computed_is_a_note(evidence: ReportData) -> None:
    page = Page()
    add_feed_section(page, evidence.feeds[:1], 1.0, ["missing:1@0.02: feature 'x' is NaN"])
    assert page.charts == 0
    assert "Not shown: missing:1@0.02" in "".join(page.parts)


def test_the_report_says_what_it_does_not_show_and_why(tmp_path: Path, train_small: Callable[..., Path]) -> None:
    """A policy without bounds on a market without funding."""
    run = open_run(train_small(tmp_path / "run", "ppo.network.encoder=shared", "market.preset=crypto_spot"))
    html = report_page(collect(run)).html("report")
    assert "Not shown: certificates are for network.encoder=flat" in html
    assert "Not shown: funding:0.003@0.005: this market charges no funding" in html
    assert "<td>fee:3</td>" in html


def test_certificates_are_sentences_and_their_absence_is_a_note(evidence: ReportData) -> None:
    page = Page()
    add_certificates(page, [])
    assert not page.parts
    why = "certificates are for network.encoder=flat"
    text = "".join(report_page(replace(evidence, certificates=(), not_certified=why)).parts)
    assert f"Not shown: {why}." in text
    add_certificates(page, [Certificate(0.05, 0.013, 0.04, 0.12, 0.83, 5_184)])
    text = "".join(page.parts).replace("&nbsp;", " ")
    assert "by up to 0.05 standard deviations at a bar" in text
    assert "more than 1.3 % of the allowed leverage on average over 5,184 decisions, 4.0 % in 95 % of them" in text


def test_charts_show_growth_tail_and_positions(evidence: ReportData) -> None:
    cases = list(evidence.feeds)
    chart = fault_chart(cases)
    growth, tail, moved = chart.data
    assert list(moved.y) == pytest.approx([100 * case.position_change for case in cases[1:]])
    assert list(tail.y) == pytest.approx([100 * case.budget.cvar.estimate for case in cases[1:] if case.budget])
    assert list(growth.y) == pytest.approx([100 * case.result.metrics["total_return"] for case in cases[1:]])
    attacks: list[Disturbed] = [
        replace(case, attack="pgd", epsilon=size) for case, size in zip(cases[1:3], (0.1, 0.2), strict=True)
    ]
    lines = attack_chart([cases[0], *attacks]).data
    assert list(lines[0].x) == [0.0, 0.1, 0.2]
    assert lines[2].y[0] == 0
