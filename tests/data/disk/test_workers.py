"""Processes end with the block that they belong to, whatever they are doing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailguard.data.disk.workers import Workers


def fail_after_the_first(tasks: list[str]) -> None:
    with Workers(2) as workers:
        for _ in workers.map("waiting", exec, tasks):
            raise ZeroDivisionError


def test_an_error_ends_processes_in_the_middle_of_their_tasks(tmp_path: Path) -> None:
    begun, late = tmp_path / "begun", tmp_path / "late"
    tasks = [
        f"import os, time\nwhile not os.path.exists({str(begun)!r}): time.sleep(0.02)",
        f"import time; open({str(begun)!r}, 'w'); time.sleep(10); open({str(late)!r}, 'w')",
    ]
    with pytest.raises(ZeroDivisionError):
        fail_after_the_first(tasks)
    assert begun.exists()
    assert not late.exists()


def test_results_come_back_in_the_order_of_the_tasks() -> None:
    with Workers(2) as workers:
        assert list(workers.map("counting", len, ["a", "bcd", ""])) == [1, 3, 0]
