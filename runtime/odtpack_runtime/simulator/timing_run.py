"""Time training steps and their operators: the part of a replay's clock that runs in the child.

Arena and memory patterns are on, as in an app that leaves ONNX Runtime's
defaults alone: nothing is limited here. Steps are timed first without a
profile; a second session then profiles a few more to see where the time goes.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint import CheckpointState
from odtpack_runtime.layout import Array, address, allocate
from odtpack_runtime.module import Module
from odtpack_runtime.optimizer import Optimizer
from odtpack_runtime.simulator.job import Job
from odtpack_runtime.simulator.schedule import Indices
from odtpack_runtime.simulator.training_run import Batches, Send, Trainer

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""Operators whose time is that of the nodes inside them, which are listed by themselves."""

_GEMM_SIZES = (256, 512, 1024)
_COPY_ELEMENTS = 16 * 2**20  # 64 MiB: several times any cache
_CALIBRATION_SECONDS = 0.4
_TIMED_STEPS = 30
_TIMED_SECONDS = 4.0
_PROFILED_STEPS = 5
_PROFILED_SECONDS = 2.0


def time_steps(job: Job, send: Send) -> None:
    """Calibrate this machine, time the first and some steady steps, and profile a few.

    Sends ``timed`` with ``first_step_ms``, ``steps_ms``, ``operators`` (rows of
    ``op_type``, ``calls``, ``total_ms`` over ``profiled_steps`` steps),
    ``gemm_flops`` (FLOP/s) and ``copy_bandwidth`` (bytes copied per second).
    """
    send("phase", name="calibrating this machine")
    gemm, copy = gemm_flops(job.threads), copy_bandwidth(job.threads)
    send("phase", name="timing steps")
    batches = Batches(list(job.data.values()), job.schedule.largest_batch)
    first, steps = _plain_steps(job, batches)
    send("phase", name="profiling steps")
    count, operators = _profiled_steps(job, batches)
    send(
        "timed",
        first_step_ms=first,
        steps_ms=steps,
        profiled_steps=count,
        operators=operators,
        gemm_flops=gemm,
        copy_bandwidth=copy,
    )


def _options(job: Job) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


def _open(job: Job, options: onnxruntime.SessionOptions, batches: Batches) -> Trainer:
    state = CheckpointState.load_checkpoint(job.checkpoint)
    module = Module(job.training_model, state, session_options=options)
    if options.enable_profiling:
        options.profile_file_prefix = str(Path(job.folder) / "optimizer")
    optimizer = Optimizer(job.optimizer_model, module)
    return Trainer(module, optimizer, batches, job.set_rate(optimizer))


def _whole_steps(job: Job) -> Iterator[list[Indices]]:
    """Batches of full size, as many as make a step, for ever."""
    batches = _whole_batches(job)
    while True:
        yield list(itertools.islice(batches, job.accumulation_steps))


def _whole_batches(job: Job) -> Iterator[Indices]:
    schedule = job.schedule
    for epoch in itertools.count():
        for indices in schedule.training_batches(epoch):
            if len(indices) == schedule.largest_batch:
                yield indices


def _plain_steps(job: Job, batches: Batches) -> tuple[float, list[float]]:
    """Milliseconds of the first step, and of those after it."""
    trainer = _open(job, _options(job), batches)
    times: list[float] = []
    end = time.perf_counter() + _TIMED_SECONDS
    for indices in itertools.islice(_whole_steps(job), 1 + _TIMED_STEPS):
        times.append(trainer.step(indices)[1] * 1e3)
        if len(times) > 3 and time.perf_counter() > end:
            break
    return times[0], times[1:]


def _profiled_steps(job: Job, batches: Batches) -> tuple[int, list[dict[str, Any]]]:
    """Number of profiled steps, and calls and milliseconds per operator over all of them."""
    options = _options(job)
    options.enable_profiling = True
    options.profile_file_prefix = str(Path(job.folder) / "training")
    trainer = _open(job, options, batches)
    source = _whole_steps(job)
    trainer.step(next(source))  # the first one is not like the others
    count = 0
    end = time.perf_counter() + _PROFILED_SECONDS
    while count < _PROFILED_STEPS and (count == 0 or time.perf_counter() < end):
        trainer.step(next(source))
        count += 1
    del trainer
    gc.collect()  # a session writes its profile when it goes
    rows: dict[str, list[float]] = {}
    for prefix in ("training", "optimizer"):
        for file in sorted(Path(job.folder).glob(f"{prefix}*.json")):
            for op_type, milliseconds in _steady_events(file, count):
                rows.setdefault(op_type, []).append(milliseconds)
    return count, [
        {"op_type": op_type, "calls": len(times), "total_ms": sum(times)}
        for op_type, times in sorted(rows.items())
    ]


def _steady_events(file: Path, steps: int) -> Iterator[tuple[str, float]]:
    """Operator and milliseconds of every node that ran in the last ``steps`` steps."""
    events = [
        (event["args"]["op_name"], event["dur"] / 1e3)
        for event in json.loads(file.read_text(encoding="utf-8"))
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    steady = len(events) * steps // (steps + 1)
    for op_type, milliseconds in events[len(events) - steady :]:
        if op_type not in CONTROL_FLOW:
            yield op_type, milliseconds


def gemm_flops(threads: int) -> float:
    """FLOP/s of a square single-precision matrix product in ONNX Runtime, best of three sizes."""
    rates = []
    for size in _GEMM_SIZES:
        shape = (size, size)
        seconds = _run_alone("MatMul", [_random(shape), _random(shape)], shape, threads)
        rates.append(2 * size**3 / seconds)
    return max(rates)


def copy_bandwidth(threads: int) -> float:
    """Bytes per second that a large elementwise operator in ONNX Runtime reads and writes anew."""
    values = _random((_COPY_ELEMENTS,))
    return values.nbytes / _run_alone("Neg", [values], values.shape, threads)


def _random(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _run_alone(
    op_type: str, inputs: list[Array], output_shape: tuple[int, ...], threads: int
) -> float:
    """Median seconds of one operator on memory that is already there."""
    from onnx import ModelProto, TensorProto, helper

    names = [f"input{index}" for index in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["output"])],
        "calibration",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape)
            for name, value in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, output_shape)],
    )
    model = ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 13))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    output = allocate(int(np.prod(output_shape)) * 4).view(np.float32).reshape(output_shape)
    binding = session.io_binding()
    for name, value in zip(names, inputs, strict=True):
        binding.bind_input(name, "cpu", 0, np.float32, value.shape, address(value))
    binding.bind_output("output", "cpu", 0, np.float32, output.shape, address(output))
    return _median_seconds(lambda: session.run_with_iobinding(binding))


def _median_seconds(work: Callable[[], object]) -> float:
    """Median duration over the calibration's time, the first two calls left out."""
    times: list[float] = []
    end = time.perf_counter() + _CALIBRATION_SECONDS
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
