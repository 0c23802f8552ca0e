"""What Optuna is asked, what it is told, and the search by a table against brute force."""

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack.fit.outcome import Point, beaten_by, choose, on_grid
from odtpack.fit.package_cache import Planned
from odtpack.fit.search import _Search
from odtpack.fit.search_context import FitRequest, Trained, Trial
from odtpack.fit.space import Candidate, Freeze
from odtpack.fit.study import Study, stopper
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.replay.executor import LocalExecutor
from tests.cli.conftest import assert_refused
from tests.fit.test_candidates import space_of
from tests.refused import refused
from tests.simulator.profiles import make_profile

EPOCHS = 3
FLOOR, CEILING = 0.6, 1_000_000_000


def candidate(number: int, *, rate: float = 0.1, optimizer: str = "sgd") -> Candidate:
    freeze = Freeze("nothing", (), ("w",), 10, False)
    return Candidate(number, 32, 32, freeze, optimizer, (), rate, None)


class TestStudy:
    def test_the_recipe_as_it_is_comes_first_and_nothing_twice(self, ground):
        candidates = space_of(ground, batch_sizes=(16,), optimizers=("sgd", "lion")).candidates()

        def asked(seed: int, size: int) -> list[int]:
            study = Study(candidates, 2, seed)
            found = list[int]()
            while group := study.ask(size):
                for each in group:
                    found.append(each.number)
                    study.tell(each, [each.learning_rate, each.micro_batch])
            return found

        order = asked(3, 8)
        assert sorted(order) == [each.number for each in candidates]
        assert asked(3, 8) == order != asked(4, 8)
        assert order[0] == asked(4, 8)[0] == 1
        # It learned: the half that was asked for first has the lower rates and batches.
        by_number = {each.number: each for each in candidates}
        costs = [by_number[number].learning_rate for number in order]
        half = len(costs) // 2
        assert np.mean(costs[:half]) < np.mean(costs[half:])

    def test_a_search_goes_on_where_it_ended(self, tmp_path):
        """The same candidates as without a break; what was under way is asked for again."""
        space = [candidate(n, rate=n / 10, optimizer=o) for o in ("sgd", "lion") for n in range(20)]
        space = [dataclasses.replace(each, number=n) for n, each in enumerate(space, 1)]

        def go(study: Study[Candidate], groups: int) -> list[int]:
            found = list[int]()
            for _ in range(groups):
                for each in study.ask(8):
                    found.append(each.number)
                    study.tell(each, [each.learning_rate], record={"n": each.number})
            return found

        whole = go(Study(space, 1, 7), 4)
        file = tmp_path / "study"
        first = go(Study(space, 1, 7, file, "x"), 2)
        Study(space, 1, 7, file, "x").ask(8)
        resumed = Study(space, 1, 7, file, "x")
        assert [record["n"] for _, record in resumed.told()] == first
        assert first + go(resumed, 2) == whole
        with refused("study-of-another-search"):
            Study(space, 1, 7, file, "y")

    @pytest.mark.parametrize("content", [b"{}\n", b"\xff\x00\n", b'{"op_code": 0}\n[1]\n'])
    def test_a_file_of_something_else(self, content, tmp_path):
        (tmp_path / "study").write_bytes(content)
        with refused("study-invalid"):
            Study([candidate(1)], 1, 0, tmp_path / "study", "x")


def test_what_is_worse_than_the_median_is_stopped():
    rivals = [(0.5, 0.4), (0.7, 0.5), (0.6, 0.3)]
    assert not stopper(rivals)(0, 0.6)
    assert stopper(rivals)(0, 0.61)
    stop = stopper(rivals)
    assert not stop(0, 0.55)
    assert stop(1, 0.5)
    assert not stopper(rivals[:1])(0, 9.0)


class Table:
    """Plans and trainings from a table, in place of packages and processes."""

    def __init__(self, peaks: dict[int, int], curves: dict[int, tuple[float, ...]]) -> None:
        self.peaks, self.curves = peaks, curves
        self.stopped = 0

    def plan(
        self, candidates: Sequence[Candidate], executor: object, *, on_done: object = None
    ) -> list[Planned]:
        return [
            Planned(f"{c.number}", self.peaks[c.number], 10, float(c.micro_batch))
            for c in candidates
        ]

    def map(
        self, function: object, items: Sequence[Trial], *, files: Sequence[Path] = (),
        on_done: Callable[[int, int], None],
    ) -> list[Any]:  # fmt: skip
        return [self.train(trial) for trial in items]

    def train(self, trial: Trial) -> Trained:
        curve = self.curves[int(trial.package)]
        stop = stopper(trial.rivals)
        for at, cost in enumerate(curve[:-1]):
            if stop(at, cost):
                self.stopped += 1
                return Trained(1 - cost, cost, curve=curve[: at + 1], stopped_after=at + 1)
        return Trained(1 - curve[-1], curve[-1], 1, curve=curve)


