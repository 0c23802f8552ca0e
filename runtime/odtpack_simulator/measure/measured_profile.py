"""Device profiles from measurements, and the files of measurements that kits' benchmarks write."""

import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Self

import onnxruntime
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import NAME_PATTERN, SECTIONS, DeviceProfile, OsClass
from odtpack_simulator.measure.calibration import (
    GpuRates,
    bound_model,
    copy_bandwidth,
    gemm_flops,
    measure_gpu,
    median_seconds,
)
from odtpack_simulator.measure.host import (
    BUSY,
    OS_NAMES,
    Machine,
    WaitingClock,
    measure_storage,
    this_machine,
)
from odtpack_simulator.values.part import Part, VersionOne, first_problem
from odtpack_simulator.values.text import read_bounded
from odtpack_simulator.values.units import format_percent

# Figures of a device profile as they are written: rounded, with kind and source.

Figure = dict[str, Any]


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def unknown(why: str) -> Figure:
    """A figure that is unknown."""
    return {"unknown": why}


def known(value: float, unit: str, kind: str, source: str) -> Figure:
    """A figure without bounds."""
    return {"value": rounded(value), "unit": unit, "kind": kind, "source": source}


def repeated(values: Sequence[float], factor: float, unit: str, source: str) -> Figure:
    """A measured figure: the median of its repetitions, between the lowest and the highest."""
    # `factor`: What the values are divided by to be in `unit`.
    scaled = [value / factor for value in values]
    figure = known(statistics.median(scaled), unit, "measured", source)
    return figure | {"low": rounded(min(scaled)), "high": rounded(max(scaled))}


def whole_mebibytes(count: int, kind: str, source: str) -> Figure:
    """A size in whole MiB, rounded down: a limit must not be more than what is there."""
    return {"value": float(count // 2**20), "unit": "MiB", "kind": kind, "source": source}


# What the benchmark of a training kit wrote on a device: read, and checked before it is used.
#
# ``docs/formats/measurements.md`` describes the file; ``docs/schemas/measurements.schema.json``
# is made from this declaration. The file comes from a phone, through whatever carried it here.

MAX_MEASUREMENTS_BYTES: Final = 2**20
_MOST_VALUES: Final = 10_000


_Rate = Annotated[float, Field(ge=1, le=1e17)]
_Rates = Annotated[list[_Rate], Field(max_length=_MOST_VALUES)]
_Seconds = Annotated[float, Field(gt=0, le=3600)]
_Times = Annotated[list[_Seconds], Field(max_length=_MOST_VALUES)]
_Bytes = Annotated[
    int,  # That a kit may have written as a floating-point number
    BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x),
    Field(ge=2**20, le=2**50),
]
_Word = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w .,:;+()/-]+$")]


class Sustained(Part):
    """Matrix products one after the other for minutes: how the device throttles.

    Attributes:
        seconds: When each rate was measured, from the start, in rising order.
        gemm_flops: FLOP/s of products with the threads of a training, as many.
    """

    seconds: list[Annotated[float, Field(ge=0, le=86_400)]] = Field(max_length=_MOST_VALUES)
    gemm_flops: _Rates

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if len(self.seconds) != len(self.gemm_flops):
            raise ValueError(f"has {len(self.seconds)} times and {len(self.gemm_flops)} rates")
        if self.seconds != sorted(self.seconds):
            raise ValueError("needs times in rising order")
        return self


