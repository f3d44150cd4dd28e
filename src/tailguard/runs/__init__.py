"""Runs: from a config to a trained agent in a folder, with its out-of-sample results."""

from tailguard.places import require_posix

require_posix()
