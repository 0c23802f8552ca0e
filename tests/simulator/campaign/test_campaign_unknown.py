"""What a campaign says of figures that nobody knows, and of trainings that never finish."""

from __future__ import annotations

import math

import pytest

from odtpack_simulator.campaign.campaign import FIGURES, steps_per_window
from odtpack_simulator.device.profile import parse_profile
from odtpack_simulator.result.result import DeviceLatency, Policy
from tests.simulator.campaigns import (
    FULL,
    MB,
    campaign,
    latency,
    ms,
    profile,
    reasons,
    same,
    triple,
)


@pytest.mark.parametrize(
    ("lacking", "null"),
    [
        ("sustained_fraction", {"throttled_share"}),
        ("time_to_throttle", {"throttled_share"}),
        ("power__load", {"energy_j", "battery_share", "battery_share_per_session"}),
        ("power__battery", {"battery_share", "battery_share_per_session"}),
        ("background_window", set(FIGURES)),
    ],
)
def test_what_the_profile_lacks_is_null_with_a_reason(lacking: str, null: set[str]) -> None:
    figures: dict[str, float | tuple[float, float, float]] = {
        "sustained_fraction": 0.5,
        "time_to_throttle": 5,
        "background_window": 60,
        "power__idle": 1,
        "power__load": 5,
        "power__battery": 50_000,
    }
    policy = Policy(state="background")
    assert reasons(campaign(profile(**figures), policy=policy)) == {}
    del figures[lacking]
    found = reasons(campaign(profile(**figures), policy=policy))
    assert set(found) == null
    assert set(found.values()) == {f"the profile gives no {lacking.replace('__', '.')}"}


def test_the_reason_that_a_profile_gives_is_passed_on() -> None:
    text = 'schema_version = 1\nname = "a/b"\ntitle = "B"\nvendor = "A"\nos = "ios"\n'
    text += 'validated = false\nbackground_window = { unknown = "not published" }\n'
    device = parse_profile(text.encode(), "b.toml")
    found = reasons(campaign(device, policy=Policy(state="background")))
    assert set(found.values()) == {"the profile gives no background_window: not published"}


def test_without_a_sustained_fraction_nothing_is_throttled_and_that_is_said() -> None:
    result = campaign(profile(time_to_throttle=1))
    assert same(result.active_s) == pytest.approx(11.8)
    assert "sustained_fraction" in {entry.figure for entry in result.left_out}


def test_without_the_time_to_throttle_it_may_be_never_or_at_once() -> None:
    """Everything but loading and saving takes twice as long: 2 * 11.2 + 0.6 s."""
    result = campaign(profile(sustained_fraction=0.5))
    assert triple(result.active_s) == pytest.approx((11.8, 23.0, 23.0))


def test_what_counts_as_nothing_is_named() -> None:
    device = profile(sustained_fraction=1, power__load=3, storage__read=MB)
    result = campaign(device, latency(ms(100)))
    assert same(result.active_s) == pytest.approx(10.0)
    assert same(result.energy_j) == pytest.approx(30.0)
    assert {entry.figure: entry.reason for entry in result.left_out} == {
        "session_creation_ms": "it was not measured",
        "first_step_ms": "it was not measured, and counts as any other step",
        "checkpoint_load_ms": "it was not measured",
        "checkpoint_save_ms": "the profile gives no storage.write",
        "power.idle": "the profile gives no power.idle",
    }
    assert campaign(profile(sustained_fraction=1)).left_out == []


def test_a_latency_that_is_not_known_judges_nothing() -> None:
    times = DeviceLatency(step_ms=None, basis="test", not_judged="the profile gives no matrix rate")
    result = campaign(profile(sustained_fraction=1, background_window=60), times, at=(0, 100))
    assert set(reasons(result).values()) == {"the profile gives no matrix rate"}
    assert len(result.not_judged) == len(FIGURES)
    assert result.curve == []
    assert steps_per_window(profile(background_window=60), times) is None


