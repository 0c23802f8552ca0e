import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.campaign import run_campaign
from odtpack_simulator.device.profile import DeviceProfile, GpuFigures, list_profiles, load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result import (
    DeviceCampaign,
    NotJudged,
    PlannedChange,
    Policy,
    SimulationResult,
)
from odtpack_simulator.values.units import Interval, Quantity
from tests.refused import refused
from tests.simulator.changed import changed, on_devices
from tests.simulator.factory import make_result, same
from tests.simulator.judged import check, judged

DEVICE = "google/pixel-8a"


def one_device(**memory: object) -> SimulationResult:
    return on_devices(make_result([DEVICE]), memory={"measured_peak_bytes": None, **memory})


def with_latency(low: float, typical: float, high: float) -> SimulationResult:
    step = Interval(low=low, typical=typical, high=high)
    times = dict.fromkeys(("step_ms", "p90_ms", "first_step_ms"), step)
    fields = "active_s energy_j sessions days written_bytes_per_day repeated_steps"
    whole = dict.fromkeys(fields.split(), step)
    shares = dict.fromkeys(("battery_share", "battery_share_per_session"), step.scaled(0.01))
    return on_devices(make_result([DEVICE]), latency=times, campaign=whole | shares)


@pytest.mark.parametrize(
    ("limit", "at_worst", "planned", "measured", "status", "outcome", "verdict"),
    [
        (103, None, 100, None, "pass", "fits", "pass"),
        (102, None, 100, None, "fail", "close", "fail"),
        (100, None, 100, None, "fail", "close", "fail"),
        (100, None, 101, None, "fail", "over", "fail"),
        # The plan decides, unless a replay took more than its margin allows.
        (103, None, 100, 103, "pass", "fits", "pass"),
        (103, None, 100, 104, "fail", "over", "fail"),
        (100, None, 101, 90, "fail", "over", "fail"),
        # A limit with a range is judged by its low end.
        (200, 103, 100, None, "pass", "fits", "pass"),
        (200, 102, 100, None, "fail", "depends", "warn"),
        (102, 60, 100, None, "fail", "close", "fail"),
        (100, 60, 101, None, "fail", "over", "fail"),
        (None, None, None, None, "not judged", "not judged", "not judged"),
        (0, None, None, None, "fail", "over", "fail"),
        (10**6, None, None, None, "fail", "killed", "fail"),
    ],
)
def test_device_limit_is_judged_without_budgets(
    limit, at_worst, planned, measured,
    status, outcome, verdict,
):  # fmt: skip
    sizes = {"limit_bytes": limit, "limit_low_bytes": at_worst, "predicted_peak_bytes": planned}
    in_mb = {"measured_peak_bytes": measured, **sizes}
    memory = {name: size * 10**6 for name, size in in_mb.items() if size is not None}
    memory = {"limit_bytes": None, "measured_peak_bytes": None, **memory}
    memory |= {"outcome": "killed"} if outcome == "killed" else {}
    result = judge(one_device(**memory))
    assert check(result, "memory_limit").status == status
    assert result.devices[0].memory.outcome == outcome
    assert result.devices[0].verdict == verdict
    assert result.verdict == verdict
    assert result.over_budget == (verdict == "fail")


def test_a_limit_that_depends_on_the_device_says_both_ends():
    memory = {"limit_bytes": 8_000_000, "limit_low_bytes": 2_000_000}
    found = check(judge(one_device(**memory, predicted_peak_bytes=3_000_000)), "memory_limit")
    assert (found.level, found.status) == ("warn", "fail")
    assert "8.00 MB" in found.message
    assert "2.00 MB at worst: it depends on the device" in found.message


