"""Step time and peak memory, side by side with ONNX Runtime training 1.19.2 and PyTorch.

    make bench
    python -m benchmarks.compare_peer --quick
    make native && python -m benchmarks.compare_peer --loop step --loop native
    python -m benchmarks.compare_peer --workload cnn --optimizer sgd --threads 1 --json bench.json

Both train the same model on the same batch, each measurement in a fresh process, ours and the
rival's in turns. The rival is ONNX Runtime training, and PyTorch for the workload whose batch
normalization it trains. A time is the median of the steps of one process: training
model, optimizer and lazy_reset_grad. A peak is the highest resident set of the process above that
before the model was loaded, without an evaluation model. A ratio is taken within a round; shown
are the median over the rounds and, after it, the lowest and the highest. Beside it stands the
ratio of the fastest steps of all rounds, which other work on the machine disturbs least. The floor
is three times the forward pass of the same model on the stock ONNX Runtime that trains ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from rich.console import Console
from rich.table import Table

from benchmarks import processes
from benchmarks.workloads import (
    GEOMETRIC_MEAN_GOAL,
    OPTIMIZERS,
    PEER,
    PYTORCH,
    WORKLOADS,
    Workload,
)
from odtpack.build import build_package
from odtpack_runtime.session.native import VARIABLE
from odtpack_simulator.measure.host import processor_name
from tests import packaging_tools
from tests.native_library import library
from tests.peer import client

_MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one process measured; times in milliseconds, memory in bytes."""

    train_ms: float
    optimizer_ms: float
    step_ms: float
    fastest_ms: float
    peak_bytes: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Sample:
        """Medians over the steps of a worker's answer, and the fastest of them."""
        steps = [a + b for a, b in zip(answer["train_ms"], answer["optimizer_ms"], strict=True)]
        return cls(
            statistics.median(answer["train_ms"]),
            statistics.median(answer["optimizer_ms"]),
            statistics.median(steps),
            min(steps),
            answer["peak_bytes"],
        )


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: list[float]) -> Spread:
        """The spread of some values, at least one."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a workload, an optimizer, threads, a setting of malloc and a loop."""

    workload: Workload
    optimizer: str
    threads: int
    malloc: str
    loop: str
    ours: list[Sample]
    rival: list[Sample]
    floor_ms: float

    @property
    def time_ratio(self) -> Spread:
        """Our step time over the rival's."""
        return self._ratio("step_ms")

    @property
    def fastest_ratio(self) -> float:
        """Our fastest step over the rival's."""
        ours, peer = ([s.fastest_ms for s in samples] for samples in (self.ours, self.rival))
        return min(ours) / min(peer)

    @property
    def memory_ratio(self) -> Spread:
        """Our peak over the rival's."""
        return self._ratio("peak_bytes")

    def _ratio(self, field: str) -> Spread:
        pairs = zip(self.ours, self.rival, strict=True)
        return Spread.over([getattr(a, field) / getattr(b, field) for a, b in pairs])

    def to_json(self) -> dict[str, Any]:
        """The row as it stands, with the ratios."""
        return {
            "ours": [dataclasses.asdict(sample) for sample in self.ours],
            "rival": [dataclasses.asdict(sample) for sample in self.rival],
            "workload": self.workload.name,
            "optimizer": self.optimizer,
            "threads": self.threads,
            "malloc": self.malloc,
            "loop": self.loop,
            "floor_ms": self.floor_ms,
            "time_ratio": dataclasses.asdict(self.time_ratio),
            "fastest_ratio": self.fastest_ratio,
            "memory_ratio": dataclasses.asdict(self.memory_ratio),
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    steps: int
    warm_up: int
    mallocs: tuple[str, ...]
    threads: tuple[int, ...]
    loops: tuple[str, ...]


def measure(
    workload: Workload, optimizers: tuple[str, ...], plan: Plan, folder: Path
) -> Iterator[Row]:
    """Build both packages of a workload in an empty folder, and measure them in turns.

    Yields a row per optimizer, setting of malloc and loop; the loops share a round's rival.
    """
    model, data = workload.write(folder)
    proto = onnx.load(model)
    for optimizer in optimizers:
        ours, theirs = folder / f"ours-{optimizer}", folder / f"peer-{optimizer}"
        packaging_tools.generate(proto, ours, packaging_tools.OPTIMIZERS[optimizer])
        if "native" in plan.loops:
            build_package(
                model, folder / f"native-{optimizer}", loss="cross_entropy", optimizer=optimizer,
                native=True, train=tuple(packaging_tools.trainable_names(proto)),
            )  # fmt: skip
        if workload.rival == PEER:
            client.generate(
                model=model,
                folder=theirs,
                frozen=packaging_tools.statistic_names(proto),
                optimizer=optimizer,
            )
        for threads, malloc in itertools.product(plan.threads, plan.mallocs):
            count = {
                "inputs": data, "steps": plan.steps, "warm_up": plan.warm_up, "threads": threads,
            }  # fmt: skip
            floors, rivals = [], []
            ours_by: dict[str, list[Sample]] = {loop: [] for loop in plan.loops}
            for number in range(plan.rounds):
                answer = processes.measure("forward", malloc=malloc, model=model, **count)
                floors.append(3 * statistics.median(answer["forward_ms"]))
                for loop, mine in ours_by.items():
                    answer = processes.measure(
                        "train", malloc=malloc,
                        folder=folder / f"native-{optimizer}" if loop == "native" else ours,
                        step_model=loop != "train", **count,
                    )  # fmt: skip
                    mine.append(Sample.of(answer))
                if workload.rival == PEER:
                    environment = processes.MALLOC[malloc]
                    answer = client.bench(folder=theirs, environment=environment, **count)
                else:
                    answer = processes.measure(
                        "pytorch", malloc=malloc, model=model, optimizer=optimizer, **count
                    )
                rivals.append(Sample.of(answer))
                own = ", ".join(f"{each[-1].step_ms:.2f} ms" for each in ours_by.values())
                print(
                    f"{workload.name} {optimizer}, threads {threads}, malloc {malloc}, round "
                    f"{number + 1} of {plan.rounds}: {own}, rival {rivals[-1].step_ms:.2f} ms",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            floor = statistics.median(floors)
            for loop, mine in ours_by.items():
                yield Row(workload, optimizer, threads, malloc, loop, mine, rivals, floor)


def table(rows: list[Row], plan: Plan) -> Table:
    """The rows for people."""
    result = Table(
        title=f"odtpack on ONNX Runtime {onnxruntime.__version__} against {PEER} "
        f"(* against {PYTORCH}), median of {plan.steps} steps in {plan.rounds} rounds",
        caption="time and memory: ours / rival's, then the ratio (lowest-highest over the rounds); "
        "malloc mmap is MALLOC_MMAP_THRESHOLD_=65536",
    )
    for heading in ("workload", "optimizer", "threads", "malloc", "loop"):
        result.add_column(heading)
    for heading in ("floor ms", "step ms", "time ratio", "fastest", "peak MB", "memory ratio"):
        result.add_column(heading, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].workload != row.workload
        result.add_row(
            row.workload.name + ("" if row.workload.rival == PEER else " *"),
            row.optimizer, str(row.threads), row.malloc, row.loop, f"{row.floor_ms:.2f}",
            f"{_median(row.ours, 'step_ms'):.2f} / {_median(row.rival, 'step_ms'):.2f}",
            str(row.time_ratio), f"{row.fastest_ratio:.2f}",
            f"{_median(row.ours, 'peak_bytes') / _MEBIBYTE:.0f} / "
            f"{_median(row.rival, 'peak_bytes') / _MEBIBYTE:.0f}",
            str(row.memory_ratio),
            end_section=last,
        )  # fmt: skip
    return result


def goals(rows: list[Row]) -> Table:
    """Which time goals are met: those of AdamW with the default malloc."""
    result = Table(title="goals for the time ratio, AdamW")
    result.add_column("goal")
    for heading in ("at most", "measured", ""):
        result.add_column(heading, justify="right")

    def add(name: str, limit: float, value: float) -> None:
        result.add_row(name, f"{limit:.2f}", f"{value:.2f}", "met" if value <= limit else "missed")

    judged = [
        row for row in rows if (row.optimizer, row.malloc, row.loop) == ("adamw", "default", "step")
    ]
    for row in judged:
        if row.threads == 1:
            add(row.workload.title, row.workload.goal, row.time_ratio.median)
    for threads in sorted({row.threads for row in judged}):
        ratios = {
            row.workload.name: row.time_ratio.median
            for row in judged
            if row.threads == threads and row.workload.rival == PEER
        }
        if set(ratios) == {w.name for w in WORKLOADS.values() if w.rival == PEER}:
            name = f"geometric mean, threads: {threads}"
            add(name, GEOMETRIC_MEAN_GOAL, statistics.geometric_mean(ratios.values()))
    return result


def _median(samples: list[Sample], field: str) -> float:
    return statistics.median(getattr(sample, field) for sample in samples)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_peer")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable")
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="repeatable")
    parser.add_argument("--threads", action="append", type=int, help="repeatable (1 and 2)")
    parser.add_argument("--malloc", action="append", choices=list(processes.MALLOC))
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
    return given


