"""What a training learns and what stops it, for the HTML report: curves and interruptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports.drawing import charts, row_charts
from odtpack_simulator.reports.drawing.row_charts import Bar
from odtpack_simulator.reports.view import view
from odtpack_simulator.result.result import CampaignPoint, DeviceResult, SimulationResult
from odtpack_simulator.values.units import format_duration, format_energy

MOST_PANELS: Final = 5
"""Devices whose curves are drawn; ``report.css`` has one rule for each."""

_OUTLINES: Final = {
    "step": "M-4.5-4.5L4.5 4.5M4.5-4.5L-4.5 4.5",
    "save": "M-4.5-4.5H4.5V4.5H-4.5Z",
    "memory warning": "M0-5.5L5.5 4.5H-5.5Z",
}
_EVENT_WORDS: Final = {
    "step": "Killed between steps",
    "save": "Killed during a save",
    "memory warning": "Low-memory warning",
}


@dataclass(frozen=True)
class Panel:
    """The curves of one device: (figure, against what, drawing), and what it comes to."""

    title: str
    note: str
    summary: str
    curves: list[tuple[str, str, Markup]]


def panels(result: SimulationResult) -> list[Panel]:
    """Curves of a few devices from the fastest to the slowest, evenly spread."""
    known = [d for d in result.devices if d.campaign and len(d.campaign.curve) > 1]
    known.sort(key=lambda device: (_active(device), device.name))
    if len(known) > MOST_PANELS:
        last = len(known) - 1
        known = [known[round(i * last / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]
    return [_panel(result, device) for device in known]


def _active(device: DeviceResult) -> float:
    return device.campaign.curve[-1].active_s if device.campaign else 0.0


def _panel(result: SimulationResult, device: DeviceResult) -> Panel:
    curve = device.campaign.curve if device.campaign else []
    name = (result.training.metric_name or "metric").capitalize()
    factor = 100.0 if name == "Accuracy" else 1.0
    title = "Accuracy, %" if name == "Accuracy" else name
    curves = []
    rows: list[tuple[str, Callable[[CampaignPoint], float | None]]] = [
        (title, lambda point: None if point.metric is None else factor * point.metric),
        ("Held-out loss", lambda point: point.loss),
    ]
    for title, pick in rows:
        if sum(pick(point) is not None for point in curve) > 1:
            curves += _against(title, pick, curve, device)
    last = curve[-1]
    parts = [f"{format_duration(last.active_s)} of work", f"{last.session} sessions"]
    if last.session == 1:
        parts[1] = "one session"
    if last.energy_j is not None:
        parts.insert(1, format_energy(last.energy_j))
    note = "" if device.validated else view.NOT_VALIDATED
    return Panel(device.title, note, ", ".join(parts), curves)


def _against(
    title: str,
    pick: Callable[[CampaignPoint], float | None],
    curve: list[CampaignPoint],
    device: DeviceResult,
) -> list[tuple[str, str, Markup]]:
    """One figure against time, energy and sessions."""
    known = [(point, value) for point in curve if (value := pick(point)) is not None]
    drawn = []
    unit, factor = _time_unit(known[-1][0].active_s)
    points = [(point.active_s / factor, value) for point, value in known]
    drawn.append((title, f"active time, {unit}", _chart(points, title, "time", device)))
    joules = [(p.energy_j, value) for p, value in known if p.energy_j is not None]
    if len(joules) > 1:
        unit, factor = ("kJ", 1e3) if joules[-1][0] >= 2e3 else ("J", 1.0)
        points = [(energy / factor, value) for energy, value in joules]
        drawn.append((title, f"energy above idle, {unit}", _chart(points, title, "energy", device)))
    ends: dict[float, float] = {}
    for point, value in known:  # the last value of a session is what it ends with
        ends[0.0 if point.step == 0 else float(point.session)] = value
    points = sorted(ends.items())
    drawn.append(
        (title, "sessions", _chart(points, title, "number of sessions", device, whole=True))
    )
    return drawn


def _chart(
    points: list[tuple[float, float]],
    title: str,
    against: str,
    device: DeviceResult,
    *,
    whole: bool = False,
) -> Markup:
    start, end = points[0][1], points[-1][1]
    alt = f"{title} against {against} on {device.title}, from {start:.4g} to {end:.4g}"
    return charts.curve_chart(points, alt, whole=whole)


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 120.0:
        return "s", 1.0
    return ("min", 60.0) if seconds < 7200.0 else ("h", 3600.0)


def interruption_rows(result: SimulationResult) -> list[Bar]:
    """One lane per kind of interruption, along the steps of the training."""
    info = result.interruption
    if info is None:
        return []
    steps = max([1, result.data.made_steps, *(entry.step for entry in info.interruptions)])
    rows = []
    for kind, words in _EVENT_WORDS.items():
        found = [entry for entry in info.interruptions if entry.at == kind]
        if found:
            events = [(e.step / steps, min(e.resumed_from_step, e.step) / steps) for e in found]
            repeated = sum(entry.repeated_steps for entry in found)
            rows.append(
                Bar(
                    words,
                    "",
                    row_charts.event_row(events, _OUTLINES[kind]),
                    f"{len(found)} ×",
                    f"{repeated} steps repeated",
                )
            )
    return rows
