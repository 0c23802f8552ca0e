"""A budget to start from: typical figures plus a quarter, and regressions, as TOML to paste.

Devices share limits, those of all of them or of an operating system, as far as it takes to
keep the file short: a few devices have tables of their own, many are grouped together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.figures.metric import Metric
from odtpack_simulator.figures.simulated import METRICS, figures_of
from odtpack_simulator.result import SimulationResult, Subject
from odtpack_simulator.values.figure import Figure
from odtpack_simulator.values.text import toml_key

_ROOM: Final = 1.25
_MOST: Final = 1e15  # in any unit: beyond, a limit limits nothing
_UNITS: Final[dict[str, tuple[tuple[str, float, float], ...]]] = {
    "B": (("MB", 1e6, 1e6), ("kB", 1e3, 1e3), ("B", 0.0, 1.0)),
    "ms": (("s", 1e4, 1e3), ("ms", 0.0, 1.0)),
    "s": (("h", 36_000.0, 3600.0), ("min", 600.0, 60.0), ("s", 0.0, 1.0)),
    "J": (("kJ", 1e4, 1e3), ("J", 0.0, 1.0)),
    "%": (("%", 0.0, 1.0),),
}
"""Unit of a metric -> units in the file: each from how many of the metric's unit on, and how many
of them it is."""
_REGRESSION: Final = "+10 %"
_REGRESSIONS: Final = ("package_size", "peak_memory", "step_latency")
"""Metrics that are limited against a baseline as well."""
_HEAD: Final = f'# "{_REGRESSION}" is judged against --baseline RESULT.json, and only with one.'
_MOST_LINES: Final = 60
_ALIKE: Final = (1.0, 1.5, 2.0, 3.0)
"""Factors by which figures that share a limit may differ: the first that gives few enough lines."""


def suggest_budget(result: SimulationResult) -> str:
    """``budgets.toml``: each limit a quarter above the figure, some also ``"+10 %"`` of a baseline.

    Intervals give their typical figure: no such limit fails this result, but where the high end
    is above it, it warns. The peak is limited once, for all devices. A metric may
    lose a quarter of what it gained, and its floor lies below its 95 % interval. What is
    unknown gets no limit; nor does what follows from other limits.

    With many devices, those of an operating system share the limit that the worst of them
    keeps, if their figures are alike: equal, or within a factor of up to three, as it takes to
    keep to sixty lines. Where that is not enough, each of the others takes one line.
    """
    head = [_HEAD, "[budgets]"]
    for figure in figures_of(result):
        metric = METRICS[figure.metric]
        if not metric.suggested:
            continue
        if metric.better == "higher":
            head += _floor(figure, result.training.metric_before)
        else:
            head += _line(metric, figure.value)
    peaks = [device.memory.peak_bytes for device in result.devices]
    peaks.append(result.memory.predicted.peak_bytes)
    head += _line(METRICS["peak_memory"], max(peaks))
    figures: dict[str, dict[str, float]] = {}
    for device in result.devices:
        for figure in figures_of(result, device):
            metric = METRICS[figure.metric]
            window = metric.key == "sessions" and result.policy.state == "foreground"
            known = figures.setdefault(metric.key, {})
            limited = metric.suggested and figure.high is not None and not window
            if limited and figure.value is not None and _line(metric, figure.value):
                known[device.name] = figure.value
    for factor in _ALIKE:
        limits = _shared_limits(result, figures, factor)
        tables = [*head, *limits.everywhere, *limits.tables()]
        if len(tables) <= _MOST_LINES:
            return "\n".join(tables) + "\n"
    return "\n".join([*head, *limits.everywhere, *limits.tables(inline=True)]) + "\n"


@dataclass(frozen=True)
class _Limits:
    """Lines such as ``step_latency = "20 ms"``, by what they hold for."""

    everywhere: list[str]
    classes: dict[str, list[str]]
    devices: dict[str, list[str]]

    def tables(self, *, inline: bool = False) -> list[str]:
        """Lines of the tables; ``inline`` takes one for each device."""
        lines: list[str] = []
        for name, own in self.classes.items():
            lines += ["", f"[class.{name}]", *own] if own else []
        devices = {toml_key(name): own for name, own in self.devices.items() if own}
        if inline and devices:
            lines += ["", "[device]"]
            return lines + [f"{name} = {{ {', '.join(own)} }}" for name, own in devices.items()]
        for name, own in devices.items():
            lines += ["", f"[device.{name}]", *own]
        return lines


def _shared_limits(
    result: SimulationResult, figures: Mapping[str, Mapping[str, float]], factor: float
) -> _Limits:
    """The limits of all devices: one for all, or for a class, where ``factor`` allows it."""
    classes: dict[str, list[str]] = {}
    for device in result.devices:
        classes.setdefault(device.os, []).append(device.name)
    names = [device.name for device in result.devices]
    found = _Limits([], {name: [] for name in classes}, {name: [] for name in names})
    for key, known in figures.items():
        metric = METRICS[key]
        if len(_alike(known, names, factor)) == len(names) > 0:
            found.everywhere.extend(_line(metric, max(known.values())))
            continue
        for name, members in classes.items():
            shared = _alike(known, members, factor)
            if shared:
                found.classes[name].extend(_line(metric, max(known[each] for each in shared)))
            for each in members:
                if each in known and each not in shared:
                    found.devices[each].extend(_line(metric, known[each]))
    return found


def _alike(known: Mapping[str, float], members: list[str], factor: float) -> list[str]:
    """The most devices of a group whose figures lie within ``factor``, and may share a limit."""
    # None where they are fewer than two, or where the figure of a member is unknown: a limit for
    # the group would hold for that member too, and could not be judged.
    if any(each not in known for each in members):
        return []
    ranked = sorted(members, key=lambda each: -known[each])
    best: list[str] = []
    for start, slowest in enumerate(ranked):
        run = [each for each in ranked[start:] if known[each] * factor >= known[slowest]]
        best = run if len(run) > len(best) else best
    return best if len(best) > 1 else []


def _line(metric: Metric[Subject], measured: float | None) -> list[str]:
    """A limit that is at most; none for what is unknown, negative or without bounds."""
    if measured is None or not 0 <= measured * _ROOM <= _MOST:
        return []
    value = measured * _ROOM
    if metric.unit == "1":
        return [f"{metric.key} = {math.ceil(value) if metric.noun else _up(value)}"]
    units = _UNITS[metric.unit]
    unit, factor = next((name, factor) for name, least, factor in units if value >= least)
    shown = math.ceil(value) if unit == "B" else _up(value / factor)
    limit = f'"{shown} {unit}"'
    if metric.key in _REGRESSIONS:
        limit = f'[{limit}, "{_REGRESSION}"]'
    return [f"{metric.key} = {limit}"]


def _floor(figure: Figure, before: float | None) -> list[str]:
    """A floor that keeps three quarters of what was gained; none for what is unknown."""
    if figure.value is None or abs(figure.value) > _MOST:
        return []
    gained = max(0.0, figure.value - (before or 0.0))
    floor = figure.value - gained * (_ROOM - 1.0)
    if figure.noise is not None:
        floor = min(floor, figure.noise[0])
    if floor > 1.0 or floor < -_MOST:  # no share is above 1
        return []
    steps = math.floor(floor * 1000)
    steps -= steps / 1000 > floor  # the product was rounded up
    if steps <= 0 and figure.noise is not None:
        return []  # a share of right answers is never below zero: such a floor holds nothing
    return [f"{figure.metric} = {steps / 1000:.3f}"]


def _up(value: float) -> str:
    """Rounded up to two significant digits, written without an exponent."""
    if value <= 0:
        return "0"
    value = max(value, 1e-9)
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{math.ceil(value / step - 1e-9) * step:.{decimals}f}"
