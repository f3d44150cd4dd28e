"""Market simulator: target weights in, net equity out. Batched over environments and assets, on any device."""

from tailguard.market.config import MarketConfig
from tailguard.market.simulator import Transition, step
from tailguard.market.state import MarketState, open_accounts
from tailguard.market.tables import Market, build_market

__all__ = ["Market", "MarketConfig", "MarketState", "Transition", "build_market", "open_accounts", "step"]
