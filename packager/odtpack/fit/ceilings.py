"""What can be said of budgets before anything is trained: memory, and the package's size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from odtpack_simulator.device.kits import RUNTIME_LIBRARY_BYTES
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.figures.limits import Budgets
from odtpack_simulator.values.units import format_bytes

PLAN_ERROR: Final = 0.1
"""How far the memory plan may be from what is measured, as a share of it.

Median and largest error over the models of docs/benchmarks.md are below 4 %; packages whose
interpreter is most of the process are predicted too low, which drops nothing here.
"""


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A limit in bytes.

    Attributes:
        limit: Most bytes allowed.
        of: What sets it, for people.
    """

    limit: float
    of: str

    def excess(self, count: float) -> float:
        """By which share of the limit a number of bytes is over it; 0 or less within it."""
        return count / self.limit - 1.0 if self.limit > 0 else float("inf")

    def describe(self, what: str, count: float) -> str:
        """A sentence about a figure that is over it."""
        limit = format_bytes(self.limit)
        return f"{what} {format_bytes(count)} is over the {limit} of {self.of}"


def memory_ceiling(profiles: Sequence[DeviceProfile], budgets: Budgets) -> Ceiling | None:
    """The lowest limit on peak memory that is an error to exceed; None if there is none."""
    found = []
    for profile in profiles:
        granted = profile.memory_limit_bytes()
        others = budgets.footprint_of(profile).nbytes + RUNTIME_LIBRARY_BYTES
        if granted is not None:
            found.append(Ceiling(max(0, granted - others), profile.title))
        for limit, where in _errors(profile, budgets, "peak_memory"):
            found.append(Ceiling(limit, where))
        for share, where in _errors(profile, budgets, "memory_headroom"):
            if granted is not None:
                found.append(Ceiling(max(0, granted * (1 - share / 100) - others), where))
    return min(found, key=lambda each: each.limit, default=None)


def size_ceiling(profiles: Sequence[DeviceProfile], budgets: Budgets) -> Ceiling | None:
    """The lowest limit on a package's size that is an error to exceed; None if there is none."""
    found = [
        Ceiling(limit, where)
        for profile in profiles
        for limit, where in _errors(profile, budgets, "package_size")
    ]
    return min(found, key=lambda each: each.limit, default=None)


def _errors(profile: DeviceProfile, budgets: Budgets, key: str) -> Iterator[tuple[float, str]]:
    """Limits of one metric on a device that are errors to exceed, and where they stand."""
    for placed in budgets.for_device(profile.name, profile.os).get(key, ()):
        if placed.level == "error" and placed.kind == "absolute":
            yield placed.limit, placed.location
