"""Limits against a baseline."""

import pytest

from odtpack_simulator.figures.simulated import METRICS, any_step
from odtpack_simulator.result import SimulationResult, Subject
from odtpack_simulator.values.figure import Check, Figure
from odtpack_simulator.values.units import Interval
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result, rebuilt
from tests.simulator.judged import check as only_check
from tests.simulator.judged import judged

DEVICE = "google/pixel-8a"


def against(
    head: SimulationResult, base: SimulationResult | None, key: str, value: str
) -> tuple[Check, str]:
    result = judged(head, f"[budgets]\n{key} = {value}", base)
    return only_check(result, key), result.verdict


def with_memory(**update: object) -> SimulationResult:
    return on_devices(make_result([DEVICE]), memory={"measured_peak_bytes": None, **update})


def with_metric(metric: float, loss: float = 0.1) -> SimulationResult:
    training = {"metric_after": metric, "eval_loss_after": loss, "metric_interval": None}
    return changed(make_result([DEVICE]), training=training)


def slower(factor: float, spread: float = 0.01) -> SimulationResult:
    """A result whose host, and so whose devices, take longer by a factor."""
    result = make_result([DEVICE])
    median = result.latency_host.p50_ms.typical * factor
    p50 = Interval(low=median * (1 - spread), typical=median, high=median * (1 + spread))
    device = result.devices[0]
    result = on_devices(result, latency={"step_ms": device.latency.step_ms.scaled(factor)})
    return rebuilt(changed(result, latency_host={"p50_ms": p50}), factor)


@pytest.mark.parametrize(("head", "value", "limit", "status"), [
    (100_000_000, '"+0 %"', 100e6, "pass"),
    (105_000_000, '"+5 %"', 105e6, "pass"),
    (105_000_001, '"+5 %"', 105e6, "fail"),
    (105_000_000, '"+5 MB"', 105e6, "pass"),
    (105_000_001, '"+5 MB"', 105e6, "fail"),
    (100_000_001, '"+0 %"', 100e6, "fail"),  # a planned peak is exact
    (90_000_000, '"+0 %"', 100e6, "pass"),
])  # fmt: skip
def test_what_may_grow(head, value, limit, status):
    base = with_memory(predicted_peak_bytes=100_000_000)
    check, _ = against(with_memory(predicted_peak_bytes=head), base, "peak_memory", value)
    assert (check.limit, check.baseline, check.actual) == (pytest.approx(limit), 100e6, head)
    assert (check.status, check.level) == (status, "error")
    assert "of the baseline" in check.message
    assert check.budget_location == "budgets.toml:2"


@pytest.mark.parametrize(("key", "head", "value", "limit", "status"), [
    ("accuracy_floor", 0.9405, '"-1 %"', 0.9405, "pass"),
    ("accuracy_floor", 0.9404, '"-1 %"', 0.9405, "fail"),
    ("accuracy_floor", 0.94, '"-0.01"', 0.94, "pass"),
    ("accuracy_floor", 0.9399, '"-0.01"', 0.94, "fail"),
    ("accuracy_floor", 0.99, '"-0 %"', 0.95, "pass"),
])  # fmt: skip
def test_what_may_fall(key, head, value, limit, status):
    check, _ = against(with_metric(head), with_metric(0.95), key, value)
    assert check.limit == pytest.approx(limit, abs=1e-12)
    assert check.status == status


@pytest.mark.parametrize(("more", "level"), [(0, "error"), (200_000, "warn"), (200_001, "error")])
def test_a_measured_peak_repeats_within_its_noise(more, level):
    def measured(peak: int) -> SimulationResult:
        memory = {"predicted_peak_bytes": 50_000_000, "limit_bytes": 10**9, "limit_low_bytes": None}
        return with_memory(**(memory | {"measured_peak_bytes": peak}))

    head, base = measured(60_000_000 + more), measured(60_000_000)
    for key, value in (("peak_memory", '"+0 %"'), ("memory_headroom", '"-0 %"')):
        check, _ = against(head, base, key, value)
        assert (check.status, check.level) == ("fail" if more else "pass", level)


