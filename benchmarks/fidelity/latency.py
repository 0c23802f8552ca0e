"""How well step times are predicted on this machine, from operators calibrated beside them.

    python -m benchmarks.fidelity.latency [--models NAME ...] [--quick]

docs/latency.md#fidelity says what is predicted. For each held-out model six processes take
turns within a fraction of a second, round by round, so that other programs slow down all of them; a
prediction is compared with the steps of its own round. Steps that waited for the processor, and
took more wall time than processor time, are not compared. Where more than half of them did,
processor times are compared instead (the column ``clock``), but not of two threads, of which one
waits for the other. A round in which two threads gain too little says nothing of them.

A calibrated step is known operator by operator. At a batch size between two calibrated ones each
operator takes what lies between its two times, by its roofs at the three sizes; what the runtime
takes for any operator is part of both. The roofs are curves here: products and copies were timed at
several sizes, since small ones are slower, and copies within a cache quicker, than large ones (A.
Ilic, F. Pratas, L. Sousa, "Cache-aware Roofline model: Upgrading the loft", IEEE Computer
Architecture Letters 13 (1), 2014).
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from benchmarks.fidelity.models import CASES, Built, build
from odtpack_simulator.latency import LEAST_GAIN, added_us, without_profile
from odtpack_simulator.memory.operator_work import Work
from scripts.harness import head, options, row, scratch

Points = Sequence[tuple[float, float]]
SERIAL = {"Abs", "Cast", "CumSum", "Expand", "Not", "Pad", "ScatterND", "Sign", "Slice", "Sum",
          "Tile", "Where"}  # fmt: skip
"""Operators that ONNX Runtime 1.31 runs in one thread.

Forty operators were run alone on a tensor of a million elements with one and two threads,
the quickest of a thousand runs and more: these gained 7 % at most, all others 50 % or more.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Curves:
    """Seconds of products by FLOP, and of copies by bytes moved, at some sizes."""

    products: Points
    copies: Points

    @classmethod
    def best(cls, turns: Sequence[Mapping[str, Any]], node_us: float) -> Self:
        """The quickest of several measurements, without what starting a run takes.

        ``least`` of a turn are the seconds of a run of one operator that has nothing to do,
        ``node_us`` is what such an operator takes within a longer run.
        """
        start, least = min(turn["least"] for turn in turns) - node_us / 1e6, node_us / 1e6
        products, copies = (
            [
                (same[0][0], max(least, min(seconds for _, seconds in same) - start))
                for same in zip(*(turn[kind] for turn in turns), strict=True)
            ]
            for kind in ("products", "copies")
        )
        return cls(products, copies)

    def seconds(self, work: Work) -> float:
        """The least time of one run of an operator."""
        arithmetic = work.flops / rate(self.products, work.flops) if work.flops else 0.0
        traffic = work.moved_bytes / rate(self.copies, work.moved_bytes) if work.moved_bytes else 0
        return max(arithmetic, traffic)


