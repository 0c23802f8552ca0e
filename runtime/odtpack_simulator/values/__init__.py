"""Quantities with units, confidence intervals, and text that comes from outside."""
