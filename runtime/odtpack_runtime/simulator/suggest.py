"""A budget to start from: what was measured, plus a quarter, as TOML to paste."""

from __future__ import annotations

import json
import math

from odtpack_runtime.simulator.result import SimulationResult, TrainingInfo

_ROOM = 1.25


def suggest_budget(result: SimulationResult) -> str:
    """``budgets.toml`` that this result keeps, each limit a quarter above what was measured.

    Latencies take the high end of their interval; a metric may lose a quarter
    of what it gained. What is unknown gets no limit.
    """
    lines = ["[budgets]", f'package_size = "{_size(result.package.package_bytes)}"']
    peaks = [device.memory.peak_bytes for device in result.devices]
    peaks.append(result.memory.measured_peak_bytes or result.memory.predicted.peak_bytes)
    lines.append(f'peak_memory = "{_size(max(peaks))}"')
    lines += _training_lines(result.training)
    for device in result.devices:
        own = []
        if device.latency.step_ms is not None:
            own.append(f'step_latency = "{_up(device.latency.step_ms.high * _ROOM)} ms"')
        if device.latency.finish_s is not None:
            own.append(f'time_to_finish = "{_up(device.latency.finish_s.high * _ROOM)} s"')
        if own:
            # A JSON string of a checked name is a TOML basic string as well.
            lines += ["", f"[device.{json.dumps(device.name)}]", *own]
    return "\n".join(lines) + "\n"


def _training_lines(training: TrainingInfo) -> list[str]:
    lines = []
    loss = training.eval_loss_after
    if loss is None and training.losses:
        loss = training.losses[-1]
    if loss is not None and loss > 0:
        lines.append(f"final_loss = {_up(loss * _ROOM)}")
    if training.metric_after is not None:
        before = training.metric_before or 0.0
        gained = max(0.0, training.metric_after - before)
        floor = training.metric_after - gained * (_ROOM - 1.0)
        lines.append(f"metric_floor = {math.floor(floor * 1000) / 1000:g}")
    return lines


def _size(count: int) -> str:
    value = count * _ROOM
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{_up(value / factor)} {unit}"
    return f"{math.ceil(value)} B"


def _up(value: float) -> str:
    """Rounded up to two significant digits, written without an exponent."""
    if value <= 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{math.ceil(value / step - 1e-9) * step:.{decimals}f}"
