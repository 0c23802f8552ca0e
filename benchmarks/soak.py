"""Eight hours of training in minutes: what grows, and whether the losses are as undisturbed ones.

python -m benchmarks.soak               # 200,000 steps, 2,000 saves, 50 updates
python -m benchmarks.soak --share 0.01  # of all numbers
python -m benchmarks.soak --kit cpp     # a program of the C++ kit (make kits)
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from odtpack.build import build_package
from odtpack.optimizers import AdamW
from odtpack_runtime import CheckpointState
from odtpack_runtime.training.loop import train_step
from scripts.harness import head, options, row, scratch
from tests import zoo
from tests.kits import cpp_kit
from tests.packaging_tools import open_training

Reading = tuple[int, int, int, int, float]
"""At a step: bytes that are resident, open handles, files, and the last evaluation's loss."""
COUNTS = (200_000, 2_000, 200, 50)  # steps, saves, evaluations, package updates
GROWTH = 0.01
_SIZES = (20, 32, 5)
_BATCHES = 1000


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a step: classes that a linear map of the data gives."""
    random = np.random.default_rng(step % _BATCHES)
    data = random.standard_normal((8, _SIZES[0]), np.float32)
    return data, data[:, : _SIZES[-1]].argmax(1)


class App:
    """Trains from a package's checkpoint, or from where it was."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.state, self.module, self.optimizer = open_training(folder, checkpoint=checkpoint)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            train_step(self.module, self.optimizer, [batch(self.optimizer.step_count)])

    def evaluate(self) -> float:
        self.module.eval()
        losses = [float(self.module(*batch(step))[0]) for step in range(20)]
        self.module.train()
        return float(np.mean(losses))


def soak(folder: Path, package: Path, counts: tuple[int, ...]) -> Iterator[Reading]:
    """Train as an app does over months; yield a reading after each twentieth."""
    saved, steps = folder / "trained.ckpt", counts[0]
    app = App(package, package / "checkpoint")
    save_at, evaluate_at, update_at, read_at = (
        {steps * i // count for i in range(1, count + 1)} for count in (*counts[1:], 20)
    )
    made, loss = 0, float("nan")
    for before, step in pairwise(sorted({0} | save_at | evaluate_at | update_at | read_at)):
        app.train(step - before)
        if step in save_at or step in update_at:
            CheckpointState.save_checkpoint(app.state, saved, True, keep_previous=True)
        if step in evaluate_at:
            loss = app.evaluate()
        if step in update_at:
            made += 1
            app = App(package.with_name("ab"[made % 2]), saved)
        if step in read_at:
            gc.collect()  # after all that can be freed is
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            handles = len([*Path("/proc/self/fd").iterdir()])  # its own is in every reading
            files = sum(1 for _ in folder.rglob("*"))
            yield step, resident * os.sysconf("SC_PAGE_SIZE"), handles, files, loss


def soak_cpp(folder: Path, package: Path, counts: tuple[int, ...]) -> Iterator[Reading]:
    """The same in a program of the C++ kit, which then trains alone as well."""
    batches = [batch(step) for step in range(_BATCHES)]
    for index, name in enumerate(("samples", "labels")):
        np.concatenate([each[index] for each in batches]).tofile(folder / f"{name}.bin")
    (folder / "saves").mkdir()
    words = [cpp_kit.built("soak"), package, package.with_name("b"), folder / "samples.bin",
             folder / "labels.bin"]  # fmt: skip
    command = [*map(str, (*words, folder / "saves" / "trained.ckpt", *counts))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            *whole, loss = line.split()
            step, resident, handles, files = map(int, whole)
            yield step, resident, handles, files, float(loss)
    assert process.returncode == 0
    alone = (*words, folder / "alone.ckpt", counts[0], 0, 0, 0)
    subprocess.run([*map(str, alone)], check=True)


def undisturbed(folder: Path, package: Path, steps: int) -> bool:
    """Whether the end of the soak equals that of a run that only trains, bit by bit."""
    if (folder / "alone.ckpt").exists():  # the C++ kit's
        alone = CheckpointState.load_checkpoint(folder / "alone.ckpt")
        soaked = folder / "saves" / "trained.ckpt"
    else:
        app, soaked = App(package, package / "checkpoint"), folder / "trained.ckpt"
        app.train(steps)
        alone = app.state
    found = [[p.data.tobytes() for _, p in state.parameters]
             for state in (alone, CheckpointState.load_checkpoint(soaked))]  # fmt: skip
    return found[0] == found[1]


def main() -> int:
    given = options(__doc__, share=1.0, kit=("python", "cpp"))
    counts = tuple(max(int(n * given.share), 20 if n == COUNTS[0] else 2) for n in COUNTS)
    run = soak_cpp if given.kit == "cpp" else soak
    start, readings = time.perf_counter(), []
    print(head("step:", "resident MB:", "handles:", "files:", "loss:"))
    with scratch() as folder:
        package = folder / "packages" / "a"
        for name in ("a", "b"):  # of the same training; their manifests differ
            build_package(zoo.mlp(_SIZES), package.with_name(name), loss="cross_entropy",
                          optimizer=AdamW(), self_check=name == "a")  # fmt: skip
        for step, resident, handles, files, loss in run(folder, package, counts):
            readings.append((resident, handles, files))
            print(row(step, f"{resident / 1e6:.2f}", handles, files, f"{loss:.5f}"), flush=True)
        equal = undisturbed(folder, package, counts[0])
    growth = np.divide(readings[-1], readings[len(readings) // 10]) - 1
    print("{:,} steps, {:,} saves, {:,} evaluations, {:,} package updates ".format(*counts)
          + f"in {time.perf_counter() - start:.0f} s")  # fmt: skip
    print("growth since a tenth: memory {:+.2%}, handles {:+.2%}, files {:+.2%}".format(*growth))
    print(f"the end equals that of a run that only trains, bit by bit: {'yes' if equal else 'NO'}")
    return 0 if equal and growth.max() <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