def rate(points: Points, amount: float) -> float:
    """Amount per second, between the two nearest sizes linearly in the logarithm of the size."""
    rates = [(size, size / seconds) for size, seconds in points]
    if amount <= rates[0][0]:
        return rates[0][1]
    for (small, low), (large, high) in itertools.pairwise(rates):
        if amount <= large:
            share = math.log(amount / small) / math.log(large / small)
            return low + (high - low) * share
    return rates[-1][1]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One operator of a step: its microseconds in the profile, and its work."""

    op_type: str
    us: float
    work: Work


Step = tuple[Sequence[Node], float]
"""The nodes of a step, and its milliseconds."""


def calibrated_nodes(
    nodes: Sequence[Node], step_ms: float, costs: tuple[float, float]
) -> tuple[list[float], float]:
    """Microseconds of each node without the profile, and of the rest of the step.

    Both sum to ``step_ms``, the step without a profile. ``costs`` are the microseconds that the
    runtime takes for any node, and that a profile adds.
    """
    node_us, profile_us = costs
    added = added_us([(node.us, 1) for node in nodes], node_us, profile_us, 1e3 * step_ms)
    times = [without_profile(node.us, 1, added, node_us) for node in nodes]
    fit = min(1.0, 1e3 * step_ms / sum(times)) if any(times) else 1.0
    return [fit * us for us in times], max(0.0, 1e3 * step_ms - fit * sum(times))


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """A step at a batch size between two calibrated ones, with one thread.

    Each node's time is linear in what its roof takes, through both its times: what does not depend
    on the batch size needs no model.
    """

    small: Step
    large: Step
    costs: tuple[float, float]  # those of :func:`calibrated_nodes`
    curves: Curves
    works: Sequence[Work]  # of the same nodes at the batch size asked for

    def nodes(self) -> tuple[list[float], float]:
        """Microseconds of each node, and of the rest."""
        (low, rest_low), (high, rest_high) = (
            calibrated_nodes(*step, self.costs) for step in (self.small, self.large)
        )
        times, seconds = [], self.curves.seconds
        for first, last, at_first, at_last, work in zip(
            self.small[0], self.large[0], low, high, self.works, strict=True
        ):
            least, most = seconds(first.work), seconds(last.work)
            share = (seconds(work) - least) / (most - least) if most > least else 0.5
            times.append(at_first + share * (at_last - at_first))
        return times, (rest_low + rest_high) / 2

    def step_ms(self) -> float:
        times, rest = self.nodes()
        return (sum(times) + rest) / 1e3

    def threaded_ms(self, threaded: Step) -> float:
        """Milliseconds of the step with more threads, known at the larger batch size.

        Each node gains what it gained there; operators that run in one thread gain nothing, however
        the two timings scattered. The step with more threads there is both predicted in this way
        and measured. Its relative error is assumed here, too.
        """
        times, rest = self.nodes()
        alone, rest_alone = calibrated_nodes(*self.large, self.costs)
        together, _ = calibrated_nodes(*threaded, self.costs)
        gains = [
            _gain(node.op_type, one, many)
            for node, one, many in zip(self.large[0], alone, together, strict=True)
        ]
        here = rest + sum(us * gain for us, gain in zip(times, gains, strict=True))
        there = rest_alone + sum(us * gain for us, gain in zip(alone, gains, strict=True))
        return threaded[1] * here / there


def _gain(op_type: str, one: float, many: float) -> float:
    """What a node's time is multiplied by with more threads."""
    gain = many / one if one > 0 else 1.0
    return max(1.0, gain) if op_type in SERIAL else gain


Group = Literal["process", "between", "threads"]
GROUPS: tuple[Group, ...] = ("process", "between", "threads")
Clock = Literal["wall", "processor"]
Steps = Sequence[tuple[float, float]]
INTERRUPTED = 1.02
"""Wall time over processor time above which a step waited for the processor."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One prediction, compared."""

    model: str
    group: Group
    batch_size: int  # of the predicted step, as the threads
    threads: int
    clock: Clock  # wall time, or processor time where that was disturbed
    predicted_ms: float  # median of the predictions of rounds in which a step was compared
    measured_ms: float  # median of all steps that were compared
    error: float  # median over the rounds of prediction over that round's median step, less 1
    within: float  # share of the steps within 10 % of their round's prediction
    steps: int  # that were compared
    interrupted: int  # steps that waited for the processor
    drift: float  # how much longer a matrix product took in one round than in another


@dataclasses.dataclass(frozen=True)
class Summary:
    """The rows of one group, or of all."""

    group: Group | Literal["all"]
    cases: int
    median_error: float
    cases_within: float  # share of the cases whose error is at most 10 %
    # Share of all steps that lie within 10 % of their prediction. In the time of one step of a
    # convolutional network the smallest makes a thousand.
    steps_within: float
    alike_within: float  # the same where every case counts alike, whatever the number of its steps
    interrupted: float  # share of the steps that waited for the processor
    drift: float  # median of the cases' drifts


