"""Eight hours of training in minutes: what grows, and whether the losses are as undisturbed ones.

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
from scripts.markdown import head, row
from tests import zoo
from tests.kits import cpp_kit

Counts = tuple[int, ...]
COUNTS = (200_000, 2_000, 200, 50)  # steps, saves, evaluations, package updates
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


def make_packages(folder: Path) -> Path:
    """Packages ``a`` and ``b`` of the same training, whose manifests differ; returns the first."""
    for name in ("a", "b"):
        build_package(zoo.mlp(_SIZES), folder / name, loss="cross_entropy", optimizer=AdamW(),
                      self_check=name == "a")  # fmt: skip
    return folder / "a"


def soak(folder: Path, package: Path, counts: Counts) -> Iterator[Reading]:
    """Train as an app does over months; yield a reading after each twentieth."""
    saved = folder / "trained.ckpt"
    app = App(package, package / "checkpoint")
    steps = counts[0]
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
            yield read(step, folder, loss)


def soak_cpp(folder: Path, package: Path, counts: Counts) -> Iterator[Reading]:
    """The same in a program of the C++ kit, which then trains alone as well."""
    batches = [batch(step) for step in range(_BATCHES)]
    for index, name in enumerate(("samples", "labels")):
        np.concatenate([each[index] for each in batches]).tofile(folder / f"{name}.bin")
    (folder / "saves").mkdir()
    words: list[object] = [
        cpp_kit.built("soak"), package, package.with_name("b"), folder / "samples.bin",
        folder / "labels.bin",
    ]  # fmt: skip
    command = [*map(str, (*words, folder / "saves" / "trained.ckpt", *counts))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            step, resident, handles, files, loss = line.split()
            yield Reading(int(step), int(resident), int(handles), int(files), float(loss))
    assert process.returncode == 0
    alone = (*words, folder / "alone.ckpt", counts[0], 0, 0, 0)
    subprocess.run([*map(str, alone)], check=True)


def undisturbed(folder: Path, package: Path, steps: int) -> bool:
    """Whether the end of the soak equals that of a run that only trains, bit by bit."""
    if (folder / "alone.ckpt").exists():  # the C++ kit's
        alone = CheckpointState.load_checkpoint(folder / "alone.ckpt")
        return content(alone) == content(
            CheckpointState.load_checkpoint(folder / "saves" / "trained.ckpt")
        )
    app = App(package, package / "checkpoint")
    app.train(steps)
    return content(app.state) == content(CheckpointState.load_checkpoint(folder / "trained.ckpt"))


def content(state: CheckpointState) -> bytes:
    return b"".join(p.data.tobytes() for _, p in state.parameters)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all numbers")
    parser.add_argument("--kit", choices=["python", "cpp"], default="python")
    arguments = parser.parse_args()
    counts = tuple(max(int(n * arguments.share), 20 if n == COUNTS[0] else 2) for n in COUNTS)
    run = soak_cpp if arguments.kit == "cpp" else soak
    start = time.perf_counter()
    print(head("step:", "resident MB:", "handles:", "files:", "loss:"))
    readings = []
    with tempfile.TemporaryDirectory(prefix="odtpack-soak-") as scratch:
        folder = Path(scratch)
        package = make_packages(folder / "packages")
        for reading in run(folder, package, counts):
            readings.append(reading)
            print(row(reading.step, f"{reading.resident_bytes / 1e6:.2f}", reading.handles,
                      reading.files, f"{reading.loss:.5f}"), flush=True)  # fmt: skip
        equal = undisturbed(folder, package, counts[0])
    first, last = readings[len(readings) // 10], readings[-1]
    growth = {
        "memory": last.resident_bytes / first.resident_bytes - 1,
        "handles": last.handles / first.handles - 1,
        "files": last.files / first.files - 1,
    }
    print(
        "{:,} steps, {:,} saves, {:,} evaluations, {:,} package updates ".format(*counts)
        + f"in {time.perf_counter() - start:.0f} s"
    )
    print("growth since a tenth: " + ", ".join(f"{k} {v:+.2%}" for k, v in growth.items()))
    print(f"the end equals that of a run that only trains, bit by bit: {'yes' if equal else 'NO'}")
    return 0 if equal and max(growth.values()) <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
