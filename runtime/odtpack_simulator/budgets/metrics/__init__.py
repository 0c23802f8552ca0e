"""The one list of metrics that budgets can limit, by key and in the order of reports."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from odtpack_simulator.budgets.budget_metric import BudgetMetric
from odtpack_simulator.budgets.metrics import campaign, latency, memory, package

METRICS: Final = MappingProxyType({
    metric.key: metric
    for module in (package, memory, latency, campaign)
    for metric in module.METRICS
})  # fmt: skip
"""Key -> metric."""

ALWAYS: Final = MappingProxyType({
    "memory_limit": "Device memory limit",
    "finite_loss": "Finite loss",
    "learns": "Learns",
    "steps_done": "Replay completed",
    "finishes": "Training comes to its end",
    "interruption": "Interruption",
    "low_memory_warning": "Low memory warning",
    "small_data": "Small data",
})  # fmt: skip
"""Titles of the checks that need no budget, by metric."""


def titles() -> dict[str, str]:
    """Title of every check for people, by its metric."""
    return dict(ALWAYS) | {key: metric.title for key, metric in METRICS.items()}


def of_scope(scope: str) -> list[BudgetMetric]:
    """The metrics that there is one of per ``package`` or per ``device``."""
    return [metric for metric in METRICS.values() if metric.scope == scope]
