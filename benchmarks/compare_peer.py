"""Step time and peak memory, side by side with ONNX Runtime training 1.19.2 and PyTorch.

    make bench
    python -m benchmarks.compare_peer --quick
    make native && python -m benchmarks.compare_peer --loop step --loop native
    python -m benchmarks.compare_peer --workload cnn --optimizer sgd --threads 1

docs/benchmarks.md says how it is measured. Beside the median ratio stands that of the fastest steps
of all rounds, which other work on the machine disturbs least. ``--quick`` makes a round of 10 steps
of AdamW on one thread. A loop is ``step_on`` with the step model (``step``, the default), module,
optimizer.step and lazy_reset_grad as the rival's (``train``), or either of a package that was built
with ``--native`` and the library of ``make native`` (``native``, ``native-train``).
"""

import argparse
import dataclasses
import operator
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from benchmarks import apart, worker, workloads
from benchmarks.workloads import OPTIMIZERS, PEER, WORKLOADS, Workload, build_native
from odtpack_runtime.session.native import VARIABLE
from odtpack_simulator.measure.host import processor_name
from scripts.harness import options, scratch, spread, table
from tests import packaging_tools
from tests.native_library import library
from tests.peer import client

Sample = dict[str, float]
"""What one process measured: the median and the fastest step, and the peak of its memory."""
TITLES = ("workload", "optimizer", "threads", "loop", "floor ms:", "step ms:", "time ratio:",
          "fastest:", "peak MB:", "memory ratio:")  # fmt: skip


def sample(answer: dict[str, Any]) -> Sample:
    """Of a worker's answer, or of the peer's, which times the optimizer apart."""
    steps = answer.get("step_ms")
    if steps is None:
        steps = [*map(sum, zip(answer["train_ms"], answer["optimizer_ms"], strict=True))]
    fastest, peak = min(steps), answer["peak_bytes"]
    return {"step_ms": statistics.median(steps), "fastest_ms": fastest, "peak_bytes": peak}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    workload: str
    optimizer: str
    threads: int
    loop: str
    ours: list[Sample]
    rival: list[Sample]
    floor_ms: float

    def ratios(self, field: str) -> list[float]:
        """Ours over the rival's in each round."""
        return [a[field] / b[field] for a, b in zip(self.ours, self.rival, strict=True)]

    def both(self, field: str, of: Callable[[list[float]], float]) -> list[float]:
        """A figure of all our rounds, and of the rival's."""
        return [of([each[field] for each in side]) for side in (self.ours, self.rival)]

    @property
    def fastest_ratio(self) -> float:
        """Our fastest step over the rival's."""
        return operator.truediv(*self.both("fastest_ms", min))

    def cells(self) -> tuple[object, ...]:
        steps = self.both("step_ms", statistics.median)
        peaks = self.both("peak_bytes", statistics.median)
        return (
            self.workload + ("" if WORKLOADS[self.workload].rival == PEER else " *"),
            self.optimizer, self.threads, self.loop, f"{self.floor_ms:.2f}",
            " / ".join(f"{each:.2f}" for each in steps), spread(self.ratios("step_ms")),
            f"{self.fastest_ratio:.2f}", " / ".join(f"{each / 2**20:.0f}" for each in peaks),
            spread(self.ratios("peak_bytes")),
        )  # fmt: skip


