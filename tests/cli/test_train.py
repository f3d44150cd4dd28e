"""Names of runs on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailguard.cli.train import run_folder
from tailguard.errors import ConfigError


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "", ".", "a/../../x", "a//b", "a/", "runs/x", "~/x", "a\nb"])
def test_a_name_stays_within_the_runs(name: str) -> None:
    with pytest.raises(ConfigError, match="choose a plain name"):
        run_folder(name)


def test_a_name_may_have_parts_but_not_lie_within_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder("btc/wide") == Path("runs/btc/wide")
    Path("runs/btc").mkdir(parents=True)
    Path("runs/btc/config.yaml").write_text("")
    with pytest.raises(ConfigError, match="runs/btc is itself a run"):
        run_folder("btc/wide")
