"""The campaign: figures by hand, every shipped profile, the example of the documentation."""

import math
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.campaign import FIGURES, steps_per_window
from odtpack_simulator.device.profile import list_profiles, load_profile, parse_profile
from odtpack_simulator.replay.job import make_sample_plan
from odtpack_simulator.result import DeviceCampaign, DeviceLatency, Policy
from tests.programs import ran
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

DOCUMENT = Path(__file__).parents[3] / "docs" / "campaign.md"


def test_one_session_in_the_foreground():
    """1.0 created, 0.2 loaded, 0.3 first step, 99 steps of 0.1, 0.4 saved: 11.8 s."""
    device = profile(sustained_fraction=1, power__idle=1, power__load=5, power__battery=4720)
    result = campaign(device, at=(0, 1, 51, 100))
    assert reasons(result) == {}
    assert same(result.active_s) == pytest.approx(11.8)
    assert same(result.sessions) == 1
    assert same(result.days) == pytest.approx(11.8 / 86_400)
    assert same(result.calendar_days) == 1
    assert same(result.energy_j) == pytest.approx(47.2)
    assert same(result.battery_share) == same(result.battery_share_per_session)
    assert same(result.battery_share) == pytest.approx(0.01)
    assert same(result.written_bytes) == same(result.written_bytes_per_day) == MB
    assert same(result.throttled_share) == 0
    assert same(result.repeated_steps) == 0
    assert same(result.restart_s) == pytest.approx(0.4 + 1.0 + 0.2 + 0.2)
    assert [p.step for p in result.curve] == [0, 1, 51, 100]
    assert [p.active_s for p in result.curve] == pytest.approx([0, 1.5, 6.5, 11.4])
    assert [p.energy_j for p in result.curve] == pytest.approx([0, 6, 26, 45.6])
    assert {(p.session, p.loss, p.metric) for p in result.curve} == {(1, 1.0, 0.5)}


def test_checkpoints_in_the_foreground_cost_time_and_bytes():
    """After 30, 60, 90 steps and at the end; after 25 four times, the last of them at the end."""
    device = profile(sustained_fraction=1)
    for every in (30, 25):
        result = campaign(device, policy=Policy(save_every=every))
        assert same(result.active_s) == pytest.approx(11.8 + 3 * 0.4)
        assert same(result.written_bytes) == 4 * MB


def test_throttling_within_a_step():
    """Throttled from 6.45 s: step 50 ends at 6.4, step 51 after 0.05 + 0.05 / 0.5 s at 6.55.

    The other 49 take 0.2 each, and saving is not slowed: 6.55 + 9.8 + 0.4.
    """
    result = campaign(profile(sustained_fraction=0.5, time_to_throttle=6.45), at=(50, 51, 100))
    assert same(result.active_s) == pytest.approx(16.75)
    assert same(result.throttled_share) == pytest.approx(10.3 / 16.75)
    assert [p.active_s for p in result.curve] == pytest.approx([6.4, 6.55, 16.35])


def test_windows_without_checkpoints_of_their_own():
    """A window of 5 s: ready after 1.2, first step 1.5, until 4.6 there is room for 31 more.

    Three windows of 32 steps make 96, each until 5.0 with its checkpoint. The last 4 steps
    end at 1.8, saved at 2.2.
    """
    device = profile(sustained_fraction=1, background_window=5)
    policy = Policy(state="background", sessions_per_day=4)
    result = campaign(device, policy=policy, at=(32, 33, 100))
    assert same(result.sessions) == 4
    assert same(result.active_s) == pytest.approx(3 * 5.0 + 2.2)
    assert same(result.days) == pytest.approx((3 * 21_600 + 2.2) / 86_400)
    assert same(result.calendar_days) == 1
    assert same(result.repeated_steps) == 0
    assert same(result.written_bytes) == same(result.written_bytes_per_day) == 4 * MB
    assert [(p.session, p.step) for p in result.curve] == [(1, 32), (2, 33), (4, 100)]
    assert [p.active_s for p in result.curve] == pytest.approx([4.6, 6.5, 16.8])


