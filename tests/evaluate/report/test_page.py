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
from tailguard.evaluate.report.collect import AlarmRaised, Evidence
from tailguard.evaluate.report.sections import SECTIONS, report_page

HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror=document.title="owned">&amp;"\''
LINK = '<a href="javascript:document.title=1">BTC</a>'


@pytest.fixture(scope="module")
def hostile(evidence: Evidence) -> Evidence:
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


def test_hostile_names_stay_text(hostile: Evidence) -> None:
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


def test_the_page_is_whole_small_and_asks_for_nothing(evidence: Evidence, tmp_path: Path) -> None:
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
    hostile: Evidence, tmp_path: Path, browser, width: int
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
