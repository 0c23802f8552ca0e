"""The fidelity benchmark's arithmetic: predictions and comparisons on made-up numbers."""

import dataclasses
import json
import math

import pytest

from benchmarks.fidelity import latency
from benchmarks.fidelity.latency import Between, Curves, Node, Prediction, Row, compare, summarize
from benchmarks.fidelity.models import CASES, build
from benchmarks.published.__main__ import NETWORKS, count
from benchmarks.published.engine import CALIBRATION, FOLDER, counted, fitted, line, published
from odtpack_simulator.memory.operator_work import Work

FLAT = Curves([(1e3, 1e-8), (1e9, 1e-2)], [(1e3, 1e-7), (1e9, 0.1)])
"""100 GFLOPS and 10 GB/s at any size."""


class TestCurves:
    def test_rate_between_sizes(self):
        points = [(10.0, 1.0), (1000.0, 10.0)]  # 10 and 100 per second
        assert latency.rate(points, 1) == 10
        assert latency.rate(points, 100) == pytest.approx(55)
        assert latency.rate(points, 1e6) == 100

    def test_the_slower_of_both(self):
        assert FLAT.seconds(Work(1e8, 1e6)) == pytest.approx(1e-3)
        assert FLAT.seconds(Work(1e6, 1e7)) == pytest.approx(1e-3)
        assert FLAT.seconds(Work(None, 0)) == 0

    def test_best_of_turns_without_what_a_run_costs(self):
        turns = [
            {"products": [(8.0, 9e-6)], "copies": [(80.0, 5e-6)], "least": 3e-6},
            {"products": [(8.0, 7e-6)], "copies": [(80.0, 2e-6)], "least": 4e-6},
        ]
        found = Curves.best(turns, node_us=1.0)
        assert found.products == [(8.0, pytest.approx(5e-6))]  # 7 µs less 2 of starting
        assert found.copies == [(80.0, pytest.approx(1e-6))]  # never less than a node takes


class TestCalibratedNodes:
    nodes = (Node("Gemm", 4000.0, Work(200e6, 1e6)), Node("Slice", 2000.0, Work(None, 5e6)))

    def test_nodes_and_the_rest_sum_to_the_step(self):
        assert latency.calibrated_nodes(self.nodes, 10, (0.0, 0.0)) == ([4000, 2000], 4000)

    def test_operators_slowed_down_by_the_profile(self):
        """Six milliseconds of operators in a step of three: each counts half."""
        assert latency.calibrated_nodes(self.nodes, 3, (0.0, 0.0)) == ([2000, 1000], 0)


def test_another_process_takes_the_calibrated_step():
    turns = {"calibrated": {"steps": [(10.0, 9.9), (10.4, 10.3), (90.0, 9.4)]}}
    prediction = Prediction({"calibrated": [*TestCalibratedNodes.nodes]}, (0.5, 0.1), [turns])
    for clock, step_ms in (("wall", 10.2), ("processor", 9.9)):
        assert prediction.of("process", "twin", turns, clock) == pytest.approx(step_ms)


class TestBetween:
    def test_linear_in_the_work_through_both_sizes(self):
        """A node of 1 ms + 1 ms per 100 MFLOP, one that is always the same, a rest of 2 ms."""

        def nodes(mflops: float) -> list[Node]:
            product = Node("Gemm", 1000 + 10 * mflops, Work(1e6 * mflops, 1e3))
            return [product, Node("Mul", 500.0, Work(None, 1e5))]

        works = [node.work for node in nodes(150)]
        small, large = (nodes(100), 4.5), (nodes(400), 7.5)
        found = Between(small, large, (0.0, 0.0), FLAT, works).step_ms()
        assert found == pytest.approx(2 + 1 + 1.5 + 0.5)

    def test_ends_at_the_calibrated_steps(self):
        small = ([Node("Conv", 900.0, Work(1e8, 1e3))], 1.3)
        large = ([Node("Conv", 1900.0, Work(3e8, 1e3))], 2.3)
        for nodes, step_ms in (small, large):
            works = [node.work for node in nodes]
            between = Between(small, large, (0.5, 0.0), FLAT, works)
            assert between.step_ms() == pytest.approx(step_ms)

    def test_threads_gain_what_each_node_gained_at_the_larger_size(self):
        """Half for the product, nothing for what runs in one thread, and what that leaves out."""

        def nodes(product: float, sliced: float) -> list[Node]:
            first = Node("Gemm", product, Work(2e5 * product, 1e3))
            return [first, Node("Slice", sliced, Work(None, 1e5))]

        small, large = (nodes(1000, 200), 1.2), (nodes(3000, 200), 3.2)
        works = [node.work for node in nodes(2000, 200)]
        for outside in (1.0, 1.1):
            two = (nodes(1500, 150), outside * (1.5 + 0.2))
            found = Between(small, large, (0.0, 0.0), FLAT, works).threaded_ms(two)
            assert found == pytest.approx(outside * (1.0 + 0.2))


