"""Devices, latencies and campaigns in few words, for the tests of the campaign."""

from functools import partial

from odtpack_simulator.campaign import FIGURES, run_campaign
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.result import DeviceCampaign, DeviceLatency, EvaluationPoint, Policy
from odtpack_simulator.values.units import Interval
from tests.simulator.profiles import made_profile

MB = 1_000_000
profile = partial(made_profile, "a/b", "android")


def ms(low: float, typical: float | None = None, high: float | None = None) -> Interval:
    typical = low if typical is None else typical
    return Interval(low=low, typical=typical, high=typical if high is None else high)


def latency(
    step: Interval, *, first: Interval | None = None, creation: Interval | None = None,
    load: Interval | None = None, save: Interval | None = None,
) -> DeviceLatency:  # fmt: skip
    return DeviceLatency(
        step_ms=step, first_step_ms=first or step, session_creation_ms=creation or ms(0),
        checkpoint_load_ms=load, checkpoint_save_ms=save, basis="test",
    )  # fmt: skip


FULL = latency(ms(100), first=ms(300), creation=ms(1000), load=ms(200), save=ms(400))


def campaign(
    device: DeviceProfile, times: DeviceLatency = FULL, policy: Policy | None = None, *,
    steps: int | list[int] = 100, checkpoint_bytes: int = MB, at: tuple[int, ...] = (),
) -> DeviceCampaign:  # fmt: skip
    return run_campaign(
        device, times, policy or Policy(), steps=[steps] if isinstance(steps, int) else steps,
        checkpoint_bytes=checkpoint_bytes,
        curve=[EvaluationPoint(step=step, loss=1.0, metric=0.5) for step in at],
    )  # fmt: skip


def triple(figure: Interval | None) -> tuple[float, float, float]:
    return figure.low, figure.typical, figure.high


def same(figure: Interval | None) -> float:
    """The figure where all scenarios agree."""
    low, typical, high = triple(figure)
    assert low == typical == high
    return typical


def reasons(result: DeviceCampaign) -> dict[str, str]:
    names = [entry.figure for entry in result.not_judged]
    assert len(names) == len(set(names))
    null = {name for name in FIGURES if getattr(result, name) is None}
    assert set(names) == null
    return {entry.figure: entry.reason for entry in result.not_judged}