@pytest.mark.parametrize(("budget", "metric", "status"), [
    ('peak_memory = "183840200 B"', "peak_memory", "fail"),
    ('peak_memory = "183840201 B"', "peak_memory", "pass"),
    ('memory_headroom = "95 %"', "memory_headroom", "pass"),
    ('memory_headroom = "96 %"', "memory_headroom", "fail"),
    ('package_size = "5361200 B"', "package_size", "pass"),
    ('package_size = "5361199 B"', "package_size", "fail"),
    ("final_loss = 0.1142", "final_loss", "pass"),
    ("final_loss = 0.1141", "final_loss", "fail"),
    ("accuracy_floor = 0.9659", "accuracy_floor", "pass"),
    ("accuracy_floor = 0.966", "accuracy_floor", "fail"),
])  # fmt: skip
def test_limits_are_inclusive(budget, metric, status):
    found = check(judged(make_result([DEVICE]), f"[budgets]\n{budget}"), metric)
    assert found.status == status
    assert found.budget_location == "budgets.toml:2"
    assert (found.advice is not None) == (status == "fail")


@pytest.mark.parametrize(
    ("size", "budget"), [(2010, "2.01 kB"), (2_010_000, "2.01 MB"), (4_350_000, "4.35 MB")]
)
def test_a_figure_at_a_limit_with_a_fraction_keeps_it(size, budget):
    result = changed(make_result([DEVICE]), package={"package_bytes": size})
    at = judged(result, f'[budgets]\npackage_size = "{budget}"')
    assert check(at, "package_size").status == "pass"


@pytest.mark.parametrize(("step_samples", "tokens"), [(8, 2048), (5, 1280)])
def test_tokens_are_those_of_a_step_that_occurs(step_samples, tokens):
    data = {"tokens_per_sample": 256, "step_samples": step_samples}
    assert changed(make_result([DEVICE]), data=data).data.tokens_per_step == tokens


@pytest.mark.parametrize(("budget", "metric", "status"), [
    ('time_per_1000_tokens = "30 s"', "time_per_1000_tokens", "pass"),
    ('time_per_1000_tokens = "29 s"', "time_per_1000_tokens", "fail"),
    ('adapter_size = "4096 B"', "adapter_size", "pass"),
    ('adapter_size = "4095 B"', "adapter_size", "fail"),
])  # fmt: skip
def test_a_language_model_is_judged_by_tokens_and_adapter(budget, metric, status):
    result = with_latency(20_480.0, 25_000.0, 61_440.0)  # ms for 4 x 2 x 256 tokens
    data = {"tokens_per_sample": 256, "step_samples": 8}
    result = changed(result, data=data, package={"adapter_bytes": 4096})
    assert check(judged(result, f"[budgets]\n{budget}"), metric).status == status


@pytest.mark.parametrize(("floor", "state", "words"), [
    ("20 %", "pass", "of 500 MB to 1.00 GB stay free"),
    ("60 %", "warn", "(58.8 to 79.4 %) of 500 MB to 1.00 GB stay free: the low end is under"),
    ("80 %", "fail", "allowed is at least 80 %"),
])  # fmt: skip
def test_headroom_has_the_low_end_of_the_limit(floor, state, words):
    memory = {"limit_bytes": 10**9, "limit_low_bytes": 5 * 10**8, "predicted_peak_bytes": 2 * 10**8}
    changes = [PlannedChange(micro_batch=1, peak_bytes=198_000_000)]
    result = changed(one_device(**memory), memory={"changes": changes})
    found = check(judged(result, f'[budgets]\nmemory_headroom = "{floor}"'), "memory_headroom")
    assert found.state == state
    assert words in found.message
    # With the margin 198 MB are too much for 60 % of the low end, and for 80 % of the other.
    assert found.advice is None or "even training in micro-batches of 1" in found.advice


@pytest.mark.parametrize("free", range(1, 100))
def test_headroom_at_its_limit_keeps_it(free):
    for unit in (10_000_000, 1_000_000):
        memory = {"limit_bytes": 10_300 * unit, "predicted_peak_bytes": (100 - free) * 100 * unit}
        budget = f'[budgets]\nmemory_headroom = "{free} %"'
        assert check(judged(one_device(**memory), budget), "memory_headroom").status == "pass"


