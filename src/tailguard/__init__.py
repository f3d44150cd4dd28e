"""Tailguard: trading agents that respect a tail-risk budget.

Names are imported when first used, so that the numeric core needs only torch and numpy, and
`tailguard --help` answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tailguard import deprecated
from tailguard._version import __version__

if TYPE_CHECKING:
    from tailguard.algorithm.ensemble import Ensemble as Ensemble
    from tailguard.algorithm.ensemble import load_agent as load_agent
    from tailguard.algorithm.pathwise import PathwiseLearner as PathwiseLearner
    from tailguard.algorithm.ppo import DistributionalPPO as DistributionalPPO
    from tailguard.data.bars import Bars as Bars
    from tailguard.data.features import compute_features as compute_features
    from tailguard.data.published import with_published as with_published
    from tailguard.data.registry import feature as feature
    from tailguard.data.sources import load_bars as load_bars
    from tailguard.data.splits import split_bars as split_bars
    from tailguard.data.splits import walk_forward as walk_forward
    from tailguard.data.synthetic import make_market as make_market
    from tailguard.envs.constraints import Constraints as Constraints
    from tailguard.envs.prepared_market import open_market as open_market
    from tailguard.envs.randomisation import Randomisation as Randomisation
    from tailguard.envs.trading import TradingEnv as TradingEnv
    from tailguard.errors import BarsError as BarsError
    from tailguard.errors import BarsWarning as BarsWarning
    from tailguard.errors import ConfigError as ConfigError
    from tailguard.errors import TailguardError as TailguardError
    from tailguard.evaluate.backtest import backtest as backtest
    from tailguard.market.config import MarketConfig as MarketConfig
    from tailguard.risk.config import RiskConfig as RiskConfig

_PUBLIC = {
    "Bars": "tailguard.data.bars",
    "BarsError": "tailguard.errors",
    "BarsWarning": "tailguard.errors",
    "ConfigError": "tailguard.errors",
    "Constraints": "tailguard.envs.constraints",
    "DistributionalPPO": "tailguard.algorithm.ppo",
    "Ensemble": "tailguard.algorithm.ensemble",
    "MarketConfig": "tailguard.market.config",
    "PathwiseLearner": "tailguard.algorithm.pathwise",
    "Randomisation": "tailguard.envs.randomisation",
    "RiskConfig": "tailguard.risk.config",
    "TailguardError": "tailguard.errors",
    "TradingEnv": "tailguard.envs.trading",
    "backtest": "tailguard.evaluate.backtest",
    "compute_features": "tailguard.data.features",
    "feature": "tailguard.data.registry",
    "split_bars": "tailguard.data.splits",
    "walk_forward": "tailguard.data.splits",
    "with_published": "tailguard.data.published",
    "load_agent": "tailguard.algorithm.ensemble",
    "load_bars": "tailguard.data.sources",
    "make_market": "tailguard.data.synthetic",
    "open_market": "tailguard.envs.prepared_market",
}

__all__ = [*sorted(_PUBLIC), "__version__"]

deprecated.install()

try:
    import gymnasium
except ImportError:  # the numeric core runs without it
    pass
else:
    # Both entry points are names, imported when an environment is made.
    gymnasium.register(
        id="tailguard/Trading-v0",
        entry_point="tailguard.envs.gym_trading:TradingGymEnv",
        vector_entry_point="tailguard.envs.gym_trading:TradingGymVectorEnv",
    )


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tailguard' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
