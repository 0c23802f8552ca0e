"""The sections of the page on a simulation: memory, latency, learning and interruptions."""

import math
from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Any, Final

from markupsafe import Markup

from odtpack_simulator.figures.limits import suggest_budget
from odtpack_simulator.reports import charts, simulation
from odtpack_simulator.reports.charts import Bar
from odtpack_simulator.reports.report import NOT_VALIDATED, FigureRow, name_list
from odtpack_simulator.reports.svg import Axis, duration_label, linear_axis, log_axis
from odtpack_simulator.result import (
    CampaignPoint,
    DeviceResult,
    OperatorCost,
    SimulationResult,
    TimelinePoint,
)
from odtpack_simulator.values.figure import verdict_of
from odtpack_simulator.values.text import counted
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_duration,
    format_energy,
    format_interval,
    format_percent,
)


def simulation_sections(result: SimulationResult) -> dict[str, Any]:
    """What the templates of a simulation draw besides what all reports share."""
    training = result.training
    checks = [check for _, check in result.all_checks()]
    unbudgeted = checks and not any(check.budget_location for check in checks)
    return {
        "metric_text": lambda value: simulation.metric_text(result, value),
        # A budget to paste where a judged result has none.
        "suggestion": suggest_budget(result) if unbudgeted else "",
        "loss_chart": charts.loss_chart(
            training.losses, training.eval_loss_before, training.eval_loss_after, training.curve
        ),
        "panels": panels(result),
        "memory": memory_section(result),
        "latency": latency_section(result),
        "unknown": simulation.unknown_rows(result),
        "policy": simulation.policy_words(result),
        "interruption": simulation.interruption_words(result.interruption),
        "interruption_rows": interruption_rows(result),
    }


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


_STATES: Final = {
    "fits": "pass", "depends": "warn", "close": "fail", "over": "fail", "killed": "fail"
}  # fmt: skip


def memory_section(result: SimulationResult) -> dict[str, Any]:
    """Rows and drawings of the section."""
    timeline = result.memory.timeline
    live = [point.live_bytes for point in timeline]
    known = [(d.title, d.memory.limit_bytes) for d in result.devices if d.memory.limit_bytes]
    lines, beyond = charts.limit_lines(max(live, default=0), known)
    limits, axis = _limit_rows(result)
    # What was taken for the app: devices, figure and source.
    apps: dict[tuple[str, str], list[str]] = {}
    for device in result.devices:
        memory = device.memory
        source = ": ".join(filter(None, (memory.app_kind, memory.app_source)))
        apps.setdefault((format_bytes(memory.app_bytes), source), []).append(device.title)
    breakdown = result.memory.predicted.breakdown
    parts = {name: getattr(breakdown, key) for key, name in _BREAKDOWN_WORDS.items()}
    largest = sorted(result.memory.tensors_at_peak, key=lambda tensor: (-tensor.bytes, tensor.name))
    peak = result.memory.predicted.peak_bytes
    return {
        "limits": limits,
        "limits_axis": axis,
        "apps": [(name_list(names), size, source) for (size, source), names in apps.items()],
        "runtime": max((device.memory.runtime_bytes for device in result.devices), default=0),
        "mapped": simulation.mapped_words(result),
        "phases": _phases(result),
        "chart": charts.timeline_chart(live, lines, parts_of_step(timeline)),
        "lines": [
            (line.letter, format_bytes(line.limit_bytes), name_list(line.devices)) for line in lines
        ],
        "beyond": _beyond(beyond, drawn=bool(lines)),
        "peak": max(timeline, key=lambda point: point.live_bytes, default=None),
        "breakdown": [_share_bar(name, nbytes, breakdown.total) for name, nbytes in parts.items()],
        "tensors": [
            _share_bar(each.name, each.bytes, peak, each.kind.replace("_", " "))
            for each in largest[:_TENSORS_SHOWN]
        ],
        "tensors_left": max(0, len(result.memory.tensors_at_peak) - _TENSORS_SHOWN),
    }


