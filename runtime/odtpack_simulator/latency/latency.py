"""Carry the times of this machine to a device through a calibrated roofline.

Operators are carried one group of equal work at a time. The device takes for
them what this machine took, times the ratio of the two machines' roofs for that
work (see :mod:`odtpack_simulator.memory.operator_work`): an operator that reaches
a third of the roof here is taken to reach a third of it there. The runtime's
own time, of small operators and around operators, scales with the speed of one
core, for which a profile has two bounds: the clock, and the rate of a matrix
product, in which wider vectors count too.

The result is an interval. A device's rates are intervals, mostly because
matrix products reach an unknown share of the published peak. Of the time of an
operator here its roof explains a part; the rest is bounded by whatever bounds
it, so that it lies between the ratio of the roofs and that of the cores. The
quantiles of the steps here have confidence intervals of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from contextlib import closing

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.options import read_metadata
from odtpack_simulator.device.device_rates import DeviceRates, device_rates, gpu_rates
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.latency.host_timing import HostTiming, OperatorGroup
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.operator_work import INT8_PRODUCTS, Roof
from odtpack_simulator.replay.job import Job, Message
from odtpack_simulator.replay.replay import STALL_SECONDS, OnMessage, run_child, with_sessions
from odtpack_simulator.result.result import ClassTime, DeviceLatency, OperatorClass
from odtpack_simulator.values.quantities import Quantity
from odtpack_simulator.values.units import Interval

__all__ = ["HostTiming", "carry", "measure_host", "measure_sessions"]


def measure_host(
    job: Job, *, on_message: OnMessage | None = None, stall_seconds: float = STALL_SECONDS
) -> HostTiming:
    """Time steps of a job whose ``task`` is ``time``, in a child process."""
    timed: Message = {}
    with closing(run_child(job, stall_seconds=stall_seconds)) as messages:
        for message in messages:
            if message["event"] in ("timed", "out-of-memory", "exit") and not timed:
                timed = message
            if on_message is not None:
                on_message(message)
    if timed["event"] != "timed":
        reason = timed.get("message") or f"exit code {timed['code']} {timed['stderr']}"
        raise OdtpackError("replay-crashed", f"The timing process failed: {reason.strip()}.")
    return HostTiming.from_message(timed)


def measure_sessions(
    job: Job, package: Package, uses: Iterable[SessionUse], on_message: OnMessage | None
) -> dict[bool, HostTiming]:
    """Time the steps of a job with a step model and without, as far as ``uses`` have either."""
    found: dict[bool, HostTiming] = {}
    for step_model, use in {use.step_model: use for use in uses}.items():
        timed = dataclasses.replace(with_sessions(job, package, use), task="time")
        for known in found.values():  # the machine is the same one
            timed = dataclasses.replace(timed, calibration=dataclasses.asdict(known.calibration))
        host = measure_host(timed, on_message=on_message)
        target = read_metadata(package.training_model).get("odtpack.target")
        found[step_model] = dataclasses.replace(host, gpu=target is not None)
    return found


def carry(host: HostTiming, profile: DeviceProfile, threads: int | None = None) -> DeviceLatency:
    """Estimate the times of a training on a device. A pure function."""
    # `threads`: of the app's sessions; None for those that suit the device best.
    device = device_rates(profile, threads)
    if host.gpu and not isinstance(device, str):
        device = gpu_rates(profile, device)
    if isinstance(device, str) or host.steady.busy is not None:
        why = device if isinstance(device, str) else host.steady.busy
        basis = "host times operator by operator"
        return DeviceLatency(step_ms=None, basis=basis, not_judged=why)
    core = core_ratio(host, device)
    memory = _over(host.copy_bandwidth, device.copy)
    by_class = _by_class(host, device, core)
    typical = host.median_ms
    mean = _sum(time.device_ms for time in by_class)
    p50, p90 = host.quantile_ms(0.5), host.quantile_ms(0.9)
    step = mean.times(p50).scaled(1 / typical)
    # Where the intervals of both quantiles overlap, the 90th is still not below the median.
    tail = Interval.of(*(max(typical, end) for end in (p90.low, p90.typical, p90.high)))
    # The first step touches memory for the first time and lets the runtime prepare.
    extra = _hull(core, memory).scaled(max(0.0, host.first_step_ms - typical))
    reading, writing = profile.storage_bandwidth("read"), profile.storage_bandwidth("write")

    def stored(cpu_ms: float, rate: Interval | None) -> Interval | None:
        """A checkpoint's way through the storage, and the processor's part in it."""
        if rate is None:
            return None
        moved = _over(1e3 * host.checkpoint_bytes, rate)
        return _sum((moved, _hull(core, memory).scaled(cpu_ms)))

    creation = [core.scaled(host.session_creation.cpu_ms)]
    creation += [] if reading is None else [_over(1e3 * host.model_bytes, reading)]
    return DeviceLatency(
        step_ms=step,
        p90_ms=mean.times(tail).scaled(1 / typical),
        first_step_ms=_sum((step, extra)),
        session_creation_ms=_sum(creation),
        checkpoint_load_ms=stored(host.checkpoint_load.cpu_ms, reading),
        checkpoint_save_ms=stored(host.checkpoint_save.cpu_ms, writing),
        threads=device.threads,
        by_class=by_class,
        basis=_basis(host, device, profile),
    )


def core_ratio(host: HostTiming, device: DeviceRates) -> Interval:
    """How many times longer one core of the device takes for what does not use vectors."""
    # Two ratios bound it, each at its typical value: that of the clocks, since a phone's core does
    # no more per cycle, and that of matrix products by one thread, in which wider vectors count
    # too. Their geometric mean is the typical value. Where a clock is unknown, the ratio of the
    # copies takes its place.
    if device.operator is not None:
        ratio = 1e6 * device.operator.typical / max(host.calibration.node_us, 0.1)
        return Interval.of(ratio, ratio, ratio)
    vectors = host.calibration.core_flops / device.core.typical
    clock = host.calibration.clock_hz
    if clock is not None and device.clock_hz is not None:
        other = clock / device.clock_hz
    else:
        other = host.copy_bandwidth / device.copy.typical
    return Interval.of(min(vectors, other), math.sqrt(vectors * other), max(vectors, other))


def group_ratio(
    group: OperatorGroup, host: HostTiming, device: DeviceRates, core: Interval
) -> Interval:
    """How many times longer the device takes for some operators."""
    if group.operator_class == "other":
        return core
    roof = host.calibration.roof
    if group.operator_class == "compute" and group.work.flops is None:
        here, there = host.gemm_flops, device.gemm
        if group.op_type in INT8_PRODUCTS:
            here, there = host.calibration.int8_ops, device.int8
        ratio, explained = _over(here, there), 1.0
    else:
        least = roof.seconds(group.work)
        if least == 0:
            return core
        gemm = device.gemm
        if group.op_type in INT8_PRODUCTS:
            # Its share of the float32 roof here says nothing of kernels for bytes there.
            roof = Roof(host.calibration.int8_ops, roof.bandwidth)
            least, gemm = roof.seconds(group.work), device.int8
        fast, middle, slow = (
            Roof(getattr(gemm, end), 2 * getattr(device.copy, end)).seconds(group.work)
            for end in ("high", "typical", "low")
        )
        ratio = Interval.of(fast / least, middle / least, slow / least)
        explained = min(1.0, 1e3 * least / group.ms) if group.ms else 1.0
    unexplained = _hull(ratio, core)
    low = explained * ratio.low + (1 - explained) * unexplained.low
    high = explained * ratio.high + (1 - explained) * unexplained.high
    # Where an end is the typical value, rounding may move it past that.
    return Interval.of(min(low, ratio.typical), ratio.typical, max(high, ratio.typical))


def _by_class(host: HostTiming, device: DeviceRates, core: Interval) -> list[ClassTime]:
    parts: dict[OperatorClass, list[Interval]] = {"compute": [], "memory": [], "other": []}
    for group in host.groups:
        carried = group_ratio(group, host, device, core).scaled(group.ms)
        parts[group.operator_class].append(carried)
    parts["other"].append(core.scaled(host.rest_ms))
    here = host.class_ms()
    return [
        ClassTime(operator_class=kind, host_ms=here[kind], device_ms=_sum(times))
        for kind, times in parts.items()
    ]


def _over(amount: float, rate: Interval) -> Interval:
    """How long an amount takes at a rate, or how many times longer than at a rate of ``amount``."""
    return Interval.of(amount / rate.high, amount / rate.typical, amount / rate.low)


def _hull(first: Interval, second: Interval) -> Interval:
    """The ends of both; the geometric mean of what is typical."""
    middle = math.sqrt(first.typical * second.typical)
    return Interval.of(min(first.low, second.low), middle, max(first.high, second.high))


def _sum(parts: Iterable[Interval]) -> Interval:
    low = typical = high = 0.0
    for part in parts:
        low, typical, high = low + part.low, typical + part.typical, high + part.high
    return Interval.of(low, typical, high)


def _basis(host: HostTiming, device: DeviceRates, profile: DeviceProfile) -> str:
    times = host.class_ms()
    total = sum(times.values()) or 1.0
    shares = ", ".join(f"{kind} {100 * ms / total:.0f} %" for kind, ms in times.items())
    threads = f" with {device.threads} threads" if device.threads else ""
    gemm, copy = (
        figure.kind if isinstance(figure, Quantity) else "by its data sheet"
        for figure in (
            (profile.gpu.fp32_gemm, profile.gpu.bandwidth)
            if host.gpu and profile.gpu is not None
            else (profile.cpu.fp32_gemm, profile.memory.bandwidth)
        )
    )
    reading = profile.storage_bandwidth("read")
    of = "its GPU's" if host.gpu else "its"
    return (
        f"host step of {host.median_ms:.3g} ms ({shares}), carried operator by operator through "
        f"a roofline from {host.gemm_flops / 1e9:.3g} GFLOPS and "
        f"{host.copy_bandwidth / 1e9:.3g} GB/s here to {of} matrix rate{threads} ({gemm}) and copy "
        f"bandwidth ({copy})"
        + ("; storage unknown: sessions without reading models" if reading is None else "")
        + (f"; {host.steady.note}" if host.steady.note else "")
    )
