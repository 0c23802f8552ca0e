"""What this machine reaches through ONNX Runtime: rates of its processor and GPU, and costs.

Measured on single operators on memory that is already there: a large matrix
product, a large copy, and chains of operators with nothing to do. A rate is the
best of many runs, as is usual for what a machine can reach (STREAM does so).
"""

import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array, address, allocate
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.native import DOMAIN
from odtpack_runtime.session.session import run_failed
from odtpack_simulator.measure.host import clock_hz
from odtpack_simulator.memory.execution_order import graphs
from odtpack_simulator.memory.operator_work import Roof, Tensor, Work, operator_work

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
"""Operators whose time is that of the nodes inside them, which are listed by themselves."""

_ITEM_SIZES: Final[Mapping[str, float]] = {
    **dict.fromkeys(("double", "float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float", "float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("int4", "uint4"), 0.5),
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of a node."""

    node: str  # Name of the node
    op_type: str  # Its operator
    us: float  # Duration as the profile says, in whole microseconds
    work: Work  # From the shapes of this run


def kernel_names(model: str | os.PathLike[str]) -> dict[str, str]:
    """What to call the native kernels of a model, by their operators."""
    from odtpack_runtime.package.checks import read_model

    return {
        node.op_type: f"native {attribute.s.decode()}"
        for each in graphs(read_model(Path(model)).graph)
        for node in each.node
        if node.domain == DOMAIN
        for attribute in node.attribute
        if attribute.name == "kernel"
    }


def model_runs(
    file: Path, kernels: Mapping[str, str] = MappingProxyType({})
) -> list[list[NodeRun]]:
    """The nodes of every run of the model, in order, without those that only run others."""
    try:
        events = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OdtpackError(
            "profile-not-whole",
            f"ONNX Runtime's profile of a step ends after {file.stat().st_size} bytes.",
            where=str(file.parent),
        ) from error
    runs: list[list[NodeRun]] = []
    nodes: list[NodeRun] = []
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "Node" and name.endswith("_kernel_time"):
            if event["args"]["op_name"] not in CONTROL_FLOW:
                nodes.append(_run(event, kernels))
        elif kind == "Session" and name == "model_run":  # written when the run has ended
            runs.append(nodes)
            nodes = []
    return runs


def typical_step(runs: Sequence[Sequence[NodeRun]], made: int) -> list[NodeRun]:
    """The nodes of one step, the first step left out."""
    # Where all steps ran the same nodes on the same shapes, each node takes the mean of the middle
    # half of its durations: a node that was interrupted once does not show, and the mean of whole
    # microseconds is finer than their median. Otherwise it is the step whose sum is the (lower)
    # median.
    # `runs`: As of model_runs; every step made equally many.
    # `made`: Number of steps, at least two.
    per_step = len(runs) // made
    steps = [
        [node for run in runs[index * per_step : (index + 1) * per_step] for node in run]
        for index in range(1, made)
    ]
    if all(_names(step) == _names(steps[0]) for step in steps):
        return [
            dataclasses.replace(same[0], us=middle_mean([node.us for node in same]))
            for same in zip(*steps, strict=True)
        ]
    steps.sort(key=lambda step: sum(node.us for node in step))
    return steps[(len(steps) - 1) // 2]


def middle_mean(values: Sequence[float]) -> float:
    """The interquartile mean: that of the values without the lowest and the highest quarter."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _names(step: Sequence[NodeRun]) -> list[tuple[str, str, Work]]:
    return [(node.node, node.op_type, node.work) for node in step]


def _run(event: Mapping[str, Any], kernels: Mapping[str, str]) -> NodeRun:
    details = event["args"]
    op_type = kernels.get(details["op_name"], details["op_name"])
    work = operator_work(
        op_type,
        _tensors(details.get("input_type_shape", ())),
        _tensors(details.get("output_type_shape", ())),
    )
    return NodeRun(event["name"].removesuffix("_kernel_time"), op_type, event["dur"], work)


def _tensors(entries: Sequence[Mapping[str, Sequence[int]]]) -> list[Tensor]:
    """Tensors of a list such as ``[{"float": [64, 10]}, {"int64": []}]``."""
    return [
        Tensor(tuple(shape), _ITEM_SIZES.get(kind, 0))
        for entry in entries
        for kind, shape in entry.items()
    ]


def _parsed(nodes: str, inputs: str, result: str) -> bytes:
    """A model of these texts of ONNX."""
    from onnx import parser

    head = f'<ir_version: 8, opset_import: ["": 13]> calibration ({inputs}) => ({result})'
    return bytes(parser.parse_model(f"{head} {{ {nodes} }}").SerializeToString())


def bound_model(
    nodes: str,  # In ONNX's text form: from the inputs to `y`
    inputs: Mapping[str, tuple[int, ...]],
    result: tuple[int, ...],
    threads: int,
    *,
    optimized: bool = False,  # Let ONNX Runtime change the graph; it runs as written otherwise
    profile: Path | None = None,
    int8: bool = False,  # The inputs are unsigned bytes and the result has 32-bit integers
) -> Callable[[], object]:
    """Open a session of float32 operators, bound to memory, and return what runs it."""
    # `profile`: Start of the path of the profile that the session writes when it goes.
    given, made = (np.uint8, np.int32) if int8 else (np.float32, np.float32)
    types = ("uint8", "int32") if int8 else ("float", "float")
    fed = ", ".join(f"{types[0]}{list(shape)} {name}" for name, shape in inputs.items())
    model = _parsed(nodes, fed, f"{types[1]}{list(result)} y")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    feeds: dict[str, Array] = {
        name: (16 * random.random(shape, dtype=np.float32)).astype(given)
        if int8
        else random.standard_normal(shape, dtype=np.float32)
        for name, shape in inputs.items()
    }
    output = allocate(4 * int(np.prod(result))).view(made).reshape(result)
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_input(name, "cpu", 0, given, value.shape, address(value))
    binding.bind_output("y", "cpu", 0, made, result, address(output))

    def run(_: object = (feeds, output)) -> None:  # ONNX Runtime holds bare addresses
        session.run_with_iobinding(binding)

    return run


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
    node = f"y = {op_type} ({', '.join(names)})"
    work = bound_model(node, inputs, shapes[-1], threads, int8=int8)
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
        nodes = typical_step(model_runs(next(Path(folder).glob("chain*.json"))), _CHAIN_RUNS)
    return node_us, max(0.0, statistics.fmean(node.us for node in nodes) - node_us)


def _chain(length: int, profile: Path | None = None) -> Callable[[], object]:
    shape = (_CHAIN_ELEMENTS,)
    values = itertools.pairwise(["x", *(f"value{index}" for index in range(1, length)), "y"])
    nodes = "\n".join(f"{after} = Neg ({before})" for before, after in values)
    return bound_model(nodes, {"x": shape}, shape, 1, profile=profile)


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

GpuRates = dict[str, tuple[list[float] | str, float, str, str]]


def measure_gpu(name: str, repeats: int) -> GpuRates:
    """Values by the profile's key, or why there are none; unit and how it was measured."""
    device = Device(name)
    figures: GpuRates = {}
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

    def best(length: int) -> float:
        """Seconds of a chain, the least of some runs, once it has run."""
        more = ", v0" if op_type == "MatMul" else ""
        nodes = [f"v{index + 1} = {op_type} (v{index}{more})" for index in range(length)]
        text = f"""
            v0 = Cast <to = {10 if dtype == np.float16 else 1}> (x)
            {" ".join(nodes)}
            m = ReduceMax <keepdims = 0> (v{length})
            y = Cast <to = 1> (m)"""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = device.session(_parsed(text, f"float{list(shape)} x", "float y"), options)
        feeds = {"x": np.full(shape, 1 / max(shape), np.float32)}
        found = []
        for _ in range(4):
            start = time.perf_counter()
            try:
                session.run(None, feeds)
            except Exception as error:  # ONNX Runtime's exceptions have no common base
                raise run_failed(error) from error
            found.append(time.perf_counter() - start)
        return min(found[1:])

    short, long = map(best, chains)
    return max(long - short, 1e-9) / (chains[1] - chains[0])
