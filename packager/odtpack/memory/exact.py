"""Chooses what is computed again exactly: the least time within a limit, by linear programming.

The program (:mod:`.formulation`) has rows for the places of the step at which memory has been seen
to be above the limit. Its solution is written as a step; where that is above the limit elsewhere,
the place gets a row, and the program is solved again. As the rows never say more than the step
takes, the first solution that the step confirms is the best one. A gap is allowed for, of the time
of a whole step: layers that are alike make as many choices that are all but equally good.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from odtpack.memory.buffers import Buffers
from odtpack.memory.formulation import MILLISECONDS, Formulation
from odtpack.memory.recompute import Choice
from odtpack.memory.timeline import Step

GAP: Final = 0.002
"""Part of a step's time by which a better choice may be better."""

NODES: Final = 200
"""Of the search for one solution; a limit in time would make two builds differ."""

MOST_DECISIONS: Final = 600
"""Beyond which the greedy search chooses alone, in seconds: a program of 900 takes many minutes."""

_ROUNDS: Final = 30


def improve(
    step: Step,
    choice: Choice,
    limit: int,
    nameable: Collection[str],
    *,
    gap: float = GAP,
    nodes: int = NODES,
) -> Choice | None:
    """Find the choice within a limit that takes least time.

    Args:
        step: The step.
        choice: A choice, to begin with where it is within the limit.
        limit: Bytes of activations at the peak.
        nameable: Names of values that a control edge can be put on: those of a known rank.
        gap: Part of the step's time by which a better choice may be better.
        nodes: Nodes of one search.

    Returns:
        The choice, as good as the one given or better; None if none was found, or if there is
        too much to decide.
    """
    buffers = Buffers(step, nameable)
    if sum(buffer.is_open for buffer in buffers.all) > MOST_DECISIONS:
        return None
    model = Formulation(buffers, limit)
    known = buffers.chosen(choice.again)
    start = {column: float(i in known) for i, column in model.again.items()}
    rows = set[tuple[int, int]]()
    timeline = buffers.kept
    model.limit_all(timeline, rows)
    model.limit_all(choice.timeline, rows)
    for _ in range(_ROUNDS):
        found = model.program.solve(
            start if choice.peak <= limit else {},
            gap=gap * sum(step.seconds) * MILLISECONDS,
            nodes=nodes,
        )
        if found is None:
            return None
        chosen = {i for i, column in model.again.items() if found.values[column] > 0.5}
        timeline = step.timeline(buffers.names(chosen))
        if timeline.peak <= limit:
            again = buffers.made(timeline)
            return Choice(again, timeline, step.time(again), found.bound / MILLISECONDS)
        if not model.limit_all(timeline, rows):
            model.forbid(chosen)
    return None