def test_windows_that_lose_steps():
    """Saved every 10: 2.4 + 0.4 = 2.8 for the first ten, 4.2 for twenty, then 8 are lost.

    So five windows keep 20 each. The last ends with its second checkpoint at 4.2.
    """
    device = profile(sustained_fraction=1, background_window=5, power__load=2, power__battery=1000)
    policy = Policy(state="background", sessions_per_day=2, save_every=10)
    result = campaign(device, policy=policy)
    assert same(result.sessions) == 5
    assert same(result.repeated_steps) == 4 * 8
    assert same(result.active_s) == pytest.approx(24.2)
    assert same(result.written_bytes) == 10 * MB
    assert same(result.written_bytes_per_day) == pytest.approx(10 * MB / 2.5)
    assert same(result.energy_j) == pytest.approx(48.4)
    assert same(result.battery_share) == pytest.approx(0.0484)
    assert same(result.battery_share_per_session) == pytest.approx(0.01)


def test_a_checkpoint_that_is_cut_off_is_written_but_does_not_count():
    """As above, but with a window of 4.1 s: the second checkpoint would end at 4.2."""
    device = profile(sustained_fraction=1, background_window=4.1)
    result = campaign(device, policy=Policy(state="background", save_every=10), steps=20)
    assert same(result.sessions) == 2
    assert same(result.repeated_steps) == 10
    assert same(result.written_bytes) == 3 * MB


def test_pieces_are_sessions():
    """100 steps in 3 pieces: 34, 33 and 33 steps, each with its own start and checkpoint."""
    parts = [34, 33, 33]
    device, policy = profile(sustained_fraction=1), Policy(pieces=3)
    result = campaign(device, policy=policy, steps=parts, at=(34, 35))
    assert same(result.sessions) == 3
    assert same(result.active_s) == pytest.approx(3 * (1.2 + 0.3 + 0.4) + 97 * 0.1)
    assert same(result.written_bytes) == 3 * MB
    assert [p.session for p in result.curve] == [1, 2]
    # Three sessions in three hours write in one day what they write in all.
    hourly = campaign(device, policy=Policy(pieces=3, sessions_per_day=24), steps=parts)
    assert same(hourly.written_bytes_per_day) == 3 * MB


def test_pieces_are_those_of_the_schedule():
    """161 samples to train on: 33, 32, 32, 32, 32. A batch of 32 makes two steps of the first."""
    schedule = make_sample_plan([], 201, batch_size=32, epochs=5, seed=0, pieces=5)
    assert schedule.steps_by_piece() == [10, 5, 5, 5, 5]
    ends = [10, 15, 20, 25]
    device, steps = profile(sustained_fraction=1), schedule.steps_by_piece()
    at = tuple(step for end in ends for step in (end, end + 1))
    result = campaign(device, policy=Policy(pieces=5), steps=steps, at=at)
    # The last step of each piece lies in its session, the step after it in the next one.
    assert [p.session for p in result.curve] == [1, 2, 2, 3, 3, 4, 4, 5]


@pytest.mark.parametrize(
    ("sessions", "per_day", "days"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 2), (4, 2, 2), (5, 2, 3), (4, 1 / 7, 22), (9, 4, 3)],
)
def test_days_are_counted_as_on_a_calendar(sessions, per_day, days):
    policy = Policy(pieces=sessions, sessions_per_day=per_day)
    result = campaign(profile(sustained_fraction=1), policy=policy, steps=[10] * sessions)
    assert same(result.sessions) == sessions
    assert same(result.calendar_days) == days


def test_a_day_that_is_just_full_is_one_day():
    """Sessions of half a day, and no pause between them."""
    times = latency(ms(43_200_000))
    policy = Policy(pieces=4, sessions_per_day=2)
    for steps, days in (([1] * 4, 2), ([1, 1, 1, 2], 3)):
        result = campaign(profile(sustained_fraction=1), times, policy, steps=steps)
        assert same(result.calendar_days) == days


