"""Every metric that is judged is shown: none fails in silence."""

from __future__ import annotations

from typing import get_args
from urllib.parse import unquote

import pytest

from odtpack_simulator.figures.metric import Topic
from odtpack_simulator.figures.simulated import ALWAYS, METRICS
from odtpack_simulator.reports import render_report, report_format, report_formats
from odtpack_simulator.reports.simulation import TOPICS, cells
from odtpack_simulator.result.result import SimulationResult
from odtpack_simulator.values.figure import Check
from tests.simulator.factory import make_result

CHECKS = {**ALWAYS, **METRICS}


def failing(metric: str, scope: str) -> SimulationResult:
    """A result in which the check of one metric fails, and there is no other."""
    check = Check(
        metric=metric, limit=1.0, actual=2.0, unit="1", level="error", status="fail",
        message="2 is over 1",
    )  # fmt: skip
    result = make_result(["google/pixel-8a"])
    if scope == "package":
        return result.model_copy(update={"checks": [check], "verdict": "fail"})
    device = result.devices[0].model_copy(update={"checks": [check], "verdict": "fail"})
    return result.model_copy(update={"devices": [device], "verdict": "fail"})


def scopes(metric: str) -> tuple[str, ...]:
    return (METRICS[metric].scope,) if metric in METRICS else ("package", "device")


@pytest.mark.parametrize(
    ("metric", "scope"), [(metric, scope) for metric in CHECKS for scope in scopes(metric)]
)
def test_a_failure_is_shown_in_every_format(metric: str, scope: str) -> None:
    result, title = failing(metric, scope), CHECKS[metric].title
    for name in report_formats():
        shown = render_report(result, name).decode()
        shown = unquote(shown) if name == "github" else shown  # workflow commands escape commas
        assert (metric if report_format(name).suffix == "json" else title) in shown, name
        assert "2 is over 1" in shown, name


@pytest.mark.parametrize("metric", CHECKS)
def test_it_is_shown_under_its_topic_and_no_other(metric: str) -> None:
    result, topic = failing(metric, "device"), CHECKS[metric].topic
    found = dict(zip(TOPICS, cells(result, result.devices[0]), strict=True))
    failed = [name for name, cell in found.items() if cell.state == "fail"]
    assert failed == ([topic] if topic in TOPICS else [])


def test_there_is_no_topic_without_a_metric_and_none_unknown() -> None:
    assert {check.topic for check in CHECKS.values()} == set(get_args(Topic))
    assert set(get_args(Topic)) - set(TOPICS) == {"Package", "Interruptions"}
    for topic in TOPICS:
        assert any(kind.headline for kind in CHECKS.values() if kind.topic == topic), topic