def main() -> int:
    """Measure what the command line asks for; print the table."""
    given = _arguments()
    reason = client.peer_available()
    if reason is not None:
        print(f"compare_peer: {reason}", file=sys.stderr)
        return 2
    mallocs, threads = tuple(given.malloc or ("default",)), tuple(given.threads or (1, 2))
    loops = tuple(given.loop or ("step",))
    if "native" in loops:
        os.environ[VARIABLE] = str(library())
    plan = Plan(given.rounds, given.steps, given.warm_up, mallocs, threads, loops)
    optimizers = tuple(given.optimizer or OPTIMIZERS)
    if given.quick:
        plan = Plan(1, 10, 3, mallocs[:1], tuple(given.threads or (1,)), loops)
        optimizers = tuple(given.optimizer or ("adamw",))
    rows: list[Row] = []
    for name in given.workload or WORKLOADS:
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure(WORKLOADS[name], optimizers, plan, Path(scratch))
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(f"{processor_name()}, load {os.getloadavg()[0]:.0f}")
    console.print(table(rows, plan))
    if "step" in plan.loops and any(
        row.optimizer == "adamw" and row.malloc == "default" for row in rows
    ):
        console.print(goals(rows))
    if given.json:
        content = {
            "onnxruntime": onnxruntime.__version__,
            "peer": PEER,
            "machine": platform.platform(),
            "plan": dataclasses.asdict(plan),
            "rows": [row.to_json() for row in rows],
        }
        given.json.write_text(json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