@pytest.mark.parametrize(("interval", "status", "level", "verdict"), [
    ((10, 20, 30), "pass", "error", "pass"), ((10, 20, 30.1), "fail", "warn", "warn"),
    ((10, 30.1, 40), "fail", "error", "fail"), ((31, 32, 33), "fail", "error", "fail"),
])  # fmt: skip
@pytest.mark.parametrize(("budget", "metric"), [
    ('step_latency = "30 ms"', "step_latency"),
    ('step_latency_p90 = "30 ms"', "step_latency_p90"),
    ('first_step = "30 ms"', "first_step"),
    ('time_to_finish = "30 s"', "time_to_finish"),
    ('energy = "30 J"', "energy"),
    ('battery_share = "30 %"', "battery_share"),
    ('battery_per_session = "30 %"', "battery_per_session"),
    ("sessions = 30", "sessions"),
    ("days = 30", "days"),
    ('written_per_day = "30 B"', "written_per_day"),
    ("repeated_steps = 30", "repeated_steps"),
])  # fmt: skip
def test_figures_of_a_device_are_judged_as_intervals(
    interval, status, level, verdict, budget,
    metric,
):  # fmt: skip
    result = judged(with_latency(*interval), f"[budgets]\n{budget}")
    found = check(result, metric)
    assert (found.status, found.level, result.verdict) == (status, level, verdict)
    actual = math.ceil(interval[1]) if metric == "days" else interval[1]  # days are whole
    assert (found.actual, found.limit) == (pytest.approx(actual), pytest.approx(30))
    assert (found.advice is not None) == (status == "fail")


def test_warn_level_never_fails():
    text = '[budgets]\nstep_latency = { limit = "1 us", level = "warn" }'
    result = judged(make_result([DEVICE]), text)
    assert check(result, "step_latency").status == "fail"
    assert result.verdict == "warn"
    assert not result.over_budget


UNKNOWN = {"eval_loss_after": None, "metric_after": None}


@pytest.mark.parametrize(("result", "budget", "words"), [
    (make_result([DEVICE]), 'time_per_1000_tokens = "30 s"', "no tokens"),
    (make_result([DEVICE]), 'adapter_size = "1 MB"', "no adapter"),
    (make_result(["web/phone"]), 'step_latency = "1 h"', "matrix rate"),
    (make_result(["web/phone"]), 'time_to_finish = "1000 h"', ""),
    (one_device(limit_bytes=None), 'memory_headroom = "1 %"', ""),
    (changed(make_result([DEVICE]), training=UNKNOWN), "final_loss = 9", ""),
    (changed(make_result([DEVICE]), training=UNKNOWN), "accuracy_floor = 0", ""),
    (make_result([]), 'peak_memory = "1 GB"', ""),
])  # fmt: skip
def test_unknown_figures_are_not_judged_and_never_pass(result, budget, words):
    found = judged(result, f"[budgets]\n{budget}")
    open_ = check(found, budget.split(" = ", maxsplit=1)[0])
    assert open_.status == "not judged"
    assert words in open_.message
    assert found.verdict == "not judged"
    of = [each.verdict for each in found.devices if open_ in each.checks]
    assert set(of) <= {"not judged"}


def test_worst_verdict_wins():
    text = '[budgets]\nstep_latency = "10 ms"\nfinal_loss = { limit = 0.0, level = "warn" }'
    names = ["web/phone", DEVICE]
    result = judged(make_result(names), text)
    assert [device.verdict for device in result.devices] == ["not judged", "fail"]
    assert result.verdict == "fail"
    assert judged(make_result(names[:1]), text).verdict == "not judged"


def test_diverged_training_fails():
    result = judge(changed(make_result([DEVICE]), training={"losses": [2.3, None, None]}))
    found = check(result, "finite_loss")
    assert found.status == "fail"
    assert "learning rate" in (found.advice or "")
    assert result.verdict == "fail"


