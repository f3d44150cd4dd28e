"""Checks of the evidence of a run: that its agent has not learned its bars by heart, and that its record repeats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tailguard.audit.registry import Measurement, at_most, information, not_applicable, register_check
from tailguard.audit.subject import Subject
from tailguard.evaluate.held_out import episodes_on
from tailguard.experiment.layout import RunLayout
from tailguard.monitor.writers import STEP

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestAgent

ORDERS = 12
"""Random orders of the bars of each part."""
MOST_BARS = 2_000
"""Bars of each part, so that the audit of a long run takes no longer than that of a short one."""


def permuted(bars: Bars, draw: np.random.Generator) -> Bars:
    """The traded bars in another order, each with its gap, its shape and its volume, so that returns stay.

    All symbols have the same order. Prices are rebuilt from the first bar; amounts in the quote currency follow them.
    """
    import polars as pl

    prices = ("open", "high", "low", "close")
    times = bars.frame["time"].unique().sort()
    order = times.filter(times >= bars.start)
    taken = dict(zip(order.to_list(), order.to_numpy()[draw.permutation(len(order))], strict=True))
    parts = []
    for part in bars.frame.partition_by("symbol", maintain_order=True):
        rows = {time: row for row, time in enumerate(part["time"].to_numpy())}
        source = [
            rows.get(np.datetime64(taken[time]), row) if time in taken else row
            for row, time in enumerate(part["time"].to_list())
        ]
        close = part["close"].to_numpy()
        before = np.concatenate([part["open"].to_numpy()[:1], close[:-1]])
        shape = {name: np.log(part[name].to_numpy() / before)[source] for name in prices}
        rebuilt = np.log(before[0]) + np.concatenate([[0.0], np.cumsum(shape["close"])[:-1]])
        moved = part[source].with_columns(part["time"], part["segment"])
        columns = {name: np.exp(rebuilt + shape[name]) for name in prices}
        factor = columns["close"] / close[source]
        quoted = [name for name in ("quote_volume", "taker_buy_quote") if name in part.columns]
        columns |= {name: moved[name].to_numpy() * factor for name in quoted}
        parts.append(moved.with_columns(pl.Series(name, values) for name, values in columns.items()))
    return replace(bars, frame=pl.concat(parts))


def growth_on(agent: BacktestAgent, bars: Bars) -> float:
    """Mean log-growth of the agent over overlapping episodes on these bars; NaN where there is none."""
    assert agent.spec is not None  # it was trained on bars
    found = [part.trade(agent).growth for part in episodes_on(agent.spec, bars)]
    return float(torch.cat(found).mean()) if found else math.nan


def knowledge_of_order(agent: BacktestAgent, bars: Bars, seed: int) -> float:
    """Growth on the bars, in standard deviations above that on the same bars in random orders."""
    draw = np.random.default_rng(seed)
    elsewhere = [growth_on(agent, permuted(bars, draw)) for _ in range(ORDERS)]
    own, spread = growth_on(agent, bars), float(np.std(elsewhere, ddof=1))
    return (own - float(np.mean(elsewhere))) / spread if spread > 0 else 0.0


def equal_parts(subject: Subject) -> dict[str, Bars]:
    """The last bars of the training part and as many of the test part."""
    from tailguard.data.splits import traded_times

    parts = {name: subject.trained.part(name) for name in ("train", "test")}
    times = {name: traded_times(bars) for name, bars in parts.items()}
    count = min(MOST_BARS, *map(len, times.values()))
    train, end = times["train"], parts["train"].frequency
    parts["train"] = parts["train"].between(train[-count], train[-1] + end, lead_in=len(parts["train"]))
    parts["test"] = replace(parts["test"].between(times["test"][0], times["test"][count - 1] + end,
                                                  lead_in=len(parts["test"])))  # fmt: skip
    return parts


@register_check(
    "E1",
    "How much more does the agent earn on its bars than on the same bars in another order?",
    why="An agent that has learned its bars by heart is far above random orders of its training bars, and not of the "
    "test bars; one that has learned the market is above both.",
    remedy="Use more bars, fewer training.total_timesteps, a smaller network, or training.members; see docs/report.md.",
    of_run=True,
)
def order_is_not_memorised(subject: Subject) -> Measurement:
    from tailguard.data.splits import Split

    run = subject.trained
    spec = run.agent.spec
    if not isinstance(run.split, Split) or spec is None or run.bars.universe is not None:  # type: ignore[union-attr]
        return not_applicable("the bars are on disk, or a universe whose members come and go: they have no other order")
    known = {name: knowledge_of_order(run.agent, bars, subject.seed) for name, bars in equal_parts(subject).items()}
    # No bound: where returns depend on each other, a real stretch of bars lies farther from random orders than these do
    # from each other, for an agent without any skill too.
    measured = f"growth on test bars above that in {ORDERS} random orders of them, in standard deviations"
    return information(f"{measured}; on as many training bars {known['train']:.1f}", known["test"])


# --- the record ------------------------------------------------------------------------------------------------------


def _lines(layout: RunLayout) -> dict[int, dict[str, float]]:
    """The metrics of every iteration, by the step that it ended with."""
    found = {}
    for line in layout.metrics_path.read_text(encoding="utf-8").splitlines():
        values: dict[str, float] = json.loads(line)
        found[int(values[STEP])] = values
    return found


def first_learner(subject: Subject) -> Learner:
    """A fresh learner with the run's settings: its first member, where it has several."""
    from tailguard.runs.members import Members

    run = subject.trained
    return Members.on(run.config, run.split.train, run.config.training.seed).build(0).agent


