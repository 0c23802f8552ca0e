"""A limit from a baseline: what the figure was, how far it may be from it, and by chance is.

A time is only compared with one of the same host, and a figure that rests on a
device's profile only with one from the same profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.budgets.budget_file import PlacedLimit
from odtpack_simulator.budgets.budget_metric import BudgetMetric, Subject, shortened
from odtpack_simulator.result.result import HostInfo, SimulationResult

NO_BASELINE: Final = (
    "no baseline was given: odtpack judge RESULT.json --budget budgets.toml --baseline BASE.json"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A limit in the unit of its metric; None where there is none to judge by, and why."""

    limit: float | None
    baseline: float | None = None
    noise: float | None = None
    reason: str = ""


def same_subject(subject: Subject, other: SimulationResult | None) -> Subject | None:
    """The same package or device in another result; None where it is not there."""
    if other is None:
        return None
    if subject.device is None:
        return Subject(other)
    found = (each for each in other.devices if each.name == subject.on.name)
    device = next(found, None)
    return None if device is None else Subject(other, device)


def same_host(base: HostInfo, head: HostInfo) -> bool:
    """Whether times of both can be compared: same processor, as many cores and threads."""
    return (base.cpu, base.cores, base.threads) == (head.cpu, head.cores, head.threads)


def incomparable(metric: BudgetMetric, base: Subject, head: Subject) -> str | None:
    """Why the figures of base and head say nothing about the change; None where they do."""
    if metric.timed and not same_host(base.result.host, head.result.host):
        host = base.result.host
        which = f"{shortened(host.cpu, 100)}, {host.threads} threads of {host.cores} cores"
        return f"the baseline was measured on another host ({which}): measure both on one machine"
    if metric.of_profile and base.on.profile_digest != head.on.profile_digest:
        return "the device's profile is another than the baseline's: measure the baseline again"
    before, now = metric.read(base).basis, metric.read(head).basis
    if before != now:
        return (
            f"the baseline's figure is another: {shortened(before, 100)}, "
            f"here {shortened(now, 100)}"
        )
    return None


def resolve(
    metric: BudgetMetric, placed: PlacedLimit, head: Subject, baseline: SimulationResult | None
) -> Resolved:
    """The limit of a budget in the metric's unit, from the baseline where it is relative.

    ``"+5 %"`` allows ``baseline + 5 % of |baseline|``; ``"-5 %"`` of a floor as much below.
    """
    if placed.kind == "absolute":
        return Resolved(placed.limit)
    if baseline is None:
        return Resolved(None, reason=NO_BASELINE)
    base = same_subject(head, baseline)
    if base is None:
        return Resolved(None, reason="the baseline does not have this device")
    reading = metric.read(base)
    if reading.actual is None:
        return Resolved(None, reason=f"not known of the baseline: {reading.text}")
    reason = incomparable(metric, base, head)
    if reason:
        return Resolved(None, reading.actual, reason=reason)
    change = placed.limit
    if placed.kind == "percent":
        change *= abs(reading.actual) / 100.0
    limit = reading.actual + change
    if not math.isfinite(limit):
        return Resolved(None, reading.actual, reason="the limit is beyond all numbers")
    return Resolved(limit, reading.actual, chance(metric, base, head))


def chance(metric: BudgetMetric, base: Subject, head: Subject) -> float | None:
    """The metric's noise; None where it is unknown, or larger than any number.

    Times of one and the same training differ by chance alone, however far they lie apart: what
    made one longer was something else on the machine.
    """
    noise = metric.noise(base, head)
    if metric.timed and same_training(base.result, head.result):
        before, now = metric.read(base).actual, metric.read(head).actual
        if before is not None and now is not None:
            noise = max(noise or 0.0, abs(now - before))
    return noise if noise is not None and math.isfinite(noise) else None


def same_training(base: SimulationResult, head: SimulationResult) -> bool:
    """Whether the same package was trained in the same way, by the same versions."""
    return (
        base.package.manifest_sha256 == head.package.manifest_sha256
        and base.data == head.data
        and base.policy == head.policy
        and base.tool_version == head.tool_version
        and base.host.onnxruntime == head.host.onnxruntime
    )
