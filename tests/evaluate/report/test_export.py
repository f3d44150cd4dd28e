"""A page as a PDF and as a picture, by a real browser."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tailguard.errors import RunError
from tailguard.evaluate.report import write_page
from tailguard.evaluate.report.charts import equity_chart
from tailguard.evaluate.report.export import save_pdf, save_png
from tailguard.evaluate.report.page import Page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, evidence) -> Path:
    content = Page()
    content.chart(equity_chart(evidence.results), "equity")
    content.add("<div style='height:2400px'></div><p>the end</p>")
    path = tmp_path_factory.mktemp("page") / "a page.html"
    write_page(content.html("page"), path)
    return path


@pytest.mark.usefixtures("browser")
def test_a_picture_shows_the_page_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    save_png(page, tmp_path / "page.png")
    data = (tmp_path / "page.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1_280
    assert 2_900 < height < 3_600
    assert len(data) > 20_000  # a chart, not an empty page


@pytest.mark.usefixtures("browser")
def test_a_page_is_printed(page: Path, tmp_path: Path) -> None:
    save_pdf(page, tmp_path / "page.pdf")
    data = (tmp_path / "page.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(data) > 20_000


@pytest.mark.usefixtures("browser")
def test_a_page_that_draws_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.html").write_text("<!DOCTYPE html><html><body>nothing</body></html>")
    with pytest.raises(RunError, match="did not draw its charts"):
        save_png(tmp_path / "empty.html", tmp_path / "empty.png")
