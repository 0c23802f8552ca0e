"""The one list of metrics that budgets can limit, by key and in the order of reports."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from odtpack_simulator.budgets.budget_metric import AlwaysCheck, BudgetMetric, Topic
from odtpack_simulator.budgets.metrics import campaign, latency, memory, package

METRICS: Final = MappingProxyType({
    metric.key: metric
    for module in (package, memory, latency, campaign)
    for metric in module.METRICS
})  # fmt: skip
"""Key -> metric."""

ALWAYS: Final = MappingProxyType({
    "memory_limit": AlwaysCheck("Device memory limit", "Memory", headline=True),
    "finite_loss": AlwaysCheck("Finite loss", "Metric", headline=True),
    "learns": AlwaysCheck("Learns", "Metric"),
    "steps_done": AlwaysCheck("Replay completed", "Sessions"),
    "finishes": AlwaysCheck("Training comes to its end", "Finish"),
    "interruption": AlwaysCheck("Interruption", "Interruptions"),
    "low_memory_warning": AlwaysCheck("Low memory warning", "Memory"),
    "small_data": AlwaysCheck("Small data", "Metric"),
})  # fmt: skip
"""The checks that need no budget, by metric."""


def titles() -> dict[str, str]:
    """Title of every check for people, by its metric."""
    return {key: check.title for key, check in (ALWAYS | METRICS).items()}


def of_topic(topic: Topic) -> frozenset[str]:
    """The metrics that reports show under a topic, with or without a budget."""
    return frozenset(key for key, check in (ALWAYS | METRICS).items() if check.topic == topic)


def headlines() -> frozenset[str]:
    """The metrics whose figure is the one that stands for their topic."""
    return frozenset(key for key, check in (ALWAYS | METRICS).items() if check.headline)


def of_scope(scope: str) -> list[BudgetMetric]:
    """The metrics that there is one of per ``package`` or per ``device``."""
    return [metric for metric in METRICS.values() if metric.scope == scope]
