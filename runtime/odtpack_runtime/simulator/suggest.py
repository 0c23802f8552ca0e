"""A budget to start from: what was measured, plus a quarter, as TOML to paste."""

from __future__ import annotations

import json
import math
from typing import Final

from odtpack_runtime.simulator.metric import Metric, Subject
from odtpack_runtime.simulator.metrics import METRICS, of_scope
from odtpack_runtime.simulator.result import SimulationResult, TrainingInfo

_ROOM: Final = 1.25
_MOST: Final = 1e15  # in any unit: beyond, a limit limits nothing
_UNITS: Final[dict[str, tuple[tuple[str, float], ...]]] = {
    "B": (("MB", 1e6), ("kB", 1e3), ("B", 1.0)),
    "ms": (("s", 1e4), ("ms", 1.0)),
    "s": (("h", 36_000.0), ("min", 600.0), ("s", 1.0)),
    "J": (("kJ", 1e4), ("J", 1.0)),
    "%": (("%", 1.0),),
}
"""Unit of a metric -> units in the file, each from so many of the metric's unit on."""
_FACTORS: Final = {"MB": 1e6, "kB": 1e3, "h": 3600.0, "min": 60.0, "kJ": 1e3}


def suggest_budget(result: SimulationResult) -> str:
    """``budgets.toml`` that this result keeps, each limit a quarter above what was measured.

    Intervals give their high end. The peak is limited once, for all devices. A metric may
    lose a quarter of what it gained, and its floor lies below its 95 % interval. What is
    unknown gets no limit; nor does what follows from other limits.
    """
    subject = Subject(result)
    lines = ["[budgets]"]
    for metric in of_scope("package"):
        if metric.key == "metric_floor":
            lines += _floor(result.training)
        else:
            lines += _line(metric, metric.read(subject).actual)
    peaks = [device.memory.peak_bytes for device in result.devices]
    peaks.append(result.memory.measured_peak_bytes or result.memory.predicted.peak_bytes)
    lines += _line(METRICS["peak_memory"], max(peaks))
    for device in result.devices:
        own = []
        for metric in of_scope("device"):
            interval = metric.read(Subject(result, device)).interval
            alone = metric.key == "sessions" and result.policy.state == "foreground"
            if metric.suggested and interval is not None and not alone:
                own += _line(metric, metric.worse_end(interval))
        if own:
            # A JSON string of a checked name is a TOML basic string as well.
            lines += ["", f"[device.{json.dumps(device.name)}]", *own]
    return "\n".join(lines) + "\n"


def _line(metric: Metric, measured: float | None) -> list[str]:
    """A limit that is at most; none for what is unknown, negative or without bounds."""
    if measured is None or not 0 <= measured * _ROOM <= _MOST:
        return []
    value = measured * _ROOM
    if metric.unit == "1":
        whole = metric.key in ("sessions", "repeated_steps")
        return [f"{metric.key} = {math.ceil(value) if whole else _up(value)}"]
    units = _UNITS[metric.unit]
    unit = next((name for name, least in units if value >= least), units[-1][0])
    shown = math.ceil(value) if unit == "B" else _up(value / _FACTORS.get(unit, 1.0))
    return [f'{metric.key} = "{shown} {unit}"']


def _floor(training: TrainingInfo) -> list[str]:
    after = training.metric_after
    if after is None or abs(after) > _MOST:
        return []
    gained = max(0.0, after - (training.metric_before or 0.0))
    floor = after - gained * (_ROOM - 1.0)
    if training.metric_interval is not None:
        floor = min(floor, training.metric_interval[0])
    if abs(floor) > _MOST:
        return []
    steps = math.floor(floor * 1000)
    steps -= steps / 1000 > floor  # the product was rounded up
    if steps <= 0 and training.metric_interval is not None:
        return []  # a share of right answers is never below zero: such a floor holds nothing
    return [f"metric_floor = {steps / 1000:.3f}"]


def _up(value: float) -> str:
    """Rounded up to two significant digits, written without an exponent."""
    if value <= 0:
        return "0"
    value = max(value, 1e-9)
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{math.ceil(value / step - 1e-9) * step:.{decimals}f}"
