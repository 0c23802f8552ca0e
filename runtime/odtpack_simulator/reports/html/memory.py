"""The memory section of the HTML report: limits, phases, timeline, and what makes the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports.drawing import charts, row_charts
from odtpack_simulator.reports.drawing.axes import linear_axis
from odtpack_simulator.reports.drawing.row_charts import Bar
from odtpack_simulator.reports.view import device_text, view
from odtpack_simulator.reports.view.process_bar import kit_words, mapped_words, process_bars
from odtpack_simulator.result.result import (
    DeviceResult,
    MemoryBreakdown,
    SimulationResult,
    TimelinePoint,
)
from odtpack_simulator.values.units import format_bytes, format_percent

_TENSORS_SHOWN: Final = 12
_LARGEST_SCALE: Final = 2.0
"""A bar ends at this multiple of the limit; the figure beside it gives the rest."""
_BREAKDOWN_WORDS: Final = {
    "parameters": "Parameters",
    "gradients": "Gradients",
    "optimizer_state": "Optimizer state",
    "inputs": "Inputs",
    "activations": "Activations",
    "session": "Session (runtime and workspace)",
}
_HELD_WORDS: Final = {
    "cgroup": "held by a control group",
    "rlimit": "held by a resource limit",
    "watchdog": "held by a watchdog",
}


_STATES: Final = {"fits": "pass", "depends": "warn", "over": "fail", "killed": "fail"}


@dataclass(frozen=True)
class MemorySection:
    """What the template draws."""

    limits: list[Bar]
    limits_axis: Markup
    apps: list[tuple[str, str, str]]
    runtime: int
    mapped: str
    phases: list[Bar]
    chart: Markup
    lines: list[tuple[str, str, str]]
    beyond: str
    peak: TimelinePoint | None
    breakdown: list[Bar]
    tensors: list[Bar]
    tensors_left: int


def memory_section(result: SimulationResult) -> MemorySection:
    """Rows and drawings of the section."""
    timeline = result.memory.timeline
    live = [point.live_bytes for point in timeline]
    known = [(d.title, d.memory.limit_bytes) for d in result.devices if d.memory.limit_bytes]
    lines, beyond = charts.limit_lines(max(live, default=0), known)
    limits, axis = _limit_rows(result)
    return MemorySection(
        limits=limits,
        limits_axis=axis,
        apps=_apps(result),
        runtime=max((bar.runtime for bar in process_bars(result)), default=0),
        mapped=mapped_words(result),
        phases=_phases(result),
        chart=charts.timeline_chart(live, lines, parts_of_step(timeline)),
        lines=[
            (line.letter, format_bytes(line.limit_bytes), view.name_list(line.devices))
            for line in lines
        ],
        beyond=_beyond(beyond, drawn=bool(lines)),
        peak=max(timeline, key=lambda point: point.live_bytes, default=None),
        breakdown=_breakdown(result.memory.predicted.breakdown),
        tensors=_tensors(result),
        tensors_left=max(0, len(result.memory.tensors_at_peak) - _TENSORS_SHOWN),
    )


def parts_of_step(timeline: Sequence[TimelinePoint]) -> list[tuple[str, int]]:
    """Forward, backward and update, each with the place of its first node.

    Where ONNX Runtime runs some nodes of the backward pass between those of the forward pass,
    it begins where the fewest nodes stand on the wrong side.
    """
    if any(point.part is None for point in timeline):
        return []
    step = [point.part == "backward" for point in timeline if point.part != "update"]
    # Wrong at a cut: the backward nodes before it, and the forward nodes from there on.
    wrong = [step.count(False)]
    for is_backward in step:
        wrong.append(wrong[-1] + (1 if is_backward else -1))
    cut = min(range(len(wrong)), key=wrong.__getitem__)
    starts = {"forward": (0, cut), "backward": (cut, len(step)), "update": (len(step), None)}
    ends = {name: len(timeline) if end is None else end for name, (_, end) in starts.items()}
    return [(name, start) for name, (start, _) in starts.items() if start < ends[name]]


def _beyond(limits: list[tuple[str, int]], *, drawn: bool) -> str:
    """A sentence about limits too high for the drawing."""
    if not limits:
        return ""
    device, lowest = limits[0]
    if len(limits) == 1 and not drawn:
        return f"The limit of {device}, {format_bytes(lowest)}, is far above the drawing."
    others = "The other limits" if drawn else "All limits"
    return f"{others} are above the drawing, the lowest {format_bytes(lowest)} ({device})."


def _limit_rows(result: SimulationResult) -> tuple[list[Bar], Markup]:
    """Peak against each device's own limit, on one axis in shares of the limit, worst first."""
    most = max([1.0, *map(_share, result.devices)])
    scale = linear_axis(min(_LARGEST_SCALE, most), count=4)
    devices = sorted(result.devices, key=lambda d: (not d.memory.limit_bytes, -_share(d)))
    rows = []
    for device in devices:
        memory = device.memory
        figure, detail = device_text.memory(device)
        drawing = row_charts.empty_row(scale)
        remarks = [f"limit {memory.limit_kind}" if memory.limit_kind else "limit unknown"]
        if memory.limit_low_bytes is not None and memory.limit_low_bytes != memory.limit_bytes:
            remarks.append(f"{format_bytes(memory.limit_low_bytes)} at worst")
        if kit := kit_words(memory):
            remarks.append(kit)
        if memory.held is not None:
            remarks.append(_HELD_WORDS[memory.held])
        if not device.validated:
            remarks.append(view.NOT_VALIDATED)
        if memory.limit_bytes:
            limit, measured = memory.limit_bytes, memory.measured_peak_bytes
            drawing = row_charts.limit_bar(
                memory.predicted_peak_bytes / limit,
                None if measured is None else measured / limit,
                scale,
                over=memory.outcome in {"over", "killed"},
                app=(memory.app_bytes or 0) / limit,
                runtime=(memory.runtime_bytes or 0) / limit,
                warning=None if memory.warning_bytes is None else memory.warning_bytes / limit,
            )
        state = _STATES.get(memory.outcome, "not judged")
        rows.append(Bar(device.title, ", ".join(remarks), drawing, figure, detail, state))
    return rows, row_charts.axis_row(scale, lambda share: f"{100 * share:g} %")


