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
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.options import read_metadata
from odtpack_simulator.device.profile import DeviceProfile, GpuFigures
from odtpack_simulator.measure.calibration import Calibration
from odtpack_simulator.measure.host import BUSY, ENOUGH_STEPS, QUIET_SHARE
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.operator_work import INT8_PRODUCTS, Roof, Work
from odtpack_simulator.replay.job import Job, Message
from odtpack_simulator.replay.replay import OnMessage, run_child, with_sessions
from odtpack_simulator.result import (
    ClassTime,
    DeviceLatency,
    HostLatency,
    OperatorClass,
    OperatorCost,
)
from odtpack_simulator.values.figure import quantile_interval
from odtpack_simulator.values.text import counted
from odtpack_simulator.values.units import Interval, Quantity, bounds, format_percent

# Whether a machine was quiet enough for its times to mean something.
#
# Other programs disturb a timing in two ways. They take the processor, which the steps
# then wait for; and they share caches, memory or, in a virtual machine, the core itself,
# which makes everything slower without any waiting. The first shows in what each step
# waited, the second in a calibration before and one after the steps, and, where it was
# there all the time, in what other programs computed meanwhile.

MOST_WAITING: Final = 0.5
"""Share of waiting above which even processor times say nothing: caches were lost too often."""
LEAST_STEPS: Final = 3  # Steps that waited less than that, without which no time is judged
MOST_DRIFT: Final = 2.0
"""Ratio of two calibrations above which the machine was not the same in between."""
SHARED_CORE: Final = 2.0
"""How much longer a step takes, at most, while another program has the other half of its core."""
LEAST_GAIN: Final = 0.4
"""What each further thread adds to a matrix product, at least, where it has a core of its own."""


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How far the times of steps can be relied on."""

    # The times to use: undisturbed steps, or all without what they waited.
    steps_ms: tuple[float, ...]
    waited: float  # Share of all steps' time that they waited for a processor
    drift: float  # The larger of two calibrations over the smaller, at least 1
    low: float  # What the low end of an interval is multiplied by, at most 1
    high: float  # What the high end is multiplied by, at least 1
    busy: str | None  # Why no time is judged; None where times are
    note: str  # What was noticed and corrected; empty on a quiet machine


def steadiness(
    steps_ms: Sequence[float],
    waited_ms: Sequence[float],  # What their threads waited for a processor, in the same order
    rates: Sequence[tuple[float, float]],
    *,
    threads: int,
    single: float,
    stolen: float = 0.0,  # Share of the time that the host of a virtual machine gave to others
    others: float = 0.0,
    load: float | None = None,
) -> Steadiness:
    """Judge a timing."""
    # `rates`: Each rate of the calibration before and after the steps; the first is a matrix
    # product with `threads`.
    # `others`: Share of the time that other programs had the cores which the steps left free.
    total = sum(steps_ms)
    lost = [min(wait, step) for wait, step in zip(waited_ms, steps_ms, strict=True)]
    waited = sum(lost) / total if total else 0.0
    quiet = [step for step, wait in zip(steps_ms, lost, strict=True) if wait <= QUIET_SHARE * step]
    drift = max((max(pair) / min(pair) for pair in rates if min(pair) > 0), default=1.0)
    signs = (
        (waited > 0.01, f"steps waited {format_percent(waited)} of their time for a processor"),
        (stolen > 0.02, f"the host of this virtual machine took {format_percent(stolen)}"),
        (others > 0.1, f"other programs had {format_percent(min(others, 1))} of the other cores"),
        (drift > 1.1, f"its speed varied by a factor of {drift:.2g}"),
    )
    seen = ", ".join(text for is_seen, text in signs if is_seen)
    loaded = f" (load average {load:.1f})" if load is not None and seen else ""
    enough = len(quiet) >= min(ENOUGH_STEPS, len(steps_ms))
    busy = None
    gain = statistics.fmean(rates[0]) / single if rates and single else float(threads)
    # Without the waiting, a step still finds its caches emptied: it is too long, if anything.
    freed = [
        step - wait
        for step, wait in zip(steps_ms, lost, strict=True)
        if wait <= MOST_WAITING * step
    ]
    few = len(freed) < min(LEAST_STEPS, len(steps_ms))
    disturbed = not enough and (waited > MOST_WAITING or few or threads > 1)
    if disturbed or drift > MOST_DRIFT or stolen > MOST_WAITING:
        busy = f"{BUSY}: {seen}{loaded}"
    elif threads > 1 and gain < 1 + LEAST_GAIN * (threads - 1):
        busy = (
            f"{threads} threads computed only {gain:.2g} times as fast as one: the virtual "
            "cores of this machine share a core, or other programs have them"
        )
    used = quiet if enough else freed or list(steps_ms)
    spoilt = 1.0 if enough else 1 + waited
    spread = math.sqrt(drift) * (1 + max(0.0, stolen))
    # Alone, the steps might have been that much faster; they cannot have been slower.
    shared = 1 + (SHARED_CORE - 1) * min(1.0, others)
    return Steadiness(
        steps_ms=tuple(used),
        waited=waited,
        drift=drift,
        low=1 / (spoilt * spread * shared),
        high=spread,
        busy=busy,
        note=f"{BUSY}, which widens the interval: {seen}{loaded}" if seen else "",
    )


# What a timing child measured on this machine, and what follows from it for a step here.

_MOST_ADDED: Final = 3.0
"""What a profile adds to a node with long shapes, over what it adds to one with short ones.

