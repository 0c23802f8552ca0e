"""What this machine reaches through ONNX Runtime: rates and the runtime's own costs.

Measured on single operators on memory that is already there: a large matrix
product, a large copy, and chains of operators with nothing to do. A rate is the
best of many runs, as is usual for what a machine can reach (STREAM does so).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from odtpack_runtime.files.scratch import scratch_folder
from odtpack_simulator.measure.host import clock_hz
from odtpack_simulator.measure.operators import Operator, bound_operators, model_runs, typical_step
from odtpack_simulator.memory.operator_work import Roof

_GEMM_SIZES: Final = (256, 512, 1024)
_COPY_ELEMENTS: Final = 16 * 2**20  # 64 MiB: several times any cache of a phone
_SECONDS: Final = 0.3  # Time for each of the figures: enough for the best of many runs

_CHAIN: Final = (200, 10)
"""Lengths of two chains of operators: their difference is free of what a run costs."""
_CHAIN_ELEMENTS: Final = 16
_CHAIN_RUNS: Final = 40


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates and costs of this machine."""

    threads: int  # Intra-operator threads of the two rates that follow
    gemm_flops: float  # FLOP/s of a large single-precision matrix product
    copy_bandwidth: float  # Bytes per second of a large copy, in bytes copied
    core_flops: float  # `gemm_flops` of one thread
    node_us: float  # Time of an operator that has nothing to do, in microseconds
    profile_us: float  # What a profile adds to the duration of each operator
    clock_hz: float | None  # Clock of the processor as the system reports it; None if it does not
    int8_ops: float  # Operations per second of a large int8 matrix product

    @property
    def roof(self) -> Roof:
        """The machine's two roofs: a copy reads as many bytes as it writes."""
        return Roof(self.gemm_flops, 2 * self.copy_bandwidth)


def calibrate(threads: int) -> Calibration:
    """Measure this machine, in about two and a half seconds."""
    node_us, profile_us = runtime_costs()
    gemm = gemm_flops(threads)
    return Calibration(
        threads=threads,
        gemm_flops=gemm,
        copy_bandwidth=copy_bandwidth(threads),
        core_flops=gemm if threads == 1 else gemm_flops(1),
        node_us=node_us,
        profile_us=profile_us,
        clock_hz=clock_hz(),
        int8_ops=int8_ops(threads),
    )


def rates(threads: int) -> tuple[float, float]:
    """The two rates of a calibration once more, in half of its time."""
    return gemm_flops(threads), copy_bandwidth(threads)


def gemm_flops(threads: int) -> float:
    """FLOP/s of a square single-precision matrix product in ONNX Runtime, best of three sizes."""
    return max(
        2 * size**3 / min(operator_seconds("MatMul", [(size, size)] * 2, threads))
        for size in _GEMM_SIZES
    )


def int8_ops(threads: int) -> float:
    """Operations per second of a matrix product of bytes in ONNX Runtime, best of two sizes."""
    return max(
        2 * size**3 / min(operator_seconds("MatMulInteger", [(size, size)] * 2, threads, int8=True))
        for size in _GEMM_SIZES[:2]
    )


def copy_bandwidth(threads: int) -> float:
    """Bytes per second that an elementwise operator in ONNX Runtime reads and writes anew."""
    return 4 * _COPY_ELEMENTS / min(operator_seconds("Neg", [(_COPY_ELEMENTS,)], threads))


def operator_seconds(
    op_type: str,  # An operator whose result has the shape of its last input
    shapes: Sequence[tuple[int, ...]],
    threads: int,
    seconds: float = _SECONDS,  # Time that it may take; five runs are made in any case
    *,
    int8: bool = False,  # On tensors of bytes instead
) -> list[float]:
    """Durations of one operator on float32 tensors, run again and again."""
    names = [f"input{index}" for index in range(len(shapes))]
    inputs = dict(zip(names, shapes, strict=True))
    operator = Operator(op_type, names, "output")
    work = bound_operators([operator], inputs, shapes[-1], threads, int8=int8)
    return list(_seconds(work, seconds))


def runtime_costs() -> tuple[float, float]:
    """Microseconds of an operator that has nothing to do, and what a profile adds to it."""
    long, short = (median_seconds(_chain(length), _SECONDS) * 1e6 for length in _CHAIN)
    node_us = max(0.0, (long - short) / (_CHAIN[0] - _CHAIN[1]))
    with scratch_folder("calibrate") as folder:
        run = _chain(_CHAIN[0], Path(folder) / "chain")
        for _ in range(_CHAIN_RUNS):
            run()
        del run  # a session writes its profile when it goes
        file = next(Path(folder).glob("chain*.json"))
        nodes = typical_step(model_runs(file), _CHAIN_RUNS)
    profiled = statistics.fmean(node.us for node in nodes)
    return node_us, max(0.0, profiled - node_us)


def _chain(length: int, profile: Path | None = None) -> Callable[[], object]:
    shape = (_CHAIN_ELEMENTS,)
    values = itertools.pairwise(f"value{index}" for index in range(length + 1))
    operators = [Operator("Neg", [before], after) for before, after in values]
    return bound_operators(operators, {"value0": shape}, shape, 1, profile=profile)


def median_seconds(work: Callable[[], object], seconds: float, most: int | None = 200) -> float:
    """Median duration over so much time, the first two calls left out."""
    return statistics.median(itertools.islice(_seconds(work, seconds, most), 2, None))


def _seconds(work: Callable[[], object], seconds: float, most: int | None = 200) -> Iterator[float]:
    """Durations of five calls, and of more while the time lasts."""
    end = time.perf_counter() + seconds
    for count in itertools.islice(itertools.count(), most):
        start = time.perf_counter()
        if count >= 5 and start > end:
            return
        work()
        yield time.perf_counter() - start
