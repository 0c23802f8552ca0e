"""Searches what a recipe leaves open for the trade-offs that keep the budgets.

``depth`` finds the layers that can be frozen, ``space`` what may vary and ``candidates`` one
choice of it; ``workshop`` builds packages and plans their memory, ``halving`` trains them
for ever more epochs, ``finalists`` simulates what is left, and ``pareto`` compares.
``search`` puts these together. docs/adr/0006-how-fit-searches.md says why it is done so.
"""

from odtpack.fit.candidates import Candidate
from odtpack.fit.outcome import FitResult
from odtpack.fit.search import FitProgress, FitRequest, fit

__all__ = ["Candidate", "FitProgress", "FitRequest", "FitResult", "fit"]