Measured with one to eight inputs of up to four axes: 1 to 1.6 times; in loops 2 to 3 times.
"""


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """Runs of one operator with the same work, in one step."""

    op_type: str  # The operator
    operator_class: OperatorClass  # What bounds it on this machine
    calls: int  # Runs per step
    ms: float  # Milliseconds per step, without what the profile adds
    work: Work  # Of all these runs together


@dataclass(frozen=True, slots=True)
class Spent:
    """Wall time of something, and the processor time in it, in milliseconds."""

    ms: float
    cpu_ms: float
    all_cpu_ms: Sequence[float]  # The same of each repetition; it is their median


@dataclass(frozen=True, slots=True)
class HostTiming:
    """What a timing child measured on this machine."""

    first_step_ms: float  # The first step, which also touches its memory, without its waiting
    steady: Steadiness  # The steps after it, and how far they can be relied on
    groups: tuple[OperatorGroup, ...]  # Where a step's time goes, the longest first
    profiled_steps: int  # Number of steps that this is from
    calibration: Calibration  # Rates and costs of this machine
    session_creation: Spent  # All sessions of the package
    checkpoint_load: Spent  # A checkpoint with the optimizer's state
    checkpoint_save: Spent  # The same
    checkpoint_bytes: int  # Its size
    model_bytes: int  # Size of the models
    gpu: bool = False  # Whether the package is built for a GPU

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> HostTiming:
        """Read the child's message ``timed``."""
        calibration = Calibration(**message["calibration"])
        # Its caches are empty anyway: what it did not wait is its own, however long it waited. What
        # several threads waited is known as a sum.
        waited_alone = message["first_waited_ms"] / calibration.threads
        first = max(0.0, message["first_step_ms"] - waited_alone)
        steps, waited = message["steps_ms"], message["waited_ms"]
        if not steps:
            steps, waited = [message["first_step_ms"]], [message["first_waited_ms"]]
        before = (calibration.gemm_flops, calibration.copy_bandwidth)
        steady = steadiness(
            steps,
            waited,
            list(zip(before, message["rates_after"], strict=True)),
            threads=calibration.threads,
            single=calibration.core_flops,
            stolen=message["stolen_share"],
            others=message["others_share"],
            load=message["load_average"],
        )
        # The steps ran between both calibrations.
        gemm, copy = map(math.sqrt, map(operator.mul, before, message["rates_after"]))
        alone = gemm
        if calibration.threads > 1:
            alone *= calibration.core_flops / calibration.gemm_flops
        calibration = dataclasses.replace(
            calibration, gemm_flops=gemm, copy_bandwidth=copy, core_flops=alone
        )
        rows, typical = message["operators"], statistics.median(steady.steps_ms)
        return cls(
            first_step_ms=first,
            steady=steady,
            groups=operator_groups(rows, calibration, typical),
            profiled_steps=message["profiled_steps"],
            calibration=calibration,
            session_creation=Spent(**message["session_creation"]),
            checkpoint_load=Spent(**message["checkpoint_load"]),
            checkpoint_save=Spent(**message["checkpoint_save"]),
            checkpoint_bytes=message["checkpoint_bytes"],
            model_bytes=message["model_bytes"],
        )

    @property
    def median_ms(self) -> float:
        """The typical step in milliseconds."""
        return statistics.median(self.steady.steps_ms)

    def quantile_ms(self, share: float) -> Interval:
        """A quantile of the steps with its confidence interval, wider on a busy machine."""
        return self._interval(self.steady.steps_ms, share)

    def _interval(self, times: Sequence[float], share: float) -> Interval:
        found = quantile_interval(times, share)
        return found.times(Interval.of(self.steady.low, 1.0, self.steady.high))

    @property
    def rest_ms(self) -> float:
        """Milliseconds of a typical step outside of operators."""
        return max(0.0, self.median_ms - sum(group.ms for group in self.groups))

    def class_ms(self) -> dict[OperatorClass, float]:
        """Milliseconds of a typical step per class; they sum to the median step."""
        # Time outside operators counts as `other`.
        times: dict[OperatorClass, float] = {"compute": 0.0, "memory": 0.0, "other": 0.0}
        for group in self.groups:
            times[group.operator_class] += group.ms
        times["other"] += self.rest_ms
        return times

    def operators(self) -> list[OperatorCost]:
        """Time and work per operator type and class over the profiled steps, longest first."""
        together: dict[tuple[str, OperatorClass], list[OperatorGroup]] = {}
        for group in self.groups:
            together.setdefault((group.op_type, group.operator_class), []).append(group)
        whole = sum(group.ms for group in self.groups) or 1.0
        costs = [
            OperatorCost(
                op_type=op_type,
                operator_class=kind,
                calls=self.profiled_steps * sum(group.calls for group in groups),
                total_ms=self.profiled_steps * sum(group.ms for group in groups),
                share=sum(group.ms for group in groups) / whole,
                flops=_times(self.profiled_steps, _sum_of([g.work.flops for g in groups])),
                moved_bytes=self.profiled_steps * sum(g.work.moved_bytes for g in groups),
            )
            for (op_type, kind), groups in together.items()
        ]
        return sorted(costs, key=lambda c: (-c.total_ms, c.op_type, c.operator_class))

    def quiet(self) -> HostTiming:
        """The same for who needs a time in any case, and says that it cannot be judged."""
        return dataclasses.replace(self, steady=dataclasses.replace(self.steady, busy=None))

    def host_latency(self) -> HostLatency:
        """The measurements as the result of a simulation stores them."""
        return HostLatency(
            first_step_ms=self.first_step_ms,
            steps_ms=list(self.steady.steps_ms),
            by_operator=self.operators(),
            p50_ms=self.quantile_ms(0.5),
            p90_ms=self.quantile_ms(0.9),
            session_creation_ms=self.session_creation.ms,
            session_creation_cpu_ms=self._interval(self.session_creation.all_cpu_ms, 0.5),
            checkpoint_load_ms=self.checkpoint_load.ms,
            checkpoint_save_ms=self.checkpoint_save.ms,
            checkpoint_bytes=self.checkpoint_bytes,
            waited_share=self.steady.waited,
            drift=self.steady.drift,
            busy=self.steady.busy,
        )


