"""Make a device profile of the machine at hand, through ONNX Runtime itself.

Rates are measured as :mod:`odtpack_runtime.simulator.timing_run` measures those of the
host, so that a profile of this machine carries a time over unchanged. Each is repeated:
the median is the figure, the extremes are its bounds.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.machine import OS_NAMES, Machine, this_machine
from odtpack_runtime.simulator.measure_allocator import TENSORS, allocator_overhead
from odtpack_runtime.simulator.measure_storage import StorageTiming, measure_storage, spread
from odtpack_runtime.simulator.profile import NAME_PATTERN, DeviceProfile
from odtpack_runtime.simulator.timing_run import copy_bandwidth, gemm_flops

MAX_THREADS: Final = 1024
_RESERVE: Final = 512 * 2**20
_CONVOLUTIONS: Final = ((4, 64, 64, 56), (4, 128, 128, 28), (4, 256, 256, 14))
"""Batch, channels in, channels out, and side of the images, as in a small residual network."""

Progress = Callable[[int, int, str], None]
_Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        repeats: Repetitions of every rate and of the storage file.
        convolution_seconds: Time spent on one shape of convolution, at least.
        file_bytes: Size of the file that is written and read.
        syncs: Number of small writes.
    """

    repeats: int = 5
    convolution_seconds: float = 0.4
    file_bytes: int = 256 * 2**20
    syncs: int = 40


def measure_device(
    folder: Path,
    *,
    name: str = "local/machine",
    title: str = "This machine",
    threads: int | None = None,
    effort: Effort | None = None,
    on_progress: Progress | None = None,
) -> DeviceProfile:
    """Measure this machine; the default effort takes well under two minutes.

    Args:
        folder: Folder whose storage is measured; nothing stays in it.
        name: ``vendor/device`` of the profile, in lower case.
        title: Name for people.
        threads: Threads that a training would use; by default one per performance core.
        effort: How much is measured.
        on_progress: Told steps done, steps in all, and what comes next.

    Raises:
        OdtpackError: A name that no profile can have, threads out of range, or storage
            that cannot be written.
    """
    _check(name, title, threads)
    effort = effort or Effort()
    machine = this_machine()
    threads = threads or machine.training_threads()
    gemms: list[float] = []
    singles: list[float] = []
    convolutions: list[float] = []
    copies: list[float] = []
    overhead: dict[str, float | None] = {}
    storage: list[StorageTiming] = []

    def fill(allocator: str) -> None:
        overhead[allocator] = allocator_overhead("arena" if allocator == "arena" else "heap")

    def store() -> None:
        storage.append(
            measure_storage(
                folder, size=effort.file_bytes, repeats=effort.repeats, syncs=effort.syncs
            )
        )

    plan: list[tuple[str, Callable[[], object]]] = []
    for _ in range(effort.repeats):
        # In turns, so that a slow minute of the machine shows in the bounds of each.
        rates: tuple[Callable[[], object], ...] = (
            lambda: gemms.append(gemm_flops(threads)),
            lambda: singles.append(gemm_flops(1)),
            lambda: convolutions.append(conv_flops(threads, effort)),
            lambda: copies.append(copy_bandwidth(1)),
        )
        plan += [("matrix products, convolutions and memory", rate) for rate in rates]
    plan += [
        ("allocator", lambda: fill("arena")),
        ("allocator", lambda: fill("heap")),
        ("storage", store),
    ]
    for index, (what, work) in enumerate(plan):
        if on_progress is not None:
            on_progress(index, len(plan), what)
        work()
    if on_progress is not None:
        on_progress(len(plan), len(plan), "done")
    source = _source()
    content = {
        "schema_version": 1,
        "name": name,
        "title": title,
        "vendor": name.partition("/")[0],
        "os": _os(),
        "validated": False,
        "sustained_fraction": _unknown("a measurement of two minutes does not show throttling"),
        "time_to_throttle": _unknown("a measurement of two minutes does not show throttling"),
        "background_window": _unknown("set by the system; not measured"),
        "memory": _memory(machine, copies, overhead, source),
        "cpu": _cpu(machine, threads, gemms, singles, convolutions, source),
        "storage": _storage(storage[0], effort, source),
        "power": dict.fromkeys(("idle", "load", "battery"), _unknown("no sensor was read")),
    }
    if machine.processor:
        content["soc"] = machine.processor
    return DeviceProfile.model_validate(content)


