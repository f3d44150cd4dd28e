"""A trading session: bar by bar from a closed bar to a decision, and from a decision to orders whose outcome is known.

Without a venue the session is a shadow: the account is simulated, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from tailguard.errors import ConfigError, TailguardError
from tailguard.evaluate.decision import Decision
from tailguard.live.bar_history import BarSource, LiveBar
from tailguard.live.decide import AccountAtClose, BarDecider
from tailguard.live.guards import Breach, GuardConfig, Guards
from tailguard.live.journal import Journal, nowhere
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig, OrderDesk, Wanted, size_order
from tailguard.live.reconcile import plain, reconcile
from tailguard.live.session_state import Ledger
from tailguard.live.stake import describe
from tailguard.live.venue import Clock, OutcomeUnknown, Venue, VenueAccount

FLATTEN_ROUNDS = 20
"""Attempts at closing a position for a kill, as when each is filled in part. A venue that does not answer is waited
for, however long it takes."""


def increases(held: Decimal, quantity: Decimal) -> bool:
    """Whether an order makes a position larger, or reverses it."""
    return abs(held + quantity) > abs(held) or held * (held + quantity) < 0


class Killed(TailguardError):
    """Trading has ended until a person releases it."""


class ShadowAccount(Protocol):
    """A simulated account that fills the last decision at the bar that has just closed."""

    def close_bar(self, target: list[float] | None) -> bool:
        """Trade the target over the bar; returns whether the account was liquidated. None: no decision yet."""
        ...

    def restore(self, equity: float, weights: list[float]) -> None: ...

    def at_close(self) -> AccountAtClose: ...


@dataclass(frozen=True)
class SessionConfig:
    """What a session trades and by which limits."""

    run: str
    """Name of the run and of the session; part of every client id."""
    mode: str
    symbols: tuple[str, ...]
    capital: float
    """Equity 1, in the quote currency."""
    leverage: float
    bar_ms: int
    window: int
    """Bars of a window of the budget: the agent's episode length."""
    guards: GuardConfig
    orders: OrderConfig
    ceiling: float = math.inf
    """Largest equity that positions are sized by, in the quote currency."""


