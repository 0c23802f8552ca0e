"""Carry the step time of this machine to a device.

The step is split by operator into work that arithmetic bounds, work that memory
bounds, and the rest. A class's time scales by the ratio of this machine's rate
to the device's: of a large matrix product, measured here through ONNX Runtime
and known of the device from its profile, for the first; of a large copy for the
second. The rest (many small operators, and what surrounds them) has no rate in
a profile: it scales by the geometric mean of the two ratios, and lies between
them.

The result is an interval: the device's rates are intervals, mostly because
matrix products reach an unknown share of the published peak, and steps on this
machine vary from their 10th to their 90th percentile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.job import Job, Message
from odtpack_runtime.simulator.profile import DeviceProfile
from odtpack_runtime.simulator.replay import STALL_SECONDS, OnMessage, run_child
from odtpack_runtime.simulator.result import (
    DeviceLatency,
    HostLatency,
    OperatorClass,
    OperatorCost,
)
from odtpack_runtime.simulator.units import Interval

COMPUTE_BOUND: Final = frozenset(
    {
        *("Conv", "ConvInteger", "ConvTranspose", "FusedConv", "Gemm", "FusedGemm", "MatMul"),
        *("FusedMatMul", "TransposeMatMul", "MatMulInteger", "Einsum", "Attention"),
        *("MultiHeadAttention", "GRU", "LSTM", "RNN"),
    }
)
"""Operators whose time is arithmetic: matrix products in one form or another."""

SMALL: Final = frozenset(
    {
        *("Cast", "Constant", "ConstantOfShape", "Flatten", "Gather", "Identity", "Range"),
        *("ReduceProd", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze", "If", "Loop", "Scan"),
    }
)
"""Operators that move little or nothing: their time is the runtime's own."""


def operator_class(op_type: str) -> OperatorClass:
    """What bounds an operator; elementwise operators, reductions and copies are memory-bound."""
    if op_type in COMPUTE_BOUND:
        return "compute"
    return "other" if op_type in SMALL else "memory"