def parts_of_step(timeline: Sequence[TimelinePoint]) -> list[tuple[str, int]]:
    """Forward, backward and update, each with the place of its first node."""
    # Where ONNX Runtime runs some nodes of the backward pass between those of the forward pass, it
    # begins where the fewest nodes stand on the wrong side.
    if any(point.part is None for point in timeline):
        return []
    step = [point.part == "backward" for point in timeline if point.part != "update"]
    # Wrong at a cut: the backward nodes before it, and the forward nodes from there on.
    wrong = [step.count(False)]
    for is_backward in step:
        wrong.append(wrong[-1] + (1 if is_backward else -1))
    cut = min(range(len(wrong)), key=wrong.__getitem__)
    starts = {"forward": 0, "backward": cut, "update": len(step)}
    ends = (cut, len(step), len(timeline))
    return [(name, at) for (name, at), end in zip(starts.items(), ends, strict=True) if at < end]


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
        figure, detail = simulation.memory_words(device)
        drawing = charts.empty_row(scale)
        remarks = [f"limit {memory.limit_kind}" if memory.limit_kind else "limit unknown"]
        if memory.limit_low_bytes is not None and memory.limit_low_bytes != memory.limit_bytes:
            remarks.append(f"{format_bytes(memory.limit_low_bytes)} at worst")
        remarks.append(simulation.kit_words(memory, result))
        if memory.held is not None:
            remarks.append(_HELD_WORDS[memory.held])
        if not device.validated:
            remarks.append(NOT_VALIDATED)
        if memory.limit_bytes:
            limit, measured = memory.limit_bytes, memory.measured_peak_bytes
            drawing = charts.limit_bar(
                memory.predicted_peak_bytes / limit,
                None if measured is None else measured / limit,
                scale,
                over=memory.outcome in {"close", "over", "killed"},
                app=memory.app_bytes / limit,
                runtime=memory.runtime_bytes / limit,
                warning=None if memory.warning_bytes is None else memory.warning_bytes / limit,
            )
        state = _STATES.get(memory.outcome, "not judged")
        rows.append(Bar(device.title, ", ".join(remarks), drawing, figure, detail, state))
    return rows, charts.axis_row(scale, lambda share: f"{100 * share:g} %")


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
            error = simulation.measured_words(phase.predicted_bytes, measured)
        drawing = charts.pair_bar(phase.predicted_bytes, measured, most)
        planned = format_bytes(phase.predicted_bytes)
        rows.append(Bar(phase.phase.capitalize(), "", drawing, planned, error))
    return rows


def _share_bar(name: str, nbytes: int, whole: int, remark: str = "") -> Bar:
    share = nbytes / max(1, whole)
    return Bar(name, remark, charts.share_bar(share), format_bytes(nbytes), format_percent(share))


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


def latency_section(result: SimulationResult) -> dict[str, Any]:
    """Rows and drawings of the section."""
    rows, axis = _latency_rows(result)
    classes = dict.fromkeys(_CLASS_WORDS, 0.0)
    for cost in result.latency_host.by_operator:
        classes[cost.operator_class] += cost.share
    return {
        "rows": rows,
        "axis": axis,
        "stages": _stages(result),
        "operators": _operators(result),
        "classes": [(_CLASS_WORDS[name], format_percent(s)) for name, s in classes.items()],
    }


def _latency_rows(result: SimulationResult) -> tuple[list[Bar], Markup | None]:
    """Step time by device, the slowest first and the host last; empty without any figure."""
    host = _host_interval(result)
    known = [d.latency.step_ms for d in result.devices if d.latency.step_ms is not None]
    spans = ([host] if host else []) + known
    positive = [span for span in spans if span.high > 0]
    if not positive:
        return [], None
    marks = [limit for limit in map(_step_budget, result.devices) if limit]
    marks += [d.latency.p90_ms.typical for d in result.devices if d.latency.p90_ms]
    axis = log_axis(
        min([span.low for span in positive] + marks), max([span.high for span in positive] + marks)
    )
    devices = sorted(
        result.devices,
        key=lambda d: -d.latency.step_ms.typical if d.latency.step_ms else math.inf,
    )
    rows = [_latency_row(device, axis, _step_budget(device)) for device in devices]
    if host is not None:
        drawing = charts.interval_bar(host, axis, None, p90=result.latency_host.p90_ms.typical)
        middle = format_duration(host.typical / 1e3)
        rows.append(Bar("This machine", "measured", drawing, middle, format_interval(host, "ms")))
    return rows, charts.axis_row(axis, duration_label)


