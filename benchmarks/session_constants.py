"""Fit what a process and its sessions take besides tensors, on the zoo's networks alone.

Every network is trained for some steps in a child process, and the plan is made with these
constants at zero. What is left is a line: so much once, so much per node,
per subgraph and per thread (``odtpack_simulator.memory.session_memory``).

    python -m benchmarks.session_constants
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import onnx

from benchmarks.memory_prediction import WORKLOADS, make_job
from odtpack.artifacts import OptimType
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory import memory_plan, session_memory
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.replay import run_training_child
from tests.simulator.packages import MODELS

CONSTANTS = ("FIRST_RUN_BYTES", "BYTES_PER_NODE", "BYTES_PER_SUBGRAPH",
             "BYTES_PER_THREAD")  # fmt: skip
PHASES = {
    "evaluation": ("evaluation",),
    "step": ("first step", "training step", "optimizer step"),
}


def main() -> None:
    tuning = {name: load for name, load in WORKLOADS.items() if "batch norm" not in name}
    tuning |= {name: (MODELS[name][0], MODELS[name][2]) for name in ("batchnorm", "recurrent")}
    rows, targets, loading = [], [], []
    for name, (factory, size) in tuning.items():
        model = factory()
        for optimizer in (OptimType.SGD, OptimType.AdamW):
            with tempfile.TemporaryDirectory(prefix="odtpack-bench-") as scratch:
                job = make_job(model, size, optimizer, Path(scratch))
                package = Package.open(Path(scratch) / "package")
                shapes = {n: (size, *np.load(f, "r").shape[1:]) for n, f in job.data.items()}
                counts = _counts(package)
                for threads in (1, 2):
                    row = [1, *counts, 3 * (threads - 1)]
                    peaks = run_training_child(
                        dataclasses.replace(job, threads=threads)
                    ).phase_peaks
                    with _without_constants():
                        plan = plan_memory(package, shapes, threads=threads)
                    planned = {phase.name: phase.nbytes for phase in plan.phases}
                    for measured, names in PHASES.items():
                        # Errors are judged in per cent: small models count as much as large ones.
                        weight = 1 / peaks[measured]
                        rows.append(weight * np.array(row))
                        left = peaks[measured] - max(planned[n] for n in names)
                        targets.append(weight * left)
                    names = [n for n in planned if n.startswith(("loading", "placing"))]
                    left = peaks["loading"] - max(planned[n] for n in names)
                    loading.append((row, left, 1 / peaks["loading"] ** 2))
                print(name, optimizer.name, counts, flush=True)
    matrix, right = np.array(rows, float), np.array(targets, float)
    found, *_ = np.linalg.lstsq(matrix, right, rcond=None)
    error = matrix @ found - right
    for name, value in zip(("LOADED_BYTES + FIRST_RUN_BYTES", *CONSTANTS[1:]), found, strict=True):
        print(f"{name:32}{value:12.0f}")
    error = 100 * np.abs(error)
    print(f"error: median {np.median(error):.1f} %, largest {error.max():.1f} %")
    once = [left - np.dot(row[1:-1], found[1:-1]) for row, left, _ in loading]
    loaded = np.average(once, weights=[weight for *_, weight in loading])
    print(f"LOADED_BYTES {loaded:.0f} of {np.round(once)}")


def _counts(package: Package) -> list[int]:
    """Nodes and subgraphs of the three models."""
    counts = np.zeros(2, int)
    for path in (package.training_model, package.eval_model, package.optimizer_model):
        graph = onnx.load(str(path), load_external_data=False).graph
        counts += session_memory.count(graph)
    return [int(value) for value in counts]


def _without_constants() -> contextlib.ExitStack:
    """The plan with every constant at zero."""
    stack = contextlib.ExitStack()
    for name in CONSTANTS[1:]:
        stack.enter_context(mock.patch.object(session_memory, name, 0))
    for name in ("LOADED_BYTES", "FIRST_RUN_BYTES"):
        stack.enter_context(mock.patch.object(memory_plan, name, 0))
    return stack


if __name__ == "__main__":
    main()
