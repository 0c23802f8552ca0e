"""How well step times are predicted on this machine, from operators calibrated beside them.

    python -m benchmarks.fidelity.latency [--models NAME ...] [--quick]

docs/latency.md#fidelity says what is predicted. For each held-out model six processes take
turns within a fraction of a second, round by round, so that other programs slow down all of them; a
prediction is compared with the steps of its own round. Steps that waited for the processor, and
took more wall time than processor time, are not compared. Where more than half of them did,
processor times are compared instead (the column ``clock``), but not of two threads, of which one
waits for the other. A round in which two threads gain too little says nothing of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.apart import scratch
from benchmarks.fidelity.latency_arithmetic import (
    TITLES,
    Between,
    Clock,
    Curves,
    Group,
    Node,
    Row,
    cells,
    compare,
    summary_lines,
    times,
    typical,
    which_clock,
)
from benchmarks.fidelity.models import CASES, Built, build
from odtpack_simulator.latency import LEAST_GAIN
from odtpack_simulator.memory.operator_work import Work
from scripts.markdown import head, row
from scripts.options import options

CALIBRATED_BY: dict[Group, tuple[str, ...]] = {
    "process": ("calibrated",),
    "between": ("calibrated", "small"),
    "threads": ("calibrated", "small", "two"),
}
"""Processes that a prediction rests on: a round in which one had no quiet step is not judged."""

ASKED: dict[Group, str] = {"process": "twin", "between": "middle", "threads": "middle-two"}
WORKER = Path(__file__).with_name("latency_worker.py")


@dataclasses.dataclass(frozen=True)
class Effort:
    """Rounds per model, seconds of steps in a turn, and of each calibrated size."""

    rounds: int = 11
    seconds: float = 0.04
    scaling: float = 0.004
    profiled: int = 12


QUICK = Effort(rounds=3, profiled=6)


def report(names: Sequence[str], quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Measure some models, and say what came of each and of all."""
    say("\n" + head(*TITLES))
    rows: list[Row] = []
    for name in names:
        found = measure_model(build(CASES[name]), QUICK if quick else Effort())
        rows += found
        for each in found:
            say(row(*cells(each)))
    for line in ("", *summary_lines(rows)):
        say(line)
    return rows


def measure_model(built: Built, effort: Effort) -> list[Row]:
    """Calibrate and predict one model's steps, and measure them."""
    largest, smallest = max(built.case.batches), min(built.case.batches)
    middle = max(1, round((largest * smallest) ** 0.5))
    configurations = {
        "calibrated": (largest, 1), "twin": (largest, 1), "middle": (middle, 1),
        "small": (smallest, 1), "two": (largest, 2), "middle-two": (middle, 2),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        processes = {
            name: stack.enter_context(Process(built, folder / name, *how))
            for name, how in configurations.items()
        }
        for process in processes.values():
            process.answer()  # it has loaded its package
        costs = processes["calibrated"].ask("costs")
        profiled = dict.fromkeys(("calibrated", "small", "two"), effort.profiled) | {"middle": 1}
        nodes = {
            name: [
                Node(op_type, us, Work(flops, moved))
                for op_type, flops, moved, us in processes[name].ask("nodes", steps=steps)["nodes"]
            ]
            for name, steps in profiled.items()
        }
        if len(set(map(len, nodes.values()))) > 1:
            raise RuntimeError(f"{built.case.name} runs other nodes at another batch size")
        rounds = [_round(processes, effort) for _ in range(effort.rounds)]
    prediction = Prediction(nodes, (costs["node_us"], costs["profile_us"]), rounds)
    products = [turns["calibrated"]["products"][-1][1] for turns in rounds]  # the largest
    rows = []
    for group, name in ASKED.items():
        steps = [turns[who]["steps"] for turns in rounds for who in ("calibrated", name)]
        # Of two threads one waits for the other: processor times say nothing there.
        clock = "wall" if group == "threads" else which_clock(itertools.chain(*steps))
        judged = [
            turns
            for turns in rounds
            if all(times(turns[who]["steps"], clock) for who in CALIBRATED_BY[group])
            and (group != "threads" or turns["two"]["gain"] >= 1 + LEAST_GAIN)
        ]
        found = compare(
            (built.case.name, group, *configurations[name], clock),
            [prediction.of(group, name, turns, clock) for turns in judged],
            [turns[name]["steps"] for turns in judged], max(products) / min(products) - 1,
        )  # fmt: skip
        rows.append(found)
    return rows


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What predicts the steps of a model: the nodes by process, the costs, all rounds."""

    nodes: dict[str, list[Node]]
    costs: tuple[float, float]
    rounds: list[dict[str, Any]]

    def of(self, group: Group, name: str, turns: dict[str, Any], clock: Clock) -> float:
        """Milliseconds of a step of process ``name`` in one round."""
        calibrated_ms = typical(turns["calibrated"]["steps"], clock)
        if group == "process":
            return calibrated_ms
        large = (self.nodes["calibrated"], calibrated_ms)
        here = Curves.best([each["calibrated"] for each in self.rounds], self.costs[0])
        small = (self.nodes["small"], typical(turns["small"]["steps"], clock))
        works = [node.work for node in self.nodes["middle"]]
        between = Between(small, large, self.costs, here, works)
        if group != "threads":
            return between.step_ms()
        return between.threaded_ms((self.nodes["two"], typical(turns["two"]["steps"], clock)))


TURNS = (
    *("calibrated", "twin", "calibrated", "middle", "small", "twin", "calibrated"),
    *("two", "middle-two", "two", "middle-two", "two"),
)
"""The order of a round: what a prediction rests on comes before and after what it is of."""


def _round(processes: dict[str, Process], effort: Effort) -> dict[str, Any]:
    """Turns of all, and how much faster two threads multiply before, between and after theirs."""
    turns: dict[str, Any] = {name: {"steps": []} for name in processes}
    gains = []
    for name in TURNS:
        if name == "two":
            alone, together = (
                processes[who].ask("product", seconds=effort.scaling)["seconds"]
                for who in ("calibrated", "two")
            )
            gains.append(alone / together)
        turns[name]["steps"] += processes[name].ask("steps", seconds=effort.seconds)["steps"]
    turns["calibrated"] |= processes["calibrated"].ask("scaling", seconds=effort.scaling)
    turns["two"]["gain"] = min(gains)
    return turns


class Process:
    """A worker in a process of its own, asked one thing at a time."""

    def __init__(self, built: Built, folder: Path, batch_size: int, threads: int) -> None:
        folder.mkdir()
        built.job(folder, batch_size, threads, task="time").write(folder / "job.json")
        pipe, command = subprocess.PIPE, [sys.executable, WORKER, folder / "job.json"]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def ask(self, what: str, **arguments: float) -> dict[str, Any]:
        """Let it do something, and wait for the answer."""
        print(json.dumps({"do": what, **arguments}), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for what it says next."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a worker ended with exit code {self._process.wait()}")
        return dict(json.loads(line))


def main() -> None:
    given = options(__doc__, models=list(CASES), quick=False)
    start = time.monotonic()
    report(given.models, given.quick, functools.partial(print, flush=True))
    print(f"{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