def test_the_three_scenarios():
    """Steps only, twenty of them: fast 10 ms each and 4 W; typical 20 ms; slow 40 ms and 9 W."""
    device = profile(power__idle=(1, 2, 3), power__load=(7, 8, 10), power__battery=(10, 20, 50))
    result = campaign(device, latency(ms(10, 20, 40)), steps=20, at=(20,))
    assert triple(result.active_s) == pytest.approx((0.2, 0.4, 0.8))
    assert triple(result.energy_j) == pytest.approx((0.8, 2.4, 7.2))
    assert triple(result.battery_share) == pytest.approx((0.8 / 50, 2.4 / 20, 7.2 / 10))
    assert result.curve[0].active_s == pytest.approx(0.4)
    assert result.curve[0].energy_j == pytest.approx(2.4)


def test_a_short_window_may_lose_fewer_steps_and_the_interval_still_spans_it():
    """Saved every 10 steps of 1 s, 20 steps: windows of 19 s lose 9 once, those of 10 s none."""
    device = profile(sustained_fraction=1, background_window=(10, 19, 20))
    policy = Policy(state="background", save_every=10)
    result = campaign(device, latency(ms(1000)), policy, steps=20)
    assert triple(result.repeated_steps) == (0, 9, 9)
    assert triple(result.active_s) == (20, 29, 29)
    assert triple(result.sessions) == (1, 2, 2)


def test_energy_above_idle_is_never_negative():
    device = profile(power__idle=(2, 3, 6), power__load=(4, 5, 7))
    assert triple(campaign(device, latency(ms(1000)), steps=1).energy_j) == (0, 2, 5)


def test_energy_is_not_judged_where_work_would_cost_none():
    device = profile(power__idle=5, power__load=(3, 4, 9), power__battery=100)
    result = campaign(device, latency(ms(1000)), steps=1)
    assert result.energy_j is result.battery_share is result.battery_share_per_session is None
    reasons = {each.figure: each.reason for each in result.not_judged}
    for figure in ("energy_j", "battery_share", "battery_share_per_session"):
        assert reasons[figure] == "the profile's power.idle is not below its power.load"


@pytest.mark.parametrize("steps", [[100], [50, 50, 50], [100, 0], []])
def test_steps_that_are_not_those_of_the_pieces_are_refused(steps):
    with pytest.raises(ValueError, match="steps of 2 pieces"):
        campaign(profile(), policy=Policy(pieces=2), steps=steps)


def test_an_evaluation_beyond_the_last_step_is_refused():
    with pytest.raises(ValueError, match="beyond step 100"):
        campaign(profile(), at=(101,))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 500), st.sampled_from([None, 1, 7, 40]), st.floats(0.3, 20),
       st.floats(0.2, 1), st.floats(1, 60))  # fmt: skip
def test_the_parts_add_up(steps, save_every, window, sustained, throttle):
    device = profile(
        sustained_fraction=sustained, time_to_throttle=throttle, background_window=window,
        power__load=3, power__battery=9000,
    )  # fmt: skip
    times = latency(ms(10, 20, 30), creation=ms(50), save=ms(5))
    policy = Policy(state="background", save_every=save_every)
    result = campaign(device, times, policy, steps=steps, at=tuple(range(0, steps + 1, 5)))
    if result.endless:
        return
    for power, active in zip(triple(result.energy_j), triple(result.active_s), strict=True):
        assert power == pytest.approx(3 * active)
    for written in triple(result.written_bytes):
        assert written % MB == 0
        assert written >= triple(result.sessions)[0] * MB
    for before, after in pairwise(result.curve):
        assert after.active_s > before.active_s
        assert after.session >= before.session
        assert after.energy_j == pytest.approx(3 * after.active_s)
    assert result.curve[-1].active_s <= triple(result.active_s)[1]


