"""The one rule for memory: whether a training whose peak was planned fits a limit.

Simulations, budgets, fleets, ``odtpack fit`` and ``odtpack build --memory-budget`` all ask it.
"""

from __future__ import annotations

from typing import Final, Literal

_PERCENT: Final = 3
MARGIN: Final = _PERCENT / 100
"""Share of a planned peak by which it may be too low: see docs/memory.md for what was measured.

A training that is said to fit and does not is killed on a phone; one that is said not to fit
and does is only measured again.
"""

MemoryFit = Literal["fits", "close", "over"]
"""``close``: the planned peak is within the limit, but not with the margin: too close to call."""


def with_margin(peak_bytes: int) -> int:
    """The most that a training with this planned peak may take, in bytes."""
    return peak_bytes - (-peak_bytes * _PERCENT // 100)  # rounded up, exactly


def memory_fit(peak_bytes: int, limit_bytes: int) -> MemoryFit:
    """How a planned peak compares with what a limit leaves the training, both in bytes."""
    if with_margin(peak_bytes) <= limit_bytes:
        return "fits"
    return "close" if peak_bytes <= limit_bytes else "over"


def judged_peak(planned_bytes: int, measured_bytes: int | None) -> int:
    """The peak that verdicts are about: the planned one, unless a replay took more than it may."""
    if measured_bytes is not None and measured_bytes > with_margin(planned_bytes):
        return measured_bytes
    return planned_bytes
