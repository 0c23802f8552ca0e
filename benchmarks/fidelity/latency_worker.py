"""One process of the fidelity benchmark for latency: ``latency_worker.py TASK.json``.

It does one of four things and writes what it measured to a JSON file:

- ``scaling``: time a matrix product and a copy of several sizes with some threads;
- ``calibrate``: time steps of a job, and profile some of them;
- ``measure``: time steps of a job;
- ``shapes``: profile a step of a job for the work of its nodes; its times are not told.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from odtpack_runtime.simulator.calibration import operator_seconds, runtime_costs
from odtpack_runtime.simulator.job import Job
from odtpack_runtime.simulator.timing_run import open_trainer, profiled_step, whole_steps
from odtpack_runtime.simulator.training_run import Batches

GEMM_SIZES = (16, 32, 64, 128, 256, 512)
COPY_SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
PROFILED = 12


def reference_ms() -> float:
    """The quickest of some matrix products in numpy: what else runs here makes it slower."""
    values = np.random.default_rng(0).random((384, 384), np.float32)
    best = float("inf")
    for _ in range(15):
        start = time.perf_counter()
        values @ values
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def scaling(task: dict[str, Any]) -> dict[str, Any]:
    """Quickest seconds of products and copies, by FLOP and by bytes moved."""
    seconds, threads = task["seconds"], task["threads"]
    products = [
        (2 * size**3, min(operator_seconds("MatMul", [(size, size)] * 2, threads, seconds)))
        for size in GEMM_SIZES
    ]
    copies = [
        (8 * size, min(operator_seconds("Neg", [(size,)], threads, seconds))) for size in COPY_SIZES
    ]
    return {"products": products, "copies": copies}


def steps(job: Job, seconds: float, most: int) -> list[tuple[float, float]]:
    """Wall and processor milliseconds of steady steps, after two that are left out."""
    trainer = open_trainer(job, Batches(list(job.data.values()), job.schedule.largest_batch))
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    for made, indices in enumerate(whole_steps(job)):
        if made >= 5 and (time.perf_counter() > end or made >= most):
            break
        cpu = time.thread_time()
        wall = trainer.step(indices)[1] * 1e3
        # Gathering the batch is in the processor time only: it can hide no interruption.
        times.append((wall, (time.thread_time() - cpu) * 1e3))
    return times[2:]


def nodes_of(job: Job, seconds: float, most: int, *, times: bool) -> list[dict[str, Any]]:
    """The nodes of a typical step: operator, work and, if asked for, profiled microseconds."""
    batches = Batches(list(job.data.values()), job.schedule.largest_batch)
    _, nodes = profiled_step(job, batches, seconds=seconds, most=most)
    return [
        {
            "op_type": node.op_type,
            "flops": node.work.flops,
            "moved_bytes": node.work.moved_bytes,
            **({"us": node.us} if times else {}),
        }
        for node in nodes
    ]


def main(path: str) -> None:
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"reference_ms": [reference_ms()]}
    if task["kind"] == "scaling":
        result |= scaling(task)
    else:
        job = Job.read(Path(task["job"]))
        seconds = task.get("seconds", 0.0)
        if task["kind"] in ("calibrate", "measure"):
            result["steps"] = steps(job, seconds, task["most"])
        if task["kind"] == "calibrate":
            node_us, profile_us = runtime_costs()
            result |= {"node_us": node_us, "profile_us": profile_us}
            result["nodes"] = nodes_of(job, seconds, PROFILED, times=True)
            result["steps"] += steps(job, seconds, task["most"])
        if task["kind"] == "shapes":
            result["nodes"] = nodes_of(job, 0.0, 1, times=False)
    result["reference_ms"].append(reference_ms())
    Path(task["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
