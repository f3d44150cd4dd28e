"""Bars and features on disk: mapped arrays, and the streams that write them without holding a market in memory."""
