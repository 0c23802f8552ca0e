"""What ``odtpack demo`` tells to paste."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from odtpack.cli.device.demo import _finish, budget_that_one_breaks, exit_words
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.reports.html_report import Again, render_html
from odtpack_simulator.values.units import Interval
from tests.simulator.factory import make_result


def test_the_command_to_go_on_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("my demo's folder")
    _finish([0.5, 0.9], 100, [], out, 5, 1.0)
    lines = "".join(capsys.readouterr()).splitlines()
    words = shlex.split(next(line for line in lines if "odtpack simulate" in line))
    assert words[2] == str(out / "package")
    assert words[words.index("--data") + 1] == str(out / "digits.npz")
    assert words[words.index("--budget") + 1] == str(out / "budgets.toml")


@pytest.mark.parametrize(
    "others", [(1.0, 2.0, 3.0), (1.0, 20.0, 90.0), (0.0004, 0.0005, 0.0006), (200.0, 210.0, 220.0)]
)
def test_the_failing_budget_is_broken_by_one_device(others: tuple[float, float, float]) -> None:
    names = ["samsung/galaxy-a12", "apple/iphone-16-pro", "raspberrypi/zero-2-w"]
    slow = tuple(40 * end for end in (others[1], others[1], others[2]))
    spans = [others, others, slow]
    result = make_result(names)
    devices = []
    for device, (low, typical, high) in zip(result.devices, spans, strict=True):
        step = Interval(low=low, typical=typical, high=high)
        memory = {"limit_bytes": 10**12, "measured_peak_bytes": 10**6, "outcome": "fits"}
        changes = {
            "latency": device.latency.model_copy(update={"step_ms": step}),
            "memory": device.memory.model_copy(update=memory | {"warning_bytes": None}),
            "training": None,
        }
        devices.append(device.model_copy(update=changes))
    result = result.model_copy(update={"devices": devices})
    judged = judge(result, parse_budgets(budget_that_one_breaks(result).encode()))
    assert [device.verdict for device in judged.devices] == ["pass", "pass", "fail"]
    assert "exit code 1" in exit_words(judged)
    assert "exit code 0" in exit_words(judge(result))
    page = render_html(judge(result), again=Again(judged, "step_latency", exit_words(judged)))
    text = page.decode()
    assert "3 devices pass" in text
    assert "2 of 3 devices pass" in text
    assert "exit code 1" in text


def test_without_two_step_times_there_is_no_failing_budget() -> None:
    assert budget_that_one_breaks(make_result(["google/pixel-8a"])) == ""
