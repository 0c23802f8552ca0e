"""Fit what a process and its sessions take besides tensors, on the zoo's networks alone.

    python -m benchmarks.session_constants

First every model of a package is opened in a process of its own; what that takes is a line. Then
every network is trained in a child process, and planned with these figures and without those of the
process: what is left is so much once, and so much per thread.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnxruntime

from benchmarks import apart
from benchmarks.memory_prediction import OPTIMIZERS, WORKLOADS, make_job, shapes
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.options import default_session_options
from odtpack_simulator.memory import memory_plan, session_memory
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import give_back_memory, memory_status
from odtpack_simulator.memory.runtime_graph import load_runtime_graph
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child
from scripts.harness import scratch
from tests.simulator.packages import MODELS

SESSION = ("BYTES_PER_SESSION", "BYTES_PER_NODE", "BYTES_PER_REMOVED_NODE", "BYTES_PER_INPUT",
           "BYTES_PER_SUBGRAPH")  # fmt: skip
PROCESS = ("LOADED_BYTES", "BYTES_PER_THREAD")
PHASES = {
    "evaluation": ("evaluation",),
    "step": ("first step", "training step", "optimizer step"),
}
_SMALL = 1e6
"""Bytes of a session below which errors count as if it took as many."""


def main() -> None:
    tuning = {name: load for name, load in WORKLOADS.items() if "batch norm" not in name}
    tuning |= {name: (MODELS[name][0], MODELS[name][2]) for name in ("batchnorm", "recurrent")}
    sessions: list[tuple[list[int], int]] = []
    jobs = []
    with scratch() as place:
        for (name, (factory, size)), optimizer in itertools.product(tuning.items(), OPTIMIZERS):
            folder = place / str(len(jobs))
            folder.mkdir()
            job = make_job(factory(), size, optimizer, folder)
            package = Package.open(folder / "package")
            jobs.append((job, package))
            sessions += _sessions(package, shapes(job))
            print(name, optimizer.name, flush=True)
        with _constants(_fit(sessions)):
            running = [each for job, package in jobs for each in _running(job, package)]
    threads, left, peaks = np.array(running, float).T
    rows = np.stack([1 / peaks, 3 * (threads - 1) / peaks], 1)
    values, *_ = np.linalg.lstsq(rows, left / peaks, rcond=None)
    for name, value in zip(PROCESS, values, strict=True):
        print(f"{name:32}{value:12.0f}")
    error = 100 * np.abs(rows @ values - left / peaks)
    print(f"error: median {np.median(error):.1f} %, largest {error.max():.1f} %")


def _running(job: Job, package: Package) -> Iterator[tuple[int, int, int]]:
    """Of each phase: threads, what its peak has above a plan without the process, and the peak."""
    for threads in (1, 2):
        peaks = run_training_child(dataclasses.replace(job, threads=threads)).phase_peaks
        with _constants(dict.fromkeys(PROCESS, 0)):
            plan = plan_memory(package, shapes(job), threads=threads)
        planned = {phase.name: phase.nbytes for phase in plan.phases}
        for phase, names in PHASES.items():
            yield threads, peaks[phase] - max(planned[n] for n in names), peaks[phase]


def _sessions(
    package: Package, sizes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[list[int], int]]:
    """Of each model what is counted, in the order of :data:`SESSION`, and what opening it takes."""
    models = (package.training_model, package.eval_model, package.step_model)
    session = package.manifest.session
    for path in filter(None, models):
        stored = onnx.load(str(path), load_external_data=False).graph
        nodes, subgraphs = session_memory.count(stored)
        level = session.optimization_level if session else "all"
        executed = sum(1 for _ in load_runtime_graph(path, sizes, level=level).walk())
        counts = [1, executed, max(0, nodes - executed), len(stored.input), subgraphs]
        yield counts, apart.call(opened, folder=package.path, name=path.name)


def opened(*, folder: str, name: str) -> int:
    """Bytes that a session takes in a process that has one already."""
    options = default_session_options(Path(folder, "training_model.onnx"), 1)
    sizes, sessions = [], []
    for each in ("optimizer_model.onnx", name):
        sessions.append(
            onnxruntime.InferenceSession(Path(folder, each), options, ["CPUExecutionProvider"])
        )
        give_back_memory()
        sizes.append(memory_status()["RssAnon"])
    return sizes[1] - sizes[0]


def _fit(sessions: Sequence[tuple[list[int], int]]) -> dict[str, int]:
    """Least squares of relative errors."""
    counts, taken = (np.array(each, float) for each in zip(*sessions, strict=True))
    weights = 1 / np.maximum(taken, _SMALL)
    found, *_ = np.linalg.lstsq(counts * weights[:, None], taken * weights, rcond=None)
    error = 100 * (counts @ found - taken) * weights
    for name, value in zip(SESSION, found, strict=True):
        print(f"{name:32}{value:12.0f}")
    print(
        f"{len(sessions)} sessions: root mean square error {np.sqrt(np.mean(error**2)):.1f} %, "
        f"largest {np.abs(error).max():.1f} %"
    )
    return {name: round(value) for name, value in zip(SESSION, found, strict=True)}


def _constants(values: Mapping[str, int]) -> contextlib.ExitStack:
    """The plan with other constants."""
    stack = contextlib.ExitStack()
    for module, name in itertools.product((session_memory, memory_plan), values):
        if hasattr(module, name):
            stack.enter_context(mock.patch.object(module, name, values[name]))
    return stack


if __name__ == "__main__":
    main()
