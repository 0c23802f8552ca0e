"""Searches how a federation is run: clients a round, local epochs, learning rate.

``settings`` says what may vary, ``search`` plays federations for ever more rounds on a fleet's
virtual clock, and ``outcome`` is what was found.
"""

from odtpack.fit.federated.outcome import FleetFitResult
from odtpack.fit.federated.search import FleetFitRequest, fit_fleet

__all__ = ["FleetFitRequest", "FleetFitResult", "fit_fleet"]