class Session:
    """One account, one agent, one journal."""

    def __init__(
        self,
        config: SessionConfig,
        decider: BarDecider,
        journal: Journal,
        clock: Clock,
        kill: KillSwitch,
        *,
        venue: Venue | None = None,
        shadow: ShadowAccount | None = None,
        about: dict[str, Any] | None = None,
        crash_point: Callable[[str], None] = nowhere,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stop`: whether a person wants the session to end; long waits for the venue ask it."""
        if (venue is None) == (shadow is None):
            raise ValueError("a session has a venue or a shadow account")
        self.config, self.decider, self.clock, self.kill = config, decider, clock, kill
        self.venue, self.shadow, self.stop = venue, shadow, stop
        self.ledger = Ledger(journal, clock.now)
        self.guards = Guards(config.guards, config.capital, config.leverage, config.bar_ms)
        self.desk = (
            None
            if venue is None
            else OrderDesk(venue, clock, self.ledger, self.guards, kill, config.orders, config.run, crash_point)
        )
        self.account = VenueAccount(config.capital, {})
        """The venue's, as last seen."""
        self.is_confirmed = config.mode != "live"
        """Whether a person has agreed to what this session will do."""
        self._skipping: str | None = None
        """Why the last bars were not traded on; each reason is told once until it ends."""
        if self.ledger.state.started is None:
            self.ledger.record(
                "start",
                run=config.run,
                mode=config.mode,
                symbols=list(config.symbols),
                capital=config.capital,
                window=config.window,
                **(about or {}),
            )
        else:
            self.ledger.record("resume", dropped_bytes=journal.dropped)

    # --- start and end ------------------------------------------------------------------------------------------------

    def confirm(self, terms: Mapping[str, Any], person: str | None) -> None:
        """A person agrees to these terms. None: nobody is there, and the terms must be those that a person has
        agreed to before."""
        if person is not None:
            self.ledger.record("confirm", by=person, terms=dict(terms))
        confirmed = self.ledger.state.confirmed
        if confirmed is None or confirmed["terms"] != terms:
            raise ConfigError(
                f"{self.config.run}: nobody has confirmed these terms: {describe(terms)}. Start the same command once "
                "in a terminal, without --service, and type the confirmation"
            )
        self.is_confirmed = True

    def start(self) -> None:
        """Bring bars, memory and books back to where the journal ends; raises `Killed` if trading has ended."""
        if not self.is_confirmed:
            raise ConfigError(f"{self.config.run}: live trading needs a confirmation, by Session.confirm")
        state = self.ledger.state
        if state.bars:
            self.decider.read(*state.bars)
            self.decider.restore(state.decisions)
            state.forget_bars()
        last = state.last_decision
        if self.shadow is not None and last is not None:
            self.shadow.restore(last["equity"], last["weights"])
        can_trade = True
        if self.desk is not None:
            if last is not None:
                self.account = VenueAccount(
                    last["cash"], {each: state.ours[each] + state.foreign[each] for each in state.ours}
                )
            can_trade = self._reach_venue()
            if last is None and not can_trade:
                raise TailguardError("the venue cannot be reached; nothing was sent. Start again when it answers")
        self.obey_kill()
        if state.bars and (last is None or last["bar"] != state.bars[-1].time_ms):
            # The process ended between a bar and its decision.
            self._decide(state.bars[-1])
        elif last is not None and can_trade and not self._is_stale(state.bars[-1]):
            self._trade(state.bars[-1], last["target"])
        self.obey_kill()

    def run(self, source: BarSource, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Trade until the source ends or a stop is asked for; raises `Killed` when the kill switch trips."""
        while not stop():
            bar = source.next_bar()
            if bar is None:
                break
            self.on_bar(bar)
        self.obey_kill()
        self.ledger.record("stop")

    def release(self, person: str) -> None:
        """Go on after a kill or a freeze, by the word of a person."""
        last = self.ledger.state.last_decision
        self.ledger.record("release", by=person, equity=None if last is None else last["equity"])
        # The record first: a crash in between leaves the switch tripped.
        self.kill.release()

    def obey_kill(self) -> None:
        """Raise `Killed` if the kill switch is tripped, after settling our orders and closing positions if asked to."""
        state = self.ledger.state
        if self.kill.is_tripped():
            wants_flat = self.kill.wants_flat()
            if state.killed is None or (wants_flat and not state.flatten_due and any(state.ours.values())):
                self.ledger.record("kill", message=self.kill.message(), flatten=wants_flat)
        if state.killed is None:
            return
        # A file that was deleted by hand does not release anything. The journal holds the kill without it, too.
        with contextlib.suppress(OSError):
            self.kill.trip(state.killed, flatten=state.flatten_due)
        if self.desk is not None:
            for intent in state.open_intents:
                self.desk.settle(intent)
            if state.flatten_due:
                self._flatten()
        held = {symbol: size for symbol, size in state.ours.items() if size}
        self.ledger.record(
            "settled",
            simulated=self.desk is None,
            cancelled=0 if self.desk is None else self.desk.cancelled_now,
            in_flight=len(state.open_intents),
            positions={symbol: f"{size.normalize():+f}" for symbol, size in held.items()},
        )
        told = ", ".join(f"{symbol} {size.normalize():+f}" for symbol, size in held.items())
        raise Killed(
            f"killed: {state.killed}. Positions of ours: {told or 'none'}. To go on, a person runs the same command "
            "with --release"
        )

    # --- a bar --------------------------------------------------------------------------------------------------------

    def on_bar(self, bar: LiveBar) -> None:
        """Take in a closed bar, decide, and trade if the bar is fresh."""
        self.obey_kill()
        state = self.ledger.state
        if state.bars and bar.time_ms <= state.bars[-1].time_ms:
            return  # a source may repeat bars after it was disconnected
        breach = self.guards.bar(bar, state.bars[-1] if state.bars else None)
        if breach is not None:
            self._freeze(breach)
            if breach.guard == "inconsistent_bar":
                return  # it is missing from now on, and what follows is a gap
        self.ledger.record("bar", **bar.to_dict())
        self.decider.read(bar)
        state.forget_bars()
        self._decide(bar)
        self.obey_kill()

    def _decide(self, bar: LiveBar) -> None:
        state = self.ledger.state
        last = state.last_decision
        liquidated = self.shadow is not None and self.shadow.close_bar(None if last is None else last["target"])
        can_trade = self.desk is None or self._reach_venue()
        account = self._account_at(bar)
        if liquidated:
            self.kill.trip("the simulated account was liquidated")
        breach = self.guards.account(account.equity, state) or self.guards.errors(state, self.clock.now())
        if breach is not None:
            self.kill.trip(f"{breach.guard}: {breach.message}")
        if not math.isfinite(account.equity):
            self.obey_kill()  # nothing can be decided, and the state must not take it in
        content: dict[str, Any] = {
            "equity": account.equity,
            "weights": list(account.weights),
            "cash": self.account.cash,
        }
        if self.decider.can_decide(account.row):
            memory = self.decider.prepare(account)
            decision = self._decision(account)
            age = memory["window"][2] % self.config.window
            content |= {"unfilled": list(account.unfilled), "memory": memory, "age": age, "flat": False}
            content |= {"target": decision.target, "throttle": decision.throttle, "shielded": decision.shielded}
        else:
            # Features warm up again after a gap. A backtest holds nothing there, and neither does a session.
            content |= {"target": [0.0] * len(self.config.symbols), "flat": True}
        self.ledger.record("decision", bar=bar.time_ms, **content)
        if can_trade:
            self._trade(bar, content["target"])
        elif not self.kill.is_tripped():
            self._skip("venue", f"no orders: the venue has not answered for {self.config.orders.patience_s:g} s")
        # Last, so that no order waits for it.
        moved = None if content["flat"] else self.decider.explain(account)
        if moved is not None:
            self.ledger.record("explanation", bar=bar.time_ms, moved=moved)

    def _decision(self, account: AccountAtClose) -> Decision:
        """What the decider wants. Where that is no number, or an error, trading ends: nobody decides any more."""
        try:
            decision = self.decider.decide(account)
            wrong = [weight for weight in decision.target if not math.isfinite(weight)]
            message = f"the target weights are {decision.target}" if wrong else None
        except TailguardError as error:
            message = str(error)
        if message is not None:
            self.kill.trip(f"decision: {message}")
            self.obey_kill()
        return decision

    def _now(self) -> int:
        """The later of our clock and the venue's: a clock that was set back makes no bar fresh."""
        ahead = 0 if self.desk is None else self.desk.clock_offset
        return self.clock.now() + max(0, ahead)

    def _is_stale(self, bar: LiveBar) -> bool:
        return self.guards.is_stale(bar, self._now())

    def _account_at(self, bar: LiveBar) -> AccountAtClose:
        """The account at the close of the bar."""
        if self.shadow is not None:
            return self.shadow.at_close()
        closes = {symbol: float(row["close"] or 0) for symbol, row in bar.values.items()}
        equity = self.account.equity(closes)
        ours = self.ledger.state.ours
        # An account that has lost everything has no weights.
        weights = [float(ours[symbol]) * closes[symbol] / equity if equity > 0 else 0.0 for symbol in closes]
        return AccountAtClose(self.decider.row, equity / self.config.capital, weights, [0.0] * len(weights))

    def _reach_venue(self) -> bool:
        """Reconcile with the venue; False where it cannot be reached within the desk's patience."""
        assert self.desk is not None
        deadline = self.clock.now() + round(1000 * self.config.orders.patience_s)
        while True:
            try:
                self.desk.sync_clock()
                self.account = reconcile(self.desk)
                self.desk.answered()
                return True
            except OutcomeUnknown as error:
                self.desk.failed(error)
            if self.clock.now() >= deadline or self.kill.is_tripped() or self.stop():
                return False
            self._wait(min(deadline, self.clock.now() + round(1000 * self.desk.retry_s)), self.kill.is_tripped)

    def _wait(self, until_ms: int, is_over: Callable[[], bool]) -> None:
        """Wait in steps, so that a person is heard."""
        while (left := until_ms - self.clock.now()) > 0 and not (is_over() or self.stop()):
            self.clock.sleep(min(left / 1000, self.config.orders.poll_s))

    # --- orders -------------------------------------------------------------------------------------------------------

    def _trade(self, bar: LiveBar, target: list[float]) -> None:
        """Send the orders of a decision, reductions first, while its bar is fresh."""
        if self.desk is None or self.venue is None:
            return
        if self._is_stale(bar):
            age, most = self._now() - bar.close_ms(self.config.bar_ms), self.guards.longest_age_ms
            whose = " by the venue's clock" if self.desk.clock_offset >= 1_000 else ""
            message = (
                f"no orders: the bar closed {age / 1000:g} s ago{whose}, and guards.bar_age allows {most / 1000:g} s"
            )
            self._skip("bar_age", message)
            return
        try:
            rules, prices = self.venue.instruments(), dict(self.venue.prices())
        except OutcomeUnknown as error:
            self.desk.failed(error)
            self._skip("venue", f"no orders: the venue has not told its prices and rules: {error}")
            return
        self._skipping = None
        state = self.ledger.state
        equity = self.account.equity({symbol: prices[symbol] for symbol in self.config.symbols})
        equity = min(equity, self.config.ceiling)
        for symbol in self.config.symbols:
            close = float(bar.values[symbol]["close"] or 0)
            breach = self.guards.price(symbol, close, prices[symbol])
            if breach is not None:
                self._freeze(breach)
        weights = dict(zip(self.config.symbols, target, strict=True))

        def sized(symbol: str) -> Decimal:
            held, price, rule = state.ours[symbol], prices[symbol], rules[symbol]
            return size_order(weights[symbol], equity, held, price, rule, reduce_only=bool(state.frozen))

        quantities = {symbol: sized(symbol) for symbol in weights}
        notional = {symbol: abs(float(quantity)) * prices[symbol] for symbol, quantity in quantities.items()}
        rising = {symbol for symbol, quantity in quantities.items() if increases(state.ours[symbol], quantity)}
        # All orders of the bar count together, those that reduce positions first.
        planned = sum(notional[symbol] for symbol in weights if symbol not in rising)
        for symbol in [each for each in weights if each in rising]:
            breach = self.guards.order(notional[symbol], equity, state, self.clock.now(), planned)
            if breach is not None:
                self._freeze(breach)
                quantities, rising = {each: sized(each) for each in weights}, set()
                break
            planned += notional[symbol]
        count = sum(bool(quantity) for quantity in quantities.values())
        for symbol in sorted(weights, key=lambda each: (each in rising, each)):
            # A fill of this very bar may have frozen increases.
            if quantities[symbol] and not (symbol in rising and state.frozen):
                self.desk.send(
                    Wanted(
                        bar.time_ms,
                        symbol,
                        quantities[symbol],
                        prices[symbol],
                        rules[symbol],
                        reduce_only=symbol not in rising,
                        is_fresh=lambda: not self._is_stale(bar),
                        seconds=self.config.orders.spread_s / count,
                    )
                )

    def _flatten(self) -> None:
        """Close all positions of ours, after a kill that asked for it."""
        assert self.desk is not None
        assert self.venue is not None
        state = self.ledger.state
        bar_ms = state.bars[-1].time_ms if state.bars else 0
        rounds = 0
        while rounds < FLATTEN_ROUNDS:
            try:
                self.desk.sync_clock()
                self.account = reconcile(self.desk)
                prices, rules = self.venue.prices(), self.venue.instruments()
            except OutcomeUnknown as error:
                self.desk.failed(error)
                if self.stop():
                    break
                self._wait(self.clock.now() + round(1000 * self.desk.retry_s), self.stop)
                continue
            self.desk.answered()
            rounds += 1
            due = {symbol: size for symbol, size in state.ours.items() if size}
            if not due and not state.open_intents:
                self.ledger.record("flattened")
                return
            for symbol, size in due.items():
                quantity = size_order(0.0, 1.0, size, prices[symbol], rules[symbol], reduce_only=True)
                if quantity:
                    self.desk.send(
                        Wanted(
                            bar_ms,
                            symbol,
                            quantity,
                            prices[symbol],
                            rules[symbol],
                            reduce_only=True,
                            is_fresh=lambda: True,
                            flatten=True,
                        )
                    )
            if all(state.ours[symbol] == size for symbol, size in due.items()):
                self.clock.sleep(self.config.orders.poll_s)
        held = ", ".join(f"{symbol} {plain(size)}" for symbol, size in state.ours.items() if size)
        left = f"{held} is left" if held else "the outcome of an order is unknown"
        self.ledger.record("alarm", guard="flatten", message=f"not flat: {left}; it is tried again at the next start")

    def _skip(self, reason: str, message: str) -> None:
        """No orders for this bar: an alarm, once for all bars that follow each other."""
        if self._skipping != reason:
            self.ledger.record("alarm", guard=reason, message=message)
            self._skipping = reason

    def _freeze(self, breach: Breach) -> None:
        if breach.guard not in self.ledger.state.frozen:
            self.ledger.record("freeze", guard=breach.guard, message=breach.message)