def relative_gaps(recorded: Mapping[str, Any], now: Mapping[str, float]) -> dict[str, float]:
    """Gaps of the metrics that say what was computed, relative to the larger value."""
    gaps = {}
    for name in recorded.keys() & now.keys():
        one, other = recorded[name], now[name]
        if name.startswith(("time/", "eval/", "warn/")):
            continue
        if one is None or not math.isfinite(other):
            if (one is None) != (not math.isfinite(other)):
                gaps[name] = math.inf
            continue
        size = max(abs(one), abs(other))
        gaps[name] = abs(one - other) / size if size > 0 else 0.0
    return gaps


@register_check(
    "E2",
    "Do the settings, the bars and a checkpoint of the run give the next line of its record again?",
    why="A record that cannot be repeated was made with other bars, other settings or other code: the agent's numbers "
    "are then not those of what is in the folder.",
    remedy="Compare the versions and hashes in the checkpoint's manifest.json; bring back the bars, or train again.",
    of_run=True,
)
def record_is_repeatable(subject: Subject) -> Measurement:
    from tailguard.algorithm.saving import PARTS
    from tailguard.runs.checkpoint import CheckpointStore, data_hashes
    from tailguard.sealed import read_about

    run = subject.trained
    layout = run.layout.training_folders()[0]
    if run.layout.is_population() or not layout.metrics_path.is_file():
        return not_applicable("the record is that of a population, or there is none")
    lines = _lines(layout)
    steps = CheckpointStore(layout.path, {}).steps()
    following = {step: min((later for later in lines if later > step), default=0) for step in steps}
    chosen = next((step for step, later in following.items() if later), None)
    if chosen is None:
        return not_applicable("no checkpoint of the run has an iteration after it")
    # Sums depend on the number of threads: here it is that of the training, and not that of the audit.
    versions = read_about(layout.checkpoint_path(chosen), PARTS).get("versions") or {}
    torch.set_num_threads(versions.get("threads") or torch.get_num_threads())
    learner = first_learner(subject)
    changed = CheckpointStore(layout.path, data_hashes(learner.env)).restore(learner, chosen)
    learner.state.progress = chosen / run.config.training.total_timesteps
    gaps = relative_gaps(lines[following[chosen]], learner.iterate())
    about = f"relative gap of {len(gaps)} metrics of the iteration after step {chosen:,}"
    largest = max(gaps, key=gaps.__getitem__, default="no metric")
    if changed:
        # Other versions of a library, or another processor, sum in another order: a metric that is a difference of
        # sums then shows little of what it should.
        found = float(np.median(list(gaps.values()))) if gaps else math.nan
        words = ", ".join(f"{name} {then}, now {now}" for name, (then, now) in changed.items())
        return at_most(f"median {about}, with {words}", found, 1e-3, f"the largest is that of {largest}")
    # The same arithmetic gives the same bits.
    return at_most(f"largest {about}", gaps.get(largest, math.nan), 1e-9, f"it is that of {largest}")
