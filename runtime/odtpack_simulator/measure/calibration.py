"""What this machine reaches through ONNX Runtime: rates of its processor and GPU, and costs.

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

import numpy as np
import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.session import run_failed
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


_SIZES: Final = (256, 1024, 4096)
_ENOUGH: Final = 0.5  # Seconds of a product after which no larger one is tried
_ELEMENTS: Final = 4 * 2**20
_CHAINS: Final = (2, 6)
_SMALL_CHAINS: Final = (20, 120)

Figures = dict[str, tuple[list[float] | str, float, str, str]]


def measure_gpu(name: str, repeats: int) -> Figures:
    """Values by the profile's key, or why there are none; unit and how it was measured."""
    device = Device(name)
    figures: Figures = {}
    for key, dtype in (("fp32_gemm", np.float32), ("fp16_gemm", np.float16)):
        rates: list[float] | str
        try:
            rates = [_product(device, np.dtype(dtype)) for _ in range(repeats)]
        except OdtpackError as error:
            if dtype == np.float32:
                raise
            rates = error.what.partition(":")[0]
        figures[key] = rates, 1e9, "GFLOPS", f"square matrix product, best of {_SIZES}, {name}"
    seconds = [_gpu_seconds(device, "Neg", (_ELEMENTS,), _CHAINS) for _ in range(repeats)]
    text = f"elementwise operator on {4 * _ELEMENTS // 2**20} MiB, bytes written, {name}"
    figures["bandwidth"] = [4 * _ELEMENTS / each for each in seconds], 1e9, "GB/s", text
    small = [_gpu_seconds(device, "Neg", (16,), _SMALL_CHAINS) for _ in range(repeats)]
    figures["operator"] = small, 1e-6, "us", f"elementwise operator on 16 numbers, {name}"
    figures["own_memory"] = "the provider does not say whether it has memory of its own", 1, "B", ""
    return figures


def _product(device: Device, dtype: np.dtype[np.floating]) -> float:
    """FLOP/s."""
    found = 0.0
    for size in _SIZES:
        seconds = _gpu_seconds(device, "MatMul", (size, size), _CHAINS, dtype)
        found = max(found, 2 * size**3 / seconds)
        if seconds > _ENOUGH / 64:  # the next one takes 64 times as long
            break
    return found


def _gpu_seconds(
    device: Device,
    op_type: str,
    shape: tuple[int, ...],
    chains: tuple[int, int],
    dtype: np.dtype[np.floating] | None = None,
) -> float:
    """Seconds of one operator: what a longer chain takes more, whose sum is read at its end."""
    best = [min(_runs(device, op_type, shape, length, dtype)) for length in chains]
    return max(best[1] - best[0], 1e-9) / (chains[1] - chains[0])


def _runs(
    device: Device,
    op_type: str,
    shape: tuple[int, ...],
    length: int,
    dtype: np.dtype[np.floating] | None,
) -> list[float]:
    """Seconds of a chain, again and again, once it has run."""
    from onnx import ModelProto, TensorProto, helper

    half = dtype == np.float16
    nodes = [helper.make_node("Cast", ["x"], ["v0"], to=10 if half else 1)]
    for index in range(length):
        inputs = [f"v{index}", *(["v0"] if op_type == "MatMul" else [])]
        nodes.append(helper.make_node(op_type, inputs, [f"v{index + 1}"]))
    nodes.append(helper.make_node("ReduceMax", [f"v{length}"], ["m"], keepdims=0))
    nodes.append(helper.make_node("Cast", ["m"], ["y"], to=1))
    graph = helper.make_graph(
        nodes, "gpu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ())],
    )  # fmt: skip
    model = ModelProto(ir_version=8, graph=graph, opset_import=[helper.make_opsetid("", 13)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = device.session(model.SerializeToString(), options)
    feeds = {"x": np.full(shape, 1 / max(shape), np.float32)}
    found = []
    for _ in range(4):
        start = time.perf_counter()
        try:
            session.run(None, feeds)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error
        found.append(time.perf_counter() - start)
    return found[1:]
