"""Figures: metrics, limits, judging, comparing and suggesting, each written once."""
