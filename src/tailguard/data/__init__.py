"""Bars: reading, validation, synthetic markets, downloads, features and splits."""
