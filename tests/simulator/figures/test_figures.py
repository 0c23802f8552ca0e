"""Figures, and judging over them alone: no result is needed."""

import itertools
import math
from typing import Any

import pytest

from odtpack_simulator.figures.judge import NO_BASELINE, limit_checks
from odtpack_simulator.figures.limits import Limit, suggest_budget
from odtpack_simulator.figures.metric import Metric, of_errors
from odtpack_simulator.figures.simulated import METRICS, all_figures
from odtpack_simulator.fleet.judge import METRICS as FLEET_METRICS
from odtpack_simulator.result import Subject
from odtpack_simulator.values.figure import Basis, Check, Figure, Verdict, verdict_of
from tests.simulator.changed import changed
from tests.simulator.factory import make_result


def metric(**changes: Any) -> Metric[None]:
    declared: dict[str, Any] = {
        "key": "ink", "title": "Ink", "topic": "Package", "unit": "B", "scope": "device",
        "words": "it takes {}", "meaning": "Ink.", "example": "1 MB",
        "read": lambda _: Figure(value=1.0), "advise": lambda _, limit: f"use less than {limit:g}",
    }  # fmt: skip
    return Metric(**(declared | changes))


@pytest.mark.parametrize(("loss", "held", "words"), [
    ("mse", 8, "the package trains no tokens"),
    ("next_token", 0, "no samples are held out"),
    ("next_token", 8, "8 held-out samples are fewer than a batch, which has 64"),
    ("next_token", 80, "no perplexity at the end"),
])  # fmt: skip
def test_why_there_is_no_perplexity(loss, held, words):
    result = make_result()
    data, training = {"held_out_samples": held}, {"curve": []}
    result = changed(result, package={"loss": loss}, data=data, training=training)
    assert METRICS["perplexity"].read(Subject(result)).reason == words


def judged(
    figure: Figure, limit: float, base: Figure | str = NO_BASELINE, kind: Any = "absolute",
    **of: Any,
) -> Check:  # fmt: skip
    declared = metric(**of)
    (check,) = limit_checks(
        {"ink": declared},
        [figure.model_copy(update={"metric": "ink", "unit": declared.unit})],
        {"ink": [Limit(limit, kind, location="budgets.toml:3")]},
        base if isinstance(base, str) else [base.model_copy(update={"metric": "ink", "unit": "B"})],
        None,
    )
    return check


@pytest.mark.parametrize(("figure", "status", "level"), [
    (Figure(value=10), "pass", "error"),
    (Figure(value=11), "fail", "error"),
    (Figure(value=9, low=8, high=10), "pass", "error"),
    (Figure(value=9, low=8, high=11), "fail", "warn"),
    (Figure(value=12, low=8, high=13), "fail", "error"),
    (Figure(value=None, reason="nobody counted"), "not judged", "error"),
    # A lower bound shows that a limit is broken, and never that it is kept.
    (Figure(value=9, low=9, reason="without the cap"), "not judged", "error"),
    (Figure(value=11, low=11, reason="without the cap"), "fail", "error"),
])  # fmt: skip
def test_a_figure_against_a_limit_of_ten(figure, status, level):
    check = judged(figure, 10)
    assert (check.status, check.level, check.actual) == (status, level, figure.value)
    assert (check.advice == "use less than 10") is (check.status == "fail")
    assert check.budget_location == "budgets.toml:3"
    if figure.reason:
        assert figure.reason in check.message


@pytest.mark.parametrize(("value", "status"), [(10, "pass"), (9, "fail"), (None, "not judged")])
def test_a_floor_of_ten(value, status):
    assert judged(Figure(value=value), 10, better="higher").status == status


def test_what_never_happens_keeps_no_limit():
    check = judged(Figure(value=None, never=True, reason="it is never dry"), 10)
    assert (check.status, check.message) == ("fail", "it is never dry")


@pytest.mark.parametrize(("base", "status", "said"), [
    (Figure(value=100), "fail", "+5 % against the 100 B of the baseline"),
    (Figure(value=110), "pass", "of the baseline"),
    (Figure(value=100, kind="measured"), "not judged", "measured, here counted"),
    (Figure(value=100, basis=Basis(host="a slow one")), "not judged", "another host"),
    (Figure(value=100, basis=Basis(profile="0")), "not judged", "measure the baseline again"),
    (Figure(value=None, reason="lost"), "not judged", "not known of the baseline: lost"),
    ("there is none", "not judged", "there is none"),
])  # fmt: skip
def test_a_figure_against_a_baseline(base, status, said):
    check = judged(Figure(value=110), 5, base, "percent")
    assert check.status == status
    assert said in check.message


def test_two_means_lie_apart_by_chance_as_their_errors_say():
    one, other = (Figure(value=5, noise=(5 - each, 5, 5 + each)) for each in (3.0, 4.0))
    assert of_errors(one, other) == pytest.approx(math.sqrt(3**2 + 4**2))
    assert of_errors(one, Figure(value=5)) is None


def test_every_figure_says_what_it_is_of():
    figures = all_figures(make_result(["google/pixel-8a", "raspberrypi/pi-4"]))
    assert len(figures) == sum(2 if each.scope == "device" else 1 for each in METRICS.values())
    for figure in figures:
        declared = METRICS[figure.metric]
        assert (figure.subject is not None) is (declared.scope == "device")
        assert figure.unit in (declared.unit, "share")
        assert figure.value is not None or figure.reason
        assert declared.describe(figure)
    assert {each.kind for each in figures} == {"counted", "measured", "predicted"}


def test_a_result_with_an_adapter_gets_no_budget_for_it():
    """What is not suggested is not, whether there is one per package or one per device."""
    result = make_result(["google/pixel-8a"])
    text = suggest_budget(changed(result, package={"adapter_bytes": 4096}))
    assert "package_size" in text
    for each in METRICS.values():
        if not each.suggested:
            assert f"\n{each.key} = " not in text


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_the_verdict_is_that_of_the_worst_check(length):
    states: dict[Verdict, dict[str, str]] = {
        "pass": {"status": "pass", "level": "error"},
        "warn": {"status": "fail", "level": "warn"},
        "not judged": {"status": "not judged", "level": "error"},
        "fail": {"status": "fail", "level": "error"},
    }
    for chosen in itertools.product(states, repeat=length):
        checks = [
            Check.model_validate({"metric": "ink", "message": "m", **states[state]})
            for state in chosen
        ]
        assert [check.state for check in checks] == list(chosen)
        order = list(states)
        worst = max((order.index(state) for state in chosen), default=0)
        assert verdict_of(checks) == order[worst]


def test_metrics_of_fleets_are_declared_like_any_other():
    for key, declared in FLEET_METRICS.items():
        assert key == declared.key
        assert declared.words.format("1 B", kind="measured", how="80 %")
