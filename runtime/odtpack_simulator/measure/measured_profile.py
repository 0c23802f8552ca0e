"""The profile that measurements of a machine make: every figure with its bounds and source."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.measure.allocator import TENSORS
from odtpack_simulator.measure.figures import (
    Figure,
    known,
    repeated,
    unknown,
    whole_mebibytes,
)
from odtpack_simulator.measure.host import BUSY, OS_NAMES, Machine, StorageTiming

_MOST_WAITED: Final = 0.05
_RESERVE: Final = 512 * 2**20
_SHORT: Final = "a measurement of two minutes does not show throttling"


@dataclass(slots=True)
class Measurements:
    """What was measured on a machine; lists hold one value per repetition.

    Attributes:
        threads: Threads of ``gemm`` and ``convolution``.
        gemm: FLOP/s of a large matrix product.
        gemm_single: The same with one thread.
        convolution: FLOP/s of a convolution.
        copy: Bytes per second that one thread copies.
        arena: Bytes mapped per byte that tensors hold, with ONNX Runtime's arena; None where
            the system does not say.
        heap: The same with the arena off.
        storage: Times of the storage, and ``file_bytes``, the size of its file.
        file_bytes: See storage.
        waited: Share of the time in which the rates waited for a processor.
    """

    threads: int
    gemm: list[float] = field(default_factory=list)
    gemm_single: list[float] = field(default_factory=list)
    convolution: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    arena: float | None = None
    heap: float | None = None
    storage: StorageTiming | None = None
    file_bytes: int = 0
    waited: float = 0.0


def measured_profile(
    machine: Machine, measured: Measurements, *, name: str, title: str
) -> DeviceProfile:
    """Put measurements into a profile.

    Args:
        machine: What the system says.
        measured: What was measured, at least one value of each rate.
        name: ``vendor/device``.
        title: Name for people.

    Raises:
        OdtpackError: Profiles know no such system.
    """
    day = datetime.now(UTC).date().isoformat()
    source = f"odtpack devices measure, ONNX Runtime {onnxruntime.__version__}, {day}"
    if measured.waited > _MOST_WAITED:
        source += f"; {BUSY}, rates waited {measured.waited:.0%} of their time for a processor"
    content = {
        "schema_version": 1,
        "name": name,
        "title": title,
        "vendor": name.partition("/")[0],
        "os": _system(),
        "validated": False,
        "sustained_fraction": unknown(_SHORT),
        "time_to_throttle": unknown(_SHORT),
        "background_window": unknown("a service runs until it is stopped"),
        "memory": _memory(machine, measured, source),
        "cpu": _cpu(machine, measured, source),
        "storage": _storage(measured, source),
        "power": dict.fromkeys(("idle", "load", "battery"), unknown("no sensor was read")),
    }
    if machine.processor:
        content["soc"] = machine.processor
    return DeviceProfile.model_validate(content)


def _system() -> str:
    if sys.platform not in OS_NAMES:
        raise OdtpackError(
            "system-unknown",
            f"profiles know no system called {sys.platform!r}",
            hint=f"run it on {', '.join(sorted(OS_NAMES.values()))}",
        )
    return OS_NAMES[sys.platform]


def _memory(machine: Machine, measured: Measurements, source: str) -> Figure:
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
    text = f"elementwise operator on 64 MiB, one thread, bytes written: {source}"
    figures["bandwidth"] = repeated(measured.copy, 1e9, "GB/s", text)
    for key, ratio, what in (
        ("arena", measured.arena, "with the arena"),
        ("heap", measured.heap, "with the arena off"),
    ):
        text = f"mapped per byte of {TENSORS} tensors of 16 KiB to 8 MiB, {what}: {source}"
        figures[f"{key}_overhead"] = (
            unknown("the system does not report to a process what it has mapped")
            if ratio is None
            else known(ratio, "1", "measured", text)
        )
    return figures


def _cpu(machine: Machine, measured: Measurements, source: str) -> Figure:
    product = "square matrix product, best of 256, 512 and 1024"
    shapes = "3 x 3 convolution, best of 64, 128 and 256 channels"
    cores = f"as the system reports it: {source}"
    threads = measured.threads
    top = "top clock" if len(machine.groups) > 1 else "clock"
    return {
        "fp32_peak": unknown("not measured: fp32_gemm is"),
        "gemm_efficiency": unknown("not needed: fp32_gemm is given"),
        "fp32_gemm": repeated(measured.gemm, 1e9, "GFLOPS", f"{product}: {source}")
        | {"threads": threads},
        "fp32_gemm_single": repeated(measured.gemm_single, 1e9, "GFLOPS", f"{product}: {source}")
        | {"threads": 1},
        "fp32_conv": repeated(measured.convolution, 1e9, "GFLOPS", f"{shapes}: {source}")
        | {"threads": threads},
        "training_threads": known(
            threads, "cores", "assumed", "the threads the rates were measured with"
        ),
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


def _storage(measured: Measurements, source: str) -> Figure:
    timing = measured.storage
    if timing is None:
        return dict.fromkeys(("read", "write", "sync_latency"), unknown("not measured"))
    size = f"file of {measured.file_bytes // 2**20} MiB"
    read = f"{size}, its pages dropped from the page cache before (posix_fadvise): {source}"
    return {
        "read": repeated(timing.read, 1e6, "MB/s", read)
        if timing.cached is None
        else unknown(timing.cached),
        "write": repeated(timing.write, 1e6, "MB/s", f"{size}, with fsync: {source}"),
        "sync_latency": repeated(timing.sync, 1e-3, "ms", f"write of 4 KiB with fsync: {source}"),
    }
