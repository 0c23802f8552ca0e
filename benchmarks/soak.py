"""Eight hours of training in minutes: what grows, and whether the losses are as undisturbed ones.

One process trains, saves (with the save before kept), evaluates, and moves to another package
again and again, going on from its checkpoint each time. Memory that stays after everything
is freed, open files and files on disk are compared with those after a first tenth, and the
trained state at the end, bit by bit, with a run that only trains.

    python -m benchmarks.soak               # 200,000 steps, 2,000 saves, 50 updates
    python -m benchmarks.soak --share 0.01
    python -m benchmarks.soak --kit cpp     # a program of the C++ kit (make kits)
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from odtpack.build import build_package
from odtpack.optimizers import AdamW
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.kits import cpp_kit

STEPS, SAVES, EVALUATIONS, UPDATES = 200_000, 2_000, 200, 50
GROWTH = 0.01
_SIZES = (20, 32, 5)
_BATCHES = 1000


@dataclass
class Reading:
    """What a process holds at one time."""

    step: int
    resident_bytes: int
    handles: int
    files: int
    loss: float


def read(step: int, folder: Path, loss: float) -> Reading:
    """Measure, after all that can be freed is."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Reading(
        step,
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - its own handle is in both readings
        sum(1 for _ in folder.rglob("*")),
        loss,
    )


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a step: classes that a linear map of the data gives."""
    random = np.random.default_rng(step % _BATCHES)
    data = random.standard_normal((8, _SIZES[0]), np.float32)
    return data, data[:, : _SIZES[-1]].argmax(1)


class App:
    """Trains from a package's checkpoint, or from where it was."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        package = Package.open(folder)
        self.state = CheckpointState.load_checkpoint(checkpoint)
        self.module = Module(package.training_model, self.state, package.eval_model)
        self.optimizer = Optimizer(package.optimizer_model, self.module)

    def train(self, steps: int) -> float:
        loss = 0.0
        for _ in range(steps):
            loss = float(self.module(*batch(self.optimizer.step_count)))
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return loss

    def evaluate(self) -> float:
        self.module.eval()
        losses = [float(self.module(*batch(step))[0]) for step in range(20)]
        self.module.train()
        return float(np.mean(losses))


def make_packages(folder: Path) -> tuple[Path, Path]:
    """Two packages of the same training, between which an app goes to and fro."""
    model = zoo.mlp(_SIZES)
    for name in ("a", "b"):
        options = {"loss": "cross_entropy", "optimizer": AdamW()}
        # The same training in two packages, whose manifests differ.
        build_package(model, folder / name, self_check=name == "a", **options)
    return folder / "a", folder / "b"


def soak(folder: Path, steps: int, saves: int, evaluations: int, updates: int) -> Iterator[Reading]:
    """Train as an app does over months; yield a reading after each twentieth."""
    (folder / "packages").mkdir()
    packages = make_packages(folder / "packages")
    saved = folder / "trained.ckpt"
    app = App(packages[0], packages[0] / "checkpoint")
    save_at, evaluate_at, update_at, read_at = (
        {steps * i // count for i in range(1, count + 1)}
        for count in (saves, evaluations, updates, 20)
    )
    events = sorted({0} | save_at | evaluate_at | update_at | read_at)
    made, loss = 0, float("nan")
    for before, step in pairwise(events):
        app.train(step - before)
        if step in save_at or step in update_at:
            CheckpointState.save_checkpoint(app.state, saved, True, keep_previous=True)
        if step in evaluate_at:
            loss = app.evaluate()
        if step in update_at:
            made += 1
            app = App(packages[made % 2], saved)
        if step in read_at:
            yield read(step, folder, loss)


def soak_cpp(
    folder: Path, steps: int, saves: int, evaluations: int, updates: int
) -> Iterator[Reading]:
    """The same in a program of the C++ kit, which moves between the two packages."""
    (folder / "packages").mkdir()
    package, _ = make_packages(folder / "packages")
    batches = [batch(step) for step in range(_BATCHES)]
    for index, name in enumerate(("samples", "labels")):
        np.concatenate([each[index] for each in batches]).tofile(folder / f"{name}.bin")
    (folder / "saves").mkdir()
    words: list[object] = [
        cpp_kit.built("soak"), package, package.with_name("b"), folder / "samples.bin",
        folder / "labels.bin",
    ]  # fmt: skip
    numbers = (steps, saves, evaluations, updates)
    with subprocess.Popen(
        [*map(str, (*words, folder / "saves" / "trained.ckpt", *numbers))],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            step, resident, handles, files, loss = line.split()
            yield Reading(int(step), int(resident), int(handles), int(files), float(loss))
    assert process.returncode == 0
    alone = (*words, folder / "alone.ckpt", steps, 0, 0, 0)
    subprocess.run([*map(str, alone)], check=True)


def undisturbed(folder: Path, steps: int) -> bool:
    """Whether the end of the soak equals that of a run that only trains, bit by bit."""
    package = folder / "packages" / "a"
    alone = App(package, package / "checkpoint")
    alone.train(steps)
    return content(alone.state) == loaded(folder / "trained.ckpt")


def undisturbed_cpp(folder: Path, steps: int) -> bool:
    """The same of the C++ kit, whose program has run alone as well."""
    return loaded(folder / "alone.ckpt") == loaded(folder / "saves" / "trained.ckpt")


def loaded(path: Path) -> bytes:
    return content(CheckpointState.load_checkpoint(path))


def content(state: CheckpointState) -> bytes:
    return b"".join(p.data.tobytes() for _, p in state.parameters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all numbers")
    parser.add_argument("--kit", choices=["python", "cpp"], default="python")
    arguments = parser.parse_args()
    steps, saves, evaluations, updates = (
        max(int(number * arguments.share), 20 if number == STEPS else 2)
        for number in (STEPS, SAVES, EVALUATIONS, UPDATES)
    )
    run, equals = (soak_cpp, undisturbed_cpp) if arguments.kit == "cpp" else (soak, undisturbed)
    start = time.perf_counter()
    print(f"{'step':>9}{'resident MB':>13}{'handles':>9}{'files':>7}{'loss':>10}")
    readings = []
    with tempfile.TemporaryDirectory(prefix="odtpack-soak-") as scratch:
        for reading in run(Path(scratch), steps, saves, evaluations, updates):
            readings.append(reading)
            print(
                f"{reading.step:>9}{reading.resident_bytes / 1e6:>13.2f}{reading.handles:>9}"
                f"{reading.files:>7}{reading.loss:>10.5f}",
                flush=True,
            )
        equal = equals(Path(scratch), steps)
    first, last = readings[len(readings) // 10], readings[-1]
    growth = {
        "memory": last.resident_bytes / first.resident_bytes - 1,
        "handles": last.handles / first.handles - 1,
        "files": last.files / first.files - 1,
    }
    print(
        f"{steps:,} steps, {saves:,} saves, {evaluations:,} evaluations, {updates:,} package "
        f"updates in {time.perf_counter() - start:.0f} s"
    )
    print("growth since a tenth: " + ", ".join(f"{k} {v:+.2%}" for k, v in growth.items()))
    print(f"the end equals that of a run that only trains, bit by bit: {'yes' if equal else 'NO'}")
    return 0 if equal and max(growth.values()) <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
