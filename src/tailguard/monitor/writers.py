"""Writers of metrics: callbacks to be passed to `learn`."""

from __future__ import annotations

from tailguard.monitor.console import ConsoleTable
from tailguard.monitor.jsonl import JsonlWriter
from tailguard.monitor.tensorboard import TensorBoardWriter
from tailguard.monitor.trackers import MLflowWriter, WandbWriter

__all__ = ["ConsoleTable", "JsonlWriter", "MLflowWriter", "TensorBoardWriter", "WandbWriter"]
