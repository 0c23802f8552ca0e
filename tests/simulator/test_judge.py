import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.budgets import judge, parse_budgets, suggest_budget
from odtpack_runtime.simulator.result import Check, SimulationResult
from odtpack_runtime.simulator.units import Interval
from tests.simulator.factory import make_result

DEVICE = "google/pixel-8a"


def one_device(**memory: object) -> SimulationResult:
    result = make_result([DEVICE])
    device = result.devices[0]
    changed = device.model_copy(update={"memory": device.memory.model_copy(update=memory)})
    return result.model_copy(update={"devices": [changed]})


def with_latency(low: float, typical: float, high: float) -> SimulationResult:
    result = make_result([DEVICE])
    step = Interval(low=low, typical=typical, high=high)
    device = result.devices[0]
    latency = device.latency.model_copy(update={"step_ms": step, "finish_s": step})
    return result.model_copy(update={"devices": [device.model_copy(update={"latency": latency})]})


def check(result: SimulationResult, metric: str) -> Check:
    found = [c for _, c in result.all_checks() if c.metric == metric]
    assert len(found) == 1, metric
    return found[0]


def judged(result: SimulationResult, text: str = "") -> SimulationResult:
    return judge(result, parse_budgets(text.encode()))


@pytest.mark.parametrize(
    ("memory", "status", "outcome", "verdict"),
    [
        ({"limit_bytes": 100, "measured_peak_bytes": 99}, "pass", "fits", "pass"),
        ({"limit_bytes": 100, "measured_peak_bytes": 100}, "pass", "fits", "pass"),
        ({"limit_bytes": 100, "measured_peak_bytes": 101}, "fail", "over", "fail"),
        # The measurement decides, not the prediction.
        (
            {"limit_bytes": 100, "predicted_peak_bytes": 101, "measured_peak_bytes": 100},
            "pass",
            "fits",
            "pass",
        ),
        (
            {"limit_bytes": 100, "predicted_peak_bytes": 101, "measured_peak_bytes": None},
            "fail",
            "over",
            "fail",
        ),
        ({"limit_bytes": None}, "not judged", "not judged", "not judged"),
        ({"limit_bytes": 0}, "fail", "over", "fail"),
        ({"limit_bytes": 10**12, "outcome": "killed"}, "fail", "killed", "fail"),
    ],
)
def test_device_limit_is_judged_without_budgets(
    memory: dict[str, object], status: str, outcome: str, verdict: str
) -> None:
    result = judge(one_device(**memory))
    assert check(result, "memory_limit").status == status
    assert result.devices[0].memory.outcome == outcome
    assert result.devices[0].verdict == verdict
    assert result.verdict == verdict
    assert result.over_budget == (verdict == "fail")


@pytest.mark.parametrize(
    ("budget", "metric", "status"),
    [
        ('peak_memory = "182233829 B"', "peak_memory", "fail"),
        ('peak_memory = "182233830 B"', "peak_memory", "pass"),
        ('memory_headroom = "95 %"', "memory_headroom", "pass"),
        ('memory_headroom = "96 %"', "memory_headroom", "fail"),
        ('package_size = "5361200 B"', "package_size", "pass"),
        ('package_size = "5361199 B"', "package_size", "fail"),
        ("final_loss = 0.1142", "final_loss", "pass"),
        ("final_loss = 0.1141", "final_loss", "fail"),
        ("metric_floor = 0.9659", "metric_floor", "pass"),
        ("metric_floor = 0.966", "metric_floor", "fail"),
    ],
)
def test_limits_are_inclusive(budget: str, metric: str, status: str) -> None:
    result = judged(make_result([DEVICE]), f"[budgets]\n{budget}")
    found = check(result, metric)
    assert found.status == status
    assert found.budget_location == "budgets.toml:2"
    assert (found.advice is not None) == (status == "fail")


@pytest.mark.parametrize(
    ("interval", "status", "level", "verdict"),
    [
        ((10, 20, 30), "pass", "error", "pass"),
        ((10, 20, 30.1), "fail", "warn", "warn"),
        ((10, 30.1, 40), "fail", "error", "fail"),
        ((31, 32, 33), "fail", "error", "fail"),
    ],
)
@pytest.mark.parametrize(
    ("budget", "metric"),
    [('step_latency = "30 ms"', "step_latency"), ('time_to_finish = "30 s"', "time_to_finish")],
)
def test_latency_is_judged_as_an_interval(
    interval: tuple[float, float, float],
    status: str,
    level: str,
    verdict: str,
    budget: str,
    metric: str,
) -> None:
    result = judged(with_latency(*interval), f"[budgets]\n{budget}")
    found = check(result, metric)
    assert (found.status, found.level, result.verdict) == (status, level, verdict)


def test_warn_level_never_fails() -> None:
    text = '[budgets]\nstep_latency = { limit = "1 us", level = "warn" }'
    result = judged(make_result([DEVICE]), text)
    assert check(result, "step_latency").status == "fail"
    assert result.verdict == "warn"
    assert not result.over_budget


