"""Settings of training against a feed that may lie."""

from __future__ import annotations

from dataclasses import dataclass

from tailguard.errors import ConfigError
from tailguard.robust.feed import Feed, parse_feed
from tailguard.validate import check_count, check_range


@dataclass(frozen=True)
class FeedConfig:
    """Faults of the feed to train under."""

    feed: tuple[str, ...] = ()
    """Faults that training episodes have, one entry each, like late:2 or frozen:12+bad_tick:0.05@0.01; the exposure is
    calibrated so that the limit holds under each of them. Empty: a perfect feed."""
    feed_probability: float = 0.5
    """Share of the training episodes that have a fault, each entry equally likely, 0 to 1."""
    feed_tables: int = 2
    """Draws of each entry's random numbers to train on, each a copy of the training bars in memory."""

    def __post_init__(self) -> None:
        check_range("robust.feed_probability", self.feed_probability, low=0, high=1)
        check_count("robust.feed_tables", self.feed_tables)
        check_range("robust.feed_tables", self.feed_tables, high=64)
        for feeds in self.feeds():
            if any(fault.kind == "fee" for fault in feeds[0].faults):
                raise ConfigError(
                    f"robust.feed: {feeds[0]}: all episodes of a market have one fee. Leave it out, and train with a "
                    "higher one: market.fee"
                )

    def feeds(self) -> list[list[Feed]]:
        """For each entry its draws: feeds with the same faults and different seeds; one where nothing is random."""
        found = []
        for text in self.feed:
            try:
                first = parse_feed(text, seed=1)
            except ConfigError as error:
                raise ConfigError(f"robust.{error}") from None
            # Seed 0 is that of evaluations.
            draws = range(1, 1 + (self.feed_tables if first.is_random else 1))
            found.append([Feed(first.faults, seed) for seed in draws])
        return found
