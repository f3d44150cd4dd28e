"""A process that trades 60 bars on paper, from wherever its files say it stopped. The test kills it."""

from __future__ import annotations

import sys
from pathlib import Path

import tailguard as tg
from tailguard.live.chaos import GUARDS
from tailguard.live.journal import Journal
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.paper import PaperVenue
from tailguard.live.session import Session, SessionConfig
from tailguard.live.simulation import RandomWeights, ReplayedMarket
from tailguard.live.venue import SimulatedClock
from tailguard.market import MarketConfig


def main(folder: Path) -> None:
    config = MarketConfig()
    replayed = ReplayedMarket.of(tg.make_market(71, assets=2, seed=3).bars, config, 11)
    journal = Journal(folder / "journal.jsonl")
    first = replayed.live_bars[0].time_ms
    clock = SimulatedClock(max([first, *(int(record["time"]) for record in journal.records[-1:])]))
    venue = PaperVenue(replayed.market, replayed.panel, clock, store=folder / "venue.sqlite")
    settings = SessionConfig(
        run="killed",
        mode="paper",
        symbols=replayed.bars.symbols,
        capital=config.capital,
        leverage=config.leverage,
        bar_ms=replayed.panel.frequency_ms,
        window=32,
        guards=GUARDS,
        orders=OrderConfig(),
    )
    decider = RandomWeights(2)
    session = Session(settings, decider, journal, clock, KillSwitch(folder / "KILL"), venue=venue)
    print("trading", flush=True)
    session.start()
    bars = session.ledger.state.bars
    after = bars[-1].time_ms if bars else first - 1
    while (bar := replayed.after(after)) is not None:
        clock.wait_until(bar.close_ms(replayed.panel.frequency_ms))
        session.on_bar(bar)
        after = bar.time_ms


if __name__ == "__main__":
    main(Path(sys.argv[1]))