def test_a_training_whose_last_step_diverged_fails():
    """All training losses are finite then; a model that only becomes finite passes."""
    result = make_result([DEVICE])
    first, *middle, last = result.training.curve
    early = {"curve": [changed(first, loss=None), *middle, last], "eval_loss_before": None}
    assert check(judge(changed(result, training=early)), "finite_loss").actual == 0
    late = {"curve": [first, *middle, changed(last, loss=None)], "eval_loss_after": None}
    result = judge(changed(result, training=late))
    found = check(result, "finite_loss")
    assert (found.status, found.actual) == ("fail", 1)
    assert f"1 of {len(middle) + 1} on held-out samples are not" in found.message
    assert "learning rate" in (found.advice or "")
    assert result.verdict == "fail"


def test_interrupted_replay_fails_once():
    ended = {"outcome": "killed", "steps_done": 12, "detail": "the background window closed"}
    found = check(judge(on_devices(make_result([DEVICE]), training=ended)), "steps_done")
    assert found.status == "fail"
    assert "background window" in found.message
    metrics = [c.metric for c in judge(one_device(outcome="killed")).devices[0].checks]
    assert metrics == ["memory_limit"]


def test_killed_replay_has_no_peak_to_pass_with():
    text = '[budgets]\npeak_memory = "1 TB"\nmemory_headroom = "1 %"'
    result = judged(one_device(outcome="killed"), text)
    assert result.devices[0].memory.outcome == "killed"
    assert "please report" in check(result, "memory_limit").message
    assert check(result, "peak_memory").status == "not judged"
    assert check(result, "memory_headroom").status == "fail"
    assert check(result, "memory_headroom").actual == 0


def test_package_limits_of_a_class_are_judged_on_its_devices():
    text = '[class.android]\npackage_size = "1 MB"'
    result = judged(make_result([DEVICE, "raspberrypi/pi-5"]), text)
    assert [device.verdict for device in result.devices] == ["fail", "pass"]
    assert [c.metric for c in result.checks] == ["finite_loss", "learns", "interruption"]


def test_entitlement_is_advised_where_it_is_enough():
    result = make_result(["apple/iphone-15-pro"], scale=25.0)
    assert result.devices[0].memory.peak_bytes > 3e9
    found = check(judge(result), "memory_limit")
    assert "entitlement" in (found.advice or "")
    assert "6.00 GB" in (found.advice or "")


def test_unknown_device_in_budgets():
    with refused("budgets-unknown-device", "does not exist"):
        judged(make_result([DEVICE]), '[device."google/pixel-99"]\nfinal_loss = 1')
    # A shipped device that this run left out is fine.
    judged(make_result([DEVICE]), '[device."google/pixel-4a"]\nfinal_loss = 1')


def test_judging_is_pure_and_repeatable():
    result = make_result()
    before = result.to_json()
    text = '[budgets]\npeak_memory = "150 MB"\nstep_latency = "60 ms"'
    first = judged(result, text)
    assert result.to_json() == before
    assert first.to_json() == judged(first, text).to_json()


def test_unknown_figures_of_the_campaign_say_why():
    text = '[budgets]\nenergy = "1 MJ"\nsessions = 100'
    result = judged(make_result(["raspberrypi/pi-5"]), text)
    assert check(result, "energy").status == "not judged"
    assert "no battery" in check(result, "energy").message
    assert check(result, "sessions").status == "pass"
    result = judged(on_devices(result, campaign=DeviceCampaign()), text)
    assert check(result, "sessions").status == "not judged"
    assert "no such figure" in check(result, "sessions").message


def test_in_the_background_the_background_limit_is_judged():
    result = make_result([DEVICE], policy=Policy(state="background"))
    result = on_devices(result, memory={"limit_bytes": 190_000_000})
    result = judged(result, '[budgets]\nmemory_headroom = "10 %"')
    assert "in the background" in check(result, "memory_limit").message
    assert check(result, "memory_limit").status == "pass"
    assert check(result, "memory_headroom").status == "fail"
    assert check(result, "memory_headroom").actual == pytest.approx(100 * (1 - 183.840201 / 190))


