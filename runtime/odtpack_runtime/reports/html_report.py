"""The HTML report: one self-contained file without scripts, for desk and phone, day and night."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from odtpack_runtime.reports import charts, view
from odtpack_runtime.reports.axes import Axis, duration_label, linear_axis, log_axis
from odtpack_runtime.simulator.profile import ProfileFigure
from odtpack_runtime.simulator.result import DeviceResult, MemoryBreakdown, SimulationResult
from odtpack_runtime.simulator.suggest import suggest_budget
from odtpack_runtime.simulator.units import (
    Interval,
    format_bytes,
    format_duration,
    format_interval,
    format_number,
    format_percent,
)

_OPERATORS_SHOWN: Final = 12
_TENSORS_SHOWN: Final = 12
_LARGEST_SCALE: Final = 2.0
"""A bar ends at this multiple of the limit; the figure beside it tells the rest."""

_NUMBER_WITH_UNIT: Final = re.compile(r"(\d) (?=(?:[kMG]?B|µs|ms|s|min|h|%)(?![\w/]))")

_BREAKDOWN_WORDS: Final = {
    "parameters": "Parameters",
    "gradients": "Gradients",
    "optimizer_state": "Optimizer state",
    "inputs": "Inputs",
    "activations": "Activations",
    "session": "Session (runtime and workspace)",
}
_CLASS_WORDS: Final = {"compute": "compute", "memory": "memory-bound", "other": "other"}


@dataclass(frozen=True)
class Bar:
    """A line of a bar list: name, remark, drawing, and the figures as text."""

    name: str
    remark: str
    drawing: Markup
    figure: str
    detail: str
    state: str = ""


def render_html(result: SimulationResult) -> bytes:
    """The report as UTF-8 HTML. The same result gives the same bytes."""
    folder = Path(__file__).parent
    # Every value is escaped; drawings are Markup built by reports.svg, which escapes as well.
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    timeline = result.memory.timeline
    page = environment.get_template("report.html.j2").render(
        result=result,
        view=view,
        words=view.VERDICT_WORDS,
        headline=view.headline(result),
        tally=view.tally(result),
        key_figures=view.key_figures(result),
        fixes=view.first_fixes(result),
        checks=view.check_rows(result),
        suggestion=_suggestion(result),
        loss_chart=charts.loss_chart(
            result.training.losses,
            result.training.eval_loss_before,
            result.training.eval_loss_after,
        ),
        limit_rows=_limit_rows(result),
        breakdown=_breakdown(result.memory.predicted.breakdown),
        timeline_chart=charts.timeline_chart([point.live_bytes for point in timeline]),
        timeline_peak=max(timeline, key=lambda point: point.live_bytes, default=None),
        tensors=_tensors(result),
        tensors_left=max(0, len(result.memory.tensors_at_peak) - _TENSORS_SHOWN),
        latency=_latency_rows(result),
        operators=_operators(result),
        operator_classes=_operator_classes(result),
        figure_text=_figure_text,
        format_bytes=format_bytes,
        format_number=format_number,
    )
    return page.encode("utf-8")


def _unbroken(value: object) -> object:
    """Keep each number on one line with its unit; drawings pass through."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _NUMBER_WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}", value)


def _suggestion(result: SimulationResult) -> str:
    """A budget to paste where a judged result has none; empty otherwise."""
    checks = [check for _, check in result.all_checks()]
    if not checks or any(check.budget_location for check in checks):
        return ""
    return suggest_budget(result)


def _limit_rows(result: SimulationResult) -> tuple[list[Bar], Markup]:
    """Peak against each device's own limit, on one axis in shares of the limit."""
    shares = [
        max(d.memory.predicted_peak_bytes, d.memory.measured_peak_bytes or 0) / d.memory.limit_bytes
        for d in result.devices
        if d.memory.limit_bytes
    ]
    scale = linear_axis(min(_LARGEST_SCALE, max([1.0, *shares])), count=4)
    rows = []
    for device in result.devices:
        memory = device.memory
        figure, detail = view.memory_text(device)
        if memory.limit_bytes:
            measured = memory.measured_peak_bytes
            drawing = charts.limit_bar(
                memory.predicted_peak_bytes / memory.limit_bytes,
                None if measured is None else measured / memory.limit_bytes,
                scale,
                over=memory.outcome in {"over", "killed"},
            )
        else:
            drawing = charts.empty_row(scale)
        known = f"limit {memory.limit_kind}" if memory.limit_kind else "limit unknown"
        state = {"fits": "pass", "over": "fail", "killed": "fail"}.get(memory.outcome, "not judged")
        rows.append(Bar(device.title, known, drawing, figure, detail, state))
    return rows, charts.axis_row(scale, lambda share: f"{100 * share:g} %")


def _breakdown(parts: MemoryBreakdown) -> list[Bar]:
    total = max(1, parts.total)
    rows = []
    for key, name in _BREAKDOWN_WORDS.items():
        value = getattr(parts, key)
        drawing = charts.share_bar(value / total)
        rows.append(Bar(name, "", drawing, format_bytes(value), format_percent(value / total)))
    return rows