@pytest.mark.parametrize("seed", range(20))
def test_brute_force_agrees(seed, ground, files, tmp_path):
    """Curves cross: what is behind after an epoch may be the only one that keeps the floor."""
    random = np.random.default_rng(seed)
    wishes: dict[str, Any] = {
        "batch_sizes": (16,), "optimizers": ("sgd", "adamw")[: 1 + seed % 2],
        "learning_rates": (0.1, 0.01),
    }  # fmt: skip
    wished = space_of(ground, **wishes)
    space = dataclasses.replace(wished, freezes=ground.freezes[:2], storages=(None,))
    candidates = space.candidates()
    numbers = [each.number for each in candidates]
    peaks = {number: int(random.integers(400, 1600)) * 10**6 for number in numbers}
    level = random.uniform(0.4, 1.0)
    ends = {number: float(np.round(random.uniform(level - 0.2, 1), 2)) for number in numbers}
    starts = random.permutation([*ends.values()])  # what is seen early says nothing of the end
    begun = zip(numbers, starts, strict=True)
    table = Table(peaks, {n: (float(start), float(start), ends[n]) for n, start in begun})
    budgets = f'[budgets]\npeak_memory = "{CEILING} B"\naccuracy_floor = {FLOOR}\n'
    request = FitRequest(
        files.settings, files.data, (make_profile("phone", None),),
        budgets=parse_budgets(budgets.encode()), epochs=EPOCHS, trials=len(numbers),
        finalists=len(numbers), seed=seed,
    )  # fmt: skip
    search = _Search(request, ground, tmp_path, LocalExecutor(), table, lambda now: None)
    search.__dict__["_packages"] = table
    found = search.finalists(search.tried(candidates))

    def point(number: int) -> Point:
        micro = candidates[number - 1].micro_batch
        steps = ground.schedule(micro, 16 // micro, EPOCHS).steps_per_epoch
        return (ends[number], peaks[number], micro * steps)

    fitting = [n for n in numbers if peaks[n] * 1.03 <= CEILING]
    keeping = [n for n in fitting if 1 - ends[n] >= FLOOR]
    chosen = [each.candidate.number for each in found]
    assert chosen, "something is always simulated"
    if keeping:
        assert set(chosen) <= set(keeping)
        best = [n for n in keeping if not any(_beats(point(o), point(n)) for o in keeping)]
        by_number = {each.number: each for each in search.left}
        stopped = {n for n in best if n in by_number and by_number[n].stage == "training"}
        assert {*best} - stopped <= {*chosen}
    elif fitting:
        # The first shown misses the floor by least: no training was cut short for that.
        assert chosen[0] == min(fitting, key=point)
    assert len({*chosen, *(each.number for each in search.left)}) == len(numbers)


def _beats(one: Point, other: Point) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


def test_without_the_extra_its_name_is_the_first_error(run, files, monkeypatch):
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert_refused(run("fit", files.model), "optuna-missing", "pip install optuna")
    fleet = run("fleet", "fit", files.folder, "--data", files.data, "--fleet", "none.toml")
    assert_refused(fleet, "optuna-missing", "pip install optuna")


# The Pareto set against its definition, on points with many ties.

COSTS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, math.inf])
POINTS = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.tuples(*[COSTS] * n), min_size=1, max_size=12)
)


def better(one: Point, other: Point) -> bool:
    """The definition, spelled out."""
    somewhere = False
    for a, b in zip(one, other, strict=True):
        if a > b:
            return False
        somewhere = somewhere or a < b
    return somewhere


@given(POINTS)
def test_every_point_but_the_set_is_beaten_by_a_member_of_it(points):
    best = [i for i, p in enumerate(points) if not any(better(q, p) for q in points)]
    for index, by in enumerate(beaten_by(points)):
        assert by == [i for i in best if better(points[i], points[index])]
        assert bool(by) == (index not in best)
    assert choose(points, len(points)) == best


def test_of_a_large_set_each_cost_keeps_its_best():
    points = [(1.0, 9.0, 5.0), (2.0, 8.0, 4.0), (3.0, 7.0, 6.0), (4.0, 1.0, 7.0), (5.0, 6.0, 1.0)]
    assert choose(points, 3) == [0, 3, 4]
    assert choose(points, 4) == [0, 1, 3, 4]


@given(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12), st.sampled_from([0.0, 0.01, 0.05]))
def test_a_grid_keeps_the_order_and_tells_apart_what_differs_by_more(one, other, tolerance):
    low, high = sorted((one, other))
    assert on_grid(low, tolerance) <= on_grid(high, tolerance)
    if high > low * (1 + tolerance) * (1 + 1e-9):
        assert on_grid(low, tolerance) < on_grid(high, tolerance)


def test_a_grid_puts_nothing_first_and_the_unknown_last():
    assert on_grid(0.0, 0.05) < on_grid(1e-300, 0.05)
    assert on_grid(math.nan, 0.05) == on_grid(math.inf, 0.0) == math.inf
    assert on_grid(100.0, 0.05) == on_grid(100.5, 0.05)
