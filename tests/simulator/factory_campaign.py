"""The parts of the made-up result that tell how a whole training goes on a device."""

import math

from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.result import (
    CampaignPoint,
    DeviceCampaign,
    EvaluationPoint,
    Interruption,
    InterruptionInfo,
    NotJudged,
    Policy,
)
from odtpack_simulator.values.units import Interval

CHECKPOINT_BYTES = 14_462_000
PER_EPOCH = 80


def interval(typical: float, spread: float = 1.5) -> Interval:
    return Interval(low=typical / spread, typical=typical, high=typical * spread)


def same(value: float) -> Interval:
    return Interval(low=value, typical=value, high=value)


def evaluations() -> list[EvaluationPoint]:
    """After every epoch, and the last one as the result's own loss and metric."""
    return [
        EvaluationPoint(step=0, loss=2.318, metric=0.094),
        EvaluationPoint(step=PER_EPOCH, loss=0.371, metric=0.8943),
        EvaluationPoint(step=2 * PER_EPOCH, loss=0.1608, metric=0.95),
        EvaluationPoint(step=3 * PER_EPOCH, loss=0.1142, metric=0.9659),
    ]


def interruption() -> InterruptionInfo:
    """Killed between steps, in a save, and warned once; equal in the end."""
    rows = [("step", 37, 30), ("save", 120, 110), ("memory warning", 181, 181)]
    return InterruptionInfo(
        interruptions=[
            Interruption(at=at, step=step, resumed_from_step=start, repeated_steps=step - start)  # type: ignore[arg-type]
            for at, step, start in rows
        ],
        save_every=10,
        saves=24,
        equal=True,
    )


def campaign(
    profile: DeviceProfile, step_ms: Interval | None, policy: Policy, steps: int
) -> DeviceCampaign:
    """A campaign whose parts agree: phones draw 3 W, boards have neither battery nor windows."""
    if step_ms is None:
        reason = NotJudged(figure="active_s", reason="the step time is unknown")
        return DeviceCampaign(not_judged=[reason])
    overhead_s = 0.9
    active = Interval(
        low=step_ms.low * steps / 1e3 + overhead_s,
        typical=step_ms.typical * steps / 1e3 * 1.2 + overhead_s,
        high=step_ms.high * steps / 1e3 * 1.8 + overhead_s,
    )
    battery_j = 60_000.0 if profile.os in ("android", "ios") else None
    sessions, repeated = same(1.0), same(0.0)
    if policy.state == "background":
        window_s = 30.0
        counts = [math.ceil(s / window_s) for s in (active.low, active.typical, active.high)]
        sessions = Interval(low=counts[0], typical=counts[1], high=counts[2])
        repeated = Interval(low=0.0, typical=5.0 * (counts[1] - 1), high=9.0 * (counts[2] - 1))
    saves = steps // (policy.save_every or steps)
    written = same(saves * CHECKPOINT_BYTES)
    days = sessions.scaled(1.0 / policy.sessions_per_day)
    per_day = Interval(
        low=min(written.low, written.low / max(1.0, days.high)),
        typical=written.typical / max(1.0, days.typical),
        high=written.high / max(1.0, days.low),
    )
    energy = None
    if battery_j is not None:
        energy = Interval(
            low=2.0 * active.low, typical=3.0 * active.typical, high=4.5 * active.high
        )
    curve = [
        CampaignPoint(
            step=point.step,
            active_s=overhead_s + (active.typical - overhead_s) * point.step / steps,
            energy_j=None if energy is None else energy.typical * point.step / steps,
            session=max(1, math.ceil(sessions.typical * point.step / steps)),
            loss=point.loss,
            metric=point.metric,
        )
        for point in evaluations()
    ]
    missing = [
        NotJudged(figure=name, reason="the profile gives no power under load and no battery")
        for name in ("energy_j", "battery_share", "battery_share_per_session")
        if energy is None
    ]
    share = energy.scaled(1.0 / battery_j) if energy is not None and battery_j else None
    return DeviceCampaign(
        active_s=active, sessions=sessions, days=days, energy_j=energy, battery_share=share,
        battery_share_per_session=share and share.scaled(1.0 / sessions.typical),
        written_bytes=written, written_bytes_per_day=per_day,
        throttled_share=Interval(low=0.0, typical=0.35, high=0.8), repeated_steps=repeated,
        curve=curve, not_judged=missing,
    )  # fmt: skip
