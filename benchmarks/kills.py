"""Kill trainings in their saves, over eight packages, and compare what is left bit by bit.

    python -m benchmarks.kills --kills 1000 [--steps 200]

Each process resumes a training from its last save and saves after each step, until it is killed.
What is left must be a save of an undisturbed training, no older than the last that was done. Every
second process keeps the save before; half of the trainings have their elements in a data file. A
training begins anew after half of its steps. ``--kills`` are those over all packages together.
"""

import hashlib
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.package.package import Package
from scripts.harness import head, options, row, scratch
from tests.kits.cases import CASES
from tests.kits.kills import PACKAGES
from tests.kits.vectors import Folder, Run, build

SAMPLES = 4


def _train(name: str, folder: Path, steps: int, saved: Callable[[Run], None]) -> None:
    """Go on from the last save, or begin; ``saved`` is told of each step."""
    case = replace(CASES[name], schedule=None)
    path = folder / "trained"
    run = Run(case, Package.open(folder / "package"), path if path.exists() else None)
    while run.optimizer.step_count < steps:
        batch = case.data(np.random.default_rng(run.optimizer.step_count), SAMPLES)
        run.step(Folder(folder, {}), batch, update=True)
        saved(run)


def _state(state: CheckpointState) -> str:
    """A digest of everything that a state holds."""
    data = state.snapshot(include_optimizer_state=True)
    seen = hashlib.sha256(f"{data.optimizer.step} {data.optimizer.learning_rate}".encode())
    for arrays in (data.trainable, data.frozen):
        for key, array in sorted(arrays.items()):
            seen.update(key.encode() + array.tobytes())
    for key, moments in sorted(data.optimizer.moments.items()):
        seen.update(key.encode() + b"".join(moment.tobytes() for moment in moments))
    return seen.hexdigest()


def _undisturbed(out: Connection, name: str, folder: Path, steps: int) -> None:
    """Build a package, and send the state after each step of a training that is not ended."""
    build(CASES[name], folder / "package")
    _train(name, folder, steps, lambda run: out.send(_state(run.state)))


def _saving(out: Connection, name: str, folder: Path, steps: int, keep: bool) -> None:
    """Train, save after each step, and send the number of each that is saved."""

    def saved(run: Run) -> None:
        CheckpointState.save_checkpoint(
            run.state, folder / "trained", include_optimizer_state=True, keep_previous=keep
        )
        out.send(run.optimizer.step_count)

    _train(name, folder, steps, saved)


def _forked(work: Callable[..., None], *arguments: object, delay: float | None = None) -> list:
    """What work in a process of its own sends, which is killed a delay after the first, if given.

    ONNX Runtime does not outlive a fork: this process never opens a session.
    """
    forking = multiprocessing.get_context("fork")
    reading, writing = forking.Pipe(duplex=False)
    process = forking.Process(target=work, args=(writing, *arguments))
    process.start()
    writing.close()
    sent = []
    try:
        while True:
            sent.append(reading.recv())
            if delay is not None:
                time.sleep(delay)
                process.kill()
                delay = None
    except (EOFError, OSError):  # at the end, also within a message
        process.join()
        return sent


def main() -> int:
    given = options(__doc__, kills=1000, steps=200)
    random_, start, totals = random.Random(0), time.perf_counter(), np.zeros(3, int)
    print(head("package", "kills:", "in a save:", "steps:", "lost:"))
    for index, name in enumerate(PACKAGES):
        writer.EXTERNAL_DATA_THRESHOLD = 2**30 if index % 2 == 0 else 64
        count = given.kills // len(PACKAGES) + (index < given.kills % len(PACKAGES))
        torn = lost = made = 0
        with scratch() as folder:
            states = _forked(_undisturbed, name, folder, given.steps)
            if len(states) != given.steps:
                raise RuntimeError(f"{name} does not train")
            for kill in range(count):
                keep, delay = kill % 2 == 0, random_.uniform(0, 0.02)
                done = _forked(_saving, name, folder, given.steps, keep, delay=delay)
                torn += any(folder.glob(".trained.*.tmp"))
                left = CheckpointState.load_checkpoint(folder / "trained")
                step = left.optimizer.step
                whole = left.recovered is None and _state(left) == states[step - 1]
                lost += step < done[-1] or not whole
                made = max(made, step)
                if step >= given.steps // 2:
                    for path in folder.glob("trained*"):
                        path.unlink()
        print(row(name, count, torn, made, lost), flush=True)
        totals += (count, torn, lost)
    print(f"{totals[0]} kills, {totals[1]} in the middle of a save, {totals[2]} lost something "
          f"({time.perf_counter() - start:.0f} s)")  # fmt: skip
    return 1 if totals[2] else 0


if __name__ == "__main__":
    sys.exit(main())
