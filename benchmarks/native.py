"""Steps with native kernels and without, alternating in one process on one thread.

    make native && python -m benchmarks.native
    python -m benchmarks.native big-mlp vit --optimizer sgd --steps 20

Shown are the shortest step of each, in processor time, the median ratio of two steps in a row, and
by how much losses differ at most. With others at work the ratios are wide.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

from benchmarks.worker import open_training
from benchmarks.workloads import OPTIMIZERS, WORKLOADS
from odtpack.build import build_package
from odtpack_runtime.session.native import VARIABLE
from scripts.markdown import head, row
from tests.native_library import library
from tests.packaging_tools import trainable_names


def main() -> None:
    """Measure what the command line asks for; print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native")
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    os.environ[VARIABLE] = str(library())
    print(f"load before: {os.getloadavg()[0]:.1f}\n")
    print(head("step, ms of a processor", "bodies:", "kernels:", "median ratio:", "losses:"))
    for name in given.workloads or WORKLOADS:
        bodies, kernels, losses = measure(name, given.optimizer, given.steps)
        ratios = [b / a for a, b in zip(bodies, kernels, strict=True)]
        off = max(abs(b / a - 1) for a, b in zip(*losses, strict=True))
        print(row(WORKLOADS[name].title, f"{min(bodies) * 1e3:.2f}", f"{min(kernels) * 1e3:.2f}",
                  f"{statistics.median(ratios):.2f}", f"{off:.0e}"), flush=True)  # fmt: skip
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


def measure(
    name: str, optimizer: str, steps: int
) -> tuple[list[float], list[float], tuple[list[float], list[float]]]:
    """Seconds of each step without and with the kernels, and the losses of both."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "package"
        model, data = WORKLOADS[name].write(Path(scratch))
        build_package(
            model, folder, loss="cross_entropy", optimizer=optimizer, native=True,
            train=tuple(trainable_names(onnx.load(model))),
        )  # fmt: skip
        feeds = dict(np.load(data))
        both = [open_training(folder, native=native) for native in (False, True)]
        times: tuple[list[float], list[float]] = ([], [])
        losses: tuple[list[float], list[float]] = ([], [])
        for step in range(steps + 2):
            for index, (module, update) in enumerate(both):
                batch = [feeds[each] for each in module.input_names()]
                started = time.process_time()
                losses[index].append(float(update.step_on(*batch)))
                if step >= 2:
                    times[index].append(time.process_time() - started)
    return *times, losses


if __name__ == "__main__":
    main()
