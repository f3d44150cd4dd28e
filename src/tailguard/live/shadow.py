"""The account of a shadow session: the simulator's, one bar at a time, as the bars close."""

from __future__ import annotations

from tailguard.live.decide import AccountAtClose, LiveDecider
from tailguard.market.serial import SerialAccount


class SimulatedAccount:
    """The account that a backtest of the same bars has, bit for bit."""

    def __init__(self, decider: LiveDecider) -> None:
        self.decider = decider
        self._account: SerialAccount | None = None
        self._restored: tuple[float, list[float]] | None = None

    def restore(self, equity: float, weights: list[float]) -> None:
        """Go on from the close before the next bar."""
        self._restored = equity, list(weights)

    def close_bar(self, target: list[float] | None) -> bool:
        """Trade the target, decided at the close before, over the bar that has just closed."""
        task, panel, row = self.decider.task, self.decider.panel, self.decider.row
        if self._account is None:
            self._account = SerialAccount(task.market, row)
        account = self._account
        account.read(task.market)
        if self._restored is not None:
            (account.equity, account.weights), self._restored = self._restored, None
        if target is None:
            account.row = row
            return False
        account.row = row - 1
        if panel.segment[row] != panel.segment[row - 1]:
            # The table has no price change over a gap. A backtest is flat there; what is held in a market is not.
            jumps = (panel.open[row] / panel.close[row - 1] - 1).tolist()
            gains = [weight * jump for weight, jump in zip(account.weights, jumps, strict=True)]
            growth = 1 + sum(gains)
            account.weights = [(weight + gain) / growth for weight, gain in zip(account.weights, gains, strict=True)]
            account.equity *= growth
        return account.step(target)

    def at_close(self) -> AccountAtClose:
        assert self._account is not None
        account = self._account
        return AccountAtClose(account.row, account.equity, list(account.weights), list(account.unfilled))