def test_a_window_too_short_never_finishes() -> None:
    """1.2 s to begin, the first step 0.3, nine more 0.9, the checkpoint 0.4: 2.8 s are needed."""
    policy = Policy(state="background", save_every=10)
    device = profile(sustained_fraction=1, background_window=2.79)
    result = campaign(device, policy=policy, at=(0, 10))
    assert result.endless == "typical"
    found = reasons(result)
    assert set(found) == set(FIGURES) - {"restart_s"}
    assert found["sessions"] == (
        "it never finishes: the window of 2.79 s ends before a checkpoint is "
        "written; 2.80 s are needed for session and checkpoint (1.20 s), 10 steps and the next "
        "checkpoint"
    )
    assert [p.step for p in result.curve] == [0]
    enough = campaign(profile(sustained_fraction=1, background_window=2.8), policy=policy)
    assert enough.endless is None
    assert same(enough.sessions) == 10


def test_a_training_that_never_finishes_in_the_worst_case_only() -> None:
    policy = Policy(state="background", save_every=10)
    device = profile(sustained_fraction=1, background_window=(2, 5, 9))
    result = campaign(device, policy=policy, at=(0, 50, 100))
    assert result.endless == "worst case"
    why = reasons(result)["active_s"]
    assert why.startswith("in the worst case it never finishes: the window of 2.00 s")
    assert why.endswith("; typically it takes 5 windows and 24.2 s of work")
    assert [(p.step, p.session) for p in result.curve] == [(0, 1), (50, 3), (100, 5)]


def test_a_device_that_stays_warm_may_never_finish() -> None:
    """The first window keeps ten steps; the second starts without a rest, throttled."""
    policy = Policy(state="background", save_every=10, sessions_per_day=1440)
    device = profile(sustained_fraction=0.25, time_to_throttle=60, background_window=60)
    times = latency(ms(2000))
    result = campaign(device, times, policy, at=(0, 30, 40))
    assert result.endless == "typical"
    assert reasons(result)["sessions"].endswith(
        "the window of 60.0 s ends before a checkpoint is written; 80.0 s are needed for session "
        "and checkpoint (0 µs), 10 steps and the next checkpoint, on a device that is still warm "
        "from the session before"
    )
    assert [p.step for p in result.curve] == [0, 30]
    rested = policy.model_copy(update={"sessions_per_day": 24})
    assert campaign(device, times, rested).endless is None


def test_steps_per_window_are_what_a_window_keeps() -> None:
    device = profile(sustained_fraction=(0.5, 0.5, 1), time_to_throttle=3, background_window=5)
    steps = steps_per_window(device, FULL)
    # Until 4.6 s: at full rate 32 steps; throttled from 3.0 on 16 in 1.5 s and 8 in 1.6 s.
    assert triple(steps) == (24, 24, 32)
    most = Policy(state="background", save_every=24)
    assert campaign(device, policy=most).endless is None
    more = Policy(state="background", save_every=25)
    assert campaign(device, policy=more).endless == "typical"
    assert steps_per_window(profile(), FULL) is None


def test_figures_beyond_reason_are_not_judged() -> None:
    aeon = latency(ms(1, 1, 1e300))
    assert set(reasons(campaign(profile(), aeon)).values()) == {
        "a step, or a checkpoint, would take more than a thousand years"
    }
    device = profile(power__load=1e18, power__battery=1e-300, sustained_fraction=1)
    result = campaign(device)
    assert set(reasons(result)) == {"battery_share", "battery_share_per_session"}
    lazy = Policy(sessions_per_day=1e-300, pieces=2)
    assert math.isfinite(same(campaign(device, policy=lazy, steps=[50, 50]).days))
    still = profile(sustained_fraction=1e-300, time_to_throttle=1e18, background_window=1e18)
    assert reasons(campaign(still, policy=Policy(state="background"))).keys() == {
        "energy_j",
        "battery_share",
        "battery_share_per_session",
    }
