"""Runs: from a config to a trained agent in a folder, with its out-of-sample results."""