def _latency_row(device: DeviceResult, axis: Axis, limit: float | None) -> Bar:
    interval, p90 = device.latency.step_ms, device.latency.p90_ms
    if interval is None:
        reason = device.latency.not_judged or ""
        return Bar(device.title, "", charts.empty_row(axis), "not judged", reason, "not judged")
    figure, detail = simulation.shown(interval, "ms")
    judged = [check for check in device.checks if check.metric == "step_latency"]
    drawing = charts.interval_bar(interval, axis, limit, p90=p90.typical if p90 else None)
    remark = "estimate" if device.validated else f"estimate, {NOT_VALIDATED}"
    return Bar(device.title, remark, drawing, figure, detail, verdict_of(judged) if judged else "")


def _host_interval(result: SimulationResult) -> Interval | None:
    """Median of the host's steady steps with the 10th and 90th percentile."""
    steps = [value for value in result.latency_host.steps_ms if value > 0]
    if not steps:
        return None
    if len(steps) < 10:
        ordered = sorted(steps)
        return Interval.of(ordered[0], ordered[len(ordered) // 2], ordered[-1])
    cuts = quantiles(steps, n=10, method="inclusive")
    return Interval.of(cuts[0], cuts[4], cuts[8])


def _step_budget(device: DeviceResult) -> float | None:
    limits = [c.limit for c in device.checks if c.metric == "step_latency" and c.limit]
    return limits[0] if limits else None


def _stages(result: SimulationResult) -> list[FigureRow]:
    """The host, then every device that has more than the time of a steady step."""
    host = result.latency_host
    known = {key: getattr(host, key) for key in _STAGES if key not in ("step_ms", "p90_ms")}
    own = {key: Interval.of(at, at, at) for key, at in known.items()}
    own |= {"step_ms": host.p50_ms, "p90_ms": host.p90_ms}
    stages = [(title, *_stage(own[key])) for key, title in _STAGES.items()]
    rows = [FigureRow("This host", True, counted(result.host.threads, "thread"), stages)]
    for device in result.devices:
        latency = device.latency
        figures = {key: getattr(latency, key) for key in _STAGES}
        if all(value is None for key, value in figures.items() if key != "step_ms"):
            continue
        total = sum(entry.device_ms.typical for entry in latency.by_class)
        shares = [
            f"{_CLASS_WORDS[entry.operator_class].removesuffix('-bound')} "
            f"{format_percent(entry.device_ms.typical / total)}"
            for entry in latency.by_class
            if total
        ]
        stages = [(title, *_stage(figures[key])) for key, title in _STAGES.items()]
        if latency.threads:
            shares.insert(0, counted(latency.threads, "thread"))
        rows.append(FigureRow(device.title, device.validated, ", ".join(shares), stages))
    return rows


def _stage(interval: Interval | None) -> tuple[str, str]:
    figure, ends = simulation.shown(interval, "ms")
    known = interval is not None and interval.low < interval.high
    return figure, ends if known else ""


def _operators(result: SimulationResult) -> list[dict[str, Any]]:
    ordered = sorted(
        result.latency_host.by_operator, key=lambda cost: (-cost.total_ms, cost.op_type)
    )
    rows = [_operator_row(cost) for cost in ordered[:_OPERATORS_SHOWN]]
    rest = ordered[_OPERATORS_SHOWN:]
    if rest:
        merged = OperatorCost(
            op_type=f"{len(rest)} more",
            operator_class="other",
            calls=sum(cost.calls for cost in rest),
            total_ms=sum(cost.total_ms for cost in rest),
            share=min(1.0, sum(cost.share for cost in rest)),
        )
        rows.append(_operator_row(merged))
    return rows


def _operator_row(cost: OperatorCost) -> dict[str, Any]:
    rate = intensity = ""
    if cost.flops is not None and cost.total_ms > 0:
        rate = f"{cost.flops / cost.total_ms / 1e6:.3g} GFLOP/s"
    elif cost.moved_bytes is not None and cost.total_ms > 0:
        rate = f"{cost.moved_bytes / cost.total_ms / 1e6:.3g} GB/s"
    if cost.flops is not None and cost.moved_bytes:
        intensity = f"{cost.flops / cost.moved_bytes:.2g} FLOP/B"
    return {
        "name": cost.op_type,
        "kind": _CLASS_WORDS[cost.operator_class],
        "bar": charts.share_bar(cost.share, f"bar {cost.operator_class}"),
        "share": format_percent(cost.share),
        "spent": format_duration(cost.total_ms / 1e3),
        "calls": f"{cost.calls} calls",
        "rate": rate,
        "intensity": intensity,
    }


MOST_PANELS: Final = 5  # Devices whose curves are drawn; `report.css` has one rule for each

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


def panels(result: SimulationResult) -> list[dict[str, Any]]:
    """Curves of a few devices from the fastest to the slowest, evenly spread."""
    curves = [(device, device.campaign.curve) for device in result.devices]
    known = [(device, curve) for device, curve in curves if len(curve) > 1]
    known.sort(key=lambda pair: (pair[1][-1].active_s, pair[0].name))
    if len(known) > MOST_PANELS:
        last = len(known) - 1
        known = [known[round(i * last / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]
    return [_panel(result, device, curve) for device, curve in known]


def _panel(
    result: SimulationResult, device: DeviceResult, curve: list[CampaignPoint]
) -> dict[str, Any]:
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
    note = "" if device.validated else NOT_VALIDATED
    return {"title": device.title, "note": note, "summary": ", ".join(parts), "curves": curves}


def _against(
    title: str,
    pick: Callable[[CampaignPoint], float | None],
    curve: list[CampaignPoint],
    device: DeviceResult,
) -> list[tuple[str, str, Markup]]:
    """One figure against time, energy and sessions."""
    known = [(point, value) for point in curve if (value := pick(point)) is not None]
    seconds = known[-1][0].active_s
    unit, factor = ("min", 60.0) if seconds < 7200.0 else ("h", 3600.0)
    if seconds < 120.0:
        unit, factor = "s", 1.0
    times = [(point.active_s / factor, value) for point, value in known]
    drawn = [("time", f"active time, {unit}", times)]
    joules = [(p.energy_j, value) for p, value in known if p.energy_j is not None]
    if len(joules) > 1:
        unit, factor = ("kJ", 1e3) if joules[-1][0] >= 2e3 else ("J", 1.0)
        energies = [(energy / factor, value) for energy, value in joules]
        drawn.append(("energy", f"energy above idle, {unit}", energies))
    ends: dict[float, float] = {}
    for point, value in known:  # the last value of a session is what it ends with
        ends[0.0 if point.step == 0 else float(point.session)] = value
    drawn.append(("number of sessions", "sessions", sorted(ends.items())))
    charted = []
    for against, axis, points in drawn:
        start, end = points[0][1], points[-1][1]
        alt = f"{title} against {against} on {device.title}, from {start:.4g} to {end:.4g}"
        charted.append((title, axis, charts.curve_chart(points, alt, whole=axis == "sessions")))
    return charted


def interruption_rows(result: SimulationResult) -> list[Bar]:
    """One lane per kind of interruption, along the steps of the training."""
    info = result.interruption
    if info is None:
        return []
    steps = max([1, result.data.trained_steps, *(entry.step for entry in info.interruptions)])
    rows = []
    for kind, words in _EVENT_WORDS.items():
        found = [entry for entry in info.interruptions if entry.at == kind]
        if found:
            events = [(e.step / steps, min(e.resumed_from_step, e.step) / steps) for e in found]
            count = sum(entry.repeated_steps for entry in found)
            repeated = f"{counted(count, 'step')} repeated"
            drawing = charts.event_row(events, _OUTLINES[kind])
            rows.append(Bar(words, "", drawing, f"{len(found)} ×", repeated))
    return rows
