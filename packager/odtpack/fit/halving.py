"""Successive halving: many candidates for a few epochs, the better ones for more.

Jamieson and Talwalkar (2016), Non-stochastic best arm identification and hyperparameter
optimization, https://arxiv.org/abs/1502.07943, with a reduction factor of 3. There is more
than one objective here, so that "better" is decided by the fronts of
:func:`fronts`, as in Schmucker et al. (2021), Multi-objective asynchronous
successive halving, https://arxiv.org/abs/2106.12639. All that decides repeats exactly: the
metric, the planned memory, and the work that is counted in the graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final

from odtpack.fit.outcome import Dropped, Rung, choice
from odtpack.fit.package_cache import Planned
from odtpack.fit.search_context import Trained
from odtpack.fit.space import Candidate

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


def pareto(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other one beats, in their order; equal ones all stay."""
    return fronts(points)[0] if points else []


def beaten_by(points: Sequence[Point]) -> list[list[int]]:
    """For each point the members of the Pareto set that beat it; none for the set's own."""
    # Every other point is beaten by at least one of them: beating is a partial order, and there are
    # finitely many points.
    best = pareto(points)
    return [[i for i in best if beats(points[i], point)] for point in points]


def fronts(points: Sequence[Point]) -> list[list[int]]:
    """The points sorted by how often one must take the Pareto set away to lay them bare."""
    # Non-dominated sorting, Deb et al. (2002), A fast and elitist multiobjective genetic algorithm:
    # NSGA-II, section III.A.
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
    """Indices of so many points to continue, in their order."""
    # Whole fronts as long as there is room. Of the front that does not fit as a whole the
    # objectives choose in turns, each the point that is best for it, the first one first.
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


REDUCTION: Final = 3

Train = Callable[[Sequence["Runner"], int], list[Trained]]
"""Trains so many runners for so many epochs."""


@dataclasses.dataclass(frozen=True)
class Runner:
    """A candidate in the race."""

    candidate: Candidate
    planned: Planned  # what is known of its package
    cost: str  # equal for candidates that differ in the learning rate only
    steps_per_epoch: int  # its optimizer steps in an epoch
    trained: Trained = dataclasses.field(default_factory=Trained)  # how its last training went

    def point(self) -> Point:
        """Loss or error rate, memory and work of an epoch: what is compared before the end."""
        metric, loss = self.trained.metric, self.trained.loss
        quality = loss if metric is None else 1.0 - metric
        work = self.planned.work * self.steps_per_epoch
        return (math.inf if quality is None else quality, float(self.planned.peak_bytes), work)

    def left(self, stage: str, reason: str, epochs: int = 0, by: Sequence[int] = ()) -> Dropped:
        """The record of a candidate that does not go on."""
        return Dropped(
            number=self.candidate.number,
            choice=choice(self.candidate),
            stage=stage,  # type: ignore[arg-type]
            reason=reason[:4000],
            epochs=epochs,
            metric=self.trained.metric,
            loss=self.trained.loss,
            predicted_peak_bytes=self.planned.peak_bytes,
            measured_peak_bytes=self.trained.peak_bytes,
            beaten_by=sorted(by),
        )


def rungs(count: int, epochs: int, finalists: int) -> list[int]:
    """Epochs of the trainings before the last one, which is for all epochs."""
    needed = math.ceil(math.log(max(1.0, count / finalists), REDUCTION))
    possible = int(math.log(epochs, REDUCTION) + 1e-9)
    levels = max(1, min(needed, possible))
    found = (max(1, epochs // REDUCTION**level) for level in range(levels, 0, -1))
    return list(dict.fromkeys(found))


def halve(
    runners: Sequence[Runner],
    epochs: Sequence[int],
    finalists: int,
    train: Train,
) -> tuple[list[Runner], list[Dropped], list[Rung]]:
    """Train for ever more epochs, and drop the worse candidates each time."""
    # `finalists`: candidates that are to be left at the end; of each cost one only, since learning
    # rates that cost the same differ by the metric alone.
    # Returns those left, in their order; the others; and the rounds.
    kept, dropped, made = list(runners), list[Dropped](), list[Rung]()
    for index, count in enumerate(epochs):
        started = len(kept)
        kept = [
            dataclasses.replace(runner, trained=trained)
            for runner, trained in zip(kept, train(kept, count), strict=True)
        ]
        kept, failed = _without_failures(kept, count)
        dropped += failed
        last = index == len(epochs) - 1
        if last:
            kept, slower = _best_rates(kept, count)
            dropped += slower
        wanted = finalists if last else max(finalists, math.ceil(started / REDUCTION))
        kept, worse = _cut(kept, wanted, count)
        dropped += worse
        made.append(Rung(epochs=count, trained=started, kept=len(kept)))
        if not kept:
            break
    return kept, dropped, made


def _without_failures(runners: Sequence[Runner], epochs: int) -> tuple[list[Runner], list[Dropped]]:
    """Drop what failed."""
    good, dropped = list[Runner](), list[Dropped]()
    for runner in runners:
        if runner.trained.problem is not None:
            dropped.append(runner.left("training", runner.trained.problem, epochs))
        else:
            good.append(runner)
    return good, dropped


def _best_rates(runners: Sequence[Runner], epochs: int) -> tuple[list[Runner], list[Dropped]]:
    """Of candidates that cost the same, the one with the best metric; the first of equals."""
    best: dict[str, Runner] = {}
    for runner in runners:
        held = best.setdefault(runner.cost, runner)
        if _quality(runner) < _quality(held):
            best[runner.cost] = runner
    kept, dropped = [], []
    for runner in runners:
        winner = best[runner.cost]
        if winner is runner:
            kept.append(runner)
        else:
            rate = f"{winner.candidate.learning_rate:g}"
            reason = (
                f"the learning rate {rate} did no worse after {epochs} epochs, at the same cost"
            )
            dropped.append(runner.left("rate", reason, epochs, [winner.candidate.number]))
    return kept, dropped


def _quality(runner: Runner) -> tuple[float, float]:
    loss = runner.trained.loss
    return (runner.point()[0], math.inf if loss is None else loss)


def _cut(runners: Sequence[Runner], count: int, epochs: int) -> tuple[list[Runner], list[Dropped]]:
    points = [runner.point() for runner in runners]
    chosen = set(keep(points, min(count, len(runners))))
    dropped = []
    for index, runner in enumerate(runners):
        if index in chosen:
            continue
        by = [runners[i].candidate.number for i in chosen if beats(points[i], points[index])]
        reason = f"after {epochs} epochs others had a better metric, less memory or less work"
        dropped.append(runner.left("training", reason, epochs, by))
    return [runner for index, runner in enumerate(runners) if index in chosen], dropped
