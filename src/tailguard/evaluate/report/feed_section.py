"""The section on a bad feed: what each fault costs, what it does to positions, and whether the budget holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tailguard.evaluate.certificates import Certificate
from tailguard.evaluate.formatting import percent
from tailguard.evaluate.report.page import Page
from tailguard.evaluate.report.robustness_charts import fault_chart
from tailguard.evaluate.robustness import Disturbed
from tailguard.evaluate.robustness_table import robustness_rows
from tailguard.robust.feed import KINDS

CAPTION = (
    "The agent sees the faulty feed; its orders fill at the true prices of the test period. Moved: mean distance of "
    "the target positions from the clean ones, of equity. Flips: positions on the other side of the market. Error: "
    "of the closes that were seen, on average. Lost: money earned less in a year, without compounding."
)


def add_feed_section(page: Page, cases: Sequence[Disturbed], capital: float, notes: Sequence[str]) -> None:
    """What the faults do, in words, as a chart and as a table. `notes`: faults that could not be shown, and why."""
    if len(cases) > 1:
        for sentence in feed_in_words(cases, capital):
            page.paragraph(sentence)
        limit = "" if cases[0].budget is None else " The dotted line is the limit of the risk budget."
        page.chart(
            fault_chart(cases),
            f"Growth, mean of the worst windows and moved positions under each fault; dashed: the clean feed.{limit}",
        )
        headings, rows = robustness_rows(cases, capital)
        page.table(["feed", *headings[1:]], rows, own=cases[0].name, caption=CAPTION)
        named = (case.name.partition(":")[0] for case in cases[1:])
        means = (f"{kind}: {KINDS[kind].means}" for kind in dict.fromkeys(named))
        page.paragraph(f"Sizes, and after @ the probability that a fault begins at a bar. {'; '.join(means)}.", "soft")
    for note in notes:
        page.paragraph(f"Not shown: {note}", "soft")


def add_certificates(page: Page, certificates: Sequence[Certificate], not_certified: str = "") -> None:
    """What an error of the features can do at most, as far as it is proven. `not_certified`: why nothing is."""
    if not certificates and not not_certified:
        return
    page.add("<h3>How far can a decision move?</h3>")
    if not certificates:
        page.paragraph(f"Not shown: {not_certified}.", "soft")
        return
    for certificate in certificates:
        page.paragraph(str(certificate))
    page.paragraph(
        "Proven by interval bounds through the network for a single bar, with the memory that a clean feed has left: "
        "no attack inside this error can do more. Errors at many bars add up in the memory, which this does not bound.",
        "soft",
    )


def feed_in_words(cases: Sequence[Disturbed], capital: float) -> list[str]:
    """The budget under each fault, the costliest fault, the price of an error, and the most flips."""
    faults = cases[1:]
    sentences = []
    if cases[0].budget is not None:
        sentences.append(budget_in_words_under(cases))
    worst = max(faults, key=lambda case: case.lost_per_year)
    if worst.lost_per_year > 0:
        sentences.append(
            f"The costliest fault was {worst.name}: it lost {capital * worst.lost_per_year:,.0f} a year on a capital "
            f"of {capital:,.0f}, {percent(worst.lost_per_year, sign=False)} of it."
        )
    else:
        sentences.append("No fault cost money on these bars.")
    priced = [case for case in faults if math.isfinite(case.lost_per_bp)]
    if priced:
        dearest = max(priced, key=lambda case: case.lost_per_bp)
        sentences.append(
            f"A basis point of error in the prices that it saw cost at most {capital * dearest.lost_per_bp:,.0f} a "
            f"year ({dearest.name}, whose error is {dearest.price_error_bp:.1f} basis points on average over all bars)."
        )
    turned = max(faults, key=lambda case: case.flips)
    sentences.append(
        f"At most {percent(turned.flips, sign=False)} of its positions were on the other side of the market than with "
        f"a clean feed ({turned.name})."
    )
    return sentences


def budget_in_words_under(cases: Sequence[Disturbed]) -> str:
    """Whether the budget was kept with a clean feed, and what changes under the faults."""
    clean = cases[0].budget
    assert clean is not None
    broken = [case.name for case in cases[1:] if case.budget is not None and case.budget.verdict == "broken"]
    beyond = [case.name for case in cases[1:] if case.budget is not None and case.budget.cvar.estimate < clean.limit]
    tails = [case.budget.cvar.estimate for case in cases[1:] if case.budget is not None]
    words = (
        f"With a clean feed the worst {100 * clean.alpha:g} % of windows made {percent(clean.cvar.estimate)} on "
        f"average, with faults {percent(min(tails))} to {percent(max(tails))}; the limit is {percent(clean.limit)}."
    )
    if broken:
        return f"{words} The risk budget was broken under {', '.join(broken)}."
    if beyond and clean.cvar.estimate >= clean.limit:
        return f"{words} Under {', '.join(beyond)} the tail is beyond the limit, which the record cannot decide."
    return f"{words} No fault broke the risk budget for certain."
