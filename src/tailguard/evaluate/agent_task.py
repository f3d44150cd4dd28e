"""What an agent sees and trades in a backtest: its task on new bars, with noise on its features or a faulty feed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.data.panel import Panel
from tailguard.envs.episodes import TradingTask
from tailguard.envs.spec import TradingSpec, task_for
from tailguard.experiment.faulty_feed import task_under
from tailguard.market import MarketConfig
from tailguard.robust.feed import Feed, parse_feed

if TYPE_CHECKING:
    from tailguard.data.bars import Bars


@dataclass(frozen=True)
class Conditions:
    """What is worse than it should be in a backtest, besides the market's costs."""

    noise: float = 0.0
    """Normal noise on each feature, in standard deviations of that feature over the bars."""
    seed: int = 0
    """Of the noise."""
    feed: Feed | None = None
    """Faults of the feed."""


def as_feed(feed: Feed | str | None) -> Feed | None:
    """The feed that a text describes, as `late:2`."""
    return parse_feed(feed) if isinstance(feed, str) else feed


def agent_task(
    spec: TradingSpec, bars: Bars, config: MarketConfig | None, dtype: torch.dtype, conditions: Conditions
) -> tuple[TradingTask, NDArray[np.bool_], Panel]:
    """The agent's task on these bars, the rows on which its features are defined, and the bars' arrays."""
    if conditions.feed is None:
        task, usable, panel = task_for(spec, bars, config, dtype)
    else:
        task, prepared = task_under(conditions.feed, spec, bars, config, dtype)
        usable, panel = prepared.usable, prepared.panel
    if conditions.noise:
        noisy = _perturbed(task.features, usable, conditions.noise, spec.scaler.clip, conditions.seed)
        task = replace(task, features=noisy)
    return task, usable, panel


def _perturbed(features: Tensor, usable: NDArray[np.bool_], noise: float, clip: float, seed: int) -> Tensor:
    """Scaled features [R, F] with noise, inside the bounds of the scaler; one that never varies has no noise."""
    deviation = features[torch.from_numpy(usable)].std(0, correction=0)
    drawn = np.random.default_rng(seed).standard_normal(tuple(features.shape), dtype=np.float32)
    return (features + noise * deviation * torch.from_numpy(drawn)).clamp(-clip, clip)
