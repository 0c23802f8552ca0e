"""What beats what: points of costs, each the smaller the better."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]


def on_grid(value: float, tolerance: float) -> float:
    """The cell of a cost on a logarithmic grid."""
    # `tolerance`: width of a cell as a share of the value; 0 for no grid.
    if not math.isfinite(value):
        return math.inf
    if tolerance == 0 or value <= 0:
        return value if tolerance == 0 else -math.inf
    return float(math.floor(math.log(value) / math.log1p(tolerance)))


def beats(one: Point, other: Point) -> bool:
    """Whether a point is nowhere worse than another, and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def beaten_by(points: Sequence[Point]) -> list[list[int]]:
    """For each point the members of the Pareto set that beat it; none for the set's own."""
    # Every other point is beaten by at least one of them: beating is a partial order, and there are
    # finitely many points.
    best = [i for i, point in enumerate(points) if not any(beats(p, point) for p in points)]
    return [[i for i in best if beats(points[i], point)] for point in points]


def choose(points: Sequence[Point], count: int) -> list[int]:
    """Indices of the Pareto set, in their order; of a larger one each cost chooses in turns."""
    rest = [i for i, by in enumerate(beaten_by(points)) if not by]
    if len(rest) <= count:
        return rest
    kept: list[int] = []
    while len(kept) < count:
        turn = len(kept) % len(points[0])
        kept.append(min(rest, key=lambda i: (points[i][turn], points[i])))
        rest.remove(kept[-1])
    return sorted(kept)
