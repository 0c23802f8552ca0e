"""Puts what was simulated together: the Pareto set, what it beats, and the recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import metadata

from odtpack.fit import finalists
from odtpack.fit.candidates import Candidate
from odtpack.fit.outcome import Dimension, Dropped, FitResult, Rung, Solution
from odtpack.fit.recipe_text import Surroundings, recipe_text
from odtpack.fit.search_context import SearchContext
from odtpack.fit.space import Space
from odtpack_simulator.result.result import SimulationResult
from odtpack_simulator.values.units import format_bytes


def summarize(
    simulated: Sequence[tuple[Candidate, SimulationResult]],
    ground: SearchContext,
    around: Surroundings,
    *,
    model: str,
    devices: list[str],
    epochs: int,
    space: Space,
    candidates: int,
    looked_at: int,
    rungs: list[Rung],
    left: Sequence[Dropped],
) -> FitResult:
    """The result of a search; see :class:`~odtpack.fit.outcome.FitResult` for the arguments.

    Args:
        simulated: The finalists with their judged results.
        ground: What all candidates share.
        around: What the recipes hold besides the settings.
        model: See FitResult, as what follows.
        devices: See model.
        epochs: See model.
        space: See model.
        candidates: See model.
        looked_at: See model.
        rungs: See model.
        left: See model.
    """
    solutions = {c.number: finalists.solution(c, result) for c, result in simulated}
    wanted, unknown = finalists.objectives(
        list(solutions.values()), finalists.reasons(result for _, result in simulated)
    )
    kept = [solutions[c.number] for c, result in simulated if not result.over_budget]
    best, beaten = finalists.compared(kept, wanted)
    over = [solutions[c.number] for c, result in simulated if result.over_budget]
    over.sort(key=lambda each: (each.miss or 0.0, each.number))
    by_number = {candidate.number: candidate for candidate, _ in simulated}

    def with_recipes(found: Sequence[Solution]) -> list[Solution]:
        return [
            each.model_copy(
                update={"recipe": _recipe(by_number[each.number], each, index, ground, around)}
            )
            for index, each in enumerate(found, 1)
        ]

    return FitResult(
        tool_version=_version(),
        model=model,
        devices=devices,
        epochs=epochs,
        seed=ground.seed,
        samples=ground.samples,
        held_out_samples=ground.whole.held_out_samples,
        space=_dimensions(space),
        candidates=candidates,
        looked_at=looked_at,
        rungs=rungs,
        objectives=wanted,
        not_judged=unknown,
        pareto=with_recipes(best),
        beaten=with_recipes(beaten),
        over_budget=with_recipes(over),
        left=sorted(left, key=lambda each: each.number),
    )


def _recipe(
    candidate: Candidate, found: Solution, index: int, ground: SearchContext, around: Surroundings
) -> str:
    metric = "" if found.metric is None else f"accuracy {found.metric:.4g}, "
    remark = (
        f"Found by odtpack fit, candidate {candidate.number}: {metric}"
        f"peak memory {format_bytes(found.peak_bytes)}."
    )
    own = dataclasses.replace(around, package=f"{around.package}-{index}", remark=(remark,))
    return recipe_text(candidate.settings(ground.base), candidate.batch_size, own)


def _dimensions(space: Space) -> list[Dimension]:
    micro = {size for sizes in space.micro_batches.values() for size in sizes}
    values: dict[str, list[str]] = {
        "batch_size": [str(size) for size in space.batch_sizes],
        "micro_batch": [str(size) for size in sorted(micro)],
        "frozen": [each.title for each in space.freezes],
        "optimizer": [kind for kind, _, _ in space.optimizers],
        "learning_rate": [
            f"{kind}: {', '.join(f'{rate:g}' for rate in rates)}"
            for kind, _, rates in space.optimizers
        ],
        "frozen_dtype": [each or "float32" for each in space.storages],
    }
    return [Dimension(name=name, values=each) for name, each in values.items()]


def _version() -> str:
    try:
        return metadata.version("odtpack")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
