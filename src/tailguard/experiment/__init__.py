"""Experiments: from settings to bars, split, environment and learner, and the run folder that keeps them."""
