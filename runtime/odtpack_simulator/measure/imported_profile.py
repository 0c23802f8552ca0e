"""The profile that a kit's measurements of a phone make, with bounds from their own spread."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Final

from pydantic import ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import NAME_PATTERN, DeviceProfile, OsClass
from odtpack_simulator.measure.figures import (
    Figure,
    known,
    repeated,
    rounded,
    unknown,
    whole_mebibytes,
)
from odtpack_simulator.measure.measurements import DeviceMeasurements, Sustained
from odtpack_simulator.values.schema_errors import first_problem

_LONG_ENOUGH: Final = 300.0
"""Seconds of load after which a phone has shown how it throttles."""
_BURST: Final = 3
"""The first rates, before the device is warm."""
_BY_KIT: Final[dict[str, OsClass]] = {
    "cpp": "linux",
    "javascript": "web",
    "js": "web",
    "kotlin": "android",
    "python": "linux",
    "swift": "ios",
}
"""Where a kit runs most often, for measurements that do not name a system."""


def imported_profile(
    measured: DeviceMeasurements,
    *,
    name: str,
    title: str,
    system: OsClass | None = None,
    like: DeviceProfile | None = None,
) -> DeviceProfile:
    """Make a profile of what a kit measured.

    Args:
        measured: What was measured.
        name: ``vendor/device`` of the profile, in lower case.
        title: Name for people.
        system: Where it was measured; by default what the measurements say, else what their
            kit runs on.
        like: A profile of the same device: figures that no benchmark measures are taken from it.

    Raises:
        OdtpackError: A name or title that no profile can have, rates that are missing, or a
            system that neither the caller nor the measurements name.
    """
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 100:
        raise OdtpackError("profile-name", f"{name[:100]!r} cannot be the name of a profile")
    if not title or len(title) > 100:
        raise OdtpackError("profile-title", "a title has 1 to 100 characters")
    for key in ("gemm_flops", "copy_bytes_per_second"):
        if not getattr(measured, key):
            text = f"the measurements hold no {key}, without which no time can be predicted"
            raise OdtpackError("measurements-incomplete", text, hint="run the whole benchmark")
    source = f"benchmark of the {measured.kit} kit, ONNX Runtime {measured.onnxruntime}"
    content: Figure = {
        "schema_version": 1,
        "name": name,
        "title": title,
        "vendor": like.vendor if like else name.partition("/")[0],
        "os": system or measured.system or (like.os if like else _BY_KIT.get(measured.kit)),
        "validated": True,
        "memory": _memory(measured, source),
        "cpu": _cpu(measured, source),
        "storage": _storage(measured, source),
        **_throttling(measured.sustained, source),
    }
    if content["os"] is None:
        raise OdtpackError(
            "measurements-system",
            "the measurements do not name the operating system of the device",
            hint="say it: --os android",
        )
    if like is not None:
        _fill(content, like)
    try:
        return DeviceProfile.model_validate(content)
    except ValidationError as error:
        key, problem = first_problem(error, DeviceProfile)
        text = f"the measurements make no valid profile, at {key}: {problem}"
        raise OdtpackError("measurements-invalid", text) from error


def _fill(content: Figure, like: DeviceProfile) -> None:
    """Take what was not measured from another profile, as it is known there."""
    known_there = like.model_dump(mode="json", exclude_none=True)
    # Peaks, efficiencies and rates belong together, and were measured.
    for key in ("fp32_peak", "gemm_efficiency", "fp32_gemm", "fp32_gemm_single"):
        known_there.get("cpu", {}).pop(key, None)
    for key in ("schema_version", "name", "title", "vendor", "os", "validated"):
        known_there.pop(key, None)
    for key, figure in known_there.items():
        if key in ("memory", "cpu", "storage", "power"):
            own = content.setdefault(key, {})
            missing = {k: v for k, v in figure.items() if "unknown" in own.get(k, {"unknown": ""})}
            content[key] = own | missing
        elif "unknown" in content.get(key, {"unknown": ""}):
            content[key] = figure
    # A system reports somewhat less memory than is sold: no limit is above that.
    ram = content["memory"].get("ram", {})
    if ram.get("kind") == "measured":
        content["memory"]["ram"] = known_there.get("memory", {}).get("ram", ram)


def _rate(values: Sequence[float], unit: str, factor: float, source: str) -> Figure:
    return repeated(values, factor, unit, source) if values else unknown("it was not measured")


def _memory(measured: DeviceMeasurements, source: str) -> Figure:
    ram, limit = measured.memory_bytes, measured.memory_limit_bytes
    text = f"elementwise operator on 64 MiB, one thread, bytes written: {source}"
    return {
        "ram": unknown("the system does not report it")
        if ram is None
        else whole_mebibytes(ram, "measured", f"as the system reports it: {source}"),
        "app_limit_foreground": unknown("the system does not report an app its limit")
        if limit is None
        else whole_mebibytes(limit, "measured", f"what the system grants the app: {source}"),
        "bandwidth": _rate(measured.copy_bytes_per_second, "GB/s", 1e9, text),
    }


def _cpu(measured: DeviceMeasurements, source: str) -> Figure:
    product = f"square matrix product, best of 256, 512 and 1024: {source}"
    filters = f"3 x 3 convolution, 64 channels, 56 x 56, batch 4: {source}"
    threads, single = measured.threads, measured.gemm_single_flops
    convolution = _rate(measured.convolution_flops, "GFLOPS", 1e9, filters)
    return {
        "fp32_gemm": _rate(measured.gemm_flops, "GFLOPS", 1e9, product) | {"threads": threads},
        "fp32_gemm_single": _rate(single, "GFLOPS", 1e9, product)
        | ({"threads": 1} if single else {}),
        "fp32_conv": convolution | ({"threads": threads} if measured.convolution_flops else {}),
        "training_threads": known(
            threads, "cores", "assumed", "the threads the rates were measured with"
        ),
    }


def _storage(measured: DeviceMeasurements, source: str) -> Figure:
    size = f"file of {measured.file_bytes // 2**20} MiB"
    cached = f"{size}, its pages dropped from the page cache before: {source}"
    return {
        "read": _rate(measured.read_bytes_per_second, "MB/s", 1e6, cached),
        "write": _rate(
            measured.write_bytes_per_second, "MB/s", 1e6, f"{size}, with fsync: {source}"
        ),
        "sync_latency": _rate(
            measured.sync_seconds, "ms", 1e-3, f"write of 4 KiB with fsync: {source}"
        ),
    }


def _throttling(sustained: Sustained | None, source: str) -> Figure:
    """How far the rate falls under load, and when.

    The first rates are the burst; what the last third holds, in share of that, is sustained.
    Throttling begins with the first rate after which none comes back to the middle of both.
    """
    last = sustained.seconds[-1] if sustained and sustained.seconds else 0.0
    if sustained is None or last < _LONG_ENOUGH or len(sustained.seconds) < 3 * _BURST:
        why = unknown(f"it takes load of {_LONG_ENOUGH / 60:.0f} min or more to show: {source}")
        return {"sustained_fraction": why, "time_to_throttle": why}
    rates = sustained.gemm_flops
    burst = statistics.median(rates[:_BURST])
    held = [
        min(1.0, rate / burst)
        for second, rate in zip(sustained.seconds, rates, strict=True)
        if second >= 2 / 3 * last
    ]
    text = f"matrix products for {last / 60:.3g} min: {source}"
    fraction = repeated(held, 1.0, "1", text)
    middle = (1 + fraction["value"]) / 2 * burst
    late = [index for index, rate in enumerate(rates) if rate >= middle]
    begin = late[-1] + 1 if late else 0
    if fraction["high"] >= 1 or begin >= len(rates):  # it comes back: there is no such moment
        begin = len(rates) - 1
    seconds = sustained.seconds
    figure = known(max(1.0, seconds[begin]), "s", "measured", text)
    # It began between the rate before and this one.
    figure |= {
        "low": rounded(max(1.0, seconds[max(0, begin - 1)])),
        "high": rounded(max(1.0, seconds[begin])),
    }
    return {"sustained_fraction": fraction, "time_to_throttle": figure}
