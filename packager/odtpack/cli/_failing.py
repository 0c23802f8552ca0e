"""The demo's failure: a budget that the measured result does not keep on one device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odtpack_simulator.result.result import SimulationResult


def budget_that_one_breaks(result: SimulationResult) -> str:
    """A budget file for the step time between those of the slowest device and of the next."""
    from odtpack_simulator.values.units import format_duration, format_limit

    steps = [device.latency.step_ms for device in result.devices]
    known = sorted((step for step in steps if step is not None), key=lambda step: step.typical)
    if len(known) < 2 or known[-2].typical >= known[-1].typical:
        return ""
    next_one, slowest = known[-2], known[-1].typical
    # Above the whole interval of the next device where that is possible, so that it passes.
    low = next_one.high if next_one.high < slowest else next_one.typical
    limit = math.sqrt(low * slowest)
    rounded = float(f"{limit:.2g}")
    limit = rounded if low <= rounded < slowest else limit
    shown = format_limit(limit, "ms") if limit < 1e3 else format_duration(limit / 1e3)
    return f'[budgets]\nstep_latency = "{shown.replace("µs", "us")}"\n'
