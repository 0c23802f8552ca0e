"""Figures of simulated candidates, what they are compared by, and what is nearest to a limit."""

from __future__ import annotations

import pytest

from odtpack.fit.finalists import compared, costs, objectives, reasons, solution
from odtpack.fit.outcome import FitResult, Solution
from odtpack.fit.space import Candidate, Freeze
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result.result import DeviceCampaign, NotJudged, SimulationResult
from odtpack_simulator.values.units import Interval
from tests.simulator.factory import make_result

NAMES = ["google/pixel-8a", "raspberrypi/pi-5"]
CANDIDATE = Candidate(7, 32, 8, Freeze("nothing", (), ("w",), 10, False), "sgd", (), 0.1, None)


def made(budgets: str = "", *, times: tuple[float, ...] = (3.0, 5.0)) -> SimulationResult:
    result = make_result(NAMES)
    devices = [
        device.model_copy(
            update={
                "campaign": DeviceCampaign(
                    active_s=Interval(low=time / 2, typical=time, high=2 * time),
                    not_judged=[NotJudged(figure="energy_j", reason="no power")],
                )
            }
        )
        for device, time in zip(result.devices, times, strict=True)
    ]
    result = result.model_copy(update={"devices": devices})
    return judge(result, parse_budgets(budgets.encode()))


def point(number: int, metric: float, peak: int, time: float | None) -> Solution:
    first = solution(CANDIDATE, made())
    return first.model_copy(
        update={"number": number, "metric": metric, "peak_bytes": peak, "time_s": time}
    )


def test_the_worst_device_counts() -> None:
    found = solution(CANDIDATE, made())
    assert (found.number, found.choice.micro_batch, found.choice.frozen_dtype) == (7, 8, "float32")
    assert found.time_s == 5.0
    assert found.energy_j is None
    assert found.peak_bytes == max(device.peak_bytes for device in found.devices)
    assert found.miss is None
    assert reasons([made()]) == [
        NotJudged(figure="energy_j", reason=f"{device.title}: no power")
        for device in made().devices
    ]


@pytest.mark.parametrize(
    ("budgets", "share"),
    [
        ('[budgets]\npeak_memory = "90 MB"\n', lambda s: s.peak_bytes / 90e6 - 1),
        ("[budgets]\naccuracy_floor = 2\n", lambda s: (2 - s.metric) / 2),
        (
            '[budgets]\npeak_memory = "90 MB"\naccuracy_floor = 2\n',
            lambda s: max(s.peak_bytes / 90e6 - 1, (2 - s.metric) / 2),
        ),
        ('[budgets]\npeak_memory = { limit = "90 MB", level = "warn" }\n', lambda s: None),
    ],
)
def test_what_is_missed_and_by_how_much(budgets: str, share: object) -> None:
    found = solution(CANDIDATE, made(budgets))
    assert callable(share)
    expected = share(found)
    assert found.miss == (None if expected is None else pytest.approx(expected))
    assert any(check.status == "fail" for d in found.devices for check in d.failed) or found.failed


def test_objectives_are_what_is_known() -> None:
    first = solution(CANDIDATE, made())
    wanted, unknown = objectives([first], reasons([made()]))
    assert [(o.name, o.better) for o in wanted] == [
        ("accuracy", "larger"),
        ("peak_bytes", "smaller"),
        ("time_s", "smaller"),
    ]
    assert {each.figure for each in unknown} == {"energy_j"}
    without = first.model_copy(update={"metric": None, "time_s": None})
    wanted, unknown = objectives([without], [])
    assert [o.name for o in wanted] == ["loss", "peak_bytes"]
    assert [each.figure for each in unknown] == ["time_s", "energy_j"]


def test_noise_beats_nobody() -> None:
    """Half a percent of time is none; a metric that is lower is. The unknown is worst."""
    found = [
        point(1, 0.9, 1000, 10.00),
        point(2, 0.8, 1000, 9.99),
        point(3, 0.8, 500, 10.0),
        point(4, 0.9, 1000, None),
    ]
    wanted, _ = objectives(found, [])
    best, rest = compared(found, wanted)
    assert [each.number for each in best] == [1, 3]
    assert [(each.number, each.beaten_by) for each in rest] == [(4, [1]), (2, [1, 3])]
    assert costs(found[0], wanted)[0] == -0.9
    assert all(each.beaten_by == [] for each in best)


def test_the_result_is_read_back() -> None:
    found = solution(CANDIDATE, made())
    result = FitResult(
        tool_version="0",
        model="m.onnx",
        devices=NAMES,
        epochs=1,
        seed=0,
        samples=10,
        held_out_samples=2,
        space=[],
        candidates=1,
        looked_at=1,
        trained=1,
        objectives=[],
        not_judged=[],
        pareto=[],
        beaten=[],
        over_budget=[found],
        left=[],
    )
    assert FitResult.model_validate_json(result.to_json()) == result
    assert not result.found
    assert result.nearest == found
