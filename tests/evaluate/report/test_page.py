"""The page holds everything it needs, and nothing that a run's names could smuggle in."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.report import write_page, write_report
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.report.record_tables import trades_table
from tailguard.evaluate.report.sections import SECTIONS, report_page
from tailguard.evaluate.report.training_record import AlarmRaised

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=document.title="owned">&amp;"\''
LINK = '<a href="javascript:document.title=1">BTC</a>'


@pytest.fixture(scope="module")
def hostile(evidence: ReportData) -> ReportData:
    """The same run, every text of which comes from someone who wants to take over the page."""

    def renamed(result: BacktestResult) -> BacktestResult:
        return replace(result, symbols=(HOSTILE,))

    return replace(
        evidence,
        name=HOSTILE,
        market=HOSTILE,
        periods=dict.fromkeys(evidence.periods, HOSTILE),
        results={name: renamed(result) for name, result in evidence.results.items()} | {LINK: evidence.agent},
        sharpes=dict(evidence.sharpes) | {LINK: evidence.sharpes["agent"]},
        stress=tuple(scenario._replace(name=HOSTILE) for scenario in evidence.stress),
        trades=tuple(replace(trade, symbol=HOSTILE) for trade in evidence.trades),
        alarms=(AlarmRaised(HOSTILE, 128, 1, HOSTILE),),
        config=HOSTILE,
        command=HOSTILE,
        facts={HOSTILE: HOSTILE},
    )


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and its title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def test_hostile_names_stay_text(hostile: ReportData) -> None:
    page = report_page(hostile).html(hostile.name)
    tags = Tags(page)
    assert not tags.named("img")
    scripts = tags.named("script")
    assert len([script for script in scripts if script.get("type") is None]) == 2
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)
    assert all(str(link["href"]).startswith("#") for link in tags.named("a"))
    assert "&lt;img src=x onerror=" in page
    # In a chart's data, too, where labels are read as HTML once more.
    assert '"owned"</script>' not in page
    assert "\\u0026lt;a href" in page


def test_the_page_is_whole_small_and_asks_for_nothing(evidence: ReportData, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(evidence, path)
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 10e6
    tags = Tags(page)
    assert not tags.named("link")
    assert not any({"src", "srcset", "action"} & set(attributes) for _, attributes in tags.found)
    assert {f"#{anchor}" for anchor in SECTIONS} == {str(link["href"]) for link in tags.named("a")}
    policy = next(meta["content"] for meta in tags.named("meta") if "http-equiv" in meta)
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert len(re.findall(r"'sha256-[A-Za-z0-9+/=]{44}'", policy)) == 2
    for words in ("verdict", "buy &amp; hold", "planted optimum", "costs ×3", "fills 1 bar later", "gamma: 0.95"):
        assert words in page, words


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report\.html: cannot be written"):
        write_page("page", tmp_path / "nowhere" / "report.html")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_real_browser_draws_every_chart_without_a_word_or_a_request(
    hostile: ReportData, tmp_path: Path, browser, width: int
) -> None:
    path = tmp_path / "report.html"
    write_report(hostile, path)
    with browser(width, 900) as window:
        window.open(path)
        assert window.log("browser") == []
        assert window.requests() == []
        drawn = window.run(
            "return [...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.trace, .bars').length)"
        )
        assert len(drawn) == report_page(hostile).charts
        assert all(count > 0 for count in drawn), drawn
        assert window.run("return document.documentElement.scrollWidth") == width
        widths = window.run("return [...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)")
        assert max(widths) <= width
        assert "owned" in window.run("return document.title")
        assert window.run("return document.title.length") > len(HOSTILE)
        assert window.run("return document.images.length") == 0


def test_the_theme_button_changes_page_and_lines_and_is_remembered(
    evidence: ReportData, tmp_path: Path, browser
) -> None:
    path = tmp_path / "report.html"
    write_report(evidence, path)
    paper = "return getComputedStyle(document.body).backgroundColor"
    agent = "return document.querySelector('.plot').data[0].line.color"
    with browser(1280, 900) as window:
        window.open(path)
        assert (window.run(paper), window.run(agent)) == ("rgb(255, 255, 255)", "#0072B2")
        window.run("document.getElementById('theme').click()")
        assert (window.run(paper), window.run(agent)) == ("rgb(20, 24, 28)", "#4DB1F0")
        window.open(path)
        assert window.run(paper) == "rgb(20, 24, 28)"
        window.run("document.getElementById('theme').click()")
        assert (window.run(paper), window.run(agent)) == ("rgb(255, 255, 255)", "#0072B2")
        assert window.log("browser") == []


def test_lines_stand_out_from_a_dark_page(evidence: ReportData, tmp_path: Path, browser) -> None:
    """A contrast of 4.5 in the dark (WCAG asks 3 of graphics, and these are thin), no line below 1.5 pixels."""
    path = tmp_path / "report.html"
    write_report(evidence, path)
    lines = """return [...document.querySelectorAll('.plot')].flatMap(p => p.data.filter(t => t.line && t.line.color)
        .map(t => [t.line.color, t.line.width === undefined ? 2 : t.line.width]))"""
    with browser(1280, 900, dark=True) as window:
        window.open(path)
        found = window.run(lines)
    assert len(found) > 10
    for colour, width in found:
        assert (luminance(colour) + 0.05) / (luminance("#14181c") + 0.05) > 4.5, colour
        assert width >= 1.5


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` as WCAG 2 defines it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_wide_table_scrolls_inside_its_box_on_a_phone(evidence: ReportData, tmp_path: Path, browser) -> None:
    path = tmp_path / "report.html"
    write_report(evidence, path)
    with browser(390, 800) as window:
        window.open(path)
        boxes = window.run(
            """return [...document.querySelectorAll('table')].map(t => {
                const box = t.closest('.wide') || t.parentElement;
                box.scrollLeft = 1e6;
                const last = t.rows[0].cells[t.rows[0].cells.length - 1].getBoundingClientRect();
                return [last.right, box.getBoundingClientRect().right, box.scrollLeft];
            })"""
        )
    assert max(scrolled for _, _, scrolled in boxes) > 100
    for last, edge, _ in boxes:
        assert last <= edge + 1 <= 391


def test_a_button_saves_every_trade(evidence: ReportData, tmp_path: Path, browser) -> None:
    path = tmp_path / "report.html"
    write_report(evidence, path)
    with browser(1280, 900) as window:
        window.open(path)
        # The file itself is the browser's business; what it is made of is caught on the way.
        window.run(
            """window.saved = [];
            const make = URL.createObjectURL;
            URL.createObjectURL = blob => { blob.text().then(text => window.saved.push(text)); return make(blob); };
            document.querySelectorAll('.download').forEach(button => button.click());"""
        )
        names = window.run("return [...document.querySelectorAll('.download')].map(button => button.dataset.name)")
        saved = window.run("return window.saved")
    assert names == ["months.csv", "drawdowns.csv", "trades.csv"]
    assert trades_table(evidence.trades).csv() in saved
    assert len(saved) == 3
