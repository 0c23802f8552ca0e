"""Results that are valid and absurd: they are judged and compared without an exception."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack_simulator.figures.compare import Comparison, compare
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets, suggest_budget
from odtpack_simulator.figures.simulated import METRICS
from odtpack_simulator.replay.paired_loss import Groups, held_out_fall, pooled, student_t
from odtpack_simulator.reports.comparison import render_markdown, render_text
from odtpack_simulator.result import (
    EvaluationPoint,
    HeldOutFall,
    MemoryBreakdown,
    Policy,
    PredictedMemory,
    SimulationResult,
)
from odtpack_simulator.simulation import simulate
from odtpack_simulator.values.units import Interval
from tests import zoo
from tests.cli.conftest import arrays
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result
from tests.simulator.judged import check, judged
from tests.sweep import split_rows

BASE = make_result(["google/pixel-8a"])
LARGEST = 1.7e308
AMOUNTS = st.sampled_from([0.0, 5e-324, 1e-9, 1.0, 1e6, 1e300, LARGEST])
SIGNED = st.sampled_from([-LARGEST, -1.0, -5e-324, 0.0, 5e-324, 0.5, 1.0, LARGEST])
COUNTS = st.sampled_from([0, 1, 2, 7, 64, 2**62])
_UNITS = {"B": "B", "ms": "ms", "s": "s", "J": "J", "%": "%"}


def _value(key: str, absolute: bool) -> str:
    metric = METRICS[key]
    sign = "-" if metric.better == "higher" else "+"
    if not absolute:
        return f'{key} = "{sign}{"1e300" if sign == "+" else "99.9"} %"'
    zero = "0" if metric.unit == "1" else f'"0 {_UNITS[metric.unit]}"'
    return f'{key} = ["{sign}1 %", {zero}]'


BUDGETS = "\n".join([
    "[budgets]", *(_value(key, True) for key in METRICS),
    "[class.android]", *(_value(key, False) for key in list(METRICS)[::2]),
])  # fmt: skip


@st.composite
def results(draw: st.DrawFn) -> SimulationResult:
    def known() -> Interval:
        low, typical, high = sorted(draw(st.tuples(AMOUNTS, AMOUNTS, AMOUNTS)))
        return Interval(low=low, typical=typical, high=high)

    def interval() -> Interval | None:
        return None if draw(st.booleans()) else known()

    device = BASE.devices[0]
    latency = {key: interval() for key in ("step_ms", "p90_ms")} | {"first_step_ms": known()}
    whole = {
        key: interval()
        for key in type(device.campaign).model_fields
        if isinstance(getattr(device.campaign, key), Interval)
    }
    size = draw(COUNTS)
    memory = {
        "limit_bytes": draw(st.one_of(st.none(), COUNTS)),
        "measured_peak_bytes": draw(st.one_of(st.none(), COUNTS)),
        "warning_bytes": draw(st.one_of(st.none(), COUNTS)),
        "entitled_limit_bytes": draw(st.one_of(st.none(), COUNTS)),
        "outcome": draw(st.sampled_from(["killed", "not judged"])),
    }
    parts = MemoryBreakdown(
        parameters=size // 8, gradients=size // 8, optimizer_state=size // 8,
        inputs=size // 8, activations=size // 8, session=size // 8,
    )  # fmt: skip
    metric, loss = draw(SIGNED), draw(SIGNED)
    training = {
        "metric_after": metric,
        "metric_before": draw(SIGNED),
        "metric_interval": tuple(sorted((metric, draw(SIGNED)))),
        "eval_loss_after": loss,
        "curve": [EvaluationPoint(step=i, loss=draw(SIGNED), metric=metric) for i in range(3)],
    }
    data = {key: draw(COUNTS) for key in ("steps", "batch_size", "epochs", "held_out_samples")}
    sizes = ("trainable_parameters", "total_parameters", "parameter_bytes", "package_bytes")
    package = {key: draw(COUNTS) for key in sizes}
    endless = draw(st.sampled_from([None, "typical", "worst case"]))
    whole |= {"endless": endless}
    latency |= {"not_judged": "unknown"}
    result = on_devices(BASE, latency=latency, campaign=whole, memory=memory)
    result = changed(
        result, package=package, data=data,
        policy=Policy(
            state=draw(st.sampled_from(["foreground", "background"])),
            save_every=draw(st.sampled_from([None, 1, 2**31])),
            sessions_per_day=draw(st.sampled_from([5e-324, 1.0, 1440.0])),
        ),
        training=training, latency_host={"p50_ms": known(), "p90_ms": known()},
        memory={"predicted": PredictedMemory(peak_bytes=parts.total, breakdown=parts)},
    )  # fmt: skip
    return SimulationResult.model_validate_json(result.to_json())  # as a file brings it


@given(st.data())
@settings(max_examples=100, phases=[Phase.generate], deadline=None, derandomize=True)
def test_nothing_that_a_file_can_hold_is_an_exception(data):
    base, head = data.draw(_hidden(results())), data.draw(_hidden(results()))
    budgets = parse_budgets(BUDGETS.encode())
    found = judge(head.result, budgets, baseline=base.result)
    assert SimulationResult.model_validate_json(found.to_json()) == found
    comparison = compare(base.result, head.result, budgets)
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison
    assert render_text(comparison)
    assert render_markdown(comparison)
    parse_budgets(suggest_budget(head.result).encode())


class _Hidden:
    """A result that is not printed whole when it is drawn."""

    def __init__(self, result: SimulationResult) -> None:
        self.result = result

    def __repr__(self) -> str:
        device = self.result.devices[0]
        return f"{device.latency!r:.500} {device.memory!r:.500}"


def _hidden(strategy: st.SearchStrategy[SimulationResult]) -> st.SearchStrategy[_Hidden]:
    return strategy.map(_Hidden)


# A training that teaches nothing is never green, and few samples are never made to say more.


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 29, 63, 127])
def test_student_points_are_those_of_scipy(freedom):
    from scipy import stats  # takes a second: not while tests are collected

    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.95, freedom), rel=1e-9)


@pytest.mark.parametrize("count", [2, 5, 40])
def test_the_interval_is_that_of_a_paired_t_test(count):
    from scipy import stats

    random = np.random.default_rng(count)
    before, after = random.normal(2, 1, count), random.normal(1.5, 1, count)
    fall = held_out_fall([groups(before)], [groups(after)])
    expected = stats.ttest_rel(before, after).confidence_interval(0.9)
    assert (fall.low, fall.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert fall.fall == pytest.approx(float(np.mean(before - after)))


def test_a_group_counts_as_its_samples():
    """Five samples as groups of one, or some of them together: the same mean fall."""
    falls, sizes = [0.5, 0.1, 0.4, 0.2], [1, 1, 1, 2]
    fall = held_out_fall([(falls, sizes)], [([0.0] * 4, sizes)])
    assert fall.fall == pytest.approx((0.5 + 0.1 + 0.4 + 2 * 0.2) / 5)
    assert (fall.groups, fall.samples) == (4, 5)


@pytest.mark.parametrize("sizes", [[1] * 8, [4] * 11 + [1]])
def test_chance_passes_an_end_in_one_of_twenty(sizes):
    """Drawn losses that differ by nothing but chance: 5 % above the interval, 5 % below."""
    random = np.random.default_rng(3)
    draws, root = 4000, np.sqrt(sizes)
    above = below = 0
    for _ in range(draws):
        differences = list(random.normal(0, 1, len(sizes)) / root)
        fall = held_out_fall([(differences, sizes)], [([0.0] * len(sizes), sizes)])
        above += fall.low > 0
        below += fall.high < 0
    for count in (above, below):
        assert 0.04 < count / draws < 0.06


def test_pooling_keeps_the_mean():
    losses, sizes = list(np.random.default_rng(1).normal(1, 1, 1001)), [8] * 1000 + [3]
    means, counts = pooled(losses, sizes)
    assert len(means) == 128
    assert sum(counts) == sum(sizes)
    expected = np.average(losses, weights=sizes)
    assert np.average(np.array(means, float), weights=counts) == pytest.approx(expected)


def test_the_smallest_groups_that_both_have_are_compared():
    coarse, fine = ([1.0, 1.0], [4, 4]), ([1.0] * 8, [1] * 8)
    both = held_out_fall([coarse, fine], [coarse, fine])
    assert (both.groups, held_out_fall([coarse, fine], [coarse]).groups) == (8, 2)


def test_without_two_finite_groups_there_is_no_interval():
    assert held_out_fall([], []) is None
    assert held_out_fall([([1.0], [3])], [([1.0], [3])]) is None
    assert held_out_fall([([1.0, 2.0], [1, 1])], [([1.0, None], [1, 1])]) is None


@pytest.mark.parametrize(("groups", "fall", "half", "status", "words"), [
    (60, 0.5, 0.1, "pass", "± 0.1 would be noise"),
    (60, 0.05, 0.1, "fail", "nothing shows that the model learned"),
    (60, -0.5, 0.1, "fail", "does not improve the model"),
    (60, 0.0, 0.0, "fail", "did not change"),
    (60, 0.002, 0.0001, "fail", "less than a thousandth"),
    (8, 0.5, 0.1, "pass", "fell by 0.5"),
    (8, 0.05, 0.1, "not judged", "hold out more samples"),
    (8, -0.5, 0.1, "fail", "rose by 0.5"),
    (4, 0.5, 0.1, "not judged", "too few to tell"),
])  # fmt: skip
def test_only_a_fall_beyond_its_noise_passes(groups, fall, half, status, words):
    found = HeldOutFall(groups=groups, samples=880, fall=fall, low=fall - half, high=fall + half)
    learns = check(judge(with_fall(found)), "learns")
    assert learns.status == status
    assert words in learns.message
    assert learns.level == "error"
    assert (learns.advice is not None) == (status == "fail")


def test_a_loss_that_is_always_zero_fails_however_few_the_samples():
    result = with_fall(None)
    zero = {"eval_loss_before": 0.0, "eval_loss_after": 0.0}
    learns = check(judge(changed(result, training=zero)), "learns")
    assert (learns.status, learns.advice is not None) == ("fail", True)
    assert "exactly 0" in learns.message


def test_budgets_can_switch_it_off():
    result = with_fall(None)
    assert check(judge(result), "learns").status == "not judged"
    switched = judged(result, "[budgets]\nlearns = false\n")
    assert "learns" not in [each.metric for each in switched.checks]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learns") / "package"
    build_package(zoo.cnn(size=8, width=(4, 8), classes=3), folder, loss="cross_entropy")
    return folder


@pytest.mark.parametrize(
    ("samples", "rate", "status", "groups"),
    split_rows(
        [(180, 0.003, "pass", 36), (180, 0.0, "fail", 36), (180, 1e-8, "fail", 36),
         (20, 0.003, "not judged", 4), (600, 0.003, "pass", 120)],
        lambda samples, rate, status, groups: samples < 600 and rate > 0,
    ),
)  # fmt: skip
def test_a_model_that_learned_nothing_fails(package, tmp_path, samples, rate, status, groups):
    result = judge(run(package, tmp_path, arrays(samples), rate))
    learns = check(result, "learns")
    assert learns.status == status, learns.message
    assert result.verdict == status
    fall = result.training.held_out_fall
    assert fall.groups == groups
    before, after = result.training.eval_loss_before, result.training.eval_loss_after
    assert fall.fall == pytest.approx(before - after, abs=1e-5)


def test_a_loss_with_negatives_from_its_batch_is_compared_in_its_batches(tmp_path):
    """Alone in its batch a sample has no negatives and no loss: it shows nothing."""
    package = tmp_path / "package"
    model, reads = zoo.mlp(sizes=(16, 16)), ("output", "input")
    build_package(model, package, loss="info_nce", loss_inputs=reads)
    data = {"input": np.random.default_rng(0).normal(size=(640, 16)).astype(np.float32)}
    fall = run(package, tmp_path, data, 0.001).training.held_out_fall
    assert (fall.groups, fall.samples) == (128 // 16, 128)


def run(package: Path, folder: Path, data: dict[str, np.ndarray], rate: float) -> SimulationResult:
    np.savez(folder / "data.npz", allow_pickle=False, **data)
    options = {"batch_size": 16, "epochs": 3, "learning_rate": rate, "seed": 0}
    return simulate(package, folder / "data.npz", [], **options)


def groups(losses: np.ndarray) -> Groups:
    return [float(loss) for loss in losses], [1] * len(losses)


def with_fall(fall: HeldOutFall | None) -> SimulationResult:
    return changed(make_result([]), training={"held_out_fall": fall}, interruption=None)