def operator_groups(
    rows: Sequence[Mapping[str, Any]], calibration: Calibration, step_ms: float
) -> tuple[OperatorGroup, ...]:
    """Time and class of the operators of a step, without what the profile adds."""
    # A profile adds about the same to the duration of every run. How much was measured on operators
    # that have nothing to do; it is more where shapes are long to write down. So where operators
    # would still take longer than the step did without a profile, more is taken from each run, up
    # to three times as much. What is still too long then was slowed down as a whole, and is scaled
    # to the step.
    # `rows`: Rows of the message `timed`.
    added = added_us(
        [(row["us"], row["calls"]) for row in rows],
        calibration.node_us,
        calibration.profile_us,
        1e3 * step_ms,
    )
    groups = []
    for row in rows:
        calls = row["calls"]
        work = Work(row["flops"], row["moved_bytes"])
        one = Work(_times(1 / calls, work.flops), work.moved_bytes / calls)
        kind = calibration.roof.bound(row["op_type"], one, calibration.node_us / 1e6)
        us = without_profile(row["us"], calls, added, calibration.node_us)
        groups.append(OperatorGroup(row["op_type"], kind, calls, us / 1e3, work))
    total = sum(group.ms for group in groups)
    if total > step_ms:
        groups = [dataclasses.replace(g, ms=g.ms * step_ms / total) for g in groups]
    return tuple(sorted(groups, key=lambda g: (-g.ms, g.op_type, g.work.moved_bytes)))


def without_profile(us: float, calls: int, added: float, node_us: float) -> float:
    """Microseconds of some runs without the profile: never less than the runtime's own."""
    return max(us - calls * added, min(us, calls * node_us))