def _tensors(result: SimulationResult) -> list[Bar]:
    peak = max(1, result.memory.predicted.peak_bytes)
    largest = sorted(result.memory.tensors_at_peak, key=lambda tensor: (-tensor.bytes, tensor.name))
    return [
        Bar(
            tensor.name,
            tensor.kind.replace("_", " "),
            charts.share_bar(tensor.bytes / peak),
            format_bytes(tensor.bytes),
            format_percent(tensor.bytes / peak),
        )
        for tensor in largest[:_TENSORS_SHOWN]
    ]


def _latency_rows(result: SimulationResult) -> tuple[list[Bar], Markup] | None:
    """Step time by device on a logarithmic axis, the host first; None without any figure."""
    host = _host_interval(result)
    known = [d.latency.step_ms for d in result.devices if d.latency.step_ms is not None]
    spans = ([host] if host else []) + known
    if not spans:
        return None
    budgets = {device.name: _step_budget(device) for device in result.devices}
    marks = [limit for limit in budgets.values() if limit]
    axis = log_axis(
        min([span.low for span in spans] + marks), max([span.high for span in spans] + marks)
    )
    rows = []
    if host is not None:
        drawing = charts.interval_bar(host, axis, None)
        middle = format_duration(host.typical / 1e3)
        rows.append(Bar("This host", "measured", drawing, middle, format_interval(host, "ms")))
    rows += [_latency_row(device, axis, budgets[device.name]) for device in result.devices]
    return rows, charts.axis_row(axis, duration_label)


def _latency_row(device: DeviceResult, axis: Axis, limit: float | None) -> Bar:
    figure, detail = view.step_text(device)
    remark = "estimate" if device.validated else "estimate, not validated"
    interval = device.latency.step_ms
    if interval is None:
        return Bar(device.title, "", charts.empty_row(axis), figure, detail, "not judged")
    judged = [check for check in device.checks if check.metric == "step_latency"]
    state = view.check_state(judged[0]) if judged else ""
    return Bar(
        device.title, remark, charts.interval_bar(interval, axis, limit), figure, detail, state
    )


def _host_interval(result: SimulationResult) -> Interval | None:
    """Median of the host's steady steps with the 10th and 90th percentile."""
    steps = [value for value in result.latency_host.steps_ms if value > 0]
    if not steps:
        return None
    if len(steps) < 10:
        ordered = sorted(steps)
        return Interval(low=ordered[0], typical=ordered[len(ordered) // 2], high=ordered[-1])
    cuts = quantiles(steps, n=10, method="inclusive")
    return Interval(low=cuts[0], typical=cuts[4], high=cuts[8])


def _step_budget(device: DeviceResult) -> float | None:
    limits = [c.limit for c in device.checks if c.metric == "step_latency" and c.limit]
    return limits[0] if limits else None


def _operators(result: SimulationResult) -> list[Bar]:
    ordered = sorted(
        result.latency_host.by_operator, key=lambda cost: (-cost.total_ms, cost.op_type)
    )
    rows = [
        Bar(
            cost.op_type,
            _CLASS_WORDS[cost.operator_class],
            charts.share_bar(cost.share, f"bar {cost.operator_class}"),
            format_percent(cost.share),
            f"{format_duration(cost.total_ms / 1e3)} in {cost.calls} calls",
        )
        for cost in ordered[:_OPERATORS_SHOWN]
    ]
    rest = ordered[_OPERATORS_SHOWN:]
    if rest:
        share = sum(cost.share for cost in rest)
        spent = format_duration(sum(cost.total_ms for cost in rest) / 1e3)
        calls = sum(cost.calls for cost in rest)
        bar = charts.share_bar(share, "bar other")
        detail = f"{spent} in {calls} calls"
        rows.append(Bar(f"{len(rest)} more", "", bar, format_percent(share), detail))
    return rows


def _operator_classes(result: SimulationResult) -> list[tuple[str, str]]:
    totals = dict.fromkeys(_CLASS_WORDS, 0.0)
    for cost in result.latency_host.by_operator:
        totals[cost.operator_class] += cost.share
    return [(_CLASS_WORDS[name], format_percent(share)) for name, share in totals.items()]


def _figure_text(figure: ProfileFigure) -> str:
    """A profile's figure with bounds and threads: ``129 GFLOPS (78.4 to 143.5), 8 threads``."""
    if figure.value is None:
        return "unknown"
    unit = "" if figure.unit in {None, "1"} else f" {figure.unit}"
    text = f"{figure.value:g}{unit}"
    if figure.low is not None and figure.high is not None:
        text += f" ({figure.low:g} to {figure.high:g})"
    if figure.threads is not None:
        text += f", {figure.threads} thread{'s' if figure.threads > 1 else ''}"
    return text
