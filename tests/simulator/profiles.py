"""Made-up device profiles from a few figures."""

from typing import Any

from odtpack_simulator.device.app import APP_FOOTPRINTS, RUNTIME_LIBRARY_BYTES
from odtpack_simulator.device.profile import DeviceProfile, OsClass

UNITS = {
    "sustained_fraction": "1", "time_to_throttle": "s", "background_window": "s",
    "power__idle": "W", "power__load": "W", "power__battery": "J", "storage__read": "B/s",
    "storage__write": "B/s", "memory__bandwidth": "GB/s", "memory__app_limit_foreground": "B",
    "cpu__gemm_efficiency": "1",
}  # fmt: skip
Figures = float | tuple[float, float, float] | dict[str, Any]


def figure(value: float, unit: str, **more: object) -> dict[str, Any]:
    made = {"value": value, "unit": unit, "kind": "assumed", "source": "made up for a test"}
    return made | more


def made_profile(name: str, os: OsClass = "linux", **figures: Figures) -> DeviceProfile:
    """A device with numbers or (low, typical, high) in ``UNITS``, or tables as in a profile."""
    content: dict[str, Any] = {
        "schema_version": 1, "name": name, "title": f"Test {name}", "vendor": "Test", "os": os,
        "validated": False, "memory": {},
    }  # fmt: skip
    for key, given in figures.items():
        section, _, own = key.rpartition("__")
        place = content.setdefault(section, {}) if section else content
        if isinstance(given, dict):
            place[own] = given
        else:
            low, value, high = given if isinstance(given, tuple) else (given,) * 3
            place[own] = figure(value, UNITS[key], low=low, high=high)
    return DeviceProfile.model_validate(content)


def make_profile(name: str, limit: int | None, *, rates: bool = True) -> DeviceProfile:
    """A made-up device with Linux, whose limit leaves a training so many bytes."""
    figures: dict[str, Figures] = {"sustained_fraction": (0.5, 0.8, 1)}
    if limit is not None:
        held = APP_FOOTPRINTS["linux"].nbytes + RUNTIME_LIBRARY_BYTES
        figures["memory__app_limit_foreground"] = limit + held
    if rates:
        figures |= {"memory__bandwidth": (2, 4, 8), "cpu__gemm_efficiency": (0.25, 0.5, 0.6),
                    "cpu__fp32_peak": figure(40, "GFLOPS", threads=4)}  # fmt: skip
    return made_profile(f"test/{name}", **figures)
