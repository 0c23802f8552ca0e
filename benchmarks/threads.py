"""Step time with one thread, and with several that spin or rest between runs.

    python -m benchmarks.threads [--models unet,vit] [--threads 2] [--rounds 5]

The held-out networks of the fidelity benchmark at their largest batch size, a trainer of each
setting in one process, in turns. A ratio is taken within a round.
"""

import functools
import statistics
import time
from unittest import mock

import numpy as np

from benchmarks.fidelity.latency_worker import Worker
from benchmarks.fidelity.models import CASES, build
from odtpack_runtime.session import options as session_options
from odtpack_simulator.replay.job import Job
from scripts.harness import head, in_turns, options, row, scratch, spread

TURN_SECONDS = 0.2
QUIET_SECONDS = 0.05
"""Between turns: long enough for spinning threads to fall asleep."""


def main() -> None:
    given = options(__doc__, models=[*CASES], threads=2, rounds=5)
    settings = {"one": (1, True), "spinning": (given.threads, False),
                "resting": (given.threads, True)}  # fmt: skip
    print(f"{given.threads} threads, median step of {given.rounds} rounds, ms\n")
    print(head("model", "batch:", *(f"{name}:" for name in settings), "to spinning:", "to one:"))
    gains: list[float] = []
    for name in given.models:
        built = build(CASES[name])
        size = max(built.case.batches)
        with scratch() as folder:
            ways = {}
            for setting, (threads, rest) in settings.items():
                (own := folder / setting).mkdir()
                job = built.job(own, size, threads, task="time")
                ways[setting] = functools.partial(median_ms, opened(job, rest))
            times = in_turns(given.rounds, ways)
        spinning, one = (np.divide(times["resting"], times[to]) for to in ("spinning", "one"))
        gains.append(statistics.median(spinning))
        medians = (f"{statistics.median(each):.2f}" for each in times.values())
        print(row(name, size, *medians, spread(spinning), spread(one)), flush=True)
    print(f"\nresting / spinning: geometric mean {statistics.geometric_mean(gains):.2f}")


def opened(job: Job, rest: bool) -> Worker:
    """A trainer whose threads rest between runs, or spin."""
    if rest:
        return Worker(job)
    alone = "odtpack_runtime.training.module.session_of"
    with (
        mock.patch.object(session_options, "SESSION_CONFIG", {}),
        mock.patch(alone, lambda _, model: session_options.session_of(None, model)),
    ):
        return Worker(job)


def median_ms(worker: Worker) -> float:
    time.sleep(QUIET_SECONDS)
    worker.steps(0)  # which warms up
    return statistics.median(wall for wall, _ in worker.steps(TURN_SECONDS)["steps"])


if __name__ == "__main__":
    main()
