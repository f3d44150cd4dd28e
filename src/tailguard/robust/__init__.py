"""Robustness: attacks on observations, training against them, bounds on their effect, and faults of the feed."""
