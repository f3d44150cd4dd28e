"""The paper venue as a process of its own: a REST and WebSocket interface on localhost, like Binance's futures."""
