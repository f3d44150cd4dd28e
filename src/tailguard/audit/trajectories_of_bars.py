"""Checks of trajectories on bars: when orders fill and earn, what features see, and where the parts of a split lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailguard.audit.promises import FREE, random_panel
from tailguard.audit.registry import Measurement, at_most, none_of, register_check
from tailguard.audit.subject import Subject
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler
from tailguard.data.splits import Split, split_bars, split_times, traded_times, walk_forward
from tailguard.data.windows import size_in_bars, walk_forward_windows
from tailguard.envs.trading import TradingEnv
from tailguard.market import Market, MarketConfig, build_market, open_accounts, step

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

# --- fills -----------------------------------------------------------------------------------------------------------

ROWS, DECIDED = 8, 3
"""Bars of the flat market, and the row at whose close the one order is decided."""
JUMP = 0.1


def with_jump(panel: Panel, row: int, place: str) -> Panel:
    """Constant prices with one jump: inside the bar of this row, or from the close before to its open."""
    opens, closes = np.full((2, ROWS, 1), 100.0)
    closes[row:] *= 1 + JUMP
    opens[row if place == "gap" else row + 1 :] *= 1 + JUMP
    return replace(
        panel, open=opens, close=closes, high=np.maximum(opens, closes), low=np.minimum(opens, closes),
        volume=np.full((ROWS, 1), 1e12),
    )  # fmt: skip


def _earned_by_step(market: Market) -> float:
    state = open_accounts(torch.zeros(1, dtype=torch.int64), 1, market.dtype)
    for row in range(ROWS - 1):
        state, _ = step(market, state, torch.full((1, 1), float(row == DECIDED), dtype=market.dtype))
    return float(state.equity) - 1


def _earned_in_env(panel: Panel, config: MarketConfig) -> float:
    bars = PreparedBars(
        panel, np.zeros((ROWS, 1), np.float32), ("nothing",), np.ones(ROWS, bool),
        Scaler(("nothing",), ("-",), np.zeros(1), np.ones(1)),
    )  # fmt: skip
    env = TradingEnv(bars, config, num_envs=1, episode_length=ROWS - 1, reward="simple", dtype=torch.float64)
    env.reset(seed=0)
    total = 1.0
    for row in range(ROWS - 1):
        total *= 1 + float(env.step(torch.full((1, 1), float(row == DECIDED))).reward)
    return total - 1


@register_check(
    "T6",
    "Does an order fill at the next open, and earn from there?",
    why="An order that fills at the close it was decided on, or earns the gap before its fill, trades on prices that "
    "it has already seen: the usual reason of a backtest that is too good.",
    remedy="See market/simulator.py: the gap belongs to the old position, the move of the next bar to the new one.",
    fast=True,
)
def orders_fill_at_the_next_open(subject: Subject) -> Measurement:
    from tailguard.evaluate.backtest import backtest

    config = MarketConfig(**FREE)
    orders = np.zeros((ROWS, 1))
    orders[DECIDED] = 1.0
    gaps, where = [0.0], ""
    for row in range(1, ROWS):
        for place in ("gap", "inside"):
            panel = with_jump(random_panel(subject.seed, ROWS), row, place)
            # Bought at the open of the next bar, sold at the open of the one after it.
            wanted = JUMP if (place, row) in (("inside", DECIDED + 1), ("gap", DECIDED + 2)) else 0.0
            results = {
                "market": _earned_by_step(build_market(panel, config, dtype=torch.float64)),
                "environment": _earned_in_env(panel, config),
                "backtest": float(backtest(orders, panel_bars(panel), config, progress_bar=False).equity[-1]) - 1,
            }
            for name, earned in results.items():
                if abs(earned - wanted) > max(1e-6, *gaps):
                    where = f"{name}: a jump at bar {row} ({place}) earns {earned:.3f}, should be {wanted:.3f}"
                gaps.append(abs(earned - wanted))
    # The environment's rewards are float32.
    return at_most(f"|earned − planted jump| of an order decided at bar {DECIDED}, jumps at every bar", max(gaps), 1e-6,
                   where)  # fmt: skip


def panel_bars(panel: Panel) -> Bars:
    """The panel's one symbol as bars."""
    import polars as pl

    from tailguard.data.bars import TIME_TYPE, Bars

    columns = {name: getattr(panel, name)[:, 0] for name in ("open", "high", "low", "close", "volume")}
    frame = pl.DataFrame({"symbol": list(panel.symbols) * panel.rows, "time": panel.time, **columns})
    frame = frame.with_columns(pl.col("time").cast(TIME_TYPE), segment=pl.Series(panel.segment, dtype=pl.Int32))
    return Bars(frame, timedelta(milliseconds=panel.frequency_ms), "a market with one jump")


