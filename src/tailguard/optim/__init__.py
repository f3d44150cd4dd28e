"""Optimisers and gradient scaling that work on any torch model."""
