"""Whether a machine was quiet enough for its times to mean something.

Other programs disturb a timing in two ways. They take the processor, which the steps
then wait for; and they share caches, memory or, in a virtual machine, the core itself,
which makes everything slower without any waiting. The first shows in what each step
waited, the second in a calibration before and one after the steps, and, where it was
there all the time, in what other programs computed meanwhile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from odtpack_simulator.measure.host import BUSY, ENOUGH_STEPS, QUIET_SHARE

MOST_WAITING: Final = 0.5
"""Share of waiting above which even processor times say nothing: caches were lost too often."""
LEAST_STEPS: Final = 3
"""Steps that waited less than that, without which no time is judged."""
MOST_DRIFT: Final = 2.0
"""Ratio of two calibrations above which the machine was not the same in between."""
SHARED_CORE: Final = 2.0
"""How much longer a step takes, at most, while another program has the other half of its core."""
LEAST_GAIN: Final = 0.4
"""What each further thread adds to a matrix product, at least, where it has a core of its own."""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How far the times of steps can be relied on.

    Attributes:
        steps_ms: The times to use: undisturbed steps, or all without what they waited.
        waited: Share of all steps' time that they waited for a processor.
        drift: The larger of two calibrations over the smaller, at least 1.
        low: What the low end of an interval is multiplied by, at most 1.
        high: What the high end is multiplied by, at least 1.
        busy: Why no time is judged; None where times are.
        note: What was noticed and corrected; empty on a quiet machine.
    """

    steps_ms: tuple[float, ...]
    waited: float
    drift: float
    low: float
    high: float
    busy: str | None
    note: str


def steadiness(
    steps_ms: Sequence[float],
    waited_ms: Sequence[float],
    rates: Sequence[tuple[float, float]],
    *,
    threads: int,
    single: float,
    stolen: float = 0.0,
    others: float = 0.0,
    load: float | None = None,
) -> Steadiness:
    """Judge a timing.

    Args:
        steps_ms: Wall times of steps, at least one.
        waited_ms: What their threads waited for a processor, in the same order.
        rates: Each rate of the calibration before and after the steps; the first is a
            matrix product with ``threads``.
        threads: Threads of the steps.
        single: The matrix product with one thread.
        stolen: Share of the time that the host of a virtual machine gave to others.
        others: Share of the time that other programs had the cores which the steps left free.
        load: Load average, for people.
    """
    total = sum(steps_ms)
    lost = [min(wait, step) for wait, step in zip(waited_ms, steps_ms, strict=True)]
    waited = sum(lost) / total if total else 0.0
    quiet = [step for step, wait in zip(steps_ms, lost, strict=True) if wait <= QUIET_SHARE * step]
    drift = max((max(pair) / min(pair) for pair in rates if min(pair) > 0), default=1.0)
    seen = f"steps waited {waited:.0%} of their time for a processor" if waited > 0.01 else ""
    if stolen > 0.02:
        seen += f"{', ' if seen else ''}the host of this virtual machine took {stolen:.0%}"
    if others > 0.1:
        seen += f"{', ' if seen else ''}other programs had {min(others, 1):.0%} of the other cores"
    if drift > 1.1:
        seen += f"{', ' if seen else ''}it computed {drift:.2g} times as fast at other moments"
    loaded = f" (load average {load:.1f})" if load is not None and seen else ""
    enough = len(quiet) >= min(ENOUGH_STEPS, len(steps_ms))
    busy = None
    gain = statistics.fmean(rates[0]) / single if rates and single else float(threads)
    # Without the waiting, a step still finds its caches emptied: it is too long, if anything.
    freed = [
        step - wait
        for step, wait in zip(steps_ms, lost, strict=True)
        if wait <= MOST_WAITING * step
    ]
    few = len(freed) < min(LEAST_STEPS, len(steps_ms))
    disturbed = not enough and (waited > MOST_WAITING or few or threads > 1)
    if disturbed or drift > MOST_DRIFT or stolen > MOST_WAITING:
        busy = f"{BUSY}: {seen}{loaded}"
    elif threads > 1 and gain < 1 + LEAST_GAIN * (threads - 1):
        busy = (
            f"{threads} threads computed only {gain:.2g} times as fast as one: the virtual "
            "cores of this machine share a core, or other programs have them"
        )
    used = quiet if enough else freed or list(steps_ms)
    spoilt = 1.0 if enough else 1 + waited
    spread = math.sqrt(drift) * (1 + max(0.0, stolen))
    # Alone, the steps might have been that much faster; they cannot have been slower.
    shared = 1 + (SHARED_CORE - 1) * min(1.0, others)
    return Steadiness(
        steps_ms=tuple(used),
        waited=waited,
        drift=drift,
        low=1 / (spoilt * spread * shared),
        high=spread,
        busy=busy,
        note=f"{BUSY}, which widens the interval: {seen}{loaded}" if seen else "",
    )
