"""A made-up result with everything that a report can show, judged; the same on every call.

The pictures in the documentation show it. It starts from the factory's result of a small CNN
and adds what a campaign, interruptions, phases and costs of operators would have found.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result import (
    CampaignPoint,
    ClassTime,
    DeviceCampaign,
    DeviceResult,
    EvaluationPoint,
    Interruption,
    InterruptionInfo,
    NotJudged,
    PhasePeak,
    Policy,
    SimulationResult,
    load_result,
)
from odtpack_simulator.values.figure import Check, Unit
from odtpack_simulator.values.units import Interval
from tests.simulator.changed import changed
from tests.simulator.factory import make_result

BUDGETS = b"""
[budgets]
package_size = "6 MB"
peak_memory = "500 MB"
step_latency = { limit = "100 ms", level = "warn" }
time_to_finish = "1 min"
accuracy_floor = 0.95

[class.linux]
step_latency = "150 ms"
"""
STORED = Path(__file__).with_name("demo.json")
STEPS = 240
CHECKPOINT_BYTES = 14_480_000
PER_STEP_FLOPS = {"Conv": 1.62e9, "MatMul": 1.31e9, "ConvTranspose": 0.71e9, "Mul": 2.1e7,
                  "Where": 1.4e7, "Add": 1.1e7, "ReduceSum": 1.3e7}  # fmt: skip
PER_STEP_BYTES = {"Conv": 2.1e8, "MatMul": 9.4e7, "ConvTranspose": 8.2e7, "Mul": 5.1e7,
                  "Where": 4.2e7, "Slice": 3.3e7, "Pad": 2.4e7, "Add": 1.7e7, "ReduceSum": 1.2e7,
                  "MaxPool": 6.1e6, "Transpose": 7.0e6, "Softmax": 8.2e4}  # fmt: skip


def stored_result(names: Sequence[str] | None = None) -> SimulationResult:
    """The made-up result of six devices as it is stored, so that tests of reports depend on
    reports alone, and not on what profiles say or the judge finds today.

    Args:
        names: Devices to keep, all by default.
    """
    result = load_result(STORED)
    if names is None:
        return result
    return changed(result, devices=[device for device in result.devices if device.name in names])


def demo_result(names: Sequence[str] | None = None, *, scale: float = 2.0) -> SimulationResult:
    """The judged result; ``scale`` is a factor on the memory that grows with the batch."""
    result = judge(rich(make_result(names, scale=scale, app=True)), parse_budgets(BUDGETS))
    return changed(result, devices=[_with_campaign_checks(device) for device in result.devices])


def rich(result: SimulationResult) -> SimulationResult:
    """The result with a campaign per device, interruptions, phases and costs of operators."""
    of_steps = {"flops": PER_STEP_FLOPS, "moved_bytes": PER_STEP_BYTES}
    host = {
        "by_operator": [
            changed(cost, **{key: _times(of.get(cost.op_type)) for key, of in of_steps.items()})
            for cost in result.latency_host.by_operator
        ],
        "p50_ms": Interval(low=41.0, typical=41.2, high=41.5),
        "p90_ms": Interval(low=42.3, typical=42.6, high=43.1),
        "session_creation_ms": 61.2, "checkpoint_load_ms": 9.4, "checkpoint_save_ms": 21.7,
        "checkpoint_bytes": CHECKPOINT_BYTES,
    }  # fmt: skip
    predicted = result.memory.predicted.peak_bytes
    phases = [
        PhasePeak(phase=name, predicted_bytes=planned, measured_bytes=found)
        for name, planned, found in (
            ("sessions created", 21_300_000, 22_100_000),
            ("checkpoint loaded", 35_700_000, 35_900_000),
            ("training step", predicted, result.memory.measured_peak_bytes),
            ("evaluation", int(0.42 * predicted), int(0.431 * predicted)),
            ("checkpoint saved", 48_600_000, None),
        )
    ]
    return changed(
        result, policy=Policy(sessions_per_day=1.0, save_every=20, state="background"),
        training={"curve": _curve(), "metric_interval": (0.9518, 0.9762)}, latency_host=host,
        memory={"phases": phases}, devices=[_device(device) for device in result.devices],
        interruption=interruption(),
    )  # fmt: skip


def interruption() -> InterruptionInfo:
    """Nine times that a process was killed, and one warning; all of them resumed."""
    kinds: list[Literal["step", "save", "memory warning"]]
    kinds = ["step", "save", "step", "step", "save", "memory warning", "step", "save", "step"]
    found, steps = [], (7, 20, 46, 71, 100, 118, 153, 180, 229)
    for index, (at, step) in enumerate(zip(kinds, steps, strict=True)):
        saved = step if at == "memory warning" else (step - (index % 2 == 1)) // 20 * 20
        found.append(
            Interruption(at=at, step=step, resumed_from_step=saved, repeated_steps=step - saved)
        )
    return InterruptionInfo(
        interruptions=found, save_every=20, saves=15, equal=True,
        detail="all 14 parameters and 28 moments have the same bits",
    )  # fmt: skip


def _times(per_step: float | None) -> float | None:
    return None if per_step is None else per_step * STEPS


def _curve() -> list[EvaluationPoint]:
    points = []
    for step in range(0, STEPS + 1, 20):
        left = (1 - step / STEPS) ** 0.25 * math.exp(-step / 38.0)
        loss = 0.1142 + (2.318 - 0.1142) * left
        metric = 0.9659 - (0.9659 - 0.094) * left
        points.append(EvaluationPoint(step=step, loss=round(loss, 4), metric=round(metric, 4)))
    return points


def _reasons(reason: str, *names: str) -> list[NotJudged]:
    return [NotJudged(figure=name, reason=reason) for name in names]


def _device(device: DeviceResult) -> DeviceResult:
    step = device.latency.step_ms
    if step is None:
        names = ("active_s", "sessions", "days", "energy_j", "battery_share")
        missing = _reasons("the step time is unknown", *names)
        return changed(device, campaign=DeviceCampaign(not_judged=missing))
    latency = {
        "p90_ms": step.scaled(1.06),
        "first_step_ms": step.scaled(2.3),
        "session_creation_ms": Interval(low=60, typical=140, high=310),
        "checkpoint_load_ms": Interval(low=11, typical=19, high=42),
        "checkpoint_save_ms": Interval(low=35, typical=71, high=180),
        "threads": 1 if device.os == "linux" else 4,
        "by_class": [
            ClassTime(operator_class=name, host_ms=host, device_ms=step.scaled(share))
            for name, host, share in (
                ("compute", 29.8, 0.7),
                ("memory", 10.7, 0.27),
                ("other", 0.8, 0.03),
            )
        ],
    }
    memory: dict[str, object] = {}
    if device.memory.limit_bytes is not None:
        held = "cgroup" if device.memory.outcome == "killed" else None
        memory = {"warning_bytes": int(0.8 * device.memory.limit_bytes), "held": held}
    return changed(device, latency=latency, memory=memory, campaign=_campaign(device, step))


def _campaign(device: DeviceResult, step: Interval) -> DeviceCampaign:
    slower = Interval(low=1.0, typical=1.18, high=1.6)
    active = Interval(
        low=step.low * STEPS / 1e3 * slower.low + 0.4,
        typical=step.typical * STEPS / 1e3 * slower.typical + 0.9,
        high=step.high * STEPS / 1e3 * slower.high + 2.1,
    )
    low, typical, high = (
        float(math.ceil(end / 25.0)) for end in (active.low, active.typical, active.high)
    )
    sessions = Interval(low=low, typical=typical, high=high)
    battery = 55_000.0 if device.os in {"android", "ios"} else None
    energy = active.scaled(4.2)
    saves = [value * CHECKPOINT_BYTES * 3 for value in (1, 2, 3)]
    curve = [
        CampaignPoint(
            step=point.step,
            active_s=active.typical * point.step / STEPS,
            energy_j=energy.typical * point.step / STEPS,
            session=1 + min(int(sessions.typical) - 1, int(sessions.typical * point.step / STEPS)),
            loss=point.loss,
            metric=point.metric,
        )
        for point in _curve()
    ]
    shares = {
        "battery_share": energy.scaled(1 / battery) if battery else None,
        "battery_share_per_session": energy.scaled(1 / battery / typical) if battery else None,
    }
    return DeviceCampaign(
        active_s=active, sessions=sessions, days=sessions, energy_j=energy, **shares,
        written_bytes=Interval(low=saves[0], typical=saves[1], high=saves[2]),
        written_bytes_per_day=Interval(low=saves[0], typical=saves[0], high=saves[1]),
        throttled_share=Interval(low=0.0, typical=0.12, high=0.45),
        repeated_steps=Interval(low=0, typical=6 * sessions.typical, high=20 * sessions.high),
        curve=curve,
        not_judged=[] if battery else _reasons("the device has no battery", *shares),
    )  # fmt: skip


def _with_campaign_checks(device: DeviceResult) -> DeviceResult:
    """Checks of energy and sessions as the judge makes them, where it did not."""
    campaign = device.campaign
    present = {check.metric for check in device.checks}
    if campaign is None or "energy" in present:
        return device
    checks = list(device.checks)
    limits: list[tuple[str, Interval | None, float, Unit, int]] = [
        ("energy", campaign.energy_j, 250.0, "J", 8),
        ("sessions", campaign.sessions, 3.0, "1", 9),
    ]
    for metric, figure, limit, unit, line in limits:
        told: dict[str, Any] = {"status": "not judged", "message": "the step time is unknown"}
        if figure is not None:
            bad, value = figure.typical > limit, figure.typical
            told = {
                "status": "fail" if bad else "pass", "actual": value,
                "message": f"estimated at {value:.3g} {unit if unit == 'J' else metric}",
                "advice": f"about {int(STEPS * limit / value)} of the {STEPS} steps fit"
                          if bad else None,
            }  # fmt: skip
        checks.append(Check(
            metric=metric, limit=limit, unit=unit, level="warn",
            budget_location=f"budgets.toml:{line}", **{"actual": None, "advice": None} | told,
        ))  # fmt: skip
    verdict = device.verdict
    if verdict == "pass" and any(check.status == "fail" for check in checks):
        verdict = "warn"
    return changed(device, checks=checks, verdict=verdict)
