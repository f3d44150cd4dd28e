"""From a trained agent to a market: shadow and paper trading, with a journal, guards and a kill switch."""