def _apps(result: SimulationResult) -> list[tuple[str, str, str]]:
    """What was taken for the app: devices, figure and source."""
    found: dict[tuple[str, str], list[str]] = {}
    for bar in process_bars(result):
        found.setdefault((format_bytes(bar.app), bar.source), []).append(bar.title)
    return [(view.name_list(titles), size, source) for (size, source), titles in found.items()]


def _share(device: DeviceResult) -> float:
    memory = device.memory
    highest = max(memory.predicted_peak_bytes, memory.measured_peak_bytes or 0)
    highest += memory.others_bytes
    return highest / memory.limit_bytes if memory.limit_bytes else 0.0


def _phases(result: SimulationResult) -> list[Bar]:
    phases = result.memory.phases
    most = float(max((max(p.predicted_bytes, p.measured_bytes or 0) for p in phases), default=0))
    rows = []
    for phase in phases:
        measured = phase.measured_bytes
        error = "not measured"
        if measured is not None:
            share = 100 * (phase.predicted_bytes - measured) / max(1, measured)
            error = f"measured {format_bytes(measured)} ({share:+.1f} %)"
        drawing = row_charts.pair_bar(phase.predicted_bytes, measured, most)
        rows.append(
            Bar(phase.phase.capitalize(), "", drawing, format_bytes(phase.predicted_bytes), error)
        )
    return rows


def _breakdown(parts: MemoryBreakdown) -> list[Bar]:
    total = max(1, parts.total)
    rows = []
    for key, name in _BREAKDOWN_WORDS.items():
        value = getattr(parts, key)
        drawing = row_charts.share_bar(value / total)
        rows.append(Bar(name, "", drawing, format_bytes(value), format_percent(value / total)))
    return rows


def _tensors(result: SimulationResult) -> list[Bar]:
    peak = max(1, result.memory.predicted.peak_bytes)
    largest = sorted(result.memory.tensors_at_peak, key=lambda tensor: (-tensor.bytes, tensor.name))
    return [
        Bar(
            tensor.name,
            tensor.kind.replace("_", " "),
            row_charts.share_bar(tensor.bytes / peak),
            format_bytes(tensor.bytes),
            format_percent(tensor.bytes / peak),
        )
        for tensor in largest[:_TENSORS_SHOWN]
    ]