class TestComparing:
    def test_steps_that_waited_are_not_compared(self):
        steps = [(10.0, 10.0), (30.0, 10.0), (10.1, 10.0)]
        assert latency.which_clock(steps) == "wall"
        assert latency.times(steps, "wall") == [10.0, 10.1]

    def test_the_processor_s_time_where_most_waited(self):
        steps = [(25.0, 9.0), (30.0, 10.0), (10.0, 10.0)]
        assert latency.which_clock(steps) == "processor"
        assert latency.times(steps, "processor") == [9.0, 10.0, 10.0]

    def test_each_round_with_its_own_steps(self):
        """The second round ran at half the speed, and was calibrated so."""
        measured = [[(10.2, 10.2), (11.8, 11.8)], [(20.0, 20.0), (21.0, 21.0), (90.0, 20.0)]]
        found = compare(("m", "between", 8, 1, "wall"), [11.0, 20.5], measured, 0.5)
        assert found.error == pytest.approx(0)
        assert found.within == 1
        assert (found.steps, found.interrupted) == (4, 1)
        assert found.predicted_ms == pytest.approx(15.75)
        assert found.measured_ms == pytest.approx(15.9)

    def test_off_by_a_quarter(self):
        measured = [[(10.0, 10.0), (8.0, 8.0)]]
        found = compare(("m", "between", 8, 1, "wall"), [10.0], measured, 0.0)
        assert found.error == pytest.approx(1 / 9)
        assert found.within == 0.5

    def test_nothing_to_compare(self):
        found = compare(("m", "between", 8, 1, "wall"), [10.0], [[(20.0, 8.0)]], 0.0)
        assert found.steps == 0
        assert math.isnan(found.error)
        assert summarize([found]) == []


def made(group: str, error: float, within: float, steps: int = 100) -> Row:
    return Row("m", group, 8, 1, "wall", 10, 10, error, within, steps, 0, 0.01)  # type: ignore[arg-type]


def test_summary_tells_groups_apart():
    rows = [made("process", 0.0, 1.0), made("between", -0.2, 0.0), made("between", 0.06, 1.0, 300)]
    process, batch, every = summarize(rows)
    assert (process.group, process.median_error, process.cases_within) == ("process", 0.0, 1.0)
    assert (batch.group, batch.cases) == ("between", 2)
    assert batch.median_error == pytest.approx(0.13)
    assert batch.cases_within == 0.5
    assert batch.steps_within == pytest.approx(0.75)
    assert batch.alike_within == pytest.approx(0.5)
    assert every.group == "all"
    assert every.median_error == pytest.approx(0.06)
    assert {row.group for row in rows} < set(latency.GROUPS)


def test_every_row_is_printed():
    rows = [made("process", -0.031, 0.97), made("between", 0.5, 0.25)]
    shown = [dict(zip(latency.TITLES, latency.cells(row), strict=True)) for row in rows]
    assert shown[0]["error:"] == "-3.1%"
    assert [each["within 10 %:"] for each in shown] == ["97%", "25%"]
    assert shown[1]["error:"] == "+50.0%"
    assert len([line for line in latency.summary_lines(rows) if "cases" in line]) == 3


def test_a_model_for_real(tmp_path):
    """Six processes take turns; what they measured answers every question."""
    case = CASES["tabular"]
    effort = latency.Effort(rounds=2, seconds=0.01, scaling=0.0005, profiled=2)
    rows = latency.measure_model(build(case, tmp_path), effort)
    assert [(row.group, row.batch_size, row.threads) for row in rows] == [
        ("process", 256, 1), ("between", 64, 1), ("threads", 64, 2),
    ]  # fmt: skip
    for row in rows:
        if row.group == "threads" and math.isnan(row.predicted_ms):
            assert row.steps == 0  # two virtual cores of this machine share one
            continue
        assert row.predicted_ms > 0
        assert row.steps + row.interrupted >= 2 * effort.rounds


# Published trainings on phones: what lies between two batch sizes, and which intervals hold.


def parts() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in published():
        found.setdefault(row.network, {})[row.batch] = row.step_ms
    return found


def test_every_row_is_of_a_network_that_is_built_and_simulated():
    rows = published()
    simulated = json.loads((FOLDER / "simulated.json").read_text())
    assert len(rows) == 25
    assert {row.network for row in rows} == set(NETWORKS) == set(counted())
    for row in rows:
        assert str(row.batch) in simulated[row.network]["step_ms"]


def test_held_out_networks_are_inside_of_a_narrow_interval():
    """MobileNet and SqueezeNet took no part in the fit, which changing their rows shows."""
    engine, held = fitted(), [row for row in published() if row.held_out]
    assert {row.network for row in held} == {"Mobilenet", "Squeezenet"}
    inside = 0
    for row in held:
        low, _, high = engine.step_ms(row.network, row.batch)
        assert high / low <= 5
        inside += low <= row.step_ms <= high
    assert inside >= 0.8 * len(held)
    assert fitted(CALIBRATION).factors == engine.factors
    assert fitted(("Lenet", "GoogLenet")).factors != engine.factors


def test_bracketing_beats_drawing_on_from_small_batches():
    """Within 10 % of what was published, of all rows that are not an end of the line."""
    bracketed, drawn_on = [], []
    for of in parts().values():
        ends = {size: of[size] for size in (1, 16)}
        small = {size: of[size] for size in (1, 2)}
        bracketed += [line(ends, size) / of[size] - 1 for size in (2, 4, 8)]
        drawn_on += [line(small, size) / of[size] - 1 for size in (4, 8, 16)]
    good, poor = (sum(abs(e) <= 0.1 for e in errors) for errors in (bracketed, drawn_on))
    assert good >= 12
    assert good > poor + 3
    assert max(map(abs, bracketed)) < 0.2


@pytest.mark.parametrize(("name", "parameters", "products"), [
    # By hand from the sources' layers: weights and biases; multiply-adds of one sample.
    ("Lenet", 520 + 25_050 + 320_400 + 4_010, 288_000 + 1_600_000 + 320_000 + 4_000),
    ("Alexnet", 30_006_666, 989_113_472),
    ("Mobilenet", 3_504_872 + 1281, None),  # torchvision's, and a class more
])  # fmt: skip
def test_networks_are_those_of_the_sources(name, parameters, products):
    found = count(name)
    assert found.parameters == 4 * parameters
    assert products is None or found.flops == 2 * products
    assert dataclasses.asdict(found) == dataclasses.asdict(counted()[name])
