"""A better device is never judged worse."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.campaign.campaign import run_campaign
from odtpack_simulator.device.profile import DeviceProfile, list_profiles, load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.result.result import Policy
from odtpack_simulator.values.quantities import Quantity
from tests.simulator.factory import make_result

ORDER = ("fail", "not judged", "warn", "pass")
BUDGETS = parse_budgets(b'[budgets]\npeak_memory = "200 MB"\nmemory_headroom = "20 %"')
PEAKS = st.integers(1, 2**31)


@settings(max_examples=500, deadline=None)
@given(
    planned=PEAKS, measured=st.none() | PEAKS, limit=st.integers(1, 2**32),
    share=st.floats(0.2, 1), app=st.integers(0, 2**30), more=st.integers(0, 2**32),
)  # fmt: skip
def test_more_memory(
    planned: int, measured: int | None, limit: int, share: float, app: int, more: int
) -> None:
    result = make_result(["google/pixel-8a"])

    def verdict(limit: int, low: int) -> int:
        memory = result.devices[0].memory.model_copy(
            update={
                "predicted_peak_bytes": planned, "measured_peak_bytes": measured,
                "limit_bytes": limit, "limit_low_bytes": low, "app_bytes": app,
                "warning_bytes": None,
            }
        )  # fmt: skip
        device = result.devices[0].model_copy(update={"memory": memory})
        judged = judge(result.model_copy(update={"devices": [device]}), BUDGETS)
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
    sustained: float, cooler: float, throttle: float, later: float, faster: float,
    save_every: int | None, state: str, name: str,
) -> None:  # fmt: skip
    policy = Policy.model_validate({"state": state, "save_every": save_every})
    device = make_result([name]).devices[0]
    profile = load_profile(name)

    def finish(profile: DeviceProfile, storage: float) -> float | None:
        latency = device.latency
        stored = {
            key: None if (time := getattr(latency, key)) is None else time.scaled(1 / storage)
            for key in ("checkpoint_load_ms", "checkpoint_save_ms")
        }
        latency = latency.model_copy(update=stored)
        campaign = run_campaign(
            profile, latency, policy, steps=[240], checkpoint_bytes=10**7, curve=[]
        )
        return None if campaign.active_s is None else campaign.active_s.typical

    def throttled(share: float, seconds: float) -> DeviceProfile:
        return profile.model_copy(
            update={
                "sustained_fraction": quantity(share, "1"),
                "time_to_throttle": quantity(seconds, "s"),
            }
        )

    slow = finish(throttled(sustained, throttle), 1)
    fast = finish(throttled(min(1.0, sustained * cooler), throttle * later), faster)
    assert (slow is None) == (fast is None)
    if slow is not None and fast is not None:
        assert fast <= slow * (1 + 1e-9)
