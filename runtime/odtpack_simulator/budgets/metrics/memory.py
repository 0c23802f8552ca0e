"""Metrics of memory on a device."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.budgets import advice
from odtpack_simulator.budgets.budget_metric import BudgetMetric, Reading, Subject
from odtpack_simulator.values.units import format_bytes, format_percent

REPEATS_BYTES: Final = 200_000
"""A measured peak repeats within 0.2 MB: what lies closer together is the same."""


def _peak(subject: Subject) -> Reading:
    memory = subject.on.memory
    if memory.outcome == "killed":
        return Reading(
            None, "the replay was ended at the device's limit, before its peak was known"
        )
    how = "measured" if memory.is_measured else "predicted"
    text = f"the {how} peak is {format_bytes(memory.peak_bytes)}"
    return Reading(memory.peak_bytes, text, basis=how)


def _peak_noise(base: Subject, head: Subject) -> float | None:
    """Predictions are exact; only between two measurements there is chance."""
    peaks = (base.on.memory.measured_peak_bytes, head.on.memory.measured_peak_bytes)
    return None if None in peaks else REPEATS_BYTES


def _headroom(subject: Subject) -> Reading:
    memory = subject.on.memory
    total = memory.limit_bytes
    if not total:
        return Reading(None, "the device's limit is unknown")
    how = "measured" if memory.is_measured else "predicted"
    free = 100.0 * (total - memory.need_bytes) / total  # exact where the share is a whole percent
    if memory.outcome == "killed":
        free = min(free, 0.0)  # whatever was predicted, it reached the limit
    text = f"{format_percent(free / 100)} of {format_bytes(total)} stay free"
    return Reading(free, text, basis=how)


def _headroom_noise(base: Subject, head: Subject) -> float | None:
    noise, total = _peak_noise(base, head), head.on.memory.limit_bytes
    return None if noise is None or not total else 100.0 * noise / total


def _headroom_advice(subject: Subject, limit: float) -> str:
    total = subject.on.memory.limit_bytes or 0
    left = total * (1.0 - limit / 100.0) - subject.on.memory.others_bytes
    return advice.for_memory(subject.result, subject.on, left)


METRICS: Final = (
    BudgetMetric(
        key="peak_memory",
        title="Peak memory",
        unit="B",
        scope="device",
        topic="Memory",
        headline=True,
        meaning="The measured peak of the replay above the process before it, or the predicted "
        "one where none was measured: the training alone, without the app around it.",
        example="200 MB",
        read=_peak,
        advise=lambda subject, limit: advice.for_memory(subject.result, subject.on, limit),
        noise=_peak_noise,
    ),
    BudgetMetric(
        key="memory_headroom",
        title="Memory headroom",
        unit="%",
        scope="device",
        topic="Memory",
        headline=True,
        better="higher",
        meaning="Share of the memory that the device grants the app, in the foreground or in the "
        "background as it trains, that must stay free, the app itself counted (`app_footprint`).",
        example="20 %",
        read=_headroom,
        advise=_headroom_advice,
        noise=_headroom_noise,
        of_profile=True,
        suggested=False,
        below=100.0,
    ),
)
