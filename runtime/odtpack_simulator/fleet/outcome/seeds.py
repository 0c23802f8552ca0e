"""The same federation with several seeds: how much of a figure is chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from odtpack_simulator.fleet.outcome.judge import verdict_of
from odtpack_simulator.fleet.outcome.result import FleetResult, SeedPoint, SeedRun

_BAD_FIRST: Final = ("fail", "not judged", "pass")
_MOST_PLACES: Final = 250
"""An outline has two points at each: so many a drawing shows."""


def seed_run(result: FleetResult) -> SeedRun:
    """A result's figures, as they stand beside those of other seeds."""
    return SeedRun(
        seed=result.plan.seed,
        loss_before=result.loss_before,
        accuracy_before=result.accuracy_before,
        points=[
            SeedPoint(
                round=each.number,
                day=(each.start_s + each.duration_s) / 86_400,
                loss=each.loss,
                accuracy=each.accuracy,
            )
            for each in result.rounds
            if each.loss is not None
        ],
        worst_tenth=None if result.fairness is None else result.fairness.worst_tenth,
        took_part=result.took_part / result.plan.clients,
        traffic_bytes=result.traffic_bytes.mean,
        energy_j=None if result.energy_j is None else result.energy_j.mean,
    )


def join_seeds(results: Sequence[FleetResult]) -> FleetResult:
    """The first of several judged results, with the figures of all and the checks of the worst.

    Args:
        results: At least one, of the same federation with different seeds.
    """
    first = results[0]
    if len(results) == 1:
        return first
    checks = []
    for metric in dict.fromkeys(check.metric for each in results for check in each.checks):
        found = [
            (check, each.plan.seed)
            for each in results
            for check in each.checks
            if check.metric == metric
        ]
        check, seed = min(found, key=lambda pair: _BAD_FIRST.index(pair[0].status))
        bad = sum(other.status == check.status for other, _ in found)
        of = f"{bad} of {len(results)} seeds" if check.status != "pass" else "all seeds"
        message = f"{check.message} (with seed {seed}, and so {of})"
        checks.append(check.model_copy(update={"message": message}))
    return first.model_copy(
        update={
            "seeds": [seed_run(each) for each in results],
            "checks": checks,
            "verdict": verdict_of(checks),
        }
    )


def seed_runs(result: FleetResult) -> list[SeedRun]:
    """The figures of every seed that was played."""
    return result.seeds or [seed_run(result)]


def band(
    runs: Iterable[SeedRun], *, by_day: bool, by_accuracy: bool
) -> list[tuple[float, float, float]]:
    """Between which values the seeds' curves lie: place, lowest and highest.

    A seed's value at a place is that of its last evaluation until then, so that its rounds need
    not end when those of another do. Of many places those beside each other are taken together.

    Args:
        runs: The seeds.
        by_day: Places are simulated days; otherwise rounds.
        by_accuracy: Values are accuracies; otherwise losses.
    """
    steps = []
    for run in runs:
        before = run.accuracy_before if by_accuracy else run.loss_before
        steps.append(
            [(0.0, before)]
            + [
                (p.day if by_day else float(p.round), p.accuracy if by_accuracy else p.loss)
                for p in run.points
            ]
        )
    found = []
    for place in sorted({x for curve in steps for x, _ in curve}):
        values = [[y for x, y in curve if x <= place][-1] for curve in steps]
        known = [value for value in values if value is not None]
        if known:
            found.append((place, min(known), max(known)))
    width = -(-len(found) // _MOST_PLACES)
    parts = [found[at : at + width] for at in range(0, len(found), width or 1)]
    return [(part[-1][0], min(p[1] for p in part), max(p[2] for p in part)) for part in parts]
