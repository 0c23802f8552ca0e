"""The app around a training: what its process holds, and whether a planned peak fits.

iOS and Android count the whole process: iOS its dirty and compressed memory (Apple, "Reducing your
app's memory use"), Android what is anonymous, resident or swapped (Android vitals, "Memory usage
(anonymous RSS + swap)", which Android 17 also limits). Pages of files, among them the code of
libraries, can be dropped and count in neither.

Simulations, budgets, fleets, ``odtpack fit`` and ``odtpack build --memory-budget`` ask the same
rule whether a planned peak fits a limit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from odtpack_simulator.device.kits import Kit
from odtpack_simulator.device.profile import DeviceProfile, OsClass
from odtpack_simulator.values.units import SourceKind, format_bytes


@dataclass(frozen=True, slots=True)
class AppFootprint:
    """Bytes that an app holds without the training and without ONNX Runtime's library."""

    nbytes: int  # How many
    kind: SourceKind | None  # How they are known; None where the app's budgets say so
    source: str  # By whom, or on what basis


RUNTIME_LIBRARY_BYTES: Final = 7_800_000
"""What ONNX Runtime's library takes before any model is loaded: relocated pages (0.55 MB) and its
environment with the schemas of all operators (7.25 MB), anonymous memory. Measured with 1.32.0 on
x86-64 Linux over the C API; a build with fewer operators takes less."""

PROCESSES: Final = MappingProxyType[Kit, tuple[int, int]]({
    "kotlin": (24_000_000, 25),
    "js": (32_000_000, 22),
})  # fmt: skip
"""Kit -> what its process takes above a plan: bytes, and per cent of the planned peak.

Classes and functions that are compiled while it trains, copies of parameters, garbage. No row of
``python -m benchmarks.fidelity.processes`` (a JVM 17 and a Node 20 on x86-64 Linux) takes more; a
phone's Java was not run."""


def runtime_bytes(kit: Kit | None, system: OsClass, peak_bytes: int) -> int:
    """What ONNX Runtime's library takes, and a kit's process above a planned peak of a training."""
    base, percent = _process_of(kit, system)
    return RUNTIME_LIBRARY_BYTES + base - (-with_margin(peak_bytes) * percent // 100)


def most_for_training(kit: Kit, system: OsClass, nbytes: float) -> float:
    """The highest peak, margin included, that fits beside :func:`runtime_bytes` into so many."""
    base, percent = _process_of(kit, system)
    return max(0.0, nbytes - RUNTIME_LIBRARY_BYTES - base) / (1 + percent / 100)


def runtime_words(kit: Kit | None, nbytes: int) -> str:
    """What :func:`runtime_bytes` counted, for people."""
    if kit is None or kit not in PROCESSES or nbytes <= RUNTIME_LIBRARY_BYTES:
        return "ONNX Runtime's library"
    base, percent = PROCESSES[kit]
    return (
        f"ONNX Runtime's library and the {kit} kit's process ({format_bytes(base)} and {percent} % "
        "of the peak)"
    )


def _process_of(kit: Kit | None, system: OsClass) -> tuple[int, int]:
    # What JavaScript takes in a browser does not lie in WebAssembly's memory, which is limited.
    return (0, 0) if kit is None or system == "web" else PROCESSES.get(kit, (0, 0))


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

FootprintOf = Callable[[DeviceProfile], AppFootprint]  # Says what the app holds on a device


def default_footprint(profile: DeviceProfile) -> AppFootprint:
    """What is taken for an app of the device's system."""
    return APP_FOOTPRINTS[profile.os]


_PERCENT: Final = 3
MARGIN: Final = _PERCENT / 100
_SMALL_PERCENT: Final = 8
_SMALL_BYTES: Final = 400_000
"""A planned peak may be too low by 3 % of it; a small one by 8 % or by so many bytes, whichever is
less: see docs/memory.md for what was measured.

A training that is said to fit and does not is killed on a phone; one that is said not to fit
and does is only measured again.
"""

MemoryFit = Literal["fits", "close", "over"]
"""``close``: the planned peak is within the limit, but not with the margin: too close to call."""


def with_margin(peak_bytes: int) -> int:
    """The most that a training with this planned peak may take, in bytes."""
    # Rounded up, exactly.
    share, small = (-(-peak_bytes * each // 100) for each in (_PERCENT, _SMALL_PERCENT))
    return peak_bytes + max(share, min(small, _SMALL_BYTES))


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