@pytest.mark.parametrize("name", list_profiles())
@pytest.mark.parametrize("state", ["foreground", "background"])
def test_every_shipped_profile_has_a_campaign_or_reasons(name, state):
    device = load_profile(name)
    policy = Policy.model_validate({"state": state, "save_every": 20, "pieces": 3})
    times = latency(ms(50, 80, 130), first=ms(200), creation=ms(300, 400, 700), save=ms(20, 40, 99))
    steps = [667, 667, 666]
    result = campaign(device, times, policy, steps=steps, at=(0, 1000, 2000))
    missing = reasons(result)
    assert result == campaign(device, times, policy, steps=steps, at=(0, 1000, 2000))
    if state == "background" and device.os == "linux":  # a service runs until it is stopped
        foreground = policy.model_copy(update={"state": "foreground"})
        assert result == campaign(device, times, foreground, steps=steps, at=(0, 1000, 2000))
    elif state == "background" and device.background_seconds() is None:
        assert set(missing) == set(FIGURES)
        return
    assert result.endless is None
    low, typical, high = triple(result.active_s)
    assert 2000 * 0.05 < low <= typical <= high
    assert triple(result.sessions)[0] >= 3
    assert len(result.curve) == 3
    assert DeviceCampaign.model_validate_json(result.model_dump_json()) == result


def test_the_example_of_the_documentation_is_what_comes_out(tmp_path):
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.M | re.S))
    (tmp_path / "phone.toml").write_text(blocks["toml"], "utf-8")
    assert ran(sys.executable, "-c", blocks["python"], cwd=tmp_path).stdout == blocks["text"]


