"""Checks of runs: resuming after a kill, files that are damaged or hostile, and the same numbers from the same seed."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tailguard.algorithm.learner import Learner
from tailguard.algorithm.saving import PARTS, capture, load_agent
from tailguard.audit.fast_paths import fast_path_gaps
from tailguard.audit.in_force import digest_of
from tailguard.audit.promises import COSTS, FREE, random_panel
from tailguard.audit.registry import Measurement, at_most, none_of, not_applicable, register_check, worst
from tailguard.audit.subject import Subject
from tailguard.envs.trading import TradingEnv
from tailguard.errors import CheckpointError, TailguardError
from tailguard.market import MarketConfig, build_market, open_accounts, step
from tailguard.market.serial import SerialAccount
from tailguard.runs.checkpoint import CheckpointStore, data_hashes
from tailguard.sealed import read_sealed, write_sealed

# --- kills -----------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """Stands for the end of the process: nothing may catch it."""


@contextmanager
def killed_at(operation: int) -> Iterator[None]:
    """A process that dies before its file operation of this number, counted from 0: none has any effect from then on.

    Counted are renames, flushes, new folders and removals. What was done before stays, as after a kill.
    """
    done = 0

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done > operation:
                raise KilledError
            return function(*given, **named)

        return call

    places: tuple[tuple[Any, str], ...] = (
        *((os, name) for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")), (shutil, "rmtree"),
    )  # fmt: skip
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, mortal(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


KINDS = ("ppo", "pathwise")


def resumable(subject: Subject, seed: int | None = None, kind: str = "ppo") -> Learner:
    """A small learner on bars, whose episodes can be saved; `seed`: in the place of the subject's."""
    seed = subject.seed if seed is None else seed
    env = TradingEnv(subject.bars, num_envs=6, episode_length=24, stagger=8, seed=seed)
    own = Subject(subject.parts, seed)
    return own.learner(env) if kind == "ppo" else own.pathwise_learner(env, stochastic=True)


def iterated(learner: Learner, count: int) -> str:
    """Hash of everything a checkpoint holds, after so many further iterations."""
    for _ in range(count):
        learner.iterate()
    return digest_of(capture(learner))


OPERATIONS = 400
"""File operations of one checkpoint are fewer."""


def _after_kills(subject: Subject, folder: Path, expected: dict[int, str]) -> Iterator[str]:
    """What is wrong with what a kill leaves, for a kill before each file operation of a checkpoint's writing."""
    learner = resumable(subject)
    hashes = data_hashes(learner.env)
    learner.iterate()
    first = CheckpointStore(folder / "0", hashes)
    first.save(learner)
    step = learner.num_timesteps
    learner.iterate()
    reader = resumable(subject)
    for operation in range(OPERATIONS):
        place = folder / str(operation + 1)
        shutil.copytree(folder / "0", place)
        finished = True
        try:
            with killed_at(operation):
                CheckpointStore(place, hashes).save(learner)
        except KilledError:
            finished = False
        store = CheckpointStore(place, hashes)
        try:
            store.clean()
            newest = store.newest()
            if newest not in expected or (finished and newest == step):
                yield f"after operation {operation} the newest checkpoint is step {newest}"
                continue
            store.restore(reader, newest)
            if digest_of(capture(reader)) != expected[newest]:
                yield f"after operation {operation} step {newest} holds another state"
        except CheckpointError as error:
            yield f"after operation {operation}: {error}"
        shutil.rmtree(place)
        if finished:
            return
    yield f"a checkpoint takes more than {OPERATIONS} file operations"


@register_check(
    "R1",
    "Does a run that is killed at any moment go on as if nothing had happened?",
    why="A stream, an average or an episode that is not saved makes the rest of the run another run; a half-written "
    "checkpoint loses all of it.",
    remedy="Everything that lives from one iteration to the next belongs into Learner.parts(); files are written "
    "beside their place, flushed and renamed (places.py).",
)
def resumes_exactly(subject: Subject) -> Measurement:
    learner = resumable(subject)
    expected = {}
    for _ in range(2):
        digest = iterated(learner, 1)
        expected[learner.num_timesteps] = digest
    with TemporaryDirectory() as name:
        wrong = list(_after_kills(subject, Path(name), expected))
        for kind in KINDS:
            interrupted = resumable(subject, kind=kind)
            iterated(interrupted, 2)
            store = CheckpointStore(Path(name) / kind, data_hashes(interrupted.env))
            store.save(interrupted)
            resumed = resumable(subject, kind=kind)
            store.restore(resumed, interrupted.num_timesteps)
            if iterated(resumed, 2) != iterated(resumable(subject, kind=kind), 4):
                wrong.append(f"two iterations after the resume of a {kind} learner the state is another one")
    return none_of("kills, one before each file operation, after which a run would not go on bit by bit", wrong)


