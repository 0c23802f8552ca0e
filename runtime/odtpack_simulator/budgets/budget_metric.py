"""What a metric is: how its figure is read from a result, and which way is better.

A metric that budgets can limit is one :class:`BudgetMetric` in ``metrics/``. The budget file's
keys and their schema, judging, suggesting, comparing, the topic of reports that shows it and the
documentation all follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from odtpack_simulator.result.result import CheckUnit, DeviceResult, SimulationResult
from odtpack_simulator.values.units import Interval, format_interval, format_value

Scope = Literal["package", "device"]
Better = Literal["lower", "higher"]
Topic = Literal[
    "Memory", "Step", "Finish", "Energy", "Sessions", "Metric", "Package", "Interruptions"
]
"""Where reports show a check: in a column of the device matrix, or in the part of that name."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a figure is read from: a result, and one of its devices where the metric has one."""

    result: SimulationResult
    device: DeviceResult | None = None

    @property
    def on(self) -> DeviceResult:
        """The device.

        Raises:
            ValueError: A device's metric was read from a package: a bug of the caller.
        """
        if self.device is None:
            msg = "this metric is read from a device"
            raise ValueError(msg)
        return self.device


@dataclass(frozen=True, slots=True)
class Reading:
    """A figure in the unit of its metric. None is unknown, and ``text`` says why.

    ``basis`` is how the figure was found, where there is more than one way. ``share`` says that
    people read a plain number as a percentage.
    """

    actual: float | None
    text: str
    interval: Interval | None = None
    basis: str = ""
    share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetMetric:
    """One figure of a result that a budget can limit.

    Attributes:
        key: Its key in a budget file.
        title: Its name for people.
        unit: Unit of the figure in results; the budget file names its own.
        scope: Whether there is one per package or one per device.
        topic: Where reports show it.
        headline: The figure that stands for its topic is its own.
        better: ``lower`` where a budget is the most that is allowed, ``higher`` for a floor.
        meaning: A sentence for the documentation and the schema.
        example: A value in a budget file.
        read: The figure of a subject.
        advise: What to change first to reach a limit, given in ``unit``.
        noise: How far the figures of base and head may lie apart, in ``unit``, by chance
            alone; None where that is unknown or nothing.
        timed: It follows from times measured on the host: hosts must be the same to compare.
        of_profile: It follows from the device's profile: profiles must be the same to compare.
        suggested: A suggested budget has it.
        below: Limits must be below this.
    """

    key: str
    title: str
    unit: CheckUnit
    scope: Scope
    topic: Topic
    headline: bool = False
    better: Better = "lower"
    meaning: str
    example: str
    read: Callable[[Subject], Reading]
    advise: Callable[[Subject, float], str]
    noise: Callable[[Subject, Subject], float | None] = lambda _base, _head: None
    timed: bool = False
    of_profile: bool = False
    suggested: bool = True
    below: float | None = None

    def keeps(self, actual: float, limit: float) -> bool:
        """Whether a figure is within a limit; at the limit is within."""
        return actual >= limit if self.better == "higher" else actual <= limit

    def worse_end(self, interval: Interval) -> float:
        """The end of an interval that a limit meets first."""
        return interval.low if self.better == "higher" else interval.high


@dataclass(frozen=True, slots=True)
class AlwaysCheck:
    """A check that needs no budget.

    Attributes:
        title: Its name for people.
        topic: Where reports show it.
        headline: The figure that stands for its topic is its own.
    """

    title: str
    topic: Topic
    headline: bool = False


def shortened(text: str, most: int = 1000) -> str:
    """Text of a result in a sentence: names and reasons of a file may be of any length."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def estimated(interval: Interval | None, unit: CheckUnit, reason: str, noun: str = "") -> Reading:
    """A reading of an interval: the typical figure and both ends, or why there is none."""
    if interval is None:
        return Reading(None, reason)
    typical = format_value(interval.typical, unit)
    typical += noun.removesuffix("s") if typical == "1" else noun
    ends = "" if interval.low == interval.high else f" ({format_interval(interval, unit)})"
    return Reading(interval.typical, f"estimated at {typical}{ends}", interval)