class DeviceMeasurements(Part):
    """What the benchmark of a training kit writes about a device.

    Lists hold one value for each repetition; an empty one was not measured.

    Attributes:
        format: Version of the format.
        kit: Which kit measured.
        onnxruntime: Version of ONNX Runtime.
        system: Operating system; null where the kit does not say.
        device: Name of the device for people; null where the kit does not say.
        threads: Threads of the rates that have no other number.
        gemm_flops: FLOP/s of a float32 matrix product with ``threads``.
        gemm_single_flops: The same with one thread.
        convolution_flops: FLOP/s of a 3 x 3 convolution with ``threads``.
        copy_bytes_per_second: Bytes that an elementwise operator writes, one thread.
        sustained: Products over minutes; null where that was not measured.
        file_bytes: Size of the file that was written and read.
        write_bytes_per_second: With fsync.
        read_bytes_per_second: After its pages were dropped from the page cache.
        sync_seconds: Of a write of 4 KiB with fsync.
        memory_bytes: Of the device; null where the system does not report it.
        memory_limit_bytes: What the system grants the app; null where it does not tell.
        gpu: Name of the GPU for people; null where none was measured, or has none.
        gpu_gemm_flops: FLOP/s of a float32 matrix product.
        gpu_copy_bytes_per_second: Bytes that an elementwise operator writes.
        gpu_operator_seconds: Of an elementwise operator on 16 numbers.
    """

    format: VersionOne
    kit: _Word
    onnxruntime: _Word
    system: OsClass | None = None
    device: _Word | None = None
    threads: int = Field(ge=1, le=1024)
    gemm_flops: _Rates
    gemm_single_flops: _Rates
    convolution_flops: _Rates = Field(default_factory=list)
    copy_bytes_per_second: _Rates
    sustained: Sustained | None = None
    file_bytes: int = Field(default=0, ge=0, le=2**50)
    write_bytes_per_second: _Rates = Field(default_factory=list)
    read_bytes_per_second: _Rates = Field(default_factory=list)
    sync_seconds: _Times = Field(default_factory=list)
    memory_bytes: _Bytes | None = None
    memory_limit_bytes: _Bytes | None = None
    gpu: _Word | None = None
    gpu_gemm_flops: _Rates = Field(default_factory=list)
    gpu_copy_bytes_per_second: _Rates = Field(default_factory=list)
    gpu_operator_seconds: _Times = Field(default_factory=list)

    @model_validator(mode="after")
    def _limit_within_memory(self) -> Self:
        limit, memory = self.memory_limit_bytes, self.memory_bytes
        if limit is not None and memory is not None and limit > memory:
            raise ValueError(f"grants the app {limit} bytes of a device that has {memory}")
        return self


def load_measurements(path: Path) -> DeviceMeasurements:
    """Read the file that a kit's benchmark wrote."""
    data = read_bounded(
        path, limit=MAX_MEASUREMENTS_BYTES, code="measurements", what="file of measurements"
    )
    hint = "name the JSON that a kit's benchmark wrote: docs/formats/measurements.md"
    try:
        return DeviceMeasurements.model_validate(json.loads(data, parse_int=_whole), strict=True)
    except ValidationError as error:
        key, problem = first_problem(error, DeviceMeasurements)
        text = f"the measurements are wrong at {key}: {problem}"
        raise OdtpackError("measurements-invalid", text, where=str(path), hint=hint) from error
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
        text = f"the measurements are not JSON in UTF-8: {detail[:200]}"
        raise OdtpackError("measurements-invalid", text, where=str(path), hint=hint) from error


def _whole(digits: str) -> int | float:
    """A whole number; one of many digits is beyond every bound, and slow to read."""
    return int(digits) if len(digits) < 40 else float("inf")


# The profile that a kit's measurements of a phone make, with bounds from their own spread.

_LONG_ENOUGH: Final = 300.0  # Seconds of load after which a phone has shown how it throttles
_BURST: Final = 3  # The first rates, before the device is warm
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
    """Make a profile of what a kit measured."""
    # `system`: Where it was measured; by default what the measurements say, else what their kit
    # runs on.
    # `like`: A profile of the same device: figures that no benchmark measures are taken from it.
    check_names(name, title)
    for key in ("gemm_flops", "copy_bytes_per_second"):
        if not getattr(measured, key):
            text = f"the measurements hold no {key}, without which no time can be predicted"
            raise OdtpackError("measurements-incomplete", text, hint="run the whole benchmark")
    source = f"benchmark of the {measured.kit} kit, ONNX Runtime {measured.onnxruntime}"
    ram, limit = measured.memory_bytes, measured.memory_limit_bytes
    content: Figure = {
        "schema_version": 1,
        "name": name,
        "title": title,
        "vendor": like.vendor if like else name.partition("/")[0],
        "os": system or measured.system or (like.os if like else _BY_KIT.get(measured.kit)),
        "validated": True,
        "memory": {
            "ram": unknown("the system does not report it")
            if ram is None
            else whole_mebibytes(ram, "measured", f"as the system reports it: {source}"),
            "app_limit_foreground": unknown("the system does not report an app its limit")
            if limit is None
            else whole_mebibytes(limit, "measured", f"what the system grants the app: {source}"),
            "bandwidth": _bandwidth(measured, source),
        },
        "cpu": _rates(measured, "3 x 3 convolution, 64 channels, 56 x 56, batch 4", source),
        "storage": _storage(measured, source),
        **_throttling(measured.sustained, source),
    }
    if measured.gpu_gemm_flops:
        content["gpu"] = _imported_gpu(measured, source)
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


