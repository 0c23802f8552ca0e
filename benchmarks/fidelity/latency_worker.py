"""A process of the fidelity benchmark for latency: one job, some threads, steps on command.

It reads commands, one JSON object per line, from standard input and answers each with one on
standard output: ``{"do": NAME, ...}`` is the method of :class:`Worker` with its arguments.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_simulator.measure.calibration import operator_seconds, runtime_costs
from odtpack_simulator.replay.child.timing_run import open_trainer, profiled_step, whole_steps
from odtpack_simulator.replay.child.training_run import Batches
from odtpack_simulator.replay.job import Indices, Job

GEMM_SIZES = (16, 32, 64, 128, 256, 512)
COPY_SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
WARM_STEPS = 3


class TimedBatches(Batches):
    """Batches that know how much processor time it took to gather them."""

    def __init__(self, files: Sequence[str], rows: int) -> None:
        super().__init__(files, rows)
        self.seconds = 0.0

    def gather(self, indices: Indices) -> list[Array]:
        """The samples of one batch."""
        start = time.thread_time()
        batch = super().gather(indices)
        self.seconds += time.thread_time() - start
        return batch


class Worker:
    """A trainer that makes steps on request."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._batches = TimedBatches(list(job.data.values()), job.schedule.largest_batch)
        self._trainer = open_trainer(job, self._batches)
        self._source: Iterator[list[Indices]] = whole_steps(job)
        for _ in range(WARM_STEPS):
            self._trainer.step(next(self._source))

    def scaling(self, seconds: float) -> dict[str, Any]:
        """Quickest seconds of products by FLOP, of copies by bytes, and of next to nothing."""

        def quickest(op_type: str, *shapes: tuple[int, ...]) -> float:
            return min(operator_seconds(op_type, shapes, self._job.threads, seconds))

        return {
            "products": [(2 * n**3, quickest("MatMul", (n, n), (n, n))) for n in GEMM_SIZES],
            "copies": [(8 * n, quickest("Neg", (n,))) for n in COPY_SIZES],
            "least": quickest("Neg", (1,)),
        }

    def product(self, seconds: float) -> dict[str, Any]:
        """Median seconds of the largest product, with the threads of the steps."""
        shapes = 2 * [2 * GEMM_SIZES[-1:]]
        found = operator_seconds("MatMul", shapes, self._job.threads, seconds)
        return {"seconds": statistics.median(found)}

    def steps(self, seconds: float) -> dict[str, Any]:
        """Steps for some time, at least two; the one before them brings the caches back."""
        self._trainer.step(next(self._source))
        times: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < end:
            indices = next(self._source)
            start = time.thread_time() - self._batches.seconds
            wall = self._trainer.step(indices)[1]
            processor = time.thread_time() - self._batches.seconds - start
            times.append((wall * 1e3, processor * 1e3))
        return {"steps": times}

    def nodes(self, steps: int) -> dict[str, Any]:
        """The nodes of a typical step, in order."""
        _, nodes = profiled_step(self._job, self._batches, seconds=1.5, most=steps)
        return {"nodes": [(n.op_type, n.work.flops, n.work.moved_bytes, n.us) for n in nodes]}

    def costs(self) -> dict[str, Any]:
        """What the runtime takes per node, and what a profile adds."""
        return dict(zip(("node_us", "profile_us"), runtime_costs(), strict=True))


def main(path: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    worker = Worker(Job.read(Path(path)))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
