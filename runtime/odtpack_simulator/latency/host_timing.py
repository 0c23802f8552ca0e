"""Times steps on this machine, and judges whether it was quiet enough."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from odtpack_simulator.measure.calibration import Calibration
from odtpack_simulator.measure.host import BUSY, ENOUGH_STEPS, QUIET_SHARE
from odtpack_simulator.memory.operator_work import Work
from odtpack_simulator.result.result import HostLatency, OperatorClass, OperatorCost
from odtpack_simulator.values.statistics import quantile_interval
from odtpack_simulator.values.units import Interval

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
    seen = f"steps waited {waited:.0%} of their time for a processor" if waited > 0.01 else ""
    if stolen > 0.02:
        seen += f"{', ' if seen else ''}the host of this virtual machine took {stolen:.0%}"
    if others > 0.1:
        seen += f"{', ' if seen else ''}other programs had {min(others, 1):.0%} of the other cores"
    if drift > 1.1:
        seen += f"{', ' if seen else ''}it computed {drift:.2g} times as fast at other moments"
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


@dataclass(frozen=True, slots=True)
class HostTiming:
    """What a timing child measured on this machine."""

    first_step_ms: float  # The first step, which also touches its memory for the first time
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
        calibration = Calibration.from_message(message["calibration"])
        steps, waited = message["steps_ms"], message["waited_ms"]
        if not steps:
            steps, waited = [message["first_step_ms"]], [0.0]
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
            first_step_ms=message["first_step_ms"],
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
    def gemm_flops(self) -> float:
        """FLOP/s of a large matrix product here."""
        return self.calibration.gemm_flops

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy here."""
        return self.calibration.copy_bandwidth

    @property
    def steps_ms(self) -> tuple[float, ...]:
        """Steps in milliseconds, as far as other programs left them alone."""
        return self.steady.steps_ms

    @property
    def median_ms(self) -> float:
        """The typical step in milliseconds."""
        return statistics.median(self.steps_ms)

    def quantile_ms(self, share: float) -> Interval:
        """A quantile of the steps with its confidence interval, wider on a busy machine."""
        found = quantile_interval(self.steps_ms, share)
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
                flops=_times(self.profiled_steps, _sum([g.work.flops for g in groups])),
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
            steps_ms=list(self.steps_ms),
            by_operator=self.operators(),
            p50_ms=self.quantile_ms(0.5),
            p90_ms=self.quantile_ms(0.9),
            session_creation_ms=self.session_creation.ms,
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
        groups = [
            OperatorGroup(g.op_type, g.operator_class, g.calls, g.ms * step_ms / total, g.work)
            for g in groups
        ]
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


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
