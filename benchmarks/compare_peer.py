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
import tempfile
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


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one process measured."""

    step_ms: float  # the median
    fastest_ms: float
    peak_bytes: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Sample:
        """Of a worker's answer, or of the peer's, which times the optimizer apart."""
        steps = answer.get("step_ms")
        if steps is None:
            steps = [*map(sum, zip(answer["train_ms"], answer["optimizer_ms"], strict=True))]
        return cls(statistics.median(steps), min(steps), answer["peak_bytes"])


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
        pairs = zip(self.ours, self.rival, strict=True)
        return [getattr(a, field) / getattr(b, field) for a, b in pairs]

    @property
    def time_ratio(self) -> float:
        """Our step time over the rival's."""
        return statistics.median(self.ratios("step_ms"))

    @property
    def fastest_ratio(self) -> float:
        """Our fastest step over the rival's."""
        ours, rival = (min(s.fastest_ms for s in side) for side in (self.ours, self.rival))
        return ours / rival

    def cells(self) -> tuple[str, ...]:
        """The row for people."""
        steps, peaks = (
            [statistics.median(getattr(s, field) for s in side) for side in (self.ours, self.rival)]
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
        ours, theirs = folder / f"ours-{optimizer}", folder / f"peer-{optimizer}"
        native = folder / f"native-{optimizer}"
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
            ours_by: dict[str, list[Sample]] = {loop: [] for loop in given.loop}
            for number in range(given.rounds):
                passes = apart.call(worker.forward, model=model, **count)
                floors.append(3 * statistics.median(passes))
                for loop, mine in ours_by.items():
                    own = {"folder": native if loop == "native" else ours}
                    step_model = loop != "train"
                    answer = apart.call(worker.train, step_model=step_model, **own, **count)
                    mine.append(Sample.of(answer))
                if workload.rival == PEER:
                    answer = client.bench(folder=theirs, **count)
                else:
                    answer = apart.call(worker.pytorch, model=model, optimizer=optimizer, **count)
                rivals.append(Sample.of(answer))
                own_ms = ", ".join(f"{each[-1].step_ms:.2f} ms" for each in ours_by.values())
                print(
                    f"{workload.name} {optimizer}, threads {threads}, round {number + 1} of "
                    f"{given.rounds}: {own_ms}, rival {rivals[-1].step_ms:.2f} ms",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            floor = statistics.median(floors)
            for loop, mine in ours_by.items():
                yield Row(workload, optimizer, threads, loop, mine, rivals, floor)


def goals(rows: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """Each time goal, of AdamW: its name, the goal and what was measured."""
    judged = [each for each in rows if (each.optimizer, each.loop) == ("adamw", "step")]
    for each in judged:
        if each.threads == 1:
            yield each.workload.title, each.workload.goal, each.time_ratio
    for threads in sorted({each.threads for each in judged}):
        ratios = {
            each.workload.name: each.time_ratio
            for each in judged
            if each.threads == threads and each.workload.rival == PEER
        }
        if set(ratios) == {w.name for w in WORKLOADS.values() if w.rival == PEER}:
            mean = statistics.geometric_mean(ratios.values())
            yield f"geometric mean, threads: {threads}", GEOMETRIC_MEAN_GOAL, mean


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_peer")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="repeatable")
    parser.add_argument("--threads", action="append", type=int, help="repeatable (1 and 2)")
    parser.add_argument(
        "--loop",
        action="append",
        choices=("step", "train", "native"),
        help="repeatable; step_on with the step model (step), module, optimizer.step and "
        "lazy_reset_grad as the rival's (train), or step_on of a package that was built with "
        "--native and the library of `make native` (native)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each (3)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per process (30)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them (5)")
    parser.add_argument(
        "--quick", action="store_true", help="one round of ten steps, AdamW, one thread"
    )
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
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure(WORKLOADS[name], given.optimizer, given, Path(scratch))
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
            "onnxruntime": onnxruntime.__version__,
            "peer": PEER,
            "machine": platform.platform(),
            "rounds": given.rounds,
            "steps": given.steps,
            "rows": [each.to_json() for each in rows],
        }
        given.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
