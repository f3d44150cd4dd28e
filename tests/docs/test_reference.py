"""The reference is complete: every setting, every command and every public name is on a page of the site."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tailguard as tg
from tailguard.audit.auditor import all_checks
from tailguard.config import RunConfig, flat_settings, to_dict

from .blocks import ROOT, pages

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """The generator of the pages, as mkdocs imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "_build"))
        import reference

        yield reference
        del sys.modules["reference"]


def test_every_setting_is_listed_once_with_its_default(reference: Any) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \| `(.*?)` \| (.+) \|$", reference.settings(), re.MULTILINE)
    listed = {name: (values, yaml.safe_load(default), text) for name, values, default, text in rows}
    assert len(rows) == len(listed)
    expected = dict(flat_settings(to_dict(RunConfig())))
    tables = {name for name, (values, _, _) in listed.items() if values == "table"}
    assert (
        set(listed) - tables
        == {name for name in expected if not any(name.startswith(f"{t}.") for t in tables)} - tables
    )
    for name in set(listed) & set(expected):
        assert listed[name][1] == expected[name], name
    assert all(len(text) > 10 for _, _, text in listed.values())
    assert listed["risk.measure"][0] == "`episode`, `drawdown`, `bar`"
    assert listed["env.episode_length"][:2] == ("integer", 256)


def test_every_command_is_listed_with_its_options(reference: Any) -> None:
    page = reference.commands()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(reference.command_names())
    assert {"tailguard train", "tailguard data check", "tailguard kill"} <= set(reference.command_names())
    section = page.split("## tailguard backtest\n")[1].split("\n## ")[0]
    assert "| `--costs NUMBER` | Factor on all assumed costs: 2 doubles them. | `1.0` |" in section
    assert "| `--split test\\|validation\\|train` |" in section
    assert "| `RUN` | Folder of a finished run, like runs/demo. |" in section


def test_every_public_name_is_in_the_api_reference(reference: Any) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    missing = [f"tailguard.{name}" for name in tg.__all__ if not name.startswith("_")]
    assert [name for name in missing if name not in listed] == []
    for module in re.findall(r"<!-- generated: api (\S+) -->", text):
        found = reference.api(module)
        assert all(name in found for name in reference.public_names(module))


def test_every_page_is_in_the_navigation_once() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def files(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for inner in part.values() if isinstance(part, dict) else part:
                yield from files(inner)

    shown = sorted(files(yaml.safe_load(text)["nav"]))
    there = sorted(str(page.relative_to(DOCS)) for page in pages() if page.is_relative_to(DOCS))
    assert shown == there


def test_pictures_are_those_that_the_script_draws() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS / "_build"))
        import pictures

        drawn = pictures.draw()
        del sys.modules["pictures"]
    assert len(drawn) == 6
    for name, svg in drawn.items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == svg, (
            f"run python docs/_build/pictures.py: {name}"
        )


def test_links_to_pages_and_images_exist() -> None:
    """mkdocs checks those of the site, this the ones of the pages outside it."""
    for page in pages():
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+\.\w+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_site_fetches_nothing() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in config
    assert "extra_javascript" not in config
    assert not re.search(r"url\((?!['\"]?data:)", (DOCS / "style.css").read_text(encoding="utf-8"))
    for page in Path(DOCS).rglob("*.md"):
        assert not re.search(r"(<script|<link|!\[[^\]]*\]\(https?:)", page.read_text(encoding="utf-8")), page


def test_every_check_of_the_audit_is_on_its_page(reference: Any) -> None:
    page = (DOCS / "audit.md").read_text(encoding="utf-8")
    assert "<!-- generated: checks -->" in page
    assert "<!-- generated: faults -->" in page
    row = re.compile(r"^\| \*\*([A-Z]\d+)\*\*.*?\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
    rows = row.findall(reference.checks())
    checks = {check.id: check for check in all_checks() if "." not in check.id}
    assert sorted(row[0] for row in rows) == sorted(checks)
    for name, question, _, _, why, remedy in rows:
        check = checks[name]
        assert (question, why) == (reference._cell(check.question), reference._cell(check.why))
        assert len(remedy) > 10


def test_the_numbers_of_the_audit_are_of_checks_that_exist_and_passed(reference: Any) -> None:
    measured = json.loads(reference.MEASURED.read_text(encoding="utf-8"))["checks"]
    checks = {check.id for check in all_checks() if not check.of_run and "." not in check.id}
    assert set(measured) <= checks, "run python docs/_build/audit_tables.py"
    assert len(measured) >= 50
    for one in measured.values():
        low, high = re.match(r"≥ (.+)", one["bound"]), re.match(r"≤ (.+)", one["bound"])
        assert not low or float(one["number"]) >= float(low[1])
        assert not high or float(one["number"]) <= float(high[1])


def test_every_fault_is_on_the_page_of_the_audit(reference: Any) -> None:
    faults = reference.load_faults()
    table = reference.faults()
    for one in faults:
        assert f"| {one.check} | {reference._cell(one.name)} |" in table
    assert table.count("\n") == len(faults) + 2
    assert len(faults) >= 40
