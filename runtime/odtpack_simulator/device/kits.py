"""The kits, and what an app around them takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from odtpack_simulator.device.profile import DeviceProfile, OsClass
from odtpack_simulator.values.quantities import SourceKind

Kit = Literal["kotlin", "swift", "cpp", "js", "python"]
"""A kit of odtpack: the binding of ONNX Runtime that an app trains through."""

Sharing = Literal["shared", "own", "none"]
"""Whether all sessions have one arena, each its own, or none: tensors are the system's then."""

KITS: Final = MappingProxyType({
    "kotlin": False,
    "swift": True,
    "cpp": True,
    "js": False,
    "python": True,
})  # fmt: skip
"""Kit -> whether its sessions can share one arena. ONNX Runtime's bindings for Java and for
JavaScript have no call that registers an allocator."""

STEP_MODEL_KITS: Final = frozenset({"kotlin", "swift", "cpp", "python"})
"""Kits that train with a package's step model where it has one; JavaScript's reads the training and
the optimizer model."""

MAPPING_KITS: Final = frozenset({"kotlin", "swift", "cpp", "python"})
"""Kits that map the frozen weights of segments. JavaScript's reads those of a segment when it runs,
in a browser from all of them in memory."""

_OF_SYSTEM: Final[dict[OsClass, Kit]] = {
    "android": "kotlin",
    "ios": "swift",
    "linux": "python",
    "macos": "swift",
    "web": "js",
    "windows": "cpp",
}


def kit_of(system: OsClass) -> Kit:
    """The kit that an app of this system is taken to train with, unless the user names one."""
    return _OF_SYSTEM[system]


@dataclass(frozen=True, slots=True)
class AppFootprint:
    """Bytes that an app holds without the training and without ONNX Runtime's library.

    Attributes:
        nbytes: How many.
        kind: How they are known; None where the app's budgets say so.
        source: By whom, or on what basis.
    """

    nbytes: int
    kind: SourceKind | None
    source: str


RUNTIME_LIBRARY_BYTES: Final = 7_800_000
"""What ONNX Runtime's library takes before any model is loaded: relocated pages (0.55 MB) and its
environment with the schemas of all operators (7.25 MB), anonymous memory. Measured with 1.32.0 on
x86-64 Linux over the C API; a build with fewer operators takes less."""

_PHONE: Final = 150_000_000
_SERVICE: Final = 20_000_000
_BUDGET: Final = "; measure yours and say so with app_footprint in the budgets"
_SERVICE_SOURCE: Final = (
    "a Python process that has imported NumPy and ONNX Runtime holds 27 MB on x86-64 Linux, of "
    f"which 8 MB are ONNX Runtime's{_BUDGET}"
)

APP_FOOTPRINTS: Final = MappingProxyType[OsClass, AppFootprint]({
    "android": AppFootprint(
        _PHONE,
        "assumed",
        "Google publishes no typical figure; its checklist for Android (Go edition) allowed an app "
        f"50 MB and a game 150 MB (stackoverflow.com/questions/49405960): the larger{_BUDGET}",
    ),
    "ios": AppFootprint(
        _PHONE, "assumed", f"Apple publishes no typical figure; that of Android is taken{_BUDGET}"
    ),
    "web": AppFootprint(
        0,
        "published",
        "the limit is that of the WebAssembly memory, in which nothing of the page lies "
        "(WebAssembly specification, linear memory)",
    ),
    "linux": AppFootprint(_SERVICE, "measured", _SERVICE_SOURCE),
    "macos": AppFootprint(_SERVICE, "assumed", f"as on Linux: {_SERVICE_SOURCE}"),
    "windows": AppFootprint(_SERVICE, "assumed", f"as on Linux: {_SERVICE_SOURCE}"),
})  # fmt: skip
"""What is taken for an app of each system where its budgets do not say."""

FootprintOf = Callable[[DeviceProfile], AppFootprint]
"""Says what the app holds on a device."""


def default_footprint(profile: DeviceProfile) -> AppFootprint:
    """What is taken for an app of the device's system."""
    return APP_FOOTPRINTS[profile.os]