def test_headroom_falls_in_percent_of_itself():
    limit = 1_030_000_000
    base = with_memory(limit_bytes=limit, predicted_peak_bytes=500_000_000)
    for peak, status in ((509_999_999, "pass"), (510_000_001, "fail")):
        head = with_memory(limit_bytes=limit, predicted_peak_bytes=peak)
        check, _ = against(head, base, "memory_headroom", '"-2 %"')
        assert check.limit == pytest.approx(49.0)
        assert check.status == status


def test_a_negative_loss_may_grow_by_a_share_of_its_size():
    base = with_metric(0.9, loss=-2.0)
    for loss, status in ((-1.8, "pass"), (-1.79, "fail")):
        check, _ = against(with_metric(0.9, loss=loss), base, "final_loss", '"+10 %"')
        assert (check.limit, check.status) == (pytest.approx(-1.8), status)


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.key)
def test_a_result_is_no_worse_than_itself(metric):
    key = METRICS[metric.key].key  # type: ignore[attr-defined]
    value = '"-0 %"' if METRICS[key].better == "higher" else '"+0 %"'
    result = changed(  # of a language model, which has all figures
        make_result([DEVICE]),
        data={"tokens_per_sample": 128},
        training={"perplexity_after": 9.0, "tokens": 50},
        package={"adapter_bytes": 4096},
    )
    check, _ = against(result, result, key, value)
    assert check.status == "pass"
    assert check.baseline == check.actual == check.limit


@pytest.mark.parametrize(("head_factor", "status", "level"), [
    (1.04, "pass", "error"),  # within 5 %, whatever the noise
    (1.06, "fail", "warn"),  # beyond by 1 %, and both leave 2 % open
    (1.08, "fail", "error"),
    (1.5, "fail", "error"),
])  # fmt: skip
def test_times_beyond_the_noise(head_factor, status, level):
    check, _ = against(slower(head_factor), slower(1.0), "step_latency", '"+5 %"')
    assert (check.status, check.level) == (status, level)


def test_times_within_the_noise_only_warn():
    # Both medians are known to 4 %: the head may be 1.04 / 0.96 - 1 = 8.3 % off by chance, and the
    # limit is at 1.05.
    for factor, level, verdict in ((1.133, "warn", "warn"), (1.134, "error", "fail")):
        check, whole = against(
            slower(factor, spread=0.04), slower(1.0, spread=0.04), "step_latency", '"+5 %"'
        )
        assert (check.status, check.level, whole) == ("fail", level, verdict)
        assert ("scatters" in check.message) == (level == "warn")


@pytest.mark.parametrize("known", [True, False])
def test_a_whole_training_scatters_with_what_every_session_begins_with(known):
    """Half of the time is that of a session's beginning and end, known to 20 %; steps to 1 %."""

    def result(seconds: float) -> SimulationResult:
        made = slower(seconds / 10)
        ends = (8.0, 10.0, 12.0) if known else (0.0, 0.0, 0.0)  # as a coarse clock says
        creation = Interval.of(*ends)
        made = changed(made, latency_host={"session_creation_cpu_ms": creation})
        campaign = {"active_s": seconds, "sessions": 2.0, "restart_s": seconds / 4}
        same = {key: Interval.of(value, value, value) for key, value in campaign.items()}
        return on_devices(made, campaign=same)

    # By chance the head is up to 1.105 / 0.895 - 1 = 23.5 % off, else 1.01 / 0.99 - 1 = 2.02 %.
    for seconds, level in ((11.4, "warn" if known else "error"), (13.5, "error")):
        check, _ = against(result(seconds), result(10.0), "time_to_finish", '"+5 %"')
        assert (check.status, check.level) == ("fail", level)


@pytest.mark.parametrize("other_host", [False, True])
def test_a_count_has_no_noise_and_is_compared_across_hosts(other_host):
    """28.9 % more bytes a day are more, however much the host's times scatter."""
    base, head = slower(1.0, spread=0.4), slower(1.0, spread=0.4)
    if other_host:
        base = changed(base, host={"cpu": "Another processor"})
    device = head.devices[0]
    more = device.campaign.written_bytes_per_day.scaled(1.289)
    head = on_devices(head, campaign={"written_bytes_per_day": more})
    for key in ("written_per_day", "sessions", "repeated_steps"):
        check, _ = against(head, base, key, '"+5 %"')
        assert check.level == "error"
        assert check.status == ("fail" if key == "written_per_day" else "pass")