def added_us(
    runs: Sequence[tuple[float, int]], node_us: float, profile_us: float, step_us: float
) -> float:
    """Microseconds that a profile added to each run of an operator."""
    # `node_us`: What the runtime takes for any operator.
    # `profile_us`: What a profile adds to an operator that has nothing to do.
    # `step_us`: What all of them take at most without a profile.

    def total(added: float) -> float:
        return sum(without_profile(us, calls, added, node_us) for us, calls in runs)

    low, high = profile_us, _MOST_ADDED * profile_us
    if total(low) <= step_us:
        return low
    if total(high) >= step_us:
        return high
    for _ in range(60):  # the sum falls with what is taken away
        middle = (low + high) / 2
        low, high = (low, middle) if total(middle) <= step_us else (middle, high)
    return high


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _sum_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def measure_host(job: Job, *, on_message: OnMessage | None = None) -> HostTiming:
    """Time steps of a job whose ``task`` is ``time``, in a child process."""
    timed: Message = {}
    with closing(run_child(job)) as messages:
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
    job: Job, package: Package, uses: Iterable[SessionUse], on_message: OnMessage | None = None
) -> dict[tuple[bool, bool], HostTiming]:
    """Time the steps of a job in each way that ``uses`` have, by :attr:`SessionUse.work`."""
    found: dict[tuple[bool, bool], HostTiming] = {}
    for work, use in {use.work: use for use in uses}.items():
        timed = dataclasses.replace(with_sessions(job, package, use), task="time")
        for known in found.values():  # the machine is the same one
            timed = dataclasses.replace(timed, calibration=dataclasses.asdict(known.calibration))
        host = measure_host(timed, on_message=on_message)
        target = read_metadata(package.training_model).get("odtpack.target")
        found[work] = dataclasses.replace(host, gpu=target is not None)
    return found


def carry(host: HostTiming, profile: DeviceProfile, threads: int | None = None) -> DeviceLatency:
    """Estimate the times of a training on a device. A pure function."""
    # `threads`: of the app's sessions; None for those that suit the device best.
    device = device_rates(profile, threads)
    if host.gpu and not isinstance(device, str):
        device = gpu_rates(profile, device)
    if isinstance(device, str) or host.steady.busy is not None:
        why = device if isinstance(device, str) else host.steady.busy
        return DeviceLatency(step_ms=None, basis="host times operator by operator", not_judged=why)
    core = core_ratio(host, device)
    memory = _over(host.calibration.copy_bandwidth, device.copy)
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
        return _sum((_over(1e3 * host.checkpoint_bytes, rate), _hull(core, memory).scaled(cpu_ms)))

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
        other = host.calibration.copy_bandwidth / device.copy.typical
    return Interval.of(min(vectors, other), math.sqrt(vectors * other), max(vectors, other))


def group_ratio(
    group: OperatorGroup, host: HostTiming, device: DeviceRates, core: Interval
) -> Interval:
    """How many times longer the device takes for some operators."""
    if group.operator_class == "other":
        return core
    roof = host.calibration.roof
    if group.operator_class == "compute" and group.work.flops is None:
        here, there = host.calibration.gemm_flops, device.gemm
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
        parts[group.operator_class].append(group_ratio(group, host, device, core).scaled(group.ms))
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
    shares = ", ".join(f"{kind} {format_percent(ms / total)}" for kind, ms in times.items())
    threads = f" with {counted(device.threads, 'thread')}" if device.threads else ""
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
        f"a roofline from {host.calibration.gemm_flops / 1e9:.3g} GFLOPS and "
        f"{host.calibration.copy_bandwidth / 1e9:.3g} GB/s here to {of} matrix rate{threads} "
        f"({gemm}) and copy bandwidth ({copy})"
        + ("; storage unknown: sessions without reading models" if reading is None else "")
        + (f"; {host.steady.note}" if host.steady.note else "")
    )


# The rates of a device at the number of threads that a training should use there.


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
    found = [each for each in figures if isinstance(each, Quantity) and each.kind == "measured"]
    if len(found) < len(figures):
        return "it would run on the GPU, of which the profile has no measured rates"
    gemm, copy, operator = map(Quantity.interval, found, ("compute", "bandwidth", "duration"))
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
    clusters = profile.cpu.clusters
    fastest = bounds(clusters[0].cores, "count") if clusters else None
    if fastest is not None and max(threads, measured) <= fastest.typical:
        return Interval.of(share, share, share)  # all of them on like cores
    if len(clusters) == 1:
        share = min(threads, len(clocks)) / max(1, min(measured, len(clocks)))
        return Interval.of(share, share, share)
    if clocks and all(clocks):
        clocks.sort(reverse=True)
        share = sum(clocks[:threads]) / sum(clocks[:measured])
    return Interval.of(min(1, share), math.sqrt(share), max(1, share))
