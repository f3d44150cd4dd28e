"""Bars in: reading, validating, making and fetching them, features, splits."""
