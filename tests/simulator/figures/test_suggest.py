"""The budget that is suggested: it parses, the result keeps it, and it is not far off."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.device.profile import list_profiles
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.figures.simulated import METRICS, of_scope
from odtpack_simulator.figures.suggest import suggest_budget
from odtpack_simulator.result.result import Policy, SimulationResult, Subject
from odtpack_simulator.values.units import Interval
from tests.simulator.factory import make_result

BASE = make_result(["google/pixel-8a"])
AMOUNTS = st.one_of(st.just(0.0), st.floats(5e-324, 1e18), st.floats(1e-3, 1e6))


@st.composite
def intervals(draw: st.DrawFn) -> Interval | None:
    if draw(st.integers(0, 5)) == 0:
        return None
    low, typical, high = sorted(draw(st.tuples(AMOUNTS, AMOUNTS, AMOUNTS)))
    return Interval(low=low, typical=typical, high=high)


TIMES = ("step_ms", "p90_ms", "first_step_ms")
WHOLE = (
    *("active_s", "energy_j", "battery_share", "battery_share_per_session"),
    *("sessions", "days", "written_bytes_per_day", "repeated_steps"),
)
NUMBERS = st.one_of(st.none(), st.floats(-1e9, 1e9), st.floats(0.0, 1.0))


@given(
    times=st.tuples(*(intervals() for _ in TIMES)),
    whole=st.tuples(*(intervals() for _ in WHOLE)),
    loss=NUMBERS,
    before=NUMBERS,
    metric=NUMBERS,
    ends=st.one_of(st.none(), st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 0.5))),
    peak=st.integers(0, 2**49),
    size=st.integers(0, 2**49),
    state=st.sampled_from(["foreground", "background"]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_result_keeps_the_budget_that_it_suggests(
    times: tuple[Interval | None, ...], whole: tuple[Interval | None, ...], loss: float | None,
    before: float | None, metric: float | None, ends: tuple[float, float] | None, peak: int,
    size: int, state: str,
) -> None:  # fmt: skip
    device = BASE.devices[0]
    assert device.campaign is not None
    reason = None if times[0] is not None else "unknown"
    latency = dict(zip(TIMES, times, strict=True)) | {"not_judged": reason}
    learned = {
        "eval_loss_after": loss,
        "metric_before": before,
        "metric_after": metric,
        "metric_interval": (metric - ends[0], metric + ends[1])
        if ends is not None and metric is not None
        else None,
    }
    update = {
        "latency": device.latency.model_copy(update=latency),
        "campaign": device.campaign.model_copy(update=dict(zip(WHOLE, whole, strict=True))),
        "memory": device.memory.model_copy(update={"predicted_peak_bytes": peak}),
    }
    result = BASE.model_copy(
        update={
            "package": BASE.package.model_copy(update={"package_bytes": size}),
            "policy": Policy(state=state),  # type: ignore[arg-type]
            "training": BASE.training.model_copy(update=learned),
            "devices": [device.model_copy(update=update)],
        }
    )
    judged = judge(result, parse_budgets(suggest_budget(result).encode()), baseline=result)
    placed = [check for _, check in judged.all_checks() if check.budget_location]
    assert {check.metric for check in placed} >= {"package_size", "peak_memory"}
    # Where only the high end of an interval is beyond it, a limit warns.
    failed = [check for check in placed if check.status == "fail" and check.level == "error"]
    assert [check.message for check in failed] == []


@pytest.mark.parametrize("scale", [0.2, 1.0, 1.9])
@pytest.mark.parametrize("state", ["foreground", "background"])
def test_limits_are_a_quarter_above_what_was_measured(scale: float, state: str) -> None:
    result = make_result(scale=scale, policy=Policy(state=state))  # type: ignore[arg-type]
    budgets = parse_budgets(suggest_budget(result).encode())
    known = {metric.key for metric in METRICS.values() if metric.suggested}
    found = set(budgets.overall())
    for device in result.devices:
        found |= set(budgets.for_device(device.name, device.os))
    if state == "foreground":
        known -= {"sessions"}  # one per piece of data: the app decides
    assert found == known
    again = judge(result, budgets, baseline=result)
    placed = [check for _, check in again.all_checks() if check.budget_location]
    assert not [
        c for c in placed if c.status == "not judged" or (c.status, c.level) == ("fail", "error")
    ]
    for check in placed:
        if check.baseline is not None:
            assert check.limit == pytest.approx(1.1 * check.baseline)
        elif check.metric in {"peak_memory", "package_size", "final_loss"}:
            assert check.limit is not None
            assert check.actual is not None
            assert 1.25 <= check.limit / check.actual <= 1.4


UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "J": 1.0, "kJ": 1e3, "kB": 1e3, "MB": 1e6}


@pytest.mark.parametrize(
    "seconds",
    [0.004, 0.9, 7.9, 8.1, 9.99, 10.1, 14.4, 99.0, 599.0, 601.0, 5e3, 28_700.0, 29e3, 4e5],
)
def test_a_suggested_limit_is_what_was_measured_in_every_unit(seconds: float) -> None:
    """From 10 s on the step was suggested in thousandths of what its unit says."""
    device = BASE.devices[0]
    assert device.campaign is not None
    same = Interval(low=seconds, typical=seconds, high=seconds)
    update = {
        "latency": device.latency.model_copy(update={"step_ms": same.scaled(1e3)}),
        "campaign": device.campaign.model_copy(update={"active_s": same, "energy_j": same}),
    }
    text = suggest_budget(BASE.model_copy(update={"devices": [device.model_copy(update=update)]}))
    for key in ("step_latency", "time_to_finish", "energy"):
        found = re.search(rf'^{key} = \[?"([0-9.]+) (\w+)"', text, re.M)
        assert found, key
        value = float(found[1]) * UNITS[found[2]]
        assert 1.25 * seconds <= value * (1 + 1e-9) <= 1.25 * 1.1 * seconds * (1 + 1e-9), text


def test_limits_are_typical_figures_and_regressions() -> None:
    device = BASE.devices[0]
    wide = Interval(low=10.0, typical=100.0, high=1000.0)
    latency = device.latency.model_copy(update={"step_ms": wide})
    devices = [device.model_copy(update={"latency": latency})]
    text = suggest_budget(BASE.model_copy(update={"devices": devices}))
    assert 'step_latency = ["130 ms", "+10 %"]\n' in text
    assert re.search(r'^peak_memory = \["[0-9.]+ MB", "\+10 %"\]$', text, re.M)


def assert_short_and_kept(result: SimulationResult) -> None:
    """The result keeps the suggestion, and no figure of a device that is known is left out."""
    text = suggest_budget(result)
    assert len(text.splitlines()) <= 60
    judged = judge(result, parse_budgets(text.encode()), baseline=result)
    assert judged.verdict in ("pass", "warn")
    for device in judged.devices:
        subject = Subject(result, device)
        placed = {
            check.metric: check
            for check in device.checks
            if check.budget_location and check.baseline is None
        }
        for metric in of_scope("device"):
            figure = metric.read(subject)
            if metric.key == "sessions" or not metric.suggested or figure.high is None:
                continue
            check = placed.pop(metric.key)
            # With two digits, and shared by figures within a factor of three.
            assert check.limit is not None
            assert figure.value is not None
            assert 1.25 <= check.limit / figure.value <= 1.25 * 1.1 * 3
            assert (check.budget_location or "").startswith("budgets.toml:")  # even inside of { }
        assert set(placed) <= {"peak_memory"}


def test_many_devices_share_limits() -> None:
    result = make_result()
    assert len(result.devices) == len(list_profiles())
    assert_short_and_kept(result)
    text = suggest_budget(result)
    assert "[class.android]" in text
    assert "[class.linux]" in text
    # Nobody knows the steps of the watch: a limit for its class could not be judged of it.
    assert "[class.ios]" not in text
    assert '"apple/iphone-11" = { step_latency' in text


def test_figures_that_some_devices_of_a_class_lack_are_told_by_device() -> None:
    """As with the shipped profiles: power is known of few."""
    result = make_result()
    devices = []
    for index, device in enumerate(result.devices):
        campaign = device.campaign
        assert campaign is not None
        if index % 3:
            update = {"energy_j": None, "battery_share_per_session": None}
            campaign = campaign.model_copy(update=update)
        devices.append(device.model_copy(update={"campaign": campaign}))
    assert_short_and_kept(result.model_copy(update={"devices": devices}))


def test_equal_figures_are_limited_once() -> None:
    text = suggest_budget(make_result(["google/pixel-8a", "raspberrypi/pi-5"]))
    assert text.count("written_per_day") == 1
    assert text.index("written_per_day") < text.index("[device.")
    assert text.count("step_latency") == 2


def test_few_devices_have_tables_of_their_own() -> None:
    names = ["google/pixel-8a", "google/pixel-4a", "samsung/galaxy-a12"]
    text = suggest_budget(make_result(names))
    assert [f'[device."{name}"]' in text for name in names] == [True] * 3
    assert "[class." not in text


def test_unknown_figures_are_left_out() -> None:
    text = suggest_budget(make_result(["web/phone"]))
    assert "web/phone" not in text
    board = suggest_budget(make_result(["raspberrypi/pi-5"]))
    assert "time_to_finish" in board
    assert "energy" not in board


def test_a_floor_lies_below_the_interval_of_few_samples() -> None:
    update = {"metric_after": 0.9, "metric_before": 0.88, "metric_interval": (0.6, 0.98)}
    training = BASE.training.model_copy(update=update)
    text = suggest_budget(BASE.model_copy(update={"training": training}))
    assert "accuracy_floor = 0.600\n" in text


def test_a_floor_of_nothing_is_left_out() -> None:
    update = {"metric_after": 0.05, "metric_before": 0.05, "metric_interval": (0.0, 0.3)}
    training = BASE.training.model_copy(update=update)
    assert "accuracy_floor" not in suggest_budget(BASE.model_copy(update={"training": training}))