def _imported_gpu(measured: DeviceMeasurements, source: str) -> dict[str, Figure]:
    found = {
        "fp32_gemm": (measured.gpu_gemm_flops, 1e9, "GFLOPS", "square matrix product"),
        "bandwidth": (
            measured.gpu_copy_bytes_per_second, 1e9, "GB/s", "elementwise operator, bytes written",
        ),
        "operator": (
            measured.gpu_operator_seconds, 1e-6, "us", "elementwise operator on 16 numbers",
        ),
    }  # fmt: skip
    device = f"{measured.gpu or 'GPU'}: {source}"
    return {
        key: _rate(values or "not measured", unit, factor, f"{text}, {device}")
        for key, (values, factor, unit, text) in found.items()
    } | {
        "fp16_gemm": unknown("this benchmark measures float32"),
        "own_memory": unknown("WebGPU does not say whether it has memory of its own"),
    }


def check_names(name: str, title: str) -> None:
    """Refuse a name or a title that no profile can have."""
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 100:
        raise OdtpackError("profile-name", f"{name[:100]!r} cannot be the name of a profile")
    if not title or len(title) > 100:
        raise OdtpackError("profile-title", "a title has 1 to 100 characters")


def _fill(content: Figure, like: DeviceProfile) -> None:
    """Take what was not measured from another profile, as it is known there."""
    known_there = like.model_dump(mode="json", exclude_none=True)
    # Peaks, efficiencies and rates belong together, and were measured.
    for key in ("fp32_peak", "gemm_efficiency", "fp32_gemm", "fp32_gemm_single"):
        known_there.get("cpu", {}).pop(key, None)
    for key in ("schema_version", "name", "title", "vendor", "os", "validated"):
        known_there.pop(key, None)
    for key, figure in known_there.items():
        if key in SECTIONS:
            own = content.setdefault(key, {})
            missing = {k: v for k, v in figure.items() if "unknown" in own.get(k, {"unknown": ""})}
            content[key] = own | missing
        elif "unknown" in content.get(key, {"unknown": ""}):
            content[key] = figure
    # A system reports somewhat less memory than is sold: no limit is above that.
    ram = content["memory"].get("ram", {})
    if ram.get("kind") == "measured":
        content["memory"]["ram"] = known_there.get("memory", {}).get("ram", ram)


def _rate(values: Sequence[float] | str, unit: str, factor: float, source: str) -> Figure:
    """A measured figure, or why there are no values."""
    values = values or "it was not measured"
    if isinstance(values, str):
        return unknown(values)
    return repeated(values, factor, unit, source)


def _bandwidth(measured: DeviceMeasurements, source: str) -> Figure:
    text = f"elementwise operator on 64 MiB, one thread, bytes written: {source}"
    return _rate(measured.copy_bytes_per_second, "GB/s", 1e9, text)


def _rates(measured: DeviceMeasurements, filters: str, source: str) -> Figure:
    """Of matrix products with the threads of a training and with one, and of convolutions."""
    product, threads = "square matrix product, best of 256, 512 and 1024", measured.threads
    found = {
        key: _rate(values, "GFLOPS", 1e9, f"{text}: {source}")
        | ({"threads": count} if values else {})
        for key, values, count, text in (
            ("fp32_gemm", measured.gemm_flops, threads, product),
            ("fp32_gemm_single", measured.gemm_single_flops, 1, product),
            ("fp32_conv", measured.convolution_flops, threads, filters),
        )
    }
    why = "the threads the rates were measured with"
    return {**found, "training_threads": known(threads, "cores", "assumed", why)}


def _throttling(sustained: Sustained | None, source: str) -> Figure:
    """How far the rate falls under load, and when."""
    # The first rates are the burst; what the last third holds, in share of that, is sustained.
    # Throttling begins with the first rate after which none comes back to the middle of both.
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


# The profile that measurements of a machine make: every figure with its bounds and source.

_MOST_WAITED: Final = 0.05
_RESERVE: Final = 512 * 2**20
_SHORT: Final = "a measurement of two minutes does not show throttling"


