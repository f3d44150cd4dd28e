"""Walk forward: an agent a fold, trained on the past and tested on what follows, and all tests put together.

What one lucky test period hides, many in a row show. A fold that is finished stays on disk and is not trained again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.config import RunConfig, to_dict, to_yaml
from tailguard.data.splits import Fold, walk_forward
from tailguard.data.windows import Size
from tailguard.errors import CheckpointError, ConfigError
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import HOLD, standard_baselines
from tailguard.evaluate.significance import SeedSummary, iqm_over_seeds
from tailguard.evaluate.trained import AGENT, build_agent
from tailguard.monitor.writers import JsonlWriter
from tailguard.sealed import replace_synced
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

PLAN = "walk_forward.json"
SETTINGS = "settings.yaml"
"""Not config.yaml, by which a folder is known as that of a single run."""
LOCK = ".lock"
"""File of whoever holds the folder."""


@dataclass(frozen=True)
class Plan:
    """How the bars are cut and how often each fold is trained."""

    folds: int = 5
    """Test windows, one after the other, up to the last bar."""
    seeds: int = 1
    """Agents a fold, with seeds that count up from training.seed."""
    train: Size = 0.5
    """Training bars of a fold, of the first one if `expanding`."""
    expanding: bool = False
    """Training keeps its first bar and grows with every fold; else it moves along."""

    def __post_init__(self) -> None:
        check_count("folds", self.folds, low=2)
        check_count("seeds", self.seeds)


@dataclass(frozen=True)
class WalkForward:
    """What all folds and seeds did on bars that came after their training."""

    folds: tuple[Fold, ...]
    results: tuple[tuple[BacktestResult, ...], ...]
    """Test results by seed and fold, each from a flat account."""
    stitched: tuple[BacktestResult, ...]
    """One account through all test windows, by seed: the agents' decisions one after the other, positions carried."""
    baselines: dict[str, BacktestResult]
    """The baselines over the same bars."""

    @property
    def sharpes(self) -> NDArray[np.float64]:
        """Yearly Sharpe ratio of each seed and fold, [seeds, folds]; NaN where an agent never traded."""
        return np.array([[result.metrics["sharpe"] for result in each] for each in self.results])

    def over_seeds(self, generator: np.random.Generator) -> SeedSummary | None:
        """Interquartile mean of the Sharpe ratios over seeds and folds; none for one seed, or an undefined ratio."""
        defined = len(self.results) > 1 and np.isfinite(self.sharpes).all()
        return iqm_over_seeds(self.sharpes, generator) if defined else None


def plan_folds(config: RunConfig, bars: Bars, plan: Plan) -> list[Fold]:
    """The folds of a plan. An episode's length is purged, and the embargo left out, before every test window."""
    return walk_forward(
        bars,
        folds=plan.folds,
        train=plan.train,
        purge=config.env.episode_length,
        embargo=config.data.embargo,
        expanding=plan.expanding,
    )


def run_walk_forward(
    config: RunConfig,
    bars: Bars,
    folder: Path,
    plan: Plan,
    *,
    say: Callable[[str], None] = lambda _: None,
    progress_bar: bool = False,
) -> WalkForward:
    """Train every fold that is not finished in `folder`, test it, and put the tests together.

    `folder`: begun here, or by an earlier call with the same settings, bars and plan, which then goes on.
    `say`: called with a line for every fold when it begins.
    """
    folds = plan_folds(config, bars, plan)
    _claim(folder, config, bars, plan, folds)
    results: list[tuple[BacktestResult, ...]] = []
    for number in range(plan.seeds):
        seed = config.training.seed + number
        own = []
        for fold in folds:
            place = folder / f"fold_{fold.number}" / f"seed_{seed}"
            done = (place / AGENT).is_dir()
            what = "is finished" if done else "trains"
            say(f"fold {fold.number} of {len(folds)}, seed {seed}, {what}: {fold.describe().partition(': ')[2]}")
            agent = _finished(place) if done else _train(config, fold, seed, place, progress_bar)
            own.append(backtest(agent, fold.test))
        results.append(tuple(own))
    tested = bars.between(folds[0].test.start, bars.end_points[1] + bars.frequency)
    return WalkForward(
        folds=tuple(folds),
        results=tuple(results),
        stitched=tuple(stitch(each, tested, config) for each in results),
        baselines={
            name: backtest(policy, tested, config.market)
            for name, policy in standard_baselines(config.market.leverage, config.market.allow_short).items()
        },
    )


def stitch(results: Sequence[BacktestResult], bars: Bars, config: RunConfig) -> BacktestResult:
    """One account that follows the decisions of one result after the other.

    Going from one agent's position to the next one's is a trade and costs what trades cost. Between the last decision
    of a fold and the first of the next, a bar, the position is held.
    """
    panel = bars.panel("portfolio")
    targets = np.full((panel.rows, panel.assets), HOLD)
    for result in results:
        rows = np.searchsorted(panel.time, result.time) - 1
        targets[rows] = result.targets
    return backtest(targets, bars, config.market)


def _train(config: RunConfig, fold: Fold, seed: int, place: Path, progress_bar: bool) -> DistributionalPPO:
    place.mkdir(parents=True, exist_ok=True)
    figures = place / "metrics.jsonl"
    figures.write_bytes(b"")  # of a training that was cut short
    agent = build_agent(config, fold.train, seed)
    agent.learn(config.training.total_timesteps, callback=[JsonlWriter(figures)], progress_bar=progress_bar)
    # The folder appears whole, by a rename: that it is there means that the fold is finished.
    agent.save(place / AGENT)
    return agent


def _finished(place: Path) -> DistributionalPPO:
    try:
        return DistributionalPPO.load(place / AGENT)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Remove {place} to train this fold again") from error


def _claim(folder: Path, config: RunConfig, bars: Bars, plan: Plan, folds: Sequence[Fold]) -> None:
    """Write down what is begun here; or make sure that what was begun is the same."""
    wanted = {
        "settings": to_dict(config),
        "bars": {"sha256": _digest(bars)},
        "sizes": {"folds": plan.folds, "train": plan.train, "expanding": plan.expanding},
        "folds": [fold.describe() for fold in folds],
    }
    path = folder / PLAN
    if path.is_file():
        begun = json.loads(path.read_text(encoding="utf-8"))
        for part, value in wanted.items():
            if begun.get(part) != value:
                how = _first_difference(begun.get(part), value)
                raise ConfigError(
                    f"{folder}: this walk forward was begun with other {part}: {how}. Go on with the same ones, or "
                    "choose another --name"
                )
        return
    if folder.exists() and any(item.name != LOCK for item in folder.iterdir()):
        raise ConfigError(f"{folder}: the folder exists already and holds no walk forward; choose another --name")
    folder.mkdir(parents=True, exist_ok=True)
    replace_synced(folder / SETTINGS, to_yaml(config).encode())
    replace_synced(path, (json.dumps(wanted, indent=2) + "\n").encode())


def _digest(bars: Bars) -> str:
    """SHA-256 of times and prices."""
    panel, digest = bars.panel("portfolio"), hashlib.sha256()
    for column in (panel.time, panel.open, panel.high, panel.low, panel.close, panel.volume):
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def _first_difference(then: Any, now: Any, where: str = "") -> str:
    """Where two settings part, and how."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in now:
            if then.get(key) != now[key]:
                return _first_difference(then.get(key), now[key], f"{where}.{key}".lstrip("."))
    return f"{where or 'it'} was {then!r} and is {now!r}"
