"""Runs: from a config to a trained agent in a folder, with its out-of-sample results."""

import importlib.util

if importlib.util.find_spec("fcntl") is None:
    raise ImportError("tailguard.runs needs a POSIX system, Linux or macOS, for locks and signals; on Windows, use WSL")