def test_without_a_baseline_nothing_is_judged():
    check, verdict = against(make_result([DEVICE]), None, "peak_memory", '"+5 %"')
    assert (check.status, check.limit, verdict) == ("not judged", None, "not judged")
    assert "--baseline" in check.message


def test_what_cannot_be_compared_is_not_judged():
    base, head = make_result([DEVICE]), make_result([DEVICE])
    killed = on_devices(base, memory={"outcome": "killed"})
    measured = on_devices(base, memory={"measured_peak_bytes": 2**40})
    cases = [
        (changed(base, devices=[]), "peak_memory", "does not have this device"),
        (killed, "peak_memory", "not known of the baseline"),
        (measured, "peak_memory", "measured, here predicted"),
        (on_devices(base, profile_digest="0" * 64), "step_latency", "profile is another"),
        (changed(base, host={"cpu": "Another"}), "energy", "another host (Another"),
        (changed(base, host={"threads": 2}), "step_latency", "another host"),
    ]
    for other, key, words in cases:
        check, verdict = against(head, other, key, '"+5 %"')
        assert (check.status, verdict) == ("not judged", "not judged"), key
        assert words in check.message
    # Memory follows neither from the host's times nor from the profile.
    for other in (cases[3][0], cases[4][0]):
        check, _ = against(head, other, "peak_memory", '"+5 %"')
        assert check.status == "pass"


def test_absolute_and_relative_together():
    base = with_memory(predicted_peak_bytes=100_000_000)
    head = with_memory(predicted_peak_bytes=150_000_000)
    text = '[budgets]\npeak_memory = ["200 MB", { limit = "+5 %", level = "warn" }]'
    result = judged(head, text, base)
    found = [c for _, c in result.all_checks() if c.metric == "peak_memory"]
    assert [(c.limit, c.status, c.level) for c in found] == [
        (200e6, "pass", "error"),
        (105e6, "fail", "warn"),
    ]
    assert result.verdict == "warn"


def test_a_relative_floor_of_a_class_is_judged_on_its_devices():
    base, head = with_metric(0.95), with_metric(0.9)
    # The baseline knows the metric even where it did not replay this device.
    base = changed(base, devices=[])
    result = judged(head, '[class.android]\naccuracy_floor = "-0.01"', base)
    assert [c.status for c in result.devices[0].checks if c.metric == "accuracy_floor"] == ["fail"]


def test_a_device_metric_is_not_read_from_a_package():
    with pytest.raises(ValueError, match="from a device"):
        METRICS["energy"].read(Subject(make_result([])))


def test_a_single_step_may_be_any_of_nine_in_ten():
    host = make_result([DEVICE]).latency_host
    host = changed(host, steps_ms=[float(step) for step in range(101)])
    assert any_step(host) == Interval(low=5.0, typical=50.0, high=95.0)
    assert any_step(changed(host, steps_ms=[1.0])) is None


def test_noise_is_the_larger_of_both_ways():
    """Head against base at their opposite ends, and base against head."""

    def step(low: float, high: float) -> Figure:
        result = make_result([DEVICE])
        p50 = Interval(low=low, typical=10.0, high=high)
        subject = Subject(changed(result, latency_host={"p50_ms": p50}), result.devices[0])
        return METRICS["step_latency"].of(subject, DEVICE)

    wide, narrow = step(10.0, 20.0), step(10.0, 10.0)
    for base, head in ((wide, narrow), (narrow, wide)):
        assert METRICS["step_latency"].chance(base, head) == pytest.approx(base.value)


@pytest.mark.parametrize(("before", "noise"), [(0.90, 0.02), (0.99, 0.03)])
def test_a_metric_scatters_by_the_end_that_looks_at_the_other(before, noise):
    head = changed(with_metric(0.95), training={"metric_interval": (0.93, 0.98)})
    metric = METRICS["accuracy_floor"]
    read = (metric.read(Subject(result)) for result in (with_metric(before), head))
    assert metric.chance(*read) == pytest.approx(noise)
