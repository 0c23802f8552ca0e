"""The rates of a device at the number of threads that a training should use there."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from odtpack_simulator.device.profile import DeviceProfile, GpuFigures
from odtpack_simulator.values.quantities import Quantity, bounds
from odtpack_simulator.values.units import Interval


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a profile says about speed."""

    threads: int | None  # Threads of the training; None if the profile cannot say
    gemm: Interval  # FLOP/s of a large matrix product with these threads
    core: Interval  # The same with one thread, on the fastest core
    copy: Interval  # Bytes per second that one thread copies in memory
    clock_hz: float | None  # Clock of the fastest core in Hz; None if unknown
    int8: Interval  # Operations per second of a large int8 product with these threads
    operator: Interval | None = None  # Seconds of an operator that has nothing to do, of a GPU


def device_rates(profile: DeviceProfile, asked: int | None = None) -> DeviceRates | str:
    """The rates of a profile; the reason, for people, where it lacks one that is needed."""
    # `asked`: threads of the app. More than the device should train with are not faster: a step
    # waits for its slowest thread. None for those that it should train with.
    rate, copy = profile.gemm_flops(), profile.copy_bandwidth()
    if rate is None or copy is None:
        missing = [
            name
            for name, figure in (("matrix rate", rate), ("memory bandwidth", copy))
            if figure is None
        ]
        return f"the profile gives no {' and no '.join(missing)}"
    measured = profile.gemm_threads()
    threads = profile.training_threads() or measured
    if asked is not None and threads is not None:
        threads = min(asked, threads)
    gemm = core = rate
    if measured is not None:
        gemm = _rate(profile, rate, threads or measured, measured)
        core = _rate(profile, rate, 1, measured)
    clock, int8 = profile.fastest_clock(), profile.int8_ops(threads)
    return DeviceRates(threads, gemm, core, copy, clock.typical if clock else None, int8 or gemm)


def gpu_rates(profile: DeviceProfile, processor: DeviceRates) -> DeviceRates | str:
    """The same of its GPU; nothing but what was measured through ONNX Runtime tells its speed."""
    gpu = profile.gpu or GpuFigures()
    figures = gpu.fp32_gemm, gpu.bandwidth, gpu.operator
    if not all(isinstance(each, Quantity) and each.kind == "measured" for each in figures):
        return "it would run on the GPU, of which the profile has no measured rates"
    dimensions = zip(figures, ("compute", "bandwidth", "duration"), strict=True)
    gemm, copy, operator = (bounds(each, dimension) for each, dimension in dimensions)
    assert gemm is not None and copy is not None  # noqa: S101, PT018 - they are quantities
    return dataclasses.replace(
        processor, threads=None, gemm=gemm, copy=copy, int8=gemm, operator=operator
    )


def _rate(profile: DeviceProfile, rate: Interval, threads: int, measured: int) -> Interval:
    """Rate of a matrix product by so many threads: by the cores' peaks, else by their clocks."""
    scaled = profile.gemm_flops(threads)
    if threads == measured or (scaled is not None and scaled != rate):
        return scaled or rate
    return rate.times(clock_share(profile, threads, measured))


def clock_share(profile: DeviceProfile, threads: int, measured: int) -> Interval:
    """Rate of ``threads`` threads as a share of that of ``measured``, without knowing peaks."""
    # Threads run on the fastest cores there are. Where all cores are of one kind, rates are in
    # proportion to their number. Otherwise the slow cores' share is only known to be between
    # nothing and what their clock (or else their number) says.
    clocks: list[float] = []
    for cluster in profile.cpu.clusters:
        cores, clock = bounds(cluster.cores, "count"), bounds(cluster.clock, "frequency")
        clocks += [clock.typical if clock else 0.0] * (int(cores.typical) if cores else 0)
    share = threads / measured
    first = [cluster.cores for cluster in profile.cpu.clusters[:1]]
    fastest = next((bounds(cores, "count") for cores in first), None)
    if fastest is not None and max(threads, measured) <= fastest.typical:
        return Interval.of(share, share, share)  # all of them on like cores
    if len(profile.cpu.clusters) == 1:
        share = min(threads, len(clocks)) / max(1, min(measured, len(clocks)))
        return Interval.of(share, share, share)
    if clocks and all(clocks):
        clocks.sort(reverse=True)
        share = sum(clocks[:threads]) / sum(clocks[:measured])
    return Interval.of(min(1, share), math.sqrt(share), max(1, share))
