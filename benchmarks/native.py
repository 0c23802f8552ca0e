"""Steps with native kernels and without, alternating in one process on one thread.

    make native && python -m benchmarks.native
    python -m benchmarks.native big-mlp vit --optimizer sgd --steps 20

Shown are the shortest step of each, in processor time, the median ratio of two steps in a row, and
by how much losses differ at most. With others at work the ratios are wide.
"""

import os
import statistics
import time

import numpy as np

from benchmarks.worker import open_training
from benchmarks.workloads import OPTIMIZERS, WORKLOADS, build_native
from odtpack_runtime.session.native import VARIABLE
from scripts.harness import head, options, row, scratch
from tests.native_library import library


def main() -> None:
    names, choices = [*WORKLOADS], ("adamw", *OPTIMIZERS)
    given = options(__doc__, "workloads", workloads=names, optimizer=choices, steps=20)
    os.environ[VARIABLE] = str(library())
    print(f"load before: {os.getloadavg()[0]:.1f}\n")
    print(head("step, ms of a processor", "bodies:", "kernels:", "median ratio:", "losses:"))
    for name in given.workloads:
        seconds, losses = measure(name, given.optimizer, given.steps)
        off = np.abs(losses[:, 1] / losses[:, 0] - 1).max()
        shortest = (f"{each * 1e3:.2f}" for each in seconds.min(0))
        ratio = statistics.median(seconds[:, 1] / seconds[:, 0])
        print(row(WORKLOADS[name].title, *shortest, f"{ratio:.2f}", f"{off:.0e}"), flush=True)
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


def measure(name: str, optimizer: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each step without and with the kernels, and the losses, two steps more."""
    with scratch() as folder:
        model, data = WORKLOADS[name].write(folder)
        build_native(model, folder / "package", optimizer)
        feeds = dict(np.load(data))
        both = [open_training(folder / "package", native=native) for native in (False, True)]
        seconds, losses = np.empty((steps + 2, 2)), np.empty((steps + 2, 2))
        for place in np.ndindex(losses.shape):
            module, update = both[place[1]]
            batch = [feeds[each] for each in module.input_names()]
            started = time.process_time()
            losses[place] = float(update.step_on(*batch))
            seconds[place] = time.process_time() - started
    return seconds[2:], losses


if __name__ == "__main__":
    main()
