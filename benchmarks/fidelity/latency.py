"""How well step times are predicted on this machine, from operators calibrated beside them.

For each held-out model five processes wait for their turn. The first is calibrated:
at the largest batch size and one thread it profiles its operators, and times its
steps. From these, and from products and copies timed at several sizes, are
predicted the steps of the others:

- ``process``: the same configuration in another process. Operators and what
  surrounds them sum to the calibrated step, so this asks whether a calibration
  holds for another process at all: the floor of all errors.
- ``batch``: another batch size, one thread. Of the other size only the shapes are
  known here, from a profile whose times are thrown away.
- ``between``: a batch size between two that are calibrated, the largest and the smallest.
- ``threads``: two threads, the same batch size.

They take turns within a fraction of a second, round by round, so that a machine
that other programs slow down slows all of them; a prediction is compared with the
steps of its own round. A step that waited for the processor took more wall time
than processor time: such steps are counted as interrupted, and not compared. Where
more than half of the steps were interrupted, processor times are compared instead
(the column ``clock``), which are the same on a machine that does nothing else. They
are no stand-in for two threads, of which one waits for the other. How far a matrix
product drifted between rounds is reported too.

    python -m benchmarks.fidelity.latency [--models NAME ...] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.fidelity.latency_prediction import Curves, Node, scaled_step, step_between
from benchmarks.fidelity.models import CASES, Built, build
from odtpack_simulator.memory.operator_work import Work
from odtpack_simulator.replay.job import Job

Group = Literal["process", "batch", "between", "threads"]
GROUPS: tuple[Group, ...] = ("process", "batch", "between", "threads")
Clock = Literal["wall", "processor"]
Steps = Sequence[tuple[float, float]]
WORKER = Path(__file__).with_name("latency_worker.py")
INTERRUPTED = 1.02
"""Wall time over processor time above which a step waited for the processor."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """Rounds per model, seconds of steps in a turn, and of each calibrated size."""

    rounds: int = 5
    seconds: float = 0.12
    scaling: float = 0.004
    profiled: int = 12


QUICK = Effort(rounds=3, seconds=0.06, profiled=6)


@dataclasses.dataclass(frozen=True)
class Row:
    """One prediction, compared.

    Attributes:
        model: Name of the case.
        group: What it asks.
        batch_size: Of the predicted step.
        threads: Of the predicted step.
        predicted_ms: Median of the rounds' predictions.
        clock: What is compared: wall time, or processor time where that was disturbed.
        measured_ms: Median of all steps that were compared.
        error: Median over the rounds of prediction over that round's median step, less 1.
        within: Share of the steps within 10 % of their round's prediction.
        steps: Steps that were compared.
        interrupted: Steps that waited for the processor.
        drift: How much longer a matrix product took in one round than in another.
    """

    model: str
    group: Group
    batch_size: int
    threads: int
    clock: Clock
    predicted_ms: float
    measured_ms: float
    error: float
    within: float
    steps: int
    interrupted: int
    drift: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """The rows of one group, or of all.

    Attributes:
        group: Which rows.
        cases: Their number.
        median_error: Of the cases.
        cases_within: Share of the cases whose error is at most 10 %.
        steps_within: Share of all steps that lie within 10 % of their prediction. In the time of
            one step of a convolutional network the smallest makes a thousand.
        alike_within: The same where every case counts alike, whatever the number of its steps.
        interrupted: Share of the steps that waited for the processor.
        drift: Median of the cases' drifts.
    """

    group: Group | Literal["all"]
    cases: int
    median_error: float
    cases_within: float
    steps_within: float
    alike_within: float
    interrupted: float
    drift: float


def measure(
    names: Sequence[str] | None = None, effort: Effort | None = None
) -> Iterator[list[Row]]:
    """Measure some models, all by default, and yield the rows of each."""
    for name in names or CASES:
        yield measure_model(build(CASES[name]), effort or Effort())


def measure_model(built: Built, effort: Effort) -> list[Row]:
    """Calibrate and predict one model's steps, and measure them."""
    largest, smallest = max(built.case.batches), min(built.case.batches)
    middle = max(1, round((largest * smallest) ** 0.5))
    configurations = {
        "calibrated": (largest, 1),
        "twin": (largest, 1),
        "middle": (middle, 1),
        "small": (smallest, 1),
        "two": (largest, 2),
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="odtpack-bench-")))
        processes: dict[str, Process] = {}
        for name, (batch_size, threads) in configurations.items():
            place = folder / name
            place.mkdir()
            job = built.job(place, batch_size, threads, task="time")
            processes[name] = stack.enter_context(Process(job))
        for process in processes.values():
            process.wait_until_ready()
        costs = processes["calibrated"].ask("costs")
        nodes = {
            name: [
                Node(op_type, us, Work(flops, moved))
                for op_type, flops, moved, us in processes[name].ask("nodes", steps=steps)["nodes"]
            ]
            for name, steps in (
                ("calibrated", effort.profiled),
                ("small", effort.profiled),
                ("middle", 1),
            )
        }
        if len(set(map(len, nodes.values()))) > 1:
            raise RuntimeError(f"{built.case.name} runs other nodes at another batch size")
        rounds = [_round(processes, effort) for _ in range(effort.rounds)]
    prediction = Prediction(nodes, (costs["node_us"], costs["profile_us"]), rounds)
    questions: tuple[tuple[Group, str], ...] = (
        ("process", "twin"),
        ("batch", "middle"),
        ("batch", "small"),
        ("between", "middle"),
        ("threads", "two"),
    )
    rows = []
    for group, name in questions:
        clock = which_clock(
            step for turns in rounds for who in ("calibrated", name) for step in turns[who]["steps"]
        )
        rows.append(
            compare(
                (built.case.name, group, *configurations[name], clock),
                [prediction.of(group, name, turns, clock) for turns in rounds],
                [turns[name]["steps"] for turns in rounds],
                _drift([turns["calibrated"] for turns in rounds]),
            )
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What predicts the steps of a model: the nodes by process, the costs, all rounds."""

    nodes: dict[str, list[Node]]
    costs: tuple[float, float]
    rounds: list[dict[str, Any]]

    def of(self, group: Group, name: str, turns: dict[str, Any], clock: Clock) -> float:
        """Milliseconds of a step of process ``name`` in one round."""
        large = (self.nodes["calibrated"], _typical(turns["calibrated"]["steps"], clock))
        works = [node.work for node in self.nodes.get(name, self.nodes["calibrated"])]
        here = self._curves("calibrated")
        if group == "between":
            small = (self.nodes["small"], _typical(turns["small"]["steps"], clock))
            return step_between(small, large, self.costs, here, works)
        if group == "threads":
            # Two virtual cores may be one core for some seconds, and two for the next: what two
            # threads gain is only comparable within a round.
            here, there = (self._curves(name, [turns]) for name in ("calibrated", "two"))
            return scaled_step(*large, self.costs, here, there, works)
        return scaled_step(*large, self.costs, here, here, works)

    def _curves(self, name: str, rounds: Sequence[dict[str, Any]] | None = None) -> Curves:
        return Curves.best([turns[name] for turns in rounds or self.rounds], self.costs[0])


def _round(processes: dict[str, Process], effort: Effort) -> dict[str, Any]:
    """A turn of each; the calibrated process has one before and one after the others."""
    turns: dict[str, Any] = {
        name: process.ask("steps", seconds=effort.seconds) for name, process in processes.items()
    }
    for name in ("two", "calibrated"):
        turns[name] |= processes[name].ask("scaling", seconds=effort.scaling)
    turns["calibrated"]["steps"] += processes["calibrated"].ask("steps", seconds=effort.seconds)[
        "steps"
    ]
    return turns


def compare(
    configuration: tuple[str, Group, int, int, Clock],
    predictions: Sequence[float],
    measured: Sequence[Steps],
    drift: float,
) -> Row:
    """Compare each round's prediction with its steps.

    Args:
        configuration: Model, group, batch size, threads, clock.
        predictions: Milliseconds, one per round.
        measured: Per round, wall and processor milliseconds of each step.
        drift: See :class:`Row`.
    """
    clock = configuration[-1]
    errors: list[float] = []
    compared: list[float] = []
    within = 0
    for predicted, steps in zip(predictions, measured, strict=True):
        found = times(steps, clock)
        if found:
            errors.append(predicted / statistics.median(found) - 1)
        compared += found
        within += sum(abs(predicted / step - 1) <= 0.1 for step in found)
    nothing = float("nan")
    return Row(
        *configuration,
        predicted_ms=statistics.median(predictions),
        measured_ms=statistics.median(compared) if compared else nothing,
        error=statistics.median(errors) if errors else nothing,
        within=within / len(compared) if compared else nothing,
        steps=len(compared),
        interrupted=sum(waited(step) for steps in measured for step in steps),
        drift=drift,
    )


def waited(step: tuple[float, float]) -> bool:
    """Whether a step of this wall and processor time waited for the processor."""
    return step[0] > INTERRUPTED * step[1]


def which_clock(steps: Iterable[tuple[float, float]]) -> Clock:
    """The wall clock, unless more than half of the steps waited for the processor."""
    waiting = [waited(step) for step in steps]
    return "processor" if 2 * sum(waiting) > len(waiting) else "wall"


def times(steps: Steps, clock: Clock) -> list[float]:
    """Processor times, or the wall times of steps that did not wait."""
    if clock == "processor":
        return [processor for _, processor in steps]
    return [step[0] for step in steps if not waited(step)]


def summarize(rows: Sequence[Row]) -> list[Summary]:
    """The groups apart, and all of them; models without a quiet step are left out."""
    summaries = []
    for group in (*GROUPS, "all"):
        own = [row for row in rows if row.steps and group in (row.group, "all")]
        if not own:
            continue
        steps = sum(row.steps for row in own)
        waiting = sum(row.interrupted for row in own)
        all_steps = sum(row.steps + row.interrupted * (row.clock == "wall") for row in own)
        summaries.append(
            Summary(
                group=group,  # type: ignore[arg-type]
                cases=len(own),
                median_error=statistics.median(abs(row.error) for row in own),
                cases_within=sum(abs(row.error) <= 0.1 for row in own) / len(own),
                steps_within=sum(row.within * row.steps for row in own) / steps,
                alike_within=statistics.fmean(row.within for row in own),
                interrupted=waiting / all_steps,
                drift=statistics.median(row.drift for row in own),
            )
        )
    return summaries


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Every row as a line of text, under a heading."""
    yield (
        f"{'model':16}{'group':9}{'batch':>6}{'threads':>8}{'predicted':>12}{'measured':>12}"
        f"{'clock':>11}{'error':>8}{'steps':>7}{'within 10 %':>12}{'interrupted':>12}{'drift':>7}"
    )
    for row in rows:
        yield (
            f"{row.model:16}{row.group:9}{row.batch_size:>6}{row.threads:>8}"
            f"{row.predicted_ms:>9.2f} ms{row.measured_ms:>9.2f} ms{row.clock:>11}"
            f"{100 * row.error:>+7.1f}%{row.steps:>7}"
            f"{100 * row.within:>11.0f}%{row.interrupted:>12}{100 * row.drift:>6.0f}%"
        )


def summary_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The summary as text, and what it is to be held against."""
    for found in summarize(rows):
        yield (
            f"{found.group}: {found.cases} cases, median error {100 * found.median_error:.1f} %, "
            f"{100 * found.cases_within:.0f} % of the cases and {100 * found.steps_within:.0f} % "
            f"of the steps within 10 % ({100 * found.alike_within:.0f} % where every case counts "
            f"alike); {100 * found.interrupted:.0f} % of the steps interrupted, "
            f"drift {100 * found.drift:.0f} %"
        )
    yield "to reach: median error at most 5 %, at least 90 % of the steps within 10 %"


class Process:
    """A worker in a process of its own, asked one thing at a time."""

    def __init__(self, job: Job) -> None:
        path = Path(job.folder) / "job.json"
        job.write(path)
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Process:
        return self

    def wait_until_ready(self) -> None:
        """Wait for it to have loaded its package."""
        self._answer()

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def ask(self, what: str, **arguments: float) -> dict[str, Any]:
        """Let it do something, and wait for the answer.

        Raises:
            RuntimeError: The process ended; it said why on standard error.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _typical(steps: Steps, clock: Clock) -> float:
    return statistics.median(times(steps, clock) or [wall for wall, _ in steps])


def _drift(turns: Sequence[dict[str, Any]]) -> float:
    times = [turn["products"][-1][1] for turn in turns]
    return max(times) / min(times) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), help="all by default")
    parser.add_argument("--quick", action="store_true", help="half the rounds, shorter turns")
    arguments = parser.parse_args()
    start = time.monotonic()
    rows: list[Row] = []
    for found in measure(arguments.models, QUICK if arguments.quick else Effort()):
        lines = table(found)
        heading = next(lines)
        if not rows:
            print(heading)
        print(*lines, sep="\n", flush=True)
        rows += found
    print(*summary_lines(rows), sep="\n")
    print(f"{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
