"""Step time and peak memory, side by side with ONNX Runtime training 1.19.2 and PyTorch.

    make bench
    python -m benchmarks.compare_peer --quick
    make native && python -m benchmarks.compare_peer --loop step --loop native
    python -m benchmarks.compare_peer --workload cnn --optimizer sgd --threads 1 --json bench.json

docs/benchmarks.md says how it is measured. Beside the median ratio stands that of the fastest steps
of all rounds, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from benchmarks import apart, worker
from benchmarks.workloads import GEOMETRIC_MEAN_GOAL, OPTIMIZERS, PEER, PYTORCH, WORKLOADS, Workload
from odtpack.build import build_package
from odtpack_runtime.session.native import VARIABLE
from odtpack_simulator.measure.host import processor_name
from scripts.markdown import head, row, spread
from tests import packaging_tools
from tests.native_library import library
from tests.peer import client

Sample = dict[str, float]
"""What one process measured: the median and the fastest step, and the peak of its memory."""


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

    workload: Workload
    optimizer: str
    threads: int
    loop: str
    ours: list[Sample]
    rival: list[Sample]
    floor_ms: float

    def ratios(self, field: str) -> list[float]:
        """Ours over the rival's in each round."""
        return [a[field] / b[field] for a, b in zip(self.ours, self.rival, strict=True)]

    @property
    def fastest_ratio(self) -> float:
        """Our fastest step over the rival's."""
        ours, rival = (min(each["fastest_ms"] for each in s) for s in (self.ours, self.rival))
        return ours / rival

    def cells(self) -> tuple[str, ...]:
        """The row for people."""
        steps, peaks = (
            [statistics.median(each[field] for each in s) for s in (self.ours, self.rival)]
            for field in ("step_ms", "peak_bytes")
        )
        return (
            self.workload.name + ("" if self.workload.rival == PEER else " *"), self.optimizer,
            str(self.threads), self.loop, f"{self.floor_ms:.2f}",
            " / ".join(f"{each:.2f}" for each in steps), spread(self.ratios("step_ms")),
            f"{self.fastest_ratio:.2f}", " / ".join(f"{each / 2**20:.0f}" for each in peaks),
            spread(self.ratios("peak_bytes")),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The row as it stands, with the ratios."""
        return dataclasses.asdict(dataclasses.replace(self, workload=self.workload.name)) | {
            "time_ratio": self.ratios("step_ms"), "fastest_ratio": self.fastest_ratio,
            "memory_ratio": self.ratios("peak_bytes"),
        }  # fmt: skip


TITLES = ("workload", "optimizer", "threads", "loop", "floor ms:", "step ms:", "time ratio:",
          "fastest:", "peak MB:", "memory ratio:")  # fmt: skip


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
        if "native" in given.loop:
            build_package(
                model, native, loss="cross_entropy", optimizer=optimizer, native=True,
                train=tuple(packaging_tools.trainable_names(proto)),
            )  # fmt: skip
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
                    package = native if loop == "native" else ours
                    answer = apart.call(
                        worker.train, folder=package, step_model=loop != "train", **count
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
            for loop, mine in loops.items():
                floor = statistics.median(floors)
                yield Row(workload, optimizer, threads, loop, mine, rivals, floor)


def goals(rows: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """Each time goal, of AdamW: its name, the goal and what was measured."""
    judged = [
        (each.workload, each.threads, statistics.median(each.ratios("step_ms")))
        for each in rows
        if (each.optimizer, each.loop) == ("adamw", "step")
    ]
    yield from ((work.title, work.goal, ratio) for work, threads, ratio in judged if threads == 1)
    everything = {name for name, work in WORKLOADS.items() if work.rival == PEER}
    for count in sorted({threads for _, threads, _ in judged}):
        ratios = {work.name: ratio for work, threads, ratio in judged if threads == count}
        if everything <= ratios.keys():
            mean = statistics.geometric_mean(ratios[name] for name in everything)
            yield f"geometric mean, threads: {count}", GEOMETRIC_MEAN_GOAL, mean


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_peer")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="repeatable")
    parser.add_argument("--threads", action="append", type=int, help="repeatable (1 and 2)")
    parser.add_argument(
        "--loop", action="append", choices=("step", "train", "native"),
        help="repeatable; step_on with the step model (step), module, optimizer.step and "
        "lazy_reset_grad as the rival's (train), or step_on of a package that was built with "
        "--native and the library of `make native` (native)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each (3)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per process (30)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them (5)")
    parser.add_argument("--quick", action="store_true", help="a round of 10 steps, AdamW, 1 thread")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write every figure here")
    given = parser.parse_args()
    if given.rounds < 1 or given.steps < 1 or given.warm_up < 0:
        parser.error("--rounds and --steps must be at least 1, --warm-up at least 0")
    if given.quick:
        given.rounds, given.steps, given.warm_up = 1, 10, 3
    given.threads = given.threads or ([1] if given.quick else [1, 2])
    given.optimizer = given.optimizer or (["adamw"] if given.quick else OPTIMIZERS)
    given.loop = given.loop or ["step"]
    return given


def main() -> int:
    """Measure what the command line asks for; print the table."""
    given = _arguments()
    reason = client.peer_available()
    if reason is not None:
        print(f"compare_peer: {reason}", file=sys.stderr)
        return 2
    if "native" in given.loop:
        os.environ[VARIABLE] = str(library())
    rows: list[Row] = []
    for name in given.workload or WORKLOADS:
        with apart.scratch() as folder:
            rows += measure(WORKLOADS[name], given.optimizer, given, folder)
    print(f"{processor_name()}, load {os.getloadavg()[0]:.0f}")
    print(f"odtpack on ONNX Runtime {onnxruntime.__version__} against {PEER} (* against {PYTORCH}),"
          f" median of {given.steps} steps in {given.rounds} rounds; time and memory: ours / "
          "rival's, then the ratio (lowest-highest over the rounds)\n")  # fmt: skip
    print("\n".join([head(*TITLES), *(row(*each.cells()) for each in rows)]))
    if found := [*goals(rows)]:
        print("\n" + head("goal for the time ratio, AdamW", "at most:", "measured:", ""))
        for name, limit, ratio in found:
            met = "met" if ratio <= limit else "missed"
            print(row(name, f"{limit:.2f}", f"{ratio:.2f}", met))
    if given.json:
        content = {
            "onnxruntime": onnxruntime.__version__, "peer": PEER, "machine": platform.platform(),
            "rounds": given.rounds, "steps": given.steps,
            "rows": [each.to_json() for each in rows],
        }  # fmt: skip
        given.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
