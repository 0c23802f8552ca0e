"""The latency section of the HTML report: steps by device, what is around them, operators."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import Final

from markupsafe import Markup

from odtpack_simulator.reports.drawing import charts, row_charts
from odtpack_simulator.reports.drawing.axes import Axis, duration_label, log_axis
from odtpack_simulator.reports.drawing.row_charts import Bar
from odtpack_simulator.reports.view import device_text, view
from odtpack_simulator.result.result import DeviceResult, OperatorCost, SimulationResult
from odtpack_simulator.values.units import (
    Interval,
    format_duration,
    format_interval,
    format_percent,
)

_OPERATORS_SHOWN: Final = 10
_CLASS_WORDS: Final = {"compute": "compute-bound", "memory": "memory-bound", "other": "other"}
_STAGES: Final = {
    "first_step_ms": "First step",
    "step_ms": "Step, P50",
    "p90_ms": "Step, P90",
    "session_creation_ms": "Session",
    "checkpoint_load_ms": "Load",
    "checkpoint_save_ms": "Save",
}
_TRAFFIC_OF_A_COPY: Final = 2.0
"""A copy reads each byte and writes it: the traffic is twice the rate of copying."""


@dataclass(frozen=True)
class OperatorRow:
    """An operator of the table; ``number`` is its badge in the roofline, if it is there."""

    number: int | None
    name: str
    kind: str
    bar: Markup
    share: str
    spent: str
    calls: str
    rate: str
    intensity: str


@dataclass(frozen=True)
class StageRow:
    """First step, steady steps, session and checkpoints of one device, as (title, text, range)."""

    title: str
    validated: bool
    remark: str
    figures: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class LatencySection:
    """What the template draws."""

    rows: list[Bar]
    axis: Markup | None
    stages: list[StageRow]
    operators: list[OperatorRow]
    classes: list[tuple[str, str]]
    roofline: Markup | None


def latency_section(result: SimulationResult) -> LatencySection:
    """Rows and drawings of the section."""
    operators, points = _operators(result)
    drawn = _latency_rows(result)
    gemm, copy = result.host.gemm_gflops, result.host.memory_bandwidth_gbs
    roofline = None
    if points and gemm and copy:
        roofline = charts.roofline_chart(points, gemm, _TRAFFIC_OF_A_COPY * copy)
    return LatencySection(
        rows=drawn[0] if drawn else [],
        axis=drawn[1] if drawn else None,
        stages=_stages(result),
        operators=operators,
        classes=_operator_classes(result),
        roofline=roofline,
    )


def _latency_rows(result: SimulationResult) -> tuple[list[Bar], Markup] | None:
    """Step time by device, the slowest first and the host last; None without any figure."""
    host = _host_interval(result)
    known = [d.latency.step_ms for d in result.devices if d.latency.step_ms is not None]
    spans = ([host] if host else []) + known
    positive = [span for span in spans if span.high > 0]
    if not positive:
        return None
    marks = [limit for limit in map(_step_budget, result.devices) if limit]
    marks += [d.latency.p90_ms.typical for d in result.devices if d.latency.p90_ms]
    axis = log_axis(
        min([span.low for span in positive] + marks), max([span.high for span in positive] + marks)
    )
    devices = sorted(result.devices, key=lambda d: (d.latency.step_ms is None, -_typical(d)))
    rows = [_latency_row(device, axis, _step_budget(device)) for device in devices]
    if host is not None:
        p90 = result.latency_host.p90_ms
        drawing = row_charts.interval_bar(host, axis, None, p90=p90.typical if p90 else None)
        middle = format_duration(host.typical / 1e3)
        rows.append(Bar("This machine", "measured", drawing, middle, format_interval(host, "ms")))
    return rows, row_charts.axis_row(axis, duration_label)


def _typical(device: DeviceResult) -> float:
    return device.latency.step_ms.typical if device.latency.step_ms else 0.0


def _latency_row(device: DeviceResult, axis: Axis, limit: float | None) -> Bar:
    interval, p90 = device.latency.step_ms, device.latency.p90_ms
    if interval is None:
        reason = device.latency.not_judged or ""
        return Bar(device.title, "", row_charts.empty_row(axis), "not judged", reason, "not judged")
    figure, detail = device_text.step(device)
    judged = [check for check in device.checks if check.metric == "step_latency"]
    drawing = row_charts.interval_bar(interval, axis, limit, p90=p90.typical if p90 else None)
    remark = "estimate" if device.validated else f"estimate, {view.NOT_VALIDATED}"
    state = view.check_state(judged[0]) if judged else ""
    return Bar(device.title, remark, drawing, figure, detail, state)


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


def _stages(result: SimulationResult) -> list[StageRow]:
    """The host, then every device that has more than the time of a steady step."""
    host = result.latency_host
    own = {
        "first_step_ms": _point(host.first_step_ms),
        "step_ms": host.p50_ms or _host_interval(result),
        "p90_ms": host.p90_ms,
        "session_creation_ms": _point(host.session_creation_ms),
        "checkpoint_load_ms": _point(host.checkpoint_load_ms),
        "checkpoint_save_ms": _point(host.checkpoint_save_ms),
    }
    rows = []
    if any(figure is not None for figure in own.values()):
        stages = tuple((title, *_stage(own[key])) for key, title in _STAGES.items())
        rows.append(StageRow("This host", True, _threads(result.host.threads), stages))
    for device in result.devices:
        latency = device.latency
        figures = {key: getattr(latency, key) for key in _STAGES}
        if all(value is None for key, value in figures.items() if key != "step_ms"):
            continue
        total = sum(entry.device_ms.typical for entry in latency.by_class)
        shares = [
            f"{_CLASS_WORDS[entry.operator_class].removesuffix('-bound')} "
            f"{100 * entry.device_ms.typical / total:.0f} %"
            for entry in latency.by_class
            if total
        ]
        stages = tuple((title, *_stage(figures[key])) for key, title in _STAGES.items())
        remarks = [*([_threads(latency.threads)] if latency.threads else []), *shares]
        rows.append(StageRow(device.title, device.validated, ", ".join(remarks), stages))
    return rows


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _point(value: float | None) -> Interval | None:
    return None if value is None else Interval(low=value, typical=value, high=value)


def _stage(interval: Interval | None) -> tuple[str, str]:
    figure, ends = device_text.duration(interval, "", unit="ms")
    known = interval is not None and interval.low < interval.high
    return figure, ends if known else ""


def _operators(
    result: SimulationResult,
) -> tuple[list[OperatorRow], list[charts.RooflinePoint]]:
    """The largest operators as rows; those whose arithmetic and traffic are known as points."""
    ordered = sorted(
        result.latency_host.by_operator, key=lambda cost: (-cost.total_ms, cost.op_type)
    )
    rows: list[OperatorRow] = []
    points: list[charts.RooflinePoint] = []
    for cost in ordered[:_OPERATORS_SHOWN]:
        place = None
        if cost.flops and cost.moved_bytes and cost.total_ms > 0:
            place = len(points) + 1
            gflops = cost.flops / cost.total_ms / 1e6
            points.append(charts.RooflinePoint(place, cost.flops / cost.moved_bytes, gflops))
        rows.append(_operator_row(cost, place))
    rest = ordered[_OPERATORS_SHOWN:]
    if rest:
        merged = OperatorCost(
            op_type=f"{len(rest)} more",
            operator_class="other",
            calls=sum(cost.calls for cost in rest),
            total_ms=sum(cost.total_ms for cost in rest),
            share=min(1.0, sum(cost.share for cost in rest)),
        )
        rows.append(_operator_row(merged, None))
    return rows, points


def _operator_row(cost: OperatorCost, place: int | None) -> OperatorRow:
    rate = intensity = ""
    if cost.flops is not None and cost.total_ms > 0:
        rate = f"{cost.flops / cost.total_ms / 1e6:.3g} GFLOP/s"
    elif cost.moved_bytes is not None and cost.total_ms > 0:
        rate = f"{cost.moved_bytes / cost.total_ms / 1e6:.3g} GB/s"
    if cost.flops is not None and cost.moved_bytes:
        intensity = f"{cost.flops / cost.moved_bytes:.2g} FLOP/B"
    return OperatorRow(
        number=place,
        name=cost.op_type,
        kind=_CLASS_WORDS[cost.operator_class],
        bar=row_charts.share_bar(cost.share, f"bar {cost.operator_class}"),
        share=format_percent(cost.share),
        spent=format_duration(cost.total_ms / 1e3),
        calls=f"{cost.calls} calls",
        rate=rate,
        intensity=intensity,
    )


def _operator_classes(result: SimulationResult) -> list[tuple[str, str]]:
    totals = dict.fromkeys(_CLASS_WORDS, 0.0)
    for cost in result.latency_host.by_operator:
        totals[cost.operator_class] += cost.share
    return [(_CLASS_WORDS[name], format_percent(share)) for name, share in totals.items()]