# --- features --------------------------------------------------------------------------------------------------------


def longest_stretch(bars: Bars, most: int) -> Bars:
    """The end of the longest stretch without a gap, of at most so many bars of each symbol."""
    import polars as pl

    counts = bars.frame.group_by("symbol", "segment").len().sort("len", "segment")
    chosen = bars.frame.join(counts.tail(1), on=["symbol", "segment"], how="semi")["time"].tail(most)
    return replace(bars, frame=bars.frame.filter(pl.col("time").is_in(chosen.implode())), first=None)


@register_check(
    "T7",
    "Does no feature see the future?",
    why="A feature that knows one bar too much makes every backtest shine, and the account lose.",
    remedy="Use shift with positive numbers alone, and rolling windows that end at the bar; a published value counts "
    "from its time of publication. tailguard.data.features.leaking_features names the bar.",
    fast=True,
    reads_run=True,
)
def features_are_causal(subject: Subject) -> Measurement:
    from tailguard.data.features import available_features, leaking_features, longest_warmup
    from tailguard.envs.prepared_market import PreparedMarket

    bars, names, about = subject.bars, None, "the synthetic market"
    if subject.run is not None and not isinstance(subject.trained.bars, PreparedMarket):
        names = subject.config.data.features or None
        bars, about = subject.trained.bars, "the run's bars"
    bars = longest_stretch(bars, longest_warmup(bars, names) + 400)
    leaks = leaking_features(bars, names, probes=4, seed=subject.seed)
    count = len(available_features(bars) if names is None else names)
    return none_of(f"of {count} features on {about}, those whose past changes with the future", map(str, leaks))


# --- splits ----------------------------------------------------------------------------------------------------------


def wrong_parts(
    about: str, parts: dict[str, range], sizes: dict[str, int], least: dict[str, int], count: int
) -> Iterator[str]:
    """Parts of a split, in order, that overlap, lie too near, or have another size than was asked for."""
    for name, size in sizes.items():
        if len(parts[name]) != size:
            yield f"{about}: {name} has {len(parts[name])} bars, not {size}"
    known = [(name, part) for name, part in parts.items() if len(part)]
    for (name, part), (after, following) in pairwise(known):
        if following.start - part.stop < least[after]:
            yield f"{about}: {following.start - part.stop} bars from {name} to {after}, not {least[after]}"
    if not all(part.start >= 0 and part.stop <= count for _, part in known):
        yield f"{about}: a part lies outside of the {count} bars"


def _wrong_windows(draw: np.random.Generator) -> Iterator[str]:
    """Random sizes, for the split of a run and for a walk forward."""
    start, hour = datetime(2021, 1, 1), timedelta(hours=1)
    for _ in range(40):
        count, embargo = int(draw.integers(60, 400)), int(draw.integers(0, 12))
        shares = draw.uniform(0.05, 0.35, 2)
        times = [start + row * hour for row in range(count)]
        made = split_times(times, hour, validation=float(shares[0]), test=float(shares[1]), embargo=embargo)
        usable = count - 2 * embargo
        sizes = {"validation": math.floor(shares[0] * usable), "test": math.floor(shares[1] * usable)}
        sizes["train"] = usable - sum(sizes.values())
        parts = {"train": made.train, "validation": made.validation, "test": made.test}
        about = f"{count} bars, embargo {embargo}"
        yield from wrong_parts(about, parts, sizes, dict.fromkeys(parts, embargo), count)

        folds, test, validation = (int(draw.integers(1, high)) for high in (5, 8, 6))
        train = int(draw.integers(5, 15))
        windows = walk_forward_windows(
            count, folds=folds, train=train, test=test, validation=validation, gap=min(embargo, 6),
            expanding=bool(draw.integers(2)),
        )  # fmt: skip
        for number, fold in enumerate(windows):
            parts = {"train": fold.train, "validation": fold.validation, "test": fold.test}
            yield from wrong_parts(f"fold {number + 1} of {folds}, {about}", parts,
                                   {"validation": validation, "test": test},
                                   dict.fromkeys(parts, min(embargo, 6)), count)  # fmt: skip
        for one, two in pairwise(windows):
            if two.test.start != one.test.stop:
                yield f"walk forward, {about}: test windows do not follow each other"