@dataclass(frozen=True, slots=True)
class HostTiming:
    """What a timing child measured on this machine.

    Attributes:
        first_step_ms: The first step, which also touches its memory for the first time.
        steps_ms: The steps after it.
        operators: Time per operator over the profiled steps.
        profiled_steps: Their number.
        gemm_flops: FLOP/s of a large matrix product.
        copy_bandwidth: Bytes per second of a large copy.
    """

    first_step_ms: float
    steps_ms: tuple[float, ...]
    operators: tuple[OperatorCost, ...]
    profiled_steps: int
    gemm_flops: float
    copy_bandwidth: float

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> HostTiming:
        """Read the child's message ``timed``."""
        rows = message["operators"]
        total = sum(row["total_ms"] for row in rows) or 1.0
        operators = [
            OperatorCost(
                op_type=row["op_type"],
                operator_class=operator_class(row["op_type"]),
                calls=row["calls"],
                total_ms=row["total_ms"],
                share=row["total_ms"] / total,
            )
            for row in rows
        ]
        operators.sort(key=lambda cost: (-cost.total_ms, cost.op_type))
        steps = tuple(message["steps_ms"]) or (message["first_step_ms"],)
        return cls(
            message["first_step_ms"],
            steps,
            tuple(operators),
            message["profiled_steps"],
            message["gemm_flops"],
            message["copy_bandwidth"],
        )

    @property
    def median_ms(self) -> float:
        """The typical step in milliseconds."""
        return statistics.median(self.steps_ms)

    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile of the steps as shares of their median."""
        if len(self.steps_ms) < 2:
            return 1.0, 1.0
        deciles = statistics.quantiles(self.steps_ms, n=10, method="inclusive")
        return deciles[0] / self.median_ms, deciles[-1] / self.median_ms

    def class_ms(self) -> dict[OperatorClass, float]:
        """Milliseconds of a typical step per class; they sum to the median step.

        Time outside operators counts as ``other``. A profile slows small
        operators down: if operators took longer than the step without a
        profile, their times are scaled to it.
        """
        times: dict[OperatorClass, float] = {"compute": 0.0, "memory": 0.0, "other": 0.0}
        for cost in self.operators:
            times[cost.operator_class] += cost.total_ms / self.profiled_steps
        kernels = sum(times.values())
        step = self.median_ms
        if kernels > step:
            return {kind: ms * step / kernels for kind, ms in times.items()}
        times["other"] += step - kernels
        return times

    def host_latency(self) -> HostLatency:
        """The measurements as the result of a simulation stores them."""
        return HostLatency(
            first_step_ms=self.first_step_ms,
            steps_ms=list(self.steps_ms),
            by_operator=list(self.operators),
        )


def measure_host(
    job: Job, *, on_message: OnMessage | None = None, stall_seconds: float = STALL_SECONDS
) -> HostTiming:
    """Time steps of a job whose ``task`` is ``time``, in a child process.

    Raises:
        OdtpackError: As :func:`~odtpack_runtime.simulator.replay.run_child`.
    """
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


def carry(host: HostTiming, profile: DeviceProfile, *, steps: int) -> DeviceLatency:
    """Estimate step time and time to finish on a device.

    Args:
        host: Measurements on this machine.
        profile: The device; ``not_judged`` says what it lacks, if it does.
        steps: Number of steps of the training.
    """
    gemm, copy = profile.gemm_flops(), profile.copy_bandwidth()
    missing = [
        name
        for name, figure in (("matrix rate", gemm), ("memory bandwidth", copy))
        if figure is None
    ]
    basis = "host times by operator class"
    if gemm is None or copy is None:
        return DeviceLatency(
            step_ms=None,
            basis=basis,
            not_judged=f"the profile gives no {' and no '.join(missing)}",
        )
    times = host.class_ms()
    arithmetic = _ratio(host.gemm_flops, gemm)
    memory = _ratio(host.copy_bandwidth, copy)
    rest = _between(arithmetic, memory)
    step = _weighted(
        (times["compute"], arithmetic), (times["memory"], memory), (times["other"], rest)
    )
    low, high = host.spread()
    step = Interval(low=step.low * low, typical=step.typical, high=step.high * max(1.0, high))
    sustained = profile.sustained()
    share = sustained or Interval(low=1.0, typical=1.0, high=1.0)
    # The first step is longer by the same factor as here.
    count = steps - 1 + max(1.0, host.first_step_ms / host.median_ms)
    finish = Interval(
        low=step.low * count / 1e3 / share.high,
        typical=step.typical * count / 1e3 / share.typical,
        high=step.high * count / 1e3 / share.low,
    )
    return DeviceLatency(
        step_ms=step, finish_s=finish, basis=_basis(host, times, profile, sustained is not None)
    )


def _ratio(host: float, device: Interval) -> Interval:
    """How many times longer the device takes."""
    return Interval(low=host / device.high, typical=host / device.typical, high=host / device.low)


def _between(first: Interval, second: Interval) -> Interval:
    return Interval(
        low=min(first.low, second.low),
        typical=math.sqrt(first.typical * second.typical),
        high=max(first.high, second.high),
    )


def _weighted(*parts: tuple[float, Interval]) -> Interval:
    low, typical, high = (
        sum(ms * getattr(ratio, end) for ms, ratio in parts) for end in ("low", "typical", "high")
    )
    return Interval(low=low, typical=typical, high=high)


def _basis(
    host: HostTiming,
    times: Mapping[OperatorClass, float],
    profile: DeviceProfile,
    throttled: bool,
) -> str:
    total = sum(times.values()) or 1.0
    shares: Sequence[str] = [f"{kind} {100 * ms / total:.0f} %" for kind, ms in times.items()]
    threads = profile.gemm_threads()
    device = f"its matrix rate{f' with {threads} threads' if threads else ''} and copy bandwidth"
    return (
        f"host step of {host.median_ms:.3g} ms by operator class ({', '.join(shares)}), carried "
        f"from {host.gemm_flops / 1e9:.3g} GFLOPS and {host.copy_bandwidth / 1e9:.3g} GB/s here "
        f"to {device}; "
        + ("time to finish under sustained load" if throttled else "throttling unknown, left out")
    )
