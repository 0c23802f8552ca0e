"""What a search over federated settings found.

``docs/schemas/fleet-fit.schema.json`` is made from these models.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import Field

from odtpack.fit.finalists import TIME_TOLERANCE
from odtpack.fit.pareto import Point, on_grid
from odtpack_simulator.fleet.figures import seed_runs
from odtpack_simulator.fleet.fleet_file import FleetBudgets
from odtpack_simulator.fleet.result import FleetResult
from odtpack_simulator.result.result import Count, Loss, NonNegative
from odtpack_simulator.values.figure import Text
from odtpack_simulator.values.part import Part

_SHA256: Final = "^[0-9a-f]{64}$"


class Figures(Part):
    """What a federation came to; means over its seeds, traffic and energy over devices as well.

    Attributes:
        accuracy: On the held-out samples; null for a package that does not classify.
        loss: On the held-out samples; null if not finite.
        days: Simulated days until the accuracy of the budgets, else of all rounds; null for never.
        took_part: Share of the population with an answer averaged at least once.
        traffic_bytes: Up and down, of a device that was chosen.
        energy_j: Of a device that was chosen; null if unknown.
    """

    accuracy: float | None
    loss: Loss
    days: NonNegative | None
    took_part: NonNegative
    traffic_bytes: NonNegative
    energy_j: NonNegative | None

    def costs(self) -> Point:
        """Error or loss, days, traffic and energy, each on its grid; what is unknown is worst."""
        quality = self.loss if self.accuracy is None else 1.0 - self.accuracy
        others = (self.days, self.traffic_bytes, self.energy_j)
        return (
            math.inf if quality is None else quality,
            *(math.inf if each is None else on_grid(each, TIME_TOLERANCE) for each in others),
        )


class Tried(Part):
    """One way to run the federation, and what it came to in so many rounds.

    Attributes:
        number: Its number in the space.
        clients: Answers that a round waits for; with a buffer, clients at a time.
        epochs: Passes of a client over its samples.
        learning_rate: Of a client's steps.
        rounds: Rounds that it was played for.
        figures: What it came to.
        failed: The budgets that it does not keep, in words.
        reason: Why it did not go on to all rounds.
        beaten_by: Numbers of those that are nowhere worse, and somewhere better.
    """

    number: Count
    clients: Count
    epochs: Count
    learning_rate: NonNegative
    rounds: Count
    figures: Figures
    failed: list[Text] = Field(default_factory=list)
    reason: Text | None = None
    beaten_by: list[Count] = Field(default_factory=list)


class FleetRung(Part):
    """So many settings were played for so many rounds, and so many of them kept."""

    rounds: Count
    played: Count
    kept: Count


class FleetFitResult(Part):
    """What was found. ``best`` keep every budget, and no other one that does beats them.

    Attributes:
        manifest_sha256: Of the package.
        fleet_digest: Of the fleet file.
        candidates: Settings in the space.
        seeds: Seeds with which those that were played to the end were.
        rungs: How the others were dropped.
        best: The best accuracy first.
        beaten: They keep every budget as well.
        over_budget: Played to the end, and over a budget.
        left: Not played to the end.
    """

    schema_version: Literal[1] = 1
    tool_version: Text
    manifest_sha256: str = Field(pattern=_SHA256)
    fleet_digest: str = Field(pattern=_SHA256)
    candidates: Count
    seeds: Count
    rungs: list[FleetRung]
    best: list[Tried]
    beaten: list[Tried]
    over_budget: list[Tried]
    left: list[Tried]


def figures_of(result: FleetResult, budgets: FleetBudgets) -> Figures:
    """The figures of a federation, as far as it was played."""
    runs = seed_runs(result)
    if budgets.accuracy is None:
        days: list[float | None] = [run.points[-1].day if run.points else 0.0 for run in runs]
    else:
        reached = [run.reached(budgets.accuracy) for run in runs]
        days = [None if point is None else point.day for point in reached]
    losses = [run.points[-1].loss if run.points else run.loss_before for run in runs]
    return Figures(
        accuracy=_mean([run.accuracy for run in runs]),
        loss=_mean(losses),
        days=_mean(days),
        took_part=statistics.fmean(run.took_part for run in runs),
        traffic_bytes=statistics.fmean(run.traffic_bytes for run in runs),
        energy_j=_mean([run.energy_j for run in runs]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
