"""The code blocks of a Markdown page and the cells of a notebook: what a reader would copy or run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- not run: (.+) -->\n *$")
RUN = ("python", "bash", "console", "yaml", "json")
"""Languages that are executed or read by their program; `text` is what a program printed, or a drawing."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    """Why the block cannot run here."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is the content of, which its first line names in a comment."""
        named = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return named[1] if named else None

    def commands(self) -> list[str]:
        """Commands of a shell block, without comments, continued lines joined; of a console those after a $."""
        text = re.sub(r"\\\n\s*", " ", self.text)
        lines = text.splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
        return [line for line in stripped if line]


def pages() -> list[Path]:
    """Every page with code that a reader may copy."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md")]
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    return [*top, *sorted(page for page in (ROOT / "docs").rglob("*.md")), *notebooks]


def cells(notebook: Path) -> Iterator[Block]:
    """The code cells of a notebook: commands after an exclamation mark, or Python. `line` is the cell's number."""
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"], 1):
        if cell["cell_type"] == "code":
            text = "".join(cell["source"])
            language = "bash" if text.startswith("!") else "python"
            # `| cat` makes the command print plain lines where a terminal would show a progress bar.
            text = re.sub(r"^!(.*?)(?: \| cat)?$", r"\1", text, flags=re.MULTILINE) if language == "bash" else text
            yield Block(notebook, number, language, text, not_run=None)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        yield from cells(page)
        return
    for found in FENCE.finditer(text):
        indent, language, code = found.groups()
        marker = MARKER.search(text[: found.start()])
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=language,
            text=re.sub(f"^{indent}", "", code, flags=re.MULTILINE),
            not_run=marker[1] if marker else None,
        )
