"""What changed from one simulated federation to another: two recipes, or two settings. Pure.

``docs/schemas/fleet-comparison.schema.json`` is made from these models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final, Literal

from pydantic import Field

from odtpack_simulator.fleet.outcome.judge import TITLES, percent
from odtpack_simulator.fleet.outcome.result import FleetResult, SeedRun
from odtpack_simulator.fleet.outcome.seeds import seed_runs
from odtpack_simulator.result.base import Count, Text
from odtpack_simulator.result.result import CheckUnit, Verdict
from odtpack_simulator.values.part import Part

Direction = Literal["better", "worse", "same", "within spread", "known now", "unknown now"]

_SAME: Final = 5e-4  # of the base: shown with one decimal, it is 0.0 %
ENOUGH_SEEDS: Final = 3
"""Seeds on either side from which on their spread says what is chance."""
_ERRORS: Final = 2.0
"""Standard errors of a difference within which it is taken for chance."""


class FleetFigure(Part):
    """One figure in both federations, in ``unit``; the mean over the seeds that know it.

    ``noise`` is twice the standard error of the difference of both means (Welch); null with fewer
    than three seeds on a side. Without a device it is of the whole population.
    """

    metric: Text
    title: Text
    device: Text | None = None
    unit: CheckUnit
    better: Literal["lower", "higher"]
    base: float | None
    head: float | None
    change: float | None = None
    noise: float | None = None
    direction: Direction


class FleetComparison(Part):
    """Head against base.

    Attributes:
        notes: What differs between the two, in one sentence each.
        accuracy: What ``rounds`` and ``days`` count until; null where a package does not classify.
        base_seeds: Seeds that the base was played with.
        head_seeds: Seeds that the head was played with.
        verdict_before: Verdict of the base under its own budgets.
        verdict: That of the head.
        figures: Those that at least one of both knows.
    """

    schema_version: Literal[1] = 1
    tool_version: Text
    notes: list[Text]
    accuracy: float | None = Field(ge=0, le=1)
    base_seeds: Count
    head_seeds: Count
    verdict_before: Verdict
    verdict: Verdict
    figures: list[FleetFigure]


Reading = Callable[[SeedRun], float | None]


def compare_fleets(
    base: FleetResult, head: FleetResult, accuracy: float | None = None
) -> FleetComparison:
    """Compare two results of ``odtpack fleet run``.

    Args:
        base: What was.
        head: What is.
        accuracy: What rounds and days are counted until, from 0 to 1; by default what the head's
            budgets ask, else the lower of both that are reached in the end.
    """
    before, now = seed_runs(base), seed_runs(head)
    target = accuracy if accuracy is not None else _asked(head, before, now)

    def until(read: Callable[[SeedRun, float], float | None]) -> Reading:
        return lambda run: None if target is None else read(run, target)

    table: list[tuple[str, str, CheckUnit, Literal["lower", "higher"], Reading]] = [
        ("accuracy", TITLES["accuracy"], "%", "higher", lambda run: percent(run.accuracy)),
        ("worst_tenth", TITLES["worst_tenth"], "%", "higher", lambda run: percent(run.worst_tenth)),
        ("rounds", TITLES["rounds"], "1", "lower", until(_rounds)),
        ("days", TITLES["days"], "1", "lower", until(_days)),
        ("participation", TITLES["participation"], "%", "higher", lambda it: percent(it.took_part)),
        ("traffic", "Traffic of a device, mean", "B", "lower", lambda run: run.traffic_bytes),
        ("energy", "Energy of a device, mean", "J", "lower", lambda run: run.energy_j),
    ]
    figures = [
        _figure(metric, title, None, unit, better, [*map(read, before)], [*map(read, now)])
        for metric, title, unit, better, read in table
    ]
    figures += _devices(base, head)
    return FleetComparison(
        tool_version=head.tool_version,
        notes=_notes(base, head),
        accuracy=target,
        base_seeds=len(before),
        head_seeds=len(now),
        verdict_before=base.verdict,
        verdict=head.verdict,
        figures=[each for each in figures if each.base is not None or each.head is not None],
    )


def _asked(head: FleetResult, before: Sequence[SeedRun], now: Sequence[SeedRun]) -> float | None:
    for check in head.checks:
        if check.metric == "accuracy" and check.limit is not None:
            return min(1.0, check.limit / 100)
    ends = [run.accuracy for run in (*before, *now)]
    known = [value for value in ends if value is not None]
    return min(known) if known and len(known) == len(ends) else None


def _rounds(run: SeedRun, accuracy: float) -> float | None:
    point = run.reached(accuracy)
    return None if point is None else float(point.round)


def _days(run: SeedRun, accuracy: float) -> float | None:
    point = run.reached(accuracy)
    return None if point is None else point.day


def _devices(base: FleetResult, head: FleetResult) -> list[FleetFigure]:
    """For each model of device which share of its clients took part."""

    def shares(result: FleetResult) -> dict[str, float]:
        return {
            each.device.title: 100 * min(1.0, each.took_part / each.clients)
            for each in result.devices
            if each.clients
        }

    before, now = shares(base), shares(head)
    return [
        _figure(
            "participation",
            TITLES["participation"],
            title,
            "%",
            "higher",
            [before.get(title)],
            [now.get(title)],
        )
        for title in dict.fromkeys((*now, *before))
    ]


def _figure(
    metric: str,
    title: str,
    device: str | None,
    unit: CheckUnit,
    better: Literal["lower", "higher"],
    base: Sequence[float | None],
    head: Sequence[float | None],
) -> FleetFigure:
    # A seed that never reaches an accuracy has no number of rounds: then there is no mean either.
    before, now = _mean(base), _mean(head)
    change = noise = None
    direction: Direction
    if before is None or now is None:
        direction = "known now" if before is None else "unknown now"
        if metric in ("rounds", "days"):  # what is not known never happens
            direction = "better" if before is None else "worse"
    else:
        change = now - before
        noise = _noise([v for v in base if v is not None], [v for v in head if v is not None])
        if abs(change) <= _SAME * abs(before):
            direction = "same"
        elif noise is not None and abs(change) <= noise:
            direction = "within spread"
        else:
            direction = "better" if (change < 0) == (better == "lower") else "worse"
    return FleetFigure(
        metric=metric,
        title=title,
        device=device,
        unit=unit,
        better=better,
        base=before,
        head=now,
        change=change,
        noise=noise,
        direction=direction,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _noise(base: Sequence[float], head: Sequence[float]) -> float | None:
    if min(len(base), len(head)) < ENOUGH_SEEDS:
        return None
    return _ERRORS * math.sqrt(
        statistics.variance(base) / len(base) + statistics.variance(head) / len(head)
    )


def _notes(base: FleetResult, head: FleetResult) -> list[str]:
    """What else differs; a note that data differ goes first."""
    notes = []
    if base.plan.data_digest != head.plan.data_digest:
        notes.append("the data differ: accuracies are of different samples")
    differing = {
        **{
            name.replace("_", " "): (getattr(base.plan, name), getattr(head.plan, name))
            for name in type(base.plan).model_fields
            if name not in ("digest", "data_digest")
        },
        "loss": (base.package.loss, head.package.loss),
        "optimizer": (base.package.optimizer, head.package.optimizer),
        "parameters that cross": (
            base.package.crossing_parameters,
            head.package.crossing_parameters,
        ),
        "bytes that cross": (base.package.payload_bytes, head.package.payload_bytes),
    }
    notes += [
        f"{name}: {_words(before)} before, {_words(now)} now"
        for name, (before, now) in differing.items()
        if before != now
    ]
    if base.package.manifest_sha256 == head.package.manifest_sha256:
        notes.append("both are of the same package")
    return notes


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
