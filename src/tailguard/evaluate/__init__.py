"""Evaluation: backtests, metrics and baselines."""
