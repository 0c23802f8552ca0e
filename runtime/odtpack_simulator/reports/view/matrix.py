"""Devices against checks: one cell per device and topic, as state, figure and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from odtpack_simulator.budgets.budget_metric import Topic
from odtpack_simulator.budgets.metrics import headlines, of_topic
from odtpack_simulator.reports.view import device_text, view
from odtpack_simulator.result.result import Check, DeviceResult, SimulationResult, Verdict
from odtpack_simulator.values.units import format_interval, format_number

_OWN: Final = headlines()
"""Metrics that a topic's figure speaks for; of another one the words say its name."""


@dataclass(frozen=True)
class Cell:
    """What one device has to say on one topic.

    Attributes:
        state: Verdict of its worst check; None where nothing was to be judged.
        figure: The figure that stands for the topic.
        words: What the check says of it, short: ``over 100 ms``, ``within 60 s``.
        detail: The message of the check, or why there is no figure.
        ends: Both ends of the interval that the figure is the typical value of.
    """

    state: Verdict | None
    figure: str
    words: str
    detail: str
    ends: str = ""


def cells(result: SimulationResult, device: DeviceResult) -> list[Cell]:
    """One cell per topic of :data:`TOPICS`; the metric is judged once for all devices."""
    found = []
    for topic, figure in _FIGURES.items():
        metrics = of_topic(topic)
        checks = [check for check in device.checks if check.metric in metrics]
        if topic == "Metric" and not _ended_early(device):
            checks += [check for check in result.checks if check.metric in metrics]
        cell = _cell(result, figure(result, device), checks)
        if topic == "Step" and device.latency.step_ms is not None:
            cell = replace(cell, ends=format_interval(device.latency.step_ms, "ms"))
        found.append(cell)
    return found


def _ended_early(device: DeviceResult) -> bool:
    return device.training is not None and device.training.outcome == "killed"


def _cell(result: SimulationResult, figure: tuple[str, str], checks: Sequence[Check]) -> Cell:
    text, reason = figure
    if not checks:
        if text == "ended early":
            return Cell(None, text, "", reason)
        known = text != device_text.UNKNOWN
        return Cell(None, text, "no budget" if known else "unknown", reason)
    worst = min(checks, key=view.severity)
    state = view.check_state(worst)
    # Where several checks pass, one of the figure that somebody wrote a budget for says more.
    if state == "pass":
        own = [check for check in checks if check.metric in _OWN] or checks
        worst = next((check for check in own if check.budget_location), own[0])
    if state == "not judged" and text != device_text.UNKNOWN:
        return Cell(state, text, "not judged", worst.message)
    if state == "not judged":
        return Cell(state, "not judged", "", worst.message)
    words = _words(result, worst, state)
    if worst.metric not in _OWN:
        words = f"{view.metric_title(worst.metric)}: {words}"
    return Cell(state, text, words, worst.message)


def _words(result: SimulationResult, check: Check, state: Verdict) -> str:
    if check.limit is None or check.metric in {"finite_loss", "learns", "steps_done"}:
        return view.VERDICT_WORDS[state].lower()
    limit = view.figure_text(result, check, check.limit, chosen=True)
    kept = check.actual is not None and check.actual <= check.limit
    if state == "pass":
        return f"within {limit}" if kept else f"at least {limit}"
    if check.actual is None:
        return "ended there"
    if check.metric in view.AT_LEAST:
        return f"below {limit}"
    return f"may pass {limit}" if kept else f"over {limit}"


def _metric(result: SimulationResult, device: DeviceResult) -> tuple[str, str]:
    if device.training is not None and _ended_early(device):
        return "ended early", device.training.detail
    info = result.training
    if info.metric_name and info.metric_after is not None:
        return view.metric_text(result, info.metric_after), info.metric_name
    if info.eval_loss_after is not None:
        return f"loss {format_number(info.eval_loss_after)}", "held-out loss"
    return device_text.UNKNOWN, "no held-out samples"


_FIGURES: Final[dict[Topic, Callable[[SimulationResult, DeviceResult], tuple[str, str]]]] = {
    "Memory": lambda _, device: device_text.memory(device),
    "Step": lambda _, device: device_text.step(device),
    "Finish": lambda _, device: device_text.finish(device),
    "Energy": lambda _, device: device_text.energy(device),
    "Sessions": lambda _, device: device_text.sessions(device),
    "Metric": _metric,
}
TOPICS: Final[tuple[str, ...]] = tuple(_FIGURES)
"""Topics that are columns, in their order; the checks of others have parts of their own."""
