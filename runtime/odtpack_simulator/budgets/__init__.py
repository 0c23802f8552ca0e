"""Budgets in one place: read the file, judge a result by it, suggest one to start from."""

from odtpack_simulator.budgets.budget_file import Budgets, PlacedLimit, parse_budgets, read_budgets
from odtpack_simulator.budgets.budget_values import Bound, Limit, Section
from odtpack_simulator.budgets.judge import judge
from odtpack_simulator.budgets.suggest import suggest_budget

__all__ = [
    "Bound",
    "Budgets",
    "Limit",
    "PlacedLimit",
    "Section",
    "judge",
    "parse_budgets",
    "read_budgets",
    "suggest_budget",
]
