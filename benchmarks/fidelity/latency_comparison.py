"""Compare predicted steps with measured ones: rows, summaries and tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

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
    """A row for people."""
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
