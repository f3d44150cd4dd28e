"""The page "Your market": its blocks run in their order, and print what their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailguard.data.registry import FEATURES

PAGE = Path(__file__).parents[2] / "docs" / "markets.md"


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
def test_the_blocks_run_and_say_what_they_promise(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        FEATURES.pop("news_surprise", None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "+27.6% a year, Sharpe 0.88"
    assert float(lines[2]) == pytest.approx(0.8, abs=1e-9)
    week, financing = map(float, lines[3].split())
    assert (week, financing) == pytest.approx((120, 0.011), rel=0.02)
    assert float(lines[4]) == 0
