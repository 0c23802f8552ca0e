"""What can be told of budgets before anything is trained: memory, and the package's size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from odtpack_runtime.simulator.budgets import Budgets
from odtpack_runtime.simulator.profile import DeviceProfile
from odtpack_runtime.simulator.units import format_bytes

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

    def told(self, what: str, count: float) -> str:
        """A sentence about a figure that is over it."""
        limit = format_bytes(self.limit)
        return f"{what} {format_bytes(count)} is over the {limit} of {self.of}"


def memory_ceiling(profiles: Sequence[DeviceProfile], budgets: Budgets) -> Ceiling | None:
    """The lowest limit on peak memory that is an error to exceed; None if there is none."""
    found = []
    for profile in profiles:
        limit = profile.memory_limit_bytes()
        if limit is not None:
            found.append(Ceiling(limit, profile.title))
        limits = budgets.for_device(profile.name, profile.os)
        for key in ("peak_memory", "memory_headroom"):
            placed = limits.get(key)
            if placed is None or placed.level != "error":
                continue
            if key == "peak_memory":
                found.append(Ceiling(placed.limit, placed.location))
            elif limit is not None:
                found.append(Ceiling(limit * (1 - placed.limit / 100), placed.location))
    return min(found, key=lambda each: each.limit, default=None)


def size_ceiling(profiles: Sequence[DeviceProfile], budgets: Budgets) -> Ceiling | None:
    """The lowest limit on a package's size that is an error to exceed; None if there is none."""
    limits = [budgets.for_device(profile.name, profile.os) for profile in profiles]
    placed = [each["package_size"] for each in limits if "package_size" in each]
    found = [Ceiling(each.limit, each.location) for each in placed if each.level == "error"]
    return min(found, key=lambda each: each.limit, default=None)