def measured_profile(
    machine: Machine,
    measured: DeviceMeasurements,
    *,
    name: str,
    title: str,
    waited: float = 0.0,  # Share of the time in which the rates waited for a processor
    unread: str | None = None,  # Why the storage was not read
    gpu: GpuRates | None = None,
) -> DeviceProfile:
    """Put measurements of this machine into a profile."""
    if sys.platform not in OS_NAMES:
        raise OdtpackError(
            "system-unknown",
            f"profiles know no system called {sys.platform!r}",
            hint=f"run it on {', '.join(sorted(OS_NAMES.values()))}",
        )
    day = datetime.now(UTC).date().isoformat()
    source = f"odtpack devices measure, ONNX Runtime {onnxruntime.__version__}, {day}"
    if waited > _MOST_WAITED:
        source += f"; {BUSY}, rates waited {format_percent(waited)} of their time for a processor"
    content = {
        "schema_version": 1,
        "name": name,
        "title": title,
        "vendor": name.partition("/")[0],
        "os": OS_NAMES[sys.platform],
        "validated": False,
        "sustained_fraction": unknown(_SHORT),
        "time_to_throttle": unknown(_SHORT),
        "background_window": unknown("a service runs until it is stopped"),
        "memory": _memory(machine, measured, source),
        "cpu": _cpu(machine, measured, source),
        "storage": _storage(measured, source, " (posix_fadvise)", unread),
        "power": dict.fromkeys(("idle", "load", "battery"), unknown("no sensor was read")),
    }
    if gpu:
        content["gpu"] = {
            key: _rate(values, unit, factor, f"{text}: {source}")
            for key, (values, factor, unit, text) in gpu.items()
        }
    if machine.processor:
        content["soc"] = machine.processor
    return DeviceProfile.model_validate(content)


def _memory(machine: Machine, measured: DeviceMeasurements, source: str) -> Figure:
    figures: Figure = {}
    ram = machine.ram_bytes
    if ram is None:
        figures["ram"] = unknown("the system does not report it")
        limit = unknown("the memory of the machine is not known")
    else:
        figures["ram"] = whole_mebibytes(ram, "measured", f"as the system reports it: {source}")
        if machine.limit_bytes is not None:
            text = f"memory.max of the control group: {source}"
            limit = whole_mebibytes(machine.limit_bytes, "measured", text)
        elif ram > 2 * _RESERVE:
            text = "RAM - 512 MiB for the system; there is no limit per process"
            limit = whole_mebibytes(ram - _RESERVE, "assumed", text)
        else:
            limit = unknown("how much of so little memory the system needs is not known")
    figures["app_limit_foreground"] = figures["app_limit_background"] = limit
    figures["app_limit_entitled"] = unknown("the system has no entitlement for more memory")
    figures["low_memory_warning"] = unknown("the system warns no process")
    figures["bandwidth"] = _bandwidth(measured, source)
    return figures


def _cpu(machine: Machine, measured: DeviceMeasurements, source: str) -> Figure:
    cores = f"as the system reports it: {source}"
    top = "top clock" if len(machine.groups) > 1 else "clock"
    return {
        "fp32_peak": unknown("not measured: fp32_gemm is"),
        "gemm_efficiency": unknown("not needed: fp32_gemm is given"),
        **_rates(measured, "3 x 3 convolution, best of 64, 128 and 256 channels", source),
        "clusters": [
            {
                "core": machine.processor[:64] if machine.processor else "not named",
                "cores": known(group.cores, "cores", "measured", cores),
                "clock": unknown("the system does not report it")
                if group.clock_hz is None
                else known(group.clock_hz / 1e9, "GHz", "measured", f"{top}, {cores}"),
                "fp32_peak": unknown("not measured per cluster"),
            }
            for group in machine.groups
        ],
    }


def _storage(
    measured: DeviceMeasurements, source: str, dropped: str = "", unread: str | None = None
) -> Figure:
    """Rates of reading and of writing, and seconds of small writes."""
    size = f"file of {measured.file_bytes // 2**20} MiB"
    read, write = measured.read_bytes_per_second, measured.write_bytes_per_second
    cached = f"{size}, its pages dropped from the page cache before{dropped}: {source}"
    sync = f"write of 4 KiB with fsync: {source}"
    return {
        "read": _rate(read or unread or "", "MB/s", 1e6, cached),
        "write": _rate(write, "MB/s", 1e6, f"{size}, with fsync: {source}"),
        "sync_latency": _rate(measured.sync_seconds, "ms", 1e-3, sync),
    }