@pytest.mark.parametrize(
    ("equal", "status", "verdict"),
    [(True, "pass", "pass"), (False, "fail", "fail"), (None, "not judged", "not judged")],
)
def test_interruptions_must_end_in_equal_weights(equal, status, verdict):
    interruption = {"equal": equal, "detail": "see the log"}
    result = judge(changed(make_result([DEVICE]), interruption=interruption))
    found = check(result, "interruption")
    assert (found.status, found.actual, result.verdict) == (status, 3, verdict)
    assert "see the log" in found.message
    assert (found.advice is not None) == (status == "fail")
    without = judge(changed(result, interruption=None))
    assert [c.metric for c in without.checks] == ["finite_loss", "learns"]


@pytest.mark.parametrize(
    ("endless", "verdict"), [("typical", "fail"), ("worst case", "warn"), (None, "pass")]
)
def test_a_training_without_end_fails(endless, verdict):
    result = make_result([DEVICE], policy=Policy(state="background"))
    campaign = DeviceCampaign(endless=endless)
    result = judge(on_devices(result, campaign=campaign, memory={"limit_bytes": 10**9}))
    assert result.verdict == verdict
    found = [c for c in result.devices[0].checks if c.metric == "finishes"]
    assert len(found) == (endless is not None)
    for c in found:
        assert "foreground" in (c.advice or "")
        assert ("worst case" in c.message) == (endless == "worst case")


def test_why_a_real_campaign_never_ends():
    """The campaign's own words: what the window lacks."""
    profile = load_profile(DEVICE)
    result = make_result([DEVICE], policy=Policy(state="background"))
    latency = changed(result.devices[0].latency, session_creation_ms=same(3e6))
    more = {"steps": [240], "checkpoint_bytes": 10**6, "curve": []}
    campaign = run_campaign(profile, latency, result.policy, **more)
    assert campaign.endless == "typical"
    result = on_devices(result, campaign=campaign)
    result = judged(result, '[budgets]\ntime_to_finish = "1 h"')
    assert result.verdict == "fail"
    assert "ends before a checkpoint is written" in check(result, "finishes").message
    assert check(result, "time_to_finish").status == "not judged"
    assert "ends before a checkpoint is written" in check(result, "time_to_finish").message


def test_what_a_figure_leaves_out_is_said():
    left_out = [NotJudged(figure=name, reason="unknown")
                for name in ("power.idle", "checkpoint_save_ms")]  # fmt: skip
    result = on_devices(make_result([DEVICE]), campaign={"left_out": left_out})
    result = judged(result, '[budgets]\nenergy = "1 MJ"\ntime_to_finish = "1 h"')
    energy, time = check(result, "energy"), check(result, "time_to_finish")
    assert "without subtracting idle power and saving checkpoints, which are" in energy.message
    assert "without saving checkpoints, which is unknown, allowed" in time.message
    assert (energy.status, time.status) == ("pass", "pass")


@pytest.mark.parametrize(("own", "app", "on_gpu", "status", "level"), [
    (900, 1000, 900, "pass", "warn"),  # what the processor needs is elsewhere
    (900, 1000, 901, "fail", "error"),
    (None, 1000, 400, "pass", "warn"),  # beside 600 of the app
    (None, 1000, 401, "fail", "warn"),
    (None, 1000, 1001, "fail", "error"),
    (None, None, 1001, "not judged", "warn"),
])  # fmt: skip
def test_memory_of_a_gpu(own, app, on_gpu, status, level):
    result = one_device(gpu_own_bytes=own, limit_bytes=app, predicted_peak_bytes=600)
    assert "gpu_memory" not in [c.metric for c in judge(result).devices[0].checks]
    found = check(judge(changed(result, memory={"gpu_bytes": on_gpu})), "gpu_memory")
    assert (found.status, found.level) == (status, level)
    assert found.actual == (on_gpu if own is not None else on_gpu + 600)


def test_own_memory_of_a_gpu_is_read_of_a_profile():
    profile = load_profile("pixel-8a")
    assert profile.gpu_memory() is None
    own = changed(profile, gpu=GpuFigures(own_memory=quantity(2, "GiB"))).gpu_memory()
    assert own.low == 2**31