def test_unknown_figures_are_not_judged_and_never_pass() -> None:
    text = '[budgets]\nstep_latency = "1 h"\ntime_to_finish = "1000 h"'
    result = judged(make_result(["web/phone"]), text)
    assert check(result, "step_latency").status == "not judged"
    assert "matrix rate" in check(result, "step_latency").message
    assert result.devices[0].verdict == "not judged"
    assert result.verdict == "not judged"

    result = judged(one_device(limit_bytes=None), '[budgets]\nmemory_headroom = "1 %"')
    assert check(result, "memory_headroom").status == "not judged"

    training = make_result([DEVICE]).training.model_copy(
        update={"eval_loss_after": None, "metric_after": None}
    )
    result = make_result([DEVICE]).model_copy(update={"training": training})
    result = judged(result, "[budgets]\nfinal_loss = 9\nmetric_floor = 0")
    assert check(result, "final_loss").status == "not judged"
    assert check(result, "metric_floor").status == "not judged"

    result = judged(make_result([]), '[budgets]\npeak_memory = "1 GB"')
    assert check(result, "peak_memory").status == "not judged"
    assert result.verdict == "not judged"


def test_worst_verdict_wins() -> None:
    text = '[budgets]\nstep_latency = "30 ms"\nfinal_loss = { limit = 0.0, level = "warn" }'
    names = ["web/phone", DEVICE]
    result = judged(make_result(names), text)
    assert [device.verdict for device in result.devices] == ["not judged", "fail"]
    assert result.verdict == "fail"
    assert judged(make_result(names[:1]), text).verdict == "not judged"


def test_diverged_training_fails() -> None:
    result = make_result([DEVICE])
    training = result.training.model_copy(update={"losses": [2.3, None, None]})
    result = judge(result.model_copy(update={"training": training}))
    found = check(result, "finite_loss")
    assert found.status == "fail"
    assert "learning rate" in (found.advice or "")
    assert result.verdict == "fail"


def test_interrupted_replay_fails_once() -> None:
    result = make_result([DEVICE])
    device = result.devices[0]
    training = device.training.model_copy(  # type: ignore[union-attr]
        update={"outcome": "killed", "steps_done": 12, "detail": "the background window closed"}
    )
    result = result.model_copy(
        update={"devices": [device.model_copy(update={"training": training})]}
    )
    found = check(judge(result), "steps_done")
    assert found.status == "fail"
    assert "background window" in found.message
    killed = judge(make_result(["raspberrypi/zero-2-w"], scale=3.0))
    metrics = [c.metric for c in killed.devices[0].checks]
    assert metrics == ["memory_limit"]


def test_killed_replay_has_no_peak_to_pass_with() -> None:
    text = '[budgets]\npeak_memory = "1 TB"\nmemory_headroom = "1 %"'
    result = judged(make_result(["raspberrypi/zero-2-w"], scale=2.0), text)
    memory = result.devices[0].memory
    assert memory.outcome == "killed"
    assert memory.predicted_peak_bytes < (memory.limit_bytes or 0)
    assert check(result, "peak_memory").status == "not judged"
    assert check(result, "memory_headroom").status == "fail"
    assert check(result, "memory_headroom").actual == 0


def test_package_limits_of_a_class_are_judged_on_its_devices() -> None:
    text = '[class.android]\npackage_size = "1 MB"'
    result = judged(make_result([DEVICE, "raspberrypi/pi-5"]), text)
    assert [device.verdict for device in result.devices] == ["fail", "pass"]
    assert [c.metric for c in result.checks] == ["finite_loss"]


def test_memory_advice_names_a_batch_that_fits() -> None:
    result = judged(make_result([DEVICE]), '[budgets]\npeak_memory = "100 MB"')
    found = check(result, "peak_memory")
    parts = result.memory.predicted.breakdown
    scaling = parts.inputs + parts.activations
    fixed = result.devices[0].memory.peak_bytes - scaling
    words = (found.advice or "").split("about ")[1]
    batch = int(words.split(" ")[0])
    assert fixed + scaling * batch / 64 <= 100e6
    assert fixed + scaling * (batch + 5) / 64 > 95e6


def test_memory_advice_when_no_batch_fits() -> None:
    tight = judged(make_result([DEVICE]), '[budgets]\npeak_memory = "20 MB"')
    assert "freeze parameters" in (check(tight, "peak_memory").advice or "")


def test_entitlement_is_advised_where_it_is_enough() -> None:
    result = make_result(["apple/iphone-15-pro"], scale=25.0)
    assert result.devices[0].memory.peak_bytes > 3e9
    found = check(judge(result), "memory_limit")
    assert "entitlement" in (found.advice or "")
    assert "6.00 GB" in (found.advice or "")


def test_unknown_device_in_budgets() -> None:
    with pytest.raises(OdtpackError, match="does not exist"):
        judged(make_result([DEVICE]), '[device."google/pixel-99"]\nfinal_loss = 1')
    # A shipped device that this run left out is fine.
    judged(make_result([DEVICE]), '[device."google/pixel-4a"]\nfinal_loss = 1')


def test_judging_is_pure_and_repeatable() -> None:
    result = make_result()
    before = result.to_json()
    text = '[budgets]\npeak_memory = "150 MB"\nstep_latency = "60 ms"'
    first = judged(result, text)
    assert result.to_json() == before
    assert first.to_json() == judged(first, text).to_json()


@pytest.mark.parametrize("scale", [0.2, 1.0, 1.9])
def test_suggested_budget_is_kept(scale: float) -> None:
    result = make_result(scale=scale)
    text = suggest_budget(result)
    again = judged(result, text)
    placed = [c for _, c in again.all_checks() if c.budget_location]
    assert len(placed) > 20
    assert {c.status for c in placed} == {"pass"}
    for c in placed:
        if c.metric in {"peak_memory", "package_size"}:
            assert 1.25 <= c.limit / c.actual <= 1.4  # type: ignore[operator]


def test_suggested_budget_leaves_unknown_figures_out() -> None:
    text = suggest_budget(make_result(["web/phone"]))
    assert "step_latency" not in text
