"""Searches what a recipe leaves open for the trade-offs that keep the budgets.

``space`` says what may vary and what a candidate chose of it, ``study`` asks Optuna what to try,
``package_cache`` builds packages and plans their memory, ``search`` trains what may fit, and
``finalists`` simulates the best. ``federated`` does the same for the settings of a federation.
docs/adr/0006-how-fit-searches.md says why.
"""

from odtpack.fit.outcome import FitResult
from odtpack.fit.search import FitProgress, fit
from odtpack.fit.search_context import FitRequest
from odtpack.fit.space import Candidate

__all__ = ["Candidate", "FitProgress", "FitRequest", "FitResult", "fit"]
