"""Kill trainings in their saves, over eight packages, and compare what is left bit by bit.

    python -m benchmarks.kills --kills 1000

Each process resumes a training from its last save and saves after each step, until it is killed.
What is left must be a save of an undisturbed training, no older than the last that was done. Every
second process keeps the save before; half of the trainings have their elements in a data file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.package.package import Package
from scripts.markdown import head, row
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
    assert data.optimizer is not None
    seen = hashlib.sha256(f"{data.optimizer.step} {data.optimizer.learning_rate}".encode())
    for arrays in (data.trainable, data.frozen):
        for key, array in sorted(arrays.items()):
            seen.update(key.encode() + array.tobytes())
    for key, moments in sorted(data.optimizer.moments.items()):
        seen.update(key.encode() + b"".join(moment.tobytes() for moment in moments))
    return seen.hexdigest()


def _forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Start work in a process of its own, with a pipe to write to: ONNX Runtime does not outlive a
    fork, so this process never opens a session."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            os.close(reading)
            work(writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def _undisturbed(name: str, folder: Path, steps: int) -> list[str]:
    """The state after each step of a training that is not ended; builds its package."""

    def work(out: int) -> None:
        build(CASES[name], folder / "package")
        _train(name, folder, steps, lambda run: os.write(out, _state(run.state).encode()) and None)

    child, reading = _forked(work)
    with os.fdopen(reading) as stream:
        text = stream.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(f"{name} does not train")
    return [text[at : at + 64] for at in range(0, len(text), 64)]


def _kill(name: str, folder: Path, steps: int, *, keep: bool, delay: float) -> int:
    """Kill a training in its saves; return the last step that it had saved."""

    def work(out: int) -> None:
        def saved(run: Run) -> None:
            CheckpointState.save_checkpoint(
                run.state, folder / "trained", include_optimizer_state=True, keep_previous=keep
            )
            os.write(out, run.optimizer.step_count.to_bytes(4, "little"))

        _train(name, folder, steps, saved)

    child, reading = _forked(work)
    with os.fdopen(reading, "rb") as stream:
        first = stream.read(4)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        done = first + stream.read()
    os.waitpid(child, 0)
    return int.from_bytes(done[-4:], "little")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="over all packages together")
    parser.add_argument("--steps", type=int, default=200, help="a training begins anew after half")
    arguments = parser.parse_args()
    random_ = random.Random(0)
    start = time.perf_counter()
    print(head("package", "kills:", "in a save:", "steps:", "lost:"))
    totals = [0, 0, 0]
    for index, name in enumerate(PACKAGES):
        writer.EXTERNAL_DATA_THRESHOLD = 2**30 if index % 2 == 0 else 64
        count = arguments.kills // len(PACKAGES) + (index < arguments.kills % len(PACKAGES))
        torn = lost = made = 0
        with tempfile.TemporaryDirectory(prefix="odtpack-kills-") as scratch:
            folder = Path(scratch)
            states = _undisturbed(name, folder, arguments.steps)
            for kill in range(count):
                keep, delay = kill % 2 == 0, random_.uniform(0, 0.02)
                last = _kill(name, folder, arguments.steps, keep=keep, delay=delay)
                torn += any(folder.glob(".trained.*.tmp"))
                left = CheckpointState.load_checkpoint(folder / "trained")
                assert left.optimizer is not None
                step = left.optimizer.step
                lost += (
                    step < last or left.recovered is not None or _state(left) != states[step - 1]
                )
                made = max(made, step)
                if step >= arguments.steps // 2:
                    for path in folder.glob("trained*"):
                        path.unlink()
        print(row(name, count, torn, made, lost), flush=True)
        totals = [sum(pair) for pair in zip(totals, (count, torn, lost), strict=True)]
    print(f"{totals[0]} kills, {totals[1]} in the middle of a save, {totals[2]} lost something "
          f"({time.perf_counter() - start:.0f} s)")  # fmt: skip
    return 1 if totals[2] else 0


if __name__ == "__main__":
    sys.exit(main())
