"""Who goes on from round to round, with trainings that are made up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from odtpack.fit.halving import Runner, halve, rungs
from odtpack.fit.package_cache import Planned
from odtpack.fit.search_context import Trained
from odtpack.fit.space import Candidate, Freeze


def runner(number: int, *, peak: int = 100, work: float = 1.0, cost: str = "") -> Runner:
    freeze = Freeze("nothing", (), ("w",), 10, False)
    candidate = Candidate(number, 32, 32, freeze, "sgd", (), number / 100, None)
    return Runner(candidate, Planned("", peak, 10, work), cost or f"{number}", 8)


class Trainer:
    """Trains by a table of final accuracies, approached as the epochs grow."""

    def __init__(self, accuracy: dict[int, Trained | float]) -> None:
        self.accuracy = accuracy
        self.calls: list[tuple[int, list[int]]] = []

    def __call__(self, runners: Sequence[Runner], epochs: int) -> list[Trained]:
        self.calls.append((epochs, [each.candidate.number for each in runners]))
        found = []
        for each in runners:
            end = self.accuracy[each.candidate.number]
            if isinstance(end, Trained):
                found.append(end)
            else:
                found.append(Trained(end * epochs / (epochs + 1), 1 - end, each.planned.peak_bytes))
        return found


@pytest.mark.parametrize(
    ("count", "epochs", "finalists", "expected"),
    [
        (24, 1, 6, [1]),
        (24, 3, 6, [1]),
        (24, 9, 6, [1, 3]),
        (54, 27, 6, [3, 9]),
        (54, 27, 2, [1, 3, 9]),
        (2, 9, 6, [3]),
        (100, 2, 1, [1]),
    ],
)
def test_rungs(count: int, epochs: int, finalists: int, expected: list[int]) -> None:
    assert rungs(count, epochs, finalists) == expected


def test_a_third_goes_on_and_the_rest_is_told_who_was_better() -> None:
    trainer = Trainer({n: n / 10 for n in range(1, 10)})
    kept, left, made = halve([runner(n) for n in range(1, 10)], [1, 3], 1, trainer)
    assert trainer.calls == [(1, list(range(1, 10))), (3, [7, 8, 9])]
    assert [each.candidate.number for each in kept] == [9]
    assert [(rung.epochs, rung.trained, rung.kept) for rung in made] == [(1, 9, 3), (3, 3, 1)]
    by = {each.number: each for each in left}
    assert (by[6].stage, by[6].epochs, by[6].beaten_by) == ("training", 1, [7, 8, 9])
    assert by[6].metric == pytest.approx(0.3)
    assert (by[8].epochs, by[8].beaten_by) == (3, [9])


def test_worse_metric_with_less_memory_or_work_goes_on() -> None:
    runners = [runner(1, peak=100), runner(2, peak=50), runner(3, work=0.5), runner(4, peak=101)]
    trainer = Trainer({1: 0.9, 2: 0.5, 3: 0.4, 4: 0.8})
    kept, left, _ = halve(runners, [1], 3, trainer)
    assert [each.candidate.number for each in kept] == [1, 2, 3]
    assert [(each.number, each.beaten_by) for each in left] == [(4, [1])]


def test_of_rates_that_cost_the_same_the_best_goes_on() -> None:
    runners = [runner(1, cost="a"), runner(2, cost="a"), runner(3, cost="a"), runner(4, cost="b")]
    kept, left, _ = halve(runners, [1], 4, Trainer({1: 0.5, 2: 0.7, 3: 0.7, 4: 0.1}))
    assert [each.candidate.number for each in kept] == [2, 4]
    assert [(each.number, each.stage, each.beaten_by) for each in left] == [
        (1, "rate", [2]),
        (3, "rate", [2]),
    ]


def test_failures_end_a_candidate() -> None:
    table: dict[int, Trained | float] = {
        1: Trained(problem="replay-crashed: it did"),
        2: 0.5,
        3: 0.9,
        4: Trained(None, None, 90, "the loss was not finite"),
    }
    runners = [runner(n) for n in (1, 2, 3, 4)]
    kept, left, _ = halve(runners, [1], 4, Trainer(table))
    assert [each.candidate.number for each in kept] == [2, 3]
    reasons = {each.number: each.reason for each in left}
    assert reasons[1] == "replay-crashed: it did"
    assert reasons[4] == "the loss was not finite"


def test_all_failed_leaves_nobody() -> None:
    trainer = Trainer({1: Trained(problem="killed"), 2: Trained(problem="killed")})
    kept, left, made = halve([runner(1), runner(2)], [1, 3], 2, trainer)
    assert kept == []
    assert len(left) == 2
    assert [rung.kept for rung in made] == [0]


def test_without_a_metric_the_loss_decides() -> None:
    table: dict[int, Trained | float] = {
        1: Trained(None, 0.5, 100),
        2: Trained(None, 0.2, 100),
        3: Trained(None, None, 100),
    }
    kept, _, _ = halve([runner(n) for n in (1, 2, 3)], [1], 1, Trainer(table))
    assert [each.candidate.number for each in kept] == [2]


def test_work_is_that_of_an_epoch() -> None:
    """A larger batch has more work in a step and fewer steps."""
    point = runner(1, work=3.0).point()
    assert point[2] == 3.0 * 8
