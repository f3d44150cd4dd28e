"""Runs: from a config to a trained agent in a folder, with the figures of what it does on bars it never saw."""