def measure(
    workload: Workload, optimizers: Sequence[str], given: argparse.Namespace, folder: Path
) -> Iterator[Row]:
    """Build both packages of a workload in an empty folder, and measure them in turns.

    Yields a row per optimizer, number of threads and loop; the loops share a round's rival.
    """
    model, data = workload.write(folder)
    proto = onnx.load(model)
    for optimizer in optimizers:
        ours, native, theirs = (folder / f"{who}-{optimizer}" for who in ("ours", "native", "peer"))
        packaging_tools.generate(proto, ours, packaging_tools.OPTIMIZERS[optimizer])
        if any(loop.startswith("native") for loop in given.loop):
            build_native(model, native, optimizer)
        if workload.rival == PEER:
            frozen = packaging_tools.statistic_names(proto)
            client.generate(model=model, folder=theirs, frozen=frozen, optimizer=optimizer)
        for threads in given.threads:
            count = {
                "inputs": data, "steps": given.steps, "warm_up": given.warm_up, "threads": threads,
            }  # fmt: skip
            floors, rivals = [], []
            loops: dict[str, list[Sample]] = {loop: [] for loop in given.loop}
            for number in range(1, given.rounds + 1):
                passes = apart.call(worker.forward, model=model, **count)
                floors.append(3 * statistics.median(passes))
                for loop, mine in loops.items():
                    package = native if loop.startswith("native") else ours
                    by_step_model = not loop.endswith("train")
                    answer = apart.call(
                        worker.train, folder=package, step_model=by_step_model, **count
                    )
                    mine.append(sample(answer))
                if workload.rival == PEER:
                    answer = client.bench(folder=theirs, **count)
                else:
                    answer = apart.call(worker.pytorch, model=model, optimizer=optimizer, **count)
                rivals.append(sample(answer))
                own = ", ".join(f"{each[-1]['step_ms']:.2f} ms" for each in loops.values())
                print(
                    f"{workload.name} {optimizer}, threads {threads}, round {number} of "
                    f"{given.rounds}: {own}, rival {rivals[-1]['step_ms']:.2f} ms",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            floor = statistics.median(floors)
            for loop, mine in loops.items():
                yield Row(workload.name, optimizer, threads, loop, mine, rivals, floor)


def goals(rows: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """Each time goal, of AdamW: its name, the goal and what was measured."""
    judged = [
        (WORKLOADS[each.workload], each.threads, statistics.median(each.ratios("step_ms")))
        for each in rows
        if (each.optimizer, each.loop) == ("adamw", "step")
    ]
    yield from ((work.title, work.goal, ratio) for work, threads, ratio in judged if threads == 1)
    everything = {name for name, work in WORKLOADS.items() if work.rival == PEER}
    for count in sorted({threads for _, threads, _ in judged}):
        ratios = {work.name: ratio for work, threads, ratio in judged if threads == count}
        if everything <= ratios.keys():
            mean = statistics.geometric_mean(ratios[name] for name in everything)
            yield f"geometric mean, threads: {count}", workloads.GEOMETRIC_MEAN_GOAL, mean


def main() -> int:
    given = options(
        __doc__, workload=[*WORKLOADS], optimizer=[*OPTIMIZERS], threads=[1, 2], rounds=3, steps=30,
        warm_up=5, loop=[str], quick=False,
    )  # fmt: skip
    given.loop = given.loop or ["step"]
    if unknown := {*given.loop} - {"step", "train", "native", "native-train"}:
        print(f"compare_peer: no loop is called {min(unknown)}", file=sys.stderr)
        return 2
    if given.quick:
        given.rounds, given.steps, given.warm_up = 1, 10, 3
        given.threads, given.optimizer = [1], ["adamw"]
    if (reason := client.peer_available()) is not None:
        print(f"compare_peer: {reason}", file=sys.stderr)
        return 2
    if any(loop.startswith("native") for loop in given.loop):
        os.environ[VARIABLE] = str(library())
    rows: list[Row] = []
    for name in given.workload:
        with scratch() as folder:
            rows += measure(WORKLOADS[name], given.optimizer, given, folder)
    print(f"{processor_name()}, load {os.getloadavg()[0]:.0f}")
    print(f"odtpack on ONNX Runtime {onnxruntime.__version__} against {PEER} (* against "
          f"{workloads.PYTORCH}), median of {given.steps} steps in {given.rounds} rounds; time and "
          "memory: ours / rival's, then the ratio (lowest-highest over the rounds)\n")  # fmt: skip
    print(table(TITLES, (each.cells() for each in rows)))
    judged = [(name, f"{limit:.2f}", f"{ratio:.2f}", "met" if ratio <= limit else "missed")
              for name, limit, ratio in goals(rows)]  # fmt: skip
    if judged:
        titles = ("goal for the time ratio, AdamW", "at most:", "measured:", "")
        print(f"\n{table(titles, judged)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
