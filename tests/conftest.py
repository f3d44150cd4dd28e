"""The same start for every test, and small markets that many tests share."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from tailguard.data.bars import Bars
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler
from tailguard.data.synthetic import make_market

from .browser import AVAILABLE, Browser

PanelMaker = Callable[..., Panel]

# vectorbt as plain Python: compiling it takes far longer than the few thousand orders of the tests. Numba reads this
# once, on import, and modules that were imported otherwise cannot be mixed.
os.environ["NUMBA_DISABLE_JIT"] = "1"

# The audit before a training has tests of its own; the trainings of the others begin at once.
os.environ["TAILGUARD_AUDIT"] = "no"

# Started with nohup, a process ignores hang-ups, and so does every process that a test starts.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hypothesis draws the same examples in every run, and no slow machine fails a test by its deadline.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


SET_BY_LIBRARIES = re.compile("PYTEST_CURRENT_TEST|_?TORCHINDUCTOR_|KMP_|RAY_|PYTHONBREAKPOINT")
"""Environment variables that pytest sets for every test, torch when it first compiles, Numba on import, Ray when it
starts."""


def process_settings() -> dict[str, Any]:
    """Settings of the process that a test could leave changed for the tests after it."""
    return {
        "torch default dtype": torch.get_default_dtype(),
        "torch default device": torch.get_default_device(),
        "torch threads": torch.get_num_threads(),
        "torch grad mode": torch.is_grad_enabled(),
        "torch deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch matmul precision": torch.get_float32_matmul_precision(),
        "numpy error handling": np.geterr(),
        "working directory": os.getcwd(),
        **{f"${name}": value for name, value in os.environ.items() if not SET_BY_LIBRARIES.match(name)},
        **{f"{number!r}": signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)},
    }


def pytest_runtest_setup() -> None:
    """Fixtures of a module or of the session are set up before any fixture of a test: seed for them, too."""
    seed_everything()


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test draws from the same seeds, whatever ran before it, and leaves the process as it was."""
    before = process_settings()
    seed_everything()
    yield
    after = process_settings()
    changed = [
        f"{name}: {before.get(name)} → {after.get(name)}"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    if changed:
        pytest.fail(f"the test leaves the process changed: {'; '.join(changed)}")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def unprivileged() -> Callable[[Path], contextlib.AbstractContextManager[Callable[[], None]]]:
    """Take the right to write in a folder away from this process; for root, rights count only as another user."""

    @contextlib.contextmanager
    def lock_out_of(folder: Path) -> Iterator[Callable[[], None]]:
        user, mode = os.geteuid(), folder.stat().st_mode
        try:
            yield lambda: os.seteuid(65534) if user == 0 else folder.chmod(0o555)
        finally:
            os.seteuid(user)
            folder.chmod(mode)

    return lock_out_of


@pytest.fixture(scope="session")
def forgeries() -> Callable[[Path, Any], Iterator[str]]:
    """Write a value into every place of a manifest in turn, with a hash that fits, as a stranger would."""

    def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key in content if isinstance(content, dict) else range(len(content)):
            yield (*path, key)
            if isinstance(content[key], dict | list):
                yield from places(content[key], (*path, key))

    def forge(manifest: Path, value: Any) -> Iterator[str]:
        whole = json.loads(manifest.read_text())
        del whole["sha256"]
        for path in places(whole):
            changed = copy.deepcopy(whole)
            spot = changed
            for key in path[:-1]:
                spot = spot[key]
            spot[path[-1]] = value
            digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
            manifest.write_text(json.dumps(changed | {"sha256": digest}))
            yield ".".join(map(str, path))

    return forge


ABSURD = [None, "x", 10**30]
MORE_ABSURD = [[], {"a": 1}, True, 0, -1, 1.5, float("nan"), float("inf")]


@pytest.fixture(params=[*ABSURD, *(pytest.param(value, marks=pytest.mark.slow) for value in MORE_ABSURD)], ids=repr)
def absurd(request: pytest.FixtureRequest) -> Any:
    """Null, text, an empty list, a table and numbers that hardly any place has."""
    return request.param


@contextlib.contextmanager
def kept_tables() -> Iterator[None]:
    """What is registered in this process, as plugins do, is forgotten afterwards."""
    from tailguard import plugins
    from tailguard.algorithm.iteration_metrics import ITERATION
    from tailguard.algorithm.loss_terms import LOSS_TERMS
    from tailguard.audit import CHECKS
    from tailguard.cli import app
    from tailguard.data.features import FEATURES
    from tailguard.evaluate.baselines import BASELINES, PORTFOLIO_BASELINES
    from tailguard.market.costs import COSTS
    from tailguard.models.critics import CRITICS
    from tailguard.monitor.health import OWN_RULES
    from tailguard.optim import OPTIMIZERS

    tables: list[dict[Any, Any]] = [FEATURES, COSTS, CRITICS, OPTIMIZERS, LOSS_TERMS, ITERATION, OWN_RULES, BASELINES]
    tables.append(PORTFOLIO_BASELINES)
    tables.append(plugins._LOADED)
    before, commands, checks = [dict(table) for table in tables], list(app.registered_commands), set(CHECKS)
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
        for name in [name for name in CHECKS if "." in name and name not in checks]:  # others are imported when used
            del CHECKS[name]
        app.registered_commands[:] = commands


@pytest.fixture(scope="module")
def own_tables() -> Iterator[None]:
    """What a test module registers is forgotten after its last test."""
    with kept_tables():
        yield


@pytest.fixture
def own_parts() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    with kept_tables():
        yield


@pytest.fixture(scope="session")
def bars() -> Bars:
    """1,200 hourly bars of one synthetic asset."""
    return make_market(1_200, seed=11).bars


@pytest.fixture(scope="session")
def make_panel() -> PanelMaker:
    """Random but consistent bars as arrays: rows, assets, seed, volatility of a bar."""

    def build(rows: int = 600, assets: int = 1, seed: int = 0, volatility: float = 0.01) -> Panel:
        draw = np.random.default_rng(seed)
        shape = (rows, assets)
        close = 100 * np.exp(np.cumsum(volatility * draw.standard_t(5, shape), axis=0))
        start = np.vstack([np.full((1, assets), 100.0), close[:-1]]) * np.exp(
            0.1 * volatility * draw.normal(size=shape)
        )
        high = np.maximum(start, close) * np.exp(0.5 * volatility * np.abs(draw.normal(size=shape)))
        low = np.minimum(start, close) * np.exp(-0.5 * volatility * np.abs(draw.normal(size=shape)))
        return Panel(
            time=1_609_459_200_000 + 3_600_000 * np.arange(rows),
            open=start,
            high=high,
            low=low,
            close=close,
            volume=1e4 * np.exp(draw.normal(size=shape)),
            segment=np.zeros(rows, np.int32),
            tradeable=np.ones(rows, bool),
            symbols=tuple(f"ASSET{index}" for index in range(assets)),
            frequency_ms=3_600_000,
        )

    return build


@pytest.fixture(scope="session")
def prepare_panel() -> Callable[..., PreparedBars]:
    """A panel with features that are random numbers: for tests of accounting, where their meaning does not matter."""

    def build(panel: Panel, features: int = 3, seed: int = 0) -> PreparedBars:
        values = np.random.default_rng(seed).normal(size=(panel.rows, features)).astype(np.float32)
        names = tuple(f"noise{index}" for index in range(features))
        scaler = Scaler(names, ("test",) * features, np.zeros(features), np.ones(features))
        return PreparedBars(panel, values, names, np.ones(panel.rows, bool), scaler)

    return build


@pytest.fixture(scope="session")
def browser() -> type[Browser]:
    """The browser; tests that need it are skipped where there is none."""
    if not AVAILABLE:
        pytest.skip("needs chromium and chromedriver")
    return Browser