def compare(
    configuration: tuple[str, Group, int, int, Clock],  # the first fields of a row
    predictions: Sequence[float],
    measured: Sequence[Steps],
    drift: float,
) -> Row:
    """Compare each round's prediction in milliseconds with wall and processor time of its steps."""
    clock = configuration[-1]
    rounds = [(predicted, times(steps, clock))
              for predicted, steps in zip(predictions, measured, strict=True)]  # fmt: skip
    judged = [(predicted, found) for predicted, found in rounds if found]
    compared = [(predicted, step) for predicted, found in judged for step in found]

    def median(values: Iterable[float]) -> float:
        return statistics.median(values) if judged else float("nan")

    return Row(
        *configuration,
        predicted_ms=median(predicted for predicted, _ in judged),
        measured_ms=median(step for _, step in compared),
        error=median(predicted / statistics.median(found) - 1 for predicted, found in judged),
        within=sum(abs(predicted / step - 1) <= 0.1 for predicted, step in compared)
        / (len(compared) or float("nan")),
        steps=len(compared),
        interrupted=sum(waited(step) for steps in measured for step in steps),
        drift=drift,
    )


def as_document(row: Row) -> dict[str, Any]:
    """The row for JSON: figures are null where no step was compared."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in dataclasses.asdict(row).items()
    }


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
        every = steps + sum(row.interrupted for row in own if row.clock == "wall")
        found = Summary(
            group, len(own),  # type: ignore[arg-type]
            median_error=statistics.median(abs(row.error) for row in own),
            cases_within=sum(abs(row.error) <= 0.1 for row in own) / len(own),
            steps_within=sum(row.within * row.steps for row in own) / steps,
            alike_within=statistics.fmean(row.within for row in own),
            interrupted=waiting / every, drift=statistics.median(row.drift for row in own),
        )  # fmt: skip
        summaries.append(found)
    return summaries


TITLES = ("model", "group", "batch:", "threads:", "predicted:", "measured:", "clock", "error:",
          "steps:", "within 10 %:", "interrupted:", "drift:")  # fmt: skip


def cells(row: Row) -> tuple[object, ...]:
    return (
        row.model, row.group, row.batch_size, row.threads, f"{row.predicted_ms:.2f} ms",
        f"{row.measured_ms:.2f} ms", row.clock, f"{100 * row.error:+.1f}%", row.steps,
        f"{100 * row.within:.0f}%", row.interrupted, f"{100 * row.drift:.0f}%",
    )  # fmt: skip


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


def typical(steps: Steps, clock: Clock) -> float:
    """Median of the steps that did not wait, or of all where all did."""
    return statistics.median(times(steps, clock) or [wall for wall, _ in steps])


# Measuring: processes that take turns.

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


def report(names: Sequence[str], quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Measure some models, and say what came of each and of all."""
    say("\n" + head(*TITLES))
    rows, effort = list[Row](), Effort(rounds=3, profiled=6) if quick else Effort()
    for name in names:
        found = measure_model(build(CASES[name]), effort)
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


def _round(processes: dict[str, Any], effort: Effort) -> dict[str, Any]:
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


class Process(subprocess.Popen):
    """A worker in a process of its own, asked one thing at a time."""

    def __init__(self, built: Built, folder: Path, batch_size: int, threads: int) -> None:
        folder.mkdir()
        built.job(folder, batch_size, threads, task="time").write(folder / "job.json")
        pipe, command = subprocess.PIPE, [sys.executable, WORKER, folder / "job.json"]
        super().__init__(command, stdin=pipe, stdout=pipe, text=True)

    def __exit__(self, *about: object) -> None:
        self.kill()
        super().__exit__(*about)

    def ask(self, what: str, **arguments: float) -> dict[str, Any]:
        """Let it do something, and wait for the answer."""
        print(json.dumps({"do": what, **arguments}), file=self.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        if not (line := self.stdout.readline()):
            raise RuntimeError(f"a worker ended with exit code {self.wait()}")
        return dict(json.loads(line))


def main() -> None:
    given = options(__doc__, models=list(CASES), quick=False)
    start = time.monotonic()
    report(given.models, given.quick, functools.partial(print, flush=True))
    print(f"{time.monotonic() - start:.0f} seconds")


if __name__ == "__main__":
    main()