def test_the_formula_of_the_documentation_holds_where_it_says():
    """n = k * floor((w - c - l - f + s) / (k * s + v)), and ceil(r / n) sessions."""
    creation, load, first, step, save = 1.0, 0.2, 0.3, 0.1, 0.4
    for window, every, steps in ((5.0, 10, 100), (30.0, 7, 991), (61.7, 100, 5000)):
        room = window - creation - load - first + step
        kept = every * math.floor(room / (every * step + save) + 1e-9)
        device = profile(sustained_fraction=1, background_window=window)
        policy = Policy(state="background", save_every=every)
        assert same(campaign(device, policy=policy, steps=steps).sessions) == -(-steps // kept)


# What a campaign says about unknown figures, and about trainings that never finish.


@pytest.mark.parametrize(("lacking", "null"), [
    ("sustained_fraction", {"throttled_share"}),
    ("time_to_throttle", {"throttled_share"}),
    ("power__load", {"energy_j", "battery_share", "battery_share_per_session"}),
    ("power__battery", {"battery_share", "battery_share_per_session"}),
    ("background_window", set(FIGURES)),
])  # fmt: skip
def test_what_the_profile_lacks_is_null_with_a_reason(lacking, null):
    figures: dict[str, float | tuple[float, float, float]] = {
        "sustained_fraction": 0.5, "time_to_throttle": 5, "background_window": 60, "power__idle": 1,
        "power__load": 5, "power__battery": 50_000,
    }  # fmt: skip
    policy = Policy(state="background")
    assert reasons(campaign(profile(**figures), policy=policy)) == {}
    del figures[lacking]
    found = reasons(campaign(profile(**figures), policy=policy))
    assert set(found) == null
    assert set(found.values()) == {f"the profile gives no {lacking.replace('__', '.')}"}


def test_the_reason_that_a_profile_gives_is_passed_on():
    text = 'schema_version = 1\nname = "a/b"\ntitle = "B"\nvendor = "A"\nos = "ios"\n'
    text += 'validated = false\nbackground_window = { unknown = "not published" }\n'
    device = parse_profile(text.encode(), "b.toml")
    found = reasons(campaign(device, policy=Policy(state="background")))
    assert set(found.values()) == {"the profile gives no background_window: not published"}


def test_without_a_sustained_fraction_nothing_is_throttled_and_that_is_said():
    result = campaign(profile(time_to_throttle=1))
    assert same(result.active_s) == pytest.approx(11.8)
    assert "sustained_fraction" in {entry.figure for entry in result.left_out}


def test_without_the_time_to_throttle_it_may_be_never_or_at_once():
    """Everything but loading and saving takes twice as long: 2 * 11.2 + 0.6 s."""
    result = campaign(profile(sustained_fraction=0.5))
    assert triple(result.active_s) == pytest.approx((11.8, 23.0, 23.0))


def test_what_counts_as_nothing_is_named():
    device = profile(sustained_fraction=1, power__load=3)
    result = campaign(device, latency(ms(100)))
    assert same(result.active_s) == pytest.approx(10.0)
    assert same(result.energy_j) == pytest.approx(30.0)
    assert {entry.figure: entry.reason for entry in result.left_out} == {
        "checkpoint_load_ms": "the profile gives no storage.read",
        "checkpoint_save_ms": "the profile gives no storage.write",
        "power.idle": "the profile gives no power.idle",
    }
    assert campaign(profile(sustained_fraction=1)).left_out == []


COUNTS = {"sessions", "repeated_steps", "written_bytes"}


@pytest.mark.parametrize(("state", "known"), [("foreground", COUNTS), ("background", set())])
def test_a_latency_that_is_not_known_judges_only_counts(state, known):
    times = DeviceLatency(step_ms=None, basis="test", not_judged="the profile gives no matrix rate")
    device, policy = profile(sustained_fraction=1, background_window=60), Policy(state=state)
    result = campaign(device, times, policy=policy, at=(0, 100))
    assert set(reasons(result).values()) == {"the profile gives no matrix rate"}
    assert set(reasons(result)) == set(FIGURES) - known
    timed = campaign(device, latency(ms(100)), policy=policy)
    assert all(getattr(result, name) == getattr(timed, name) for name in known)
    assert result.curve == []
    assert steps_per_window(profile(background_window=60), times) is None


def test_a_window_too_short_never_finishes():
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


@pytest.mark.parametrize(("typical", "words"), [(5, "5 windows"), (60, "1 window")])
def test_a_training_that_never_finishes_in_the_worst_case_only(typical, words):
    policy = Policy(state="background", save_every=10)
    device = profile(sustained_fraction=1, background_window=(2, typical, 90))
    result = campaign(device, policy=policy, at=(0, 50, 100))
    assert result.endless == "worst case"
    why = reasons(result)["active_s"]
    assert why.startswith("in the worst case it never finishes: the window of 2.00 s")
    assert f"; typically it takes {words} and " in why
    sessions = [1, 3, 5] if typical == 5 else [1, 1, 1]
    assert [p.session for p in result.curve] == sessions
    assert [p.step for p in result.curve] == [0, 50, 100]


def test_a_device_that_stays_warm_may_never_finish():
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


def test_steps_per_window_are_what_a_window_keeps():
    device = profile(sustained_fraction=(0.5, 0.5, 1), time_to_throttle=3, background_window=5)
    steps = steps_per_window(device, FULL)
    # Until 4.6 s: at full rate 32 steps; throttled from 3.0 on 16 in 1.5 s and 8 in 1.6 s.
    assert triple(steps) == (24, 24, 32)
    assert campaign(device, policy=Policy(state="background", save_every=24)).endless is None
    more = Policy(state="background", save_every=25)
    assert campaign(device, policy=more).endless == "typical"
    assert steps_per_window(profile(), FULL) is None


def test_figures_beyond_reason_are_not_judged():
    aeon = latency(ms(1, 1, 1e300))
    assert set(reasons(campaign(profile(), aeon)).values()) == {
        "a step, or a checkpoint, would take more than a thousand years"
    }
    device = profile(power__load=1e18, power__battery=1e-18, sustained_fraction=1)
    assert reasons(campaign(device)) == {}
    lazy = Policy(sessions_per_day=1e-300, pieces=2)
    assert math.isfinite(same(campaign(device, policy=lazy, steps=[50, 50]).days))
    still = profile(sustained_fraction=1e-18, time_to_throttle=1e18, background_window=1e18)
    assert reasons(campaign(still, policy=Policy(state="background"))).keys() == {
        "energy_j", "battery_share", "battery_share_per_session",
    }  # fmt: skip
