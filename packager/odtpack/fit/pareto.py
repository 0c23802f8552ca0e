"""Which candidates are not beaten: the Pareto set, and who beats the others.

All objectives are costs: smaller is better. A measured figure is as good as another within
its noise, so each is put on a grid of its tolerance before it is compared; equality on a
grid is transitive, so that nothing can beat what beats it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]


def on_grid(value: float, tolerance: float) -> float:
    """The cell of a cost on a logarithmic grid.

    Args:
        value: 0 or more; infinite and NaN stay out of reach.
        tolerance: Width of a cell as a share of the value; 0 for no grid.
    """
    if not math.isfinite(value):
        return math.inf
    if tolerance == 0 or value <= 0:
        return value if tolerance == 0 else -math.inf
    return float(math.floor(math.log(value) / math.log1p(tolerance)))


def beats(one: Point, other: Point) -> bool:
    """Whether a point is nowhere worse than another, and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def pareto(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other one beats, in their order; equal ones all stay."""
    return fronts(points)[0] if points else []


def beaten_by(points: Sequence[Point]) -> list[list[int]]:
    """For each point the members of the Pareto set that beat it; none for the set's own.

    Every other point is beaten by at least one of them: beating is a partial order, and there
    are finitely many points.
    """
    best = pareto(points)
    return [[i for i in best if beats(points[i], point)] for point in points]


def fronts(points: Sequence[Point]) -> list[list[int]]:
    """The points sorted by how often one must take the Pareto set away to lay them bare.

    Non-dominated sorting, Deb et al. (2002), A fast and elitist multiobjective genetic
    algorithm: NSGA-II, section III.A.
    """
    count = len(points)
    beating: list[list[int]] = [[] for _ in range(count)]
    betters = [0] * count
    for i in range(count):
        for j in range(count):
            if beats(points[i], points[j]):
                beating[i].append(j)
                betters[j] += 1
    found = []
    front = [i for i in range(count) if betters[i] == 0]
    while front:
        found.append(front)
        bare = []
        for i in front:
            for j in beating[i]:
                betters[j] -= 1
                if betters[j] == 0:
                    bare.append(j)
        front = sorted(bare)
    return found


def keep(points: Sequence[Point], count: int) -> list[int]:
    """Indices of so many points to go on with, in their order.

    Whole fronts as long as there is room. Of the front that does not fit as a whole the
    objectives choose in turns, each the point that is best for it, the first one first.
    """
    kept: list[int] = []
    for front in fronts(points):
        rest = list(front)
        if len(kept) + len(rest) <= count:
            kept += rest
            continue
        turn = 0
        while len(kept) < count:
            best = min(rest, key=lambda i: (points[i][turn], points[i]))
            rest.remove(best)
            kept.append(best)
            turn = (turn + 1) % len(points[best])
        break
    return sorted(kept)