@pytest.mark.parametrize(
    ("peak", "status", "verdict"), [(699, "pass", "pass"), (700, "fail", "warn")]
)
def test_a_peak_that_the_system_warns_of(peak, status, verdict):
    limits = {"limit_bytes": 1_000_000_000, "warning_bytes": 700_000_000}
    result = judge(one_device(**limits, predicted_peak_bytes=peak * 10**6))
    assert check(result, "low_memory_warning").status == status
    assert result.verdict == verdict
    over = judge(one_device(**limits, predicted_peak_bytes=1_001_000_000))
    assert "low_memory_warning" not in [c.metric for c in over.devices[0].checks]
    unknown = judge(one_device(warning_bytes=None))
    assert "low_memory_warning" not in [c.metric for c in unknown.devices[0].checks]


@pytest.mark.parametrize(("budget", "verdict", "metrics"), [
    ('"1 GB"', "pass", {"peak_memory": "pass"}),
    ('["1 GB", "+5 %"]', "not judged", None),
    ('"1 MB"', "fail", {"peak_memory": "fail"}),
    ('"+5 %"', "not judged", {"memory_limit": "not judged", "peak_memory": "not judged"}),
    ('{ limit = "1 GB", level = "warn" }', "not judged",
     {"memory_limit": "not judged", "peak_memory": "pass"}),
])  # fmt: skip
def test_a_budget_stands_in_for_a_limit_that_nobody_knows(budget, verdict, metrics):
    """Only one that could fail by itself; and only for a limit that is unknown."""
    text = f"[budgets]\npeak_memory = {budget}"
    result = judged(one_device(limit_bytes=None), text)
    checks = result.devices[0].checks
    assert result.devices[0].verdict == verdict
    if metrics is not None:
        assert {c.metric: c.status for c in checks} == metrics
    else:
        assert [c.metric for c in checks] == ["peak_memory", "peak_memory"]
    stands_in = "memory_limit" not in {c.metric for c in checks}
    assert ("stands in for the device's own limit" in checks[0].message) == stands_in
    assert result.devices[0].memory.outcome == "not judged"
    known = judged(one_device(limit_bytes=10**9), text).devices[0].checks
    assert "memory_limit" in {c.metric for c in known}


def test_no_budget_stands_in_for_a_limit_that_is_known():
    """Even where the check of the limit is open, as a replay was ended at a lower one."""
    ended = one_device(limit_bytes=10**9, held_bytes=10**8, outcome="killed")
    result = judged(ended, '[budgets]\npeak_memory = "1 GB"')
    found = check(result, "memory_limit")
    assert found.status == "not judged"
    assert "simulate with this app_footprint" in found.message
    assert "stands in" not in check(result, "peak_memory").message


def test_windows_alone_make_counts_depend_on_times():
    """In the foreground an unknown time of saving changes neither sessions nor bytes."""
    left_out = [NotJudged(figure="checkpoint_save_ms", reason="unknown")]
    for state, said in (("foreground", False), ("background", True)):
        result = make_result([DEVICE], policy=Policy.model_validate({"state": state}))
        result = on_devices(result, campaign={"left_out": left_out})
        result = judged(result, '[budgets]\nsessions = 900\nwritten_per_day = "9 GB"')
        for metric in ("sessions", "written_per_day"):
            assert ("without saving checkpoints" in check(result, metric).message) == said


def test_a_host_that_cannot_measure_memory_is_told():
    """As macOS and Windows: the plan's verdict stands, and what was not measured is not a pass."""
    result = judge(changed(make_result([DEVICE]), memory={"measured_peak_bytes": None}))
    found = check(result, "memory_measured")
    assert (found.status, found.message) == (
        "not judged",
        "memory is predicted, not measured, and no limit was enforced: this host cannot",
    )
    assert result.devices[0].verdict == "pass"
    assert result.verdict == "not judged"
    assert "memory_measured" not in [c.metric for c in judge(make_result([DEVICE])).checks]


