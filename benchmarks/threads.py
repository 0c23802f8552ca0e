"""Step time with one thread, and with several that spin or rest between runs.

    python -m benchmarks.threads [--models unet,vit] [--threads 2] [--rounds 5]

The held-out networks of the fidelity benchmark at their largest batch size, a trainer of each
setting in one process, in turns. A ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from benchmarks.fidelity.models import CASES, build
from odtpack_runtime.session import options
from odtpack_simulator.replay.child.timing_run import open_trainer, whole_steps
from odtpack_simulator.replay.child.training_run import Batches, Trainer
from odtpack_simulator.replay.job import Indices, Job
from scripts.markdown import head, row, spread

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
    print(f"{given.threads} threads, median step of {given.rounds} rounds, ms\n")
    print(head("model", "batch:", *(f"{name}:" for name in settings), "to spinning:", "to one:"))
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
        spinning, one = ([e["resting"] / e[to] for e in rounds] for to in ("spinning", "one"))
        gains.append(statistics.median(spinning))
        times = [f"{statistics.median(e[setting] for e in rounds):.2f}" for setting in settings]
        print(row(name, size, *times, spread(spinning), spread(one)), flush=True)
    print(f"\nresting / spinning: geometric mean {statistics.geometric_mean(gains):.2f}")


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


if __name__ == "__main__":
    main()