def _check(name: str, title: str, threads: int | None) -> None:
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > 100:
        raise OdtpackError(
            "profile-name",
            f"{name[:100]!r} cannot be the name of a profile",
            hint="write vendor/device in lower case, for example acme/phone-1",
        )
    if not title or len(title) > 100:
        raise OdtpackError(
            "profile-title", "a title has 1 to 100 characters", hint='for example --title "Phone 1"'
        )
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise OdtpackError(
            "threads-range",
            f"{threads} threads cannot be measured with",
            hint=f"choose 1 to {MAX_THREADS}, or leave the option out",
        )


def _source() -> str:
    import onnxruntime

    day = datetime.now(UTC).date().isoformat()
    return f"odtpack devices measure, ONNX Runtime {onnxruntime.__version__}, {day}"


def _os() -> str:
    import sys

    if sys.platform not in OS_NAMES:
        raise OdtpackError(
            "system-unknown",
            f"profiles know no system called {sys.platform!r}",
            hint=f"run it on {', '.join(sorted(OS_NAMES.values()))}",
        )
    return OS_NAMES[sys.platform]


def _unknown(why: str) -> _Figure:
    return {"unknown": why}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _known(value: float, unit: str, kind: str, source: str) -> _Figure:
    return {"value": _rounded(value), "unit": unit, "kind": kind, "source": source}


def _measured(values: list[float], factor: float, unit: str, source: str) -> _Figure:
    low, middle, high = spread(tuple(value / factor for value in values))
    figure = _known(middle, unit, "measured", source)
    return figure | {"low": _rounded(low), "high": _rounded(high)}


def _memory(
    machine: Machine, copies: list[float], overhead: dict[str, float | None], source: str
) -> _Figure:
    figures: _Figure = {}
    ram = machine.ram_bytes
    if ram is None:
        figures["ram"] = _unknown("the system does not tell it")
        limit = _unknown("the memory of the machine is not known")
    else:
        figures["ram"] = _bytes(ram, "measured", f"as the system reports it: {source}")
        if machine.limit_bytes is not None:
            text = f"memory.max of the control group: {source}"
            limit = _bytes(machine.limit_bytes, "measured", text)
        elif ram > 2 * _RESERVE:
            text = "RAM - 512 MiB for the system; there is no limit per process"
            limit = _bytes(ram - _RESERVE, "assumed", text)
        else:
            limit = _unknown("how much of so little memory the system needs is not known")
    figures["app_limit_foreground"] = figures["app_limit_background"] = limit
    figures["app_limit_entitled"] = _unknown("the system has no entitlement for more memory")
    figures["low_memory_warning"] = _unknown("the system warns no process")
    text = f"elementwise operator on 64 MiB, one thread, bytes written: {source}"
    figures["bandwidth"] = _measured(copies, 1e9, "GB/s", text)
    for key, what in (("arena", "with the arena"), ("heap", "with the arena off")):
        ratio = overhead[key]
        text = f"mapped per byte of {TENSORS} tensors of 16 KiB to 8 MiB, {what}: {source}"
        figures[f"{key}_overhead"] = (
            _unknown("the system does not tell a process what it has mapped")
            if ratio is None
            else _known(ratio, "1", "measured", text)
        )
    return figures


