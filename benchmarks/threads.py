"""Step time with one thread, and with several that spin or rest between runs.

    python -m benchmarks.threads [--models unet,vit] [--threads 2] [--rounds 5]

The held-out networks of the fidelity benchmark at their largest batch size, a trainer of each
setting in one process, in turns. A ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.models import CASES, build
from odtpack_runtime.session import options
from odtpack_simulator.replay.child.timing_run import open_trainer, whole_steps
from odtpack_simulator.replay.child.training_run import Batches, Trainer
from odtpack_simulator.replay.job import Indices, Job

TURN_SECONDS = 0.2
QUIET_SECONDS = 0.05
"""Between turns: long enough for spinning threads to fall asleep."""
WARM_STEPS = 3


def main() -> None:
    """Measure what the command line asks for; print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    settings = {
        "one": (1, True),
        "spinning": (given.threads, False),
        "resting": (given.threads, True),
    }
    table = Table(title=f"{given.threads} threads, median step of {given.rounds} rounds, ms")
    for heading in ("model", "batch", "one", "spinning", "resting", "to spinning", "to one"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    gains: list[float] = []
    for name in given.models:
        built = build(CASES[name])
        size = max(built.case.batches)
        with tempfile.TemporaryDirectory(prefix="odtpack-bench-") as scratch:
            turns = {
                setting: Turns(
                    built.job(Path(tempfile.mkdtemp(dir=scratch)), size, threads, task="time"), rest
                )
                for setting, (threads, rest) in settings.items()
            }
            rounds = [{name: turn.median_ms() for name, turn in turns.items()}
                      for _ in range(given.rounds)]  # fmt: skip
        spinning, one = (
            sorted(row["resting"] / row[to] for row in rounds) for to in ("spinning", "one")
        )
        gains.append(statistics.median(spinning))
        times = [f"{statistics.median(row[setting] for row in rounds):.2f}" for setting in settings]
        table.add_row(name, str(size), *times, _text(spinning), _text(one))
    console = Console(width=None if os.isatty(1) else 120)
    console.print(table)
    console.print(f"resting / spinning: geometric mean {statistics.geometric_mean(gains):.2f}")


class Turns:
    """A trainer that makes steps for some time when it is its turn."""

    def __init__(self, job: Job, rest: bool) -> None:
        self._batches = Batches(list(job.data.values()), job.schedule.largest_batch)
        with contextlib.ExitStack() as stack:
            if not rest:
                spinning = mock.patch.object(options, "SESSION_CONFIG", {})
                stack.enter_context(spinning)
                alone = mock.patch(
                    "odtpack_runtime.training.module.session_of",
                    lambda _, model: options.session_of(None, model),
                )
                stack.enter_context(alone)
            self._trainer: Trainer = open_trainer(job, self._batches)
        self._source: Iterator[list[Indices]] = whole_steps(job)

    def median_ms(self) -> float:
        """The median step of one turn."""
        time.sleep(QUIET_SECONDS)
        for _ in range(WARM_STEPS):
            self._trainer.step(next(self._source))
        times: list[float] = []
        end = time.perf_counter() + TURN_SECONDS
        while len(times) < 3 or time.perf_counter() < end:
            times.append(1e3 * self._trainer.step(next(self._source))[1])
        return statistics.median(times)


def _text(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