# --- files -----------------------------------------------------------------------------------------------------------

UNSAFE = re.compile(
    r"^\s*(?:import|from)\s+(?:pickle|cloudpickle|dill|marshal|shelve|joblib)\b"
    r"|\b(?:torch\.load|yaml\.load|yaml\.unsafe_load|pandas\.read_pickle|pd\.read_pickle)\(",
    re.MULTILINE,
)
"""What can run code that a file brings."""
SOURCE = Path(__file__).parents[1]


def unsafe_calls(source: Path) -> list[str]:
    """Modules that could run what a file holds."""
    paths = sorted(source.rglob("*.py"))
    return [f"{path.name}: {match[0].strip()}" for path in paths for match in UNSAFE.finditer(path.read_text("utf-8"))]


def accepted_damage(folder: Path, draw: np.random.Generator) -> Iterator[str]:
    """Ways to damage a saved agent that loading it does not notice."""

    def loads(what: str) -> Iterator[str]:
        try:
            load_agent(folder)
        except CheckpointError:
            return
        yield what

    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for place in draw.integers(len(whole), size=8):
            changed = bytearray(whole)
            changed[place] ^= 1 << int(draw.integers(8))
            path.write_bytes(bytes(changed))
            # A manifest's white space is no content.
            if bytes(changed).split() != whole.split():
                yield from loads(f"{path.name}: a bit of byte {place} is turned")
        for what, content in (("cut in half", whole[: len(whole) // 2]), ("empty", b"")):
            path.write_bytes(content)
            yield from loads(f"{path.name}: {what}")
        path.unlink()
        yield from loads(f"{path.name}: missing")
        path.write_bytes(whole)


def accepted_forgeries(folder: Path, elsewhere: Path) -> Iterator[str]:
    """Well-sealed agents that were not written by saving one, and load."""
    about, parts = read_sealed(folder, PARTS)
    weights = {name: value for name, value in parts["weights"].items() if name != next(iter(parts["weights"]))}
    forged = {
        "the name of a module as the learner": ({**about, "learner": "os.system"}, parts),
        "an expression as a setting": ({**about, "config": {**about["config"], "gamma": "__import__('os')"}}, parts),
        "weights without one tensor": (about, {**parts, "weights": weights}),
        "weights that are not numbers": (about, {**parts, "weights": _not_finite(parts["weights"])}),
    }
    for what, (description, content) in forged.items():
        write_sealed(elsewhere, content, description)
        try:
            load_agent(elsewhere)
        except TailguardError:
            continue
        yield what


def _not_finite(weights: dict[str, Any]) -> dict[str, Any]:
    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: spoil(each) for name, each in value.items()}
        return torch.full_like(value, math.nan) if isinstance(value, torch.Tensor) else value

    return {name: spoil(value) for name, value in weights.items()}


@register_check(
    "R2",
    "Is a damaged checkpoint noticed, and can none of them run code?",
    why="A checkpoint from a stranger that is unpickled runs the stranger's code; a turned bit in the weights is an "
    "agent that nobody trained.",
    remedy="Read files through sealed.py alone: safetensors and JSON, sizes and SHA-256 checked before use.",
    fast=True,
)
def checkpoints_are_safe(subject: Subject) -> Measurement:
    learner = subject.learner()
    learner.iterate()
    with TemporaryDirectory() as name:
        folder = Path(name) / "saved"
        learner.save(folder)
        wrong = list(accepted_damage(folder, np.random.default_rng(subject.seed)))
        wrong += accepted_forgeries(folder, Path(name) / "forged")
    wrong += unsafe_calls(SOURCE)
    return none_of("ways to damage or forge a saved agent that pass, and calls that could run what it holds", wrong)


# --- the same numbers ------------------------------------------------------------------------------------------------


def serial_gap(seed: int) -> float:
    """Largest gap of an account in plain numbers to the simulator's tensors, with every cost, over random orders."""
    draw = np.random.default_rng(seed)
    config = MarketConfig(**(dict(FREE) | dict(COSTS["everything"])))
    market = build_market(random_panel(seed, 60, assets=2, volatility=0.02), config, dtype=torch.float64)
    account = SerialAccount(market, 0)
    state = open_accounts(torch.zeros(1, dtype=torch.int64), 2, market.dtype)
    gaps = [0.0]
    for _ in range(58):
        target = draw.uniform(-0.5, 0.5, 2) * config.leverage
        account.step(target.tolist())
        state, _ = step(market, state, torch.from_numpy(target[None]))
        gaps.append(abs(float(state.equity) - account.equity))
        gaps.append(float(np.abs(state.weights[0].numpy() - account.weights).max()))
    return max(gaps)


def _graph_gap(subject: Subject) -> Measurement:
    """Recorded CUDA graphs against eager execution, by the metrics of four iterations."""
    if not torch.cuda.is_available():
        return not_applicable("there is no GPU, on which iterations are recorded")
    losses = []
    for runtime in ("eager", "graph"):
        env = TradingEnv(subject.bars, num_envs=6, episode_length=24, device="cuda", seed=subject.seed)
        learner = subject.learner(env, runtime=runtime, n_steps=12, on_nonfinite="stop")
        losses.append([learner.iterate()["train/loss"] for _ in range(4)])
    gap = max(abs(one - other) for one, other in zip(*losses, strict=True))
    return at_most("gap of the loss of recorded iterations to eager ones", gap, 1e-3)


@register_check(
    "R3",
    "Does the same seed give the same run, another seed another one, and the fast code the same numbers?",
    why="Two runs that should be one cannot be compared, and a gain of a changed setting is then luck.",
    remedy="Draw from the learner's and the environment's own generators, never from the process's; see "
    "Learner.reseed for all of them.",
    fast=True,
)
def same_seed_same_run(subject: Subject) -> Measurement:
    wrong = []
    for kind in KINDS:
        first, second = (iterated(resumable(subject, kind=kind), 3) for _ in range(2))
        other = resumable(subject, subject.seed + 1, kind)
        wrong += [] if first == second else [f"two {kind} runs with one seed differ"]
        wrong += [f"{kind} runs with two seeds are the same"] if iterated(other, 3) == first else []
    found = [
        none_of("runs that differ where they should not, or are the same", wrong),
        # Double precision over 58 bars, in another order of the sums.
        at_most("gap of an account in plain numbers to the simulator's, all costs", serial_gap(subject.seed), 1e-9),
    ]
    recorded = _graph_gap(subject)
    return worst([*found, *fast_path_gaps(subject), *([recorded] if recorded.applies else [])])


# --- tests -----------------------------------------------------------------------------------------------------------

TEST_BRANCHES = re.compile(
    r"PYTEST|UNITTEST|\bunittest\b|\bpytest\b|\bunder_test\b|\bis_testing\b|\bTESTING\b|\bmonkeypatch\b"
)
"""Words by which code would know that it is tested."""
KNOWS_WHY = {"reproduction.py"}
"""This module, which looks for them."""


def knowing_of_tests(source: Path) -> list[str]:
    """Modules that know of tests."""
    paths = [path for path in sorted(source.rglob("*.py")) if path.name not in KNOWS_WHY]
    return [f"{path.name}: {match[0]}" for path in paths for match in TEST_BRANCHES.finditer(path.read_text("utf-8"))]


@contextmanager
def as_if_tested() -> Iterator[None]:
    """What a process looks like in which tests run."""
    names = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION", "CI", "TESTING")
    before = {name: os.environ.get(name) for name in names}
    modules = {name: sys.modules.get(name) for name in ("pytest", "_pytest", "unittest")}
    os.environ |= dict.fromkeys(names, "1")
    for name, module in modules.items():
        sys.modules[name] = module or ModuleType(name)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        for name, module in modules.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@contextmanager
def as_if_in_use() -> Iterator[None]:
    """What a process looks like in which no tests run."""
    names = [name for name in os.environ if name.startswith("PYTEST") or name in ("CI", "TESTING")]
    before = {name: os.environ.pop(name) for name in names}
    tools = ("pytest", "_pytest", "unittest")
    modules: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in tools if name in sys.modules}
    try:
        yield
    finally:
        os.environ |= before
        sys.modules.update(modules)


@register_check(
    "R4",
    "Does the code compute under tests what it computes in use?",
    why="A branch for tests, or randomness that tests replace, is code that no test has seen.",
    remedy="Give the part a seed, a size or a generator as an argument, and let tests use that.",
    fast=True,
)
def tests_see_the_same_code(subject: Subject) -> Measurement:
    with as_if_in_use():
        used = iterated(resumable(subject), 2)
    with as_if_tested():
        tested = iterated(resumable(subject), 2)
    wrong = knowing_of_tests(SOURCE) + ([] if used == tested else ["an iteration computes other numbers under tests"])
    return none_of("places in the package that know of tests, and iterations that differ under them", wrong)
