"""Hooks of mkdocs: pages that are generated from the code, and formulas as MathML, so that nothing is fetched."""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
import reference

GENERATED = re.compile(r"^<!-- generated: (\w+)(?: (\S+))? -->$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- generated: settings -->` and its like by what the code says."""

    def generated(found: re.Match[str]) -> str:
        make = getattr(reference, found[1])
        text: str = make(found[2]) if found[2] else make()
        return text

    return GENERATED.sub(generated, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw themselves."""

    def mathml(found: re.Match[str]) -> str:
        display = "block" if found[2] == "[" else "inline"
        formula = convert(html.unescape(found[3]).strip(), display=display)
        return formula if display == "inline" else f'<div class="formula">{formula}</div>'

    return FORMULA.sub(mathml, content)