@pytest.mark.parametrize(("sharing", "said"), [("none", True), ("shared", False)])
@pytest.mark.parametrize(("system", "glibc"), [("linux", True), ("android", False)])
def test_what_glibc_must_be_told_where_there_is_no_arena(sharing, said, system, glibc):
    result = on_devices(make_result([DEVICE]), os=system, memory={"sharing": sharing})
    message = check(judge(result), "memory_limit").message
    assert ("MALLOC_MMAP_THRESHOLD_=16384" in message) == (said and glibc)


@pytest.mark.parametrize(("measured", "status"), [(None, "not judged"), (20_000_000, "pass")])
def test_a_plan_that_knows_no_bound_promises_nothing(measured, status):
    """Of a Loop that data end: what was measured decides, if anything was."""
    memory = {"unbounded": True, "measured_peak_bytes": measured}
    found = check(judge(on_devices(make_result([DEVICE]), memory=memory)), "memory_limit")
    assert found.status == status
    assert "how often a Loop turns" in found.message
    budgets = '[budgets]\npeak_memory = "1 GB"\nmemory_headroom = "1 %"'
    result = judged(on_devices(make_result([DEVICE]), memory=memory), budgets)
    assert check(result, "peak_memory").status == check(result, "memory_headroom").status == status


# A better device is never judged worse.

ORDER = ("fail", "not judged", "warn", "pass")
BUDGETS = parse_budgets(b'[budgets]\npeak_memory = "200 MB"\nmemory_headroom = "20 %"')
PEAKS = st.integers(1, 2**31)


@settings(max_examples=500, deadline=None)
@given(
    planned=PEAKS, measured=st.none() | PEAKS, limit=st.integers(1, 2**32),
    share=st.floats(0.2, 1), app=st.integers(0, 2**30), more=st.integers(0, 2**32),
)  # fmt: skip
def test_more_memory(planned, measured, limit, share, app, more):
    result = make_result(["google/pixel-8a"])

    def verdict(limit: int, low: int) -> int:
        memory = {
            "predicted_peak_bytes": planned, "measured_peak_bytes": measured,
            "limit_bytes": limit, "limit_low_bytes": low, "app_bytes": app,
            "warning_bytes": None,
        }  # fmt: skip
        judged = judge(on_devices(result, memory=memory), BUDGETS)
        return ORDER.index(judged.devices[0].verdict)

    low = int(share * limit)
    assert verdict(limit + more, low + more) >= verdict(limit, low)


def quantity(value: float, unit: str) -> Quantity:
    return Quantity(value=value, unit=unit, kind="assumed", source="made up for a test")


@settings(max_examples=500, deadline=None)
@given(
    sustained=st.floats(0.1, 1), cooler=st.floats(1, 10), throttle=st.floats(1, 600),
    later=st.floats(1, 10), faster=st.floats(1, 100), save_every=st.none() | st.integers(1, 50),
    state=st.sampled_from(["foreground", "background"]), name=st.sampled_from(list_profiles()),
)  # fmt: skip
def test_faster_storage_and_a_later_or_milder_throttle(
    sustained, cooler, throttle, later, faster,
    save_every, state, name,
):  # fmt: skip
    policy = Policy.model_validate({"state": state, "save_every": save_every})
    device = make_result([name]).devices[0]
    profile = load_profile(name)

    def finish(profile: DeviceProfile, storage: float) -> float | None:
        latency = device.latency
        stored = {
            key: None if (time := getattr(latency, key)) is None else time.scaled(1 / storage)
            for key in ("checkpoint_load_ms", "checkpoint_save_ms")
        }
        latency = changed(latency, **stored)
        more = {"steps": [240], "checkpoint_bytes": 10**7, "curve": []}
        active = run_campaign(profile, latency, policy, **more).active_s
        return None if active is None else active.typical

    def throttled(share: float, seconds: float) -> DeviceProfile:
        slower = {"sustained_fraction": quantity(share, "1")}
        return changed(profile, **slower, time_to_throttle=quantity(seconds, "s"))

    slow = finish(throttled(sustained, throttle), 1)
    fast = finish(throttled(min(1.0, sustained * cooler), throttle * later), faster)
    assert (slow is None) == (fast is None)
    if slow is not None and fast is not None:
        assert fast <= slow * (1 + 1e-9)
