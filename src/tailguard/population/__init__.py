"""Populations: many members train with settings of their own, and the best hand their state to the others."""
