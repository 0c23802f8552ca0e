"""Make a device profile of this machine, through ONNX Runtime itself.

Rates are measured as :mod:`odtpack_simulator.measure.measurements` measures those of the
host, so that a profile of this machine carries a time over unchanged. Each is repeated:
the median is the figure, the extremes are its bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.measure.calibration import copy_bandwidth, gemm_flops, median_seconds
from odtpack_simulator.measure.gpu import measure_gpu
from odtpack_simulator.measure.host import WaitingClock, measure_storage, this_machine
from odtpack_simulator.measure.measured_profile import Measurements, check_names, measured_profile
from odtpack_simulator.measure.operators import Operator, bound_operators

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
    measured = Measurements(threads or machine.training_threads(), file_bytes=effort.file_bytes)
    total = effort.repeats + 1
    clock, start = WaitingClock(measured.threads), time.perf_counter()
    end = start + effort.rate_seconds
    for done in range(effort.repeats):
        if done and time.perf_counter() > end:
            break
        # In turns, so that a slow minute of the machine shows in the bounds of each.
        report(done, total, "matrix products, convolutions and memory")
        measured.gemm.append(gemm_flops(measured.threads))
        measured.gemm_single.append(gemm_flops(1))
        measured.convolution.append(conv_flops(measured.threads, effort))
        measured.copy.append(copy_bandwidth(1))
    measured.waited = min(1.0, clock.seconds() / (time.perf_counter() - start))
    clock.close()
    if gpu is not None:
        report(effort.repeats, total, "the GPU")
        measured.gpu = measure_gpu(gpu, effort.repeats)
    report(effort.repeats, total, "storage")
    measured.storage = measure_storage(
        folder,
        size=effort.file_bytes,
        repeats=effort.repeats,
        syncs=effort.syncs,
        seconds=effort.storage_seconds,
    )
    report(total, total, "done")
    return measured_profile(machine, measured, name=name, title=title)


def conv_flops(threads: int, effort: Effort) -> float:
    """FLOP/s of a 3 x 3 convolution in ONNX Runtime, best of three shapes."""
    # Operations are those of the definition (two per weight and output), whatever the kernel saves:
    # this is the rate that a layer's cost divided by its time gives. The weights are an input, as
    # they are in a training step, so none are laid out anew before.
    return max(_convolution(*shape, threads, effort) for shape in _CONVOLUTIONS)


def _convolution(
    batch: int, inputs: int, outputs: int, side: int, threads: int, effort: Effort
) -> float:
    convolution = Operator("Conv", ["images", "weight"], "result", {"pads": [1, 1, 1, 1]})
    work = bound_operators(
        [convolution],
        {"images": (batch, inputs, side, side), "weight": (outputs, inputs, 3, 3)},
        (batch, outputs, side, side),
        threads,
        optimized=True,
    )
    operations = 2 * batch * outputs * side * side * inputs * 9
    return operations / median_seconds(work, effort.convolution_seconds, most=None)
