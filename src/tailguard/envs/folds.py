"""Folds of the training bars: stretches of time, each of which one agent does not train on and is judged on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tailguard.envs.feed_copies import MixedStarts
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.validate import check_count

MOST_STARTS = 50_000_000
"""Episode starts that are listed one by one; a larger market is not cut into folds."""


@dataclass(frozen=True)
class EpisodeFold:
    """One of several stretches of time with equally many episode starts."""

    first_ms: int
    """Open time of its first bar, in milliseconds."""
    last_ms: int
    """Open time of its last bar."""
    inside: Tensor
    """Rows of the episodes that lie inside it, [S] int64."""
    outside: Tensor
    """Rows of the episodes that come no closer to it than an embargo, [S] int64."""


def cut_folds(env: TradingEnv, folds: int, embargo_ms: int) -> list[EpisodeFold]:
    """Cut the episodes of an environment into folds by time.

    To leave a fold out, restrict the environment to the starts outside (`TradingEnv.restrict_starts`). Features look
    back, so no episode outside is closer to the fold than the embargo. Rescaled copies of the bars are left out by the
    same times; an agent is judged on the bars themselves.
    """
    check_count("folds", folds, low=2)
    # The folds of randomised bars are those of the clean ones.
    starts = env.starts.rows if isinstance(env.starts, MixedStarts) else env.starts
    count = starts.shape[0]
    if count > MOST_STARTS:
        raise ConfigError(f"training.members: {count:,} episode starts are too many to cut into folds; set it to 1")
    rows = starts.index_select(0, torch.arange(count, device=env.device)).cpu().numpy()
    time = np.asarray(env.prepared.panel.time)
    begin, end = time[rows], time[rows + env.episode_length]
    edges = np.quantile(begin, np.arange(folds + 1) / folds, method="nearest").astype(np.int64)
    edges[-1] = end.max() + 1
    cut = []
    for first, stop in pairwise(edges.tolist()):
        inside = (begin >= first) & (end < stop) & (rows < env.prepared.own_rows)
        outside = (end < first - embargo_ms) | (begin >= stop + embargo_ms)
        if not inside.any() or not outside.any():
            raise ConfigError(
                f"training.members: {folds} folds of {count:,} possible episodes of {env.episode_length:,} bars are "
                "too short to train without one and to judge on it. Use fewer members, shorter episodes or more bars"
            )
        last = int(end[inside].max())
        cut.append(EpisodeFold(first, last, torch.as_tensor(rows[inside]), torch.as_tensor(rows[outside])))
    return cut