def _bytes(count: int, kind: str, source: str) -> _Figure:
    """A size in whole MiB, rounded down: a limit must not be more than what is there."""
    return {"value": float(count // 2**20), "unit": "MiB", "kind": kind, "source": source}


def _cpu(
    machine: Machine,
    threads: int,
    gemms: list[float],
    singles: list[float],
    convolutions: list[float],
    source: str,
) -> _Figure:
    product = "square matrix product, best of 256, 512 and 1024"
    shapes = "3 x 3 convolution, best of 64, 128 and 256 channels"
    cores = f"as the system reports it: {source}"
    top = "top clock" if len(machine.groups) > 1 else "clock"
    return {
        "fp32_peak": _unknown("not measured: fp32_gemm is"),
        "gemm_efficiency": _unknown("not needed: fp32_gemm is given"),
        "fp32_gemm": _measured(gemms, 1e9, "GFLOPS", f"{product}: {source}") | {"threads": threads},
        "fp32_gemm_single": _measured(singles, 1e9, "GFLOPS", f"{product}: {source}")
        | {"threads": 1},
        "fp32_conv": _measured(convolutions, 1e9, "GFLOPS", f"{shapes}: {source}")
        | {"threads": threads},
        "training_threads": _known(
            threads, "cores", "assumed", "the threads the rates were measured with"
        ),
        "clusters": [
            {
                "core": machine.processor[:64] if machine.processor else "not named",
                "cores": _known(group.cores, "cores", "measured", cores),
                "clock": _unknown("the system does not tell it")
                if group.clock_hz is None
                else _known(group.clock_hz / 1e9, "GHz", "measured", f"{top}, {cores}"),
                "fp32_peak": _unknown("not measured per cluster"),
            }
            for group in machine.groups
        ],
    }


def _storage(timing: StorageTiming, effort: Effort, source: str) -> _Figure:
    size = f"file of {effort.file_bytes // 2**20} MiB"
    read = f"{size}, its pages dropped from the page cache before (posix_fadvise): {source}"
    return {
        "read": _measured(list(timing.read), 1e6, "MB/s", read)
        if timing.cached is None
        else _unknown(timing.cached),
        "write": _measured(list(timing.write), 1e6, "MB/s", f"{size}, with fsync: {source}"),
        "sync_latency": _measured(
            list(timing.sync), 1e-3, "ms", f"write of 4 KiB with fsync: {source}"
        ),
    }


def conv_flops(threads: int, effort: Effort) -> float:
    """FLOP/s of a 3 x 3 convolution in ONNX Runtime, best of three shapes.

    Operations are those of the definition (two per weight and output), whatever the kernel
    saves: this is the rate that a layer's cost divided by its time gives. The weights are an
    input, as they are in a training step, so none are laid out anew before.
    """
    return max(_convolution(*shape, threads, effort) for shape in _CONVOLUTIONS)


def _convolution(
    batch: int, inputs: int, outputs: int, side: int, threads: int, effort: Effort
) -> float:
    import numpy as np
    import onnxruntime
    from onnx import ModelProto, TensorProto, helper

    shapes = {
        "images": (batch, inputs, side, side),
        "weight": (outputs, inputs, 3, 3),
        "result": (batch, outputs, side, side),
    }
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    }
    node = helper.make_node("Conv", ["images", "weight"], ["result"], pads=[1, 1, 1, 1])
    graph = helper.make_graph(
        [node], "calibration", [infos["images"], infos["weight"]], [infos["result"]]
    )
    model = ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 13))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(0)
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(
            random.standard_normal(shape, dtype=np.float32)
        )
        for name, shape in shapes.items()
    }
    binding = session.io_binding()
    binding.bind_ortvalue_input("images", values["images"])
    binding.bind_ortvalue_input("weight", values["weight"])
    binding.bind_ortvalue_output("result", values["result"])
    run = list(_timed(lambda: session.run_with_iobinding(binding), effort.convolution_seconds))
    operations = 2 * batch * outputs * side * side * inputs * 9
    return operations / statistics.median(run[2:])


def _timed(work: Callable[[], object], seconds: float) -> Iterator[float]:
    """Durations for at least five calls and at least so long."""
    end = time.perf_counter() + seconds
    count = 0
    while count < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        yield time.perf_counter() - start
        count += 1