# Make a device profile of this machine, through ONNX Runtime itself.
#
# Rates are measured as :mod:`odtpack_simulator.measure.calibration` measures those of the
# host, so that a profile of this machine carries a time over unchanged. Each is repeated:
# the median is the figure, the extremes are its bounds.

MAX_THREADS: Final = 1024
_CONVOLUTIONS: Final = ((4, 64, 64, 56), (4, 128, 128, 28), (4, 256, 256, 14))
"""Batch, channels in, channels out, and side of the images, as in a small residual network."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    repeats: int = 5  # Repetitions of every rate and of the storage file, if time allows
    convolution_seconds: float = 0.4  # Time spent on one shape of convolution, at least
    rate_seconds: float = 40.0  # Time after which rates are not repeated once more
    file_bytes: int = 256 * 2**20  # Size of the file that is written and read
    syncs: int = 40  # Number of small writes
    storage_seconds: float = 20.0  # Time after which the file is not written once more


def measure_device(
    folder: Path,
    *,
    name: str = "local/machine",
    title: str = "This machine",
    threads: int | None = None,
    gpu: str | None = None,
    effort: Effort | None = None,
    on_progress: Progress | None = None,
) -> DeviceProfile:
    """Measure this machine; the default effort takes well under two minutes."""
    # `threads`: Threads that a training would use; by default one per performance core.
    # `gpu`: Device to measure as well, as `Module(device=...)` takes it.
    check_names(name, title)
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise OdtpackError(
            "threads-range",
            f"{threads} threads cannot be measured with",
            hint=f"choose 1 to {MAX_THREADS}, or leave the option out",
        )
    effort = effort or Effort()
    report = on_progress or (lambda done, total, what: None)
    machine = this_machine()
    threads = threads or machine.training_threads()
    rates: dict[str, list[float]] = defaultdict(list)
    total = effort.repeats + 1
    clock, start = WaitingClock(threads), time.perf_counter()
    end = start + effort.rate_seconds
    for done in range(effort.repeats):
        if done and time.perf_counter() > end:
            break
        # In turns, so that a slow minute of the machine shows in the bounds of each.
        report(done, total, "matrix products, convolutions and memory")
        rates["gemm_flops"].append(gemm_flops(threads))
        rates["gemm_single_flops"].append(gemm_flops(1))
        rates["convolution_flops"].append(conv_flops(threads, effort))
        rates["copy_bytes_per_second"].append(copy_bandwidth(1))
    waited = min(1.0, clock.seconds() / (time.perf_counter() - start))
    clock.close()
    gpu_rates = None
    if gpu is not None:
        report(effort.repeats, total, "the GPU")
        gpu_rates = measure_gpu(gpu, effort.repeats)
    report(effort.repeats, total, "storage")
    storage = measure_storage(
        folder,
        size=effort.file_bytes,
        repeats=effort.repeats,
        syncs=effort.syncs,
        seconds=effort.storage_seconds,
    )
    report(total, total, "done")
    measured = DeviceMeasurements.model_validate(
        {
            "format": 1,
            "kit": "python",
            "onnxruntime": onnxruntime.__version__,
            "threads": threads,
            **rates,
            "file_bytes": effort.file_bytes,
            "write_bytes_per_second": list(storage.write),
            "read_bytes_per_second": list(storage.read),
            "sync_seconds": list(storage.sync),
        }
    )
    return measured_profile(
        machine,
        measured,
        name=name,
        title=title,
        waited=waited,
        unread=storage.cached,
        gpu=gpu_rates,
    )


def conv_flops(threads: int, effort: Effort) -> float:
    """FLOP/s of a 3 x 3 convolution in ONNX Runtime, best of three shapes."""
    # Operations are those of the definition (two per weight and output), whatever the kernel saves:
    # this is the rate that a layer's cost divided by its time gives. The weights are an input, as
    # they are in a training step, so none are laid out anew before.
    rates = []
    for batch, inputs, outputs, side in _CONVOLUTIONS:
        work = bound_model(
            "y = Conv <pads = [1, 1, 1, 1]> (images, weight)",
            {"images": (batch, inputs, side, side), "weight": (outputs, inputs, 3, 3)},
            (batch, outputs, side, side),
            threads,
            optimized=True,
        )
        operations = 2 * batch * outputs * side * side * inputs * 9
        rates.append(operations / median_seconds(work, effort.convolution_seconds, most=None))
    return max(rates)