def _wrong_times(split: Split, embargo: int, bars: Bars) -> Iterator[str]:
    """Traded bars of the parts of a split, by their times among those of all bars."""
    order = {time: row for row, time in enumerate(traded_times(bars))}
    parts: dict[str, range] = {}
    for name in ("train", "validation", "test"):
        rows = [order[time] for time in traded_times(getattr(split, name))]
        parts[name] = range(rows[0], rows[-1] + 1)
        if len(rows) != len(parts[name]):
            yield f"{name} has {len(rows)} bars from row {rows[0]} to {rows[-1]}"
    yield from wrong_parts(bars.source, parts, {}, dict.fromkeys(parts, embargo), len(order))


def _in_bars(subject: Subject, size: str) -> int:
    bars = subject.trained.part("train")
    return size_in_bars("data.embargo", size, 0, bars.frequency, 0, bars.sessions)


MEMBERS, EPISODE, EMBARGO = 2, 24, 30
"""Members of a run, and the bars of their episodes and of the embargo around the fold that each leaves out."""


def _wrong_folds(subject: Subject) -> Iterator[str]:
    """Bars of its own fold that a member trades in training, or of the embargo around it."""
    from tailguard.config import load_config
    from tailguard.experiment.build import trading_env
    from tailguard.runs.members import Members

    own = {"env.num_envs": 64, "env.episode_length": EPISODE, "data.features": "[return_24]", "risk.limit": -0.04,
           "training.members": MEMBERS, "data.embargo": f"{EMBARGO}h", "pathwise.n_steps": EPISODE}  # fmt: skip
    config = load_config(overrides=[f"{name}={value}" for name, value in own.items()])
    members = Members.on(config, subject.bars, subject.seed)
    for number in range(MEMBERS):
        member = members.build(number)
        env, fold = trading_env(member.agent), member.fold
        assert fold is not None  # each of several members leaves one out
        time, traded = env.prepared.panel.time, set[int]()
        for _ in range(4):
            member.agent.iterate()
            env.reset(subject.seed)
            state = env.state
            assert state is not None  # it was reset
            rows = state.market.row.unsqueeze(1) + torch.arange(EPISODE + 1)
            traded |= set(time[rows.numpy().ravel()].tolist())
        near = EMBARGO * subject.bars.frequency // timedelta(milliseconds=1)
        seen = [moment for moment in traded if fold.first_ms - near <= moment < fold.last_ms + near]
        if seen:
            yield f"member {number + 1} trains on {len(seen)} bars of its fold"
        if len(member.held_out().starts) == 0:
            yield f"member {number + 1} has no episodes of its fold to be judged on"


@register_check(
    "T8",
    "Are the parts of a split apart, as far as asked, and of the sizes asked for, and the folds of a run's members?",
    why="One bar in two parts, or an embargo that is not kept, lets the test show what training has seen. A member "
    "that trains on its own fold calibrates its exposure on bars that it knows by heart.",
    remedy="See data/windows.py, data/splits.py and envs/folds.py; compare the line split of tailguard train with "
    "data.embargo.",
    fast=True,
    reads_run=True,
)
def splits_are_apart(subject: Subject) -> Measurement:
    draw = np.random.default_rng(subject.seed)
    wrong = list(_wrong_windows(draw))
    split = split_bars(subject.bars, validation=0.2, test=0.2, embargo=24)
    wrong += _wrong_times(split, 24, subject.bars)
    for fold in walk_forward(subject.bars, folds=3, test=100, purge=10, embargo=14):
        tested = traded_times(fold.test)
        trained = traded_times(fold.train)
        if len(tested) != 100 or (tested[0] - trained[-1]) // subject.bars.frequency != 25:
            wrong.append(f"{fold.describe()}: not 100 bars, 24 after the training")
    if subject.run is not None and isinstance(subject.trained.split, Split):
        bars = subject.trained.bars
        assert not hasattr(bars, "train")  # a split is one of bars in memory
        wrong += _wrong_times(subject.trained.split, _in_bars(subject, subject.config.data.embargo), bars)
    wrong += _wrong_folds(subject)
    return none_of("wrong parts of 40 random splits, walks forward, splits of bars, and folds of members", wrong)
