"""The virtual clock against a simulator that makes every step by itself."""

from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.campaign import NEVER, DeviceTimes, Session, play, play_session


@dataclass
class Phone:
    """One session, played step by step: ``now`` and ``heat`` move on with every thing done."""

    pace: DeviceTimes
    heat: int
    now: int = 0
    throttled: int = 0

    def compute(self, work: int) -> None:
        while work:
            if self.heat < self.pace.throttle_after:
                done = min(work, self.pace.throttle_after - self.heat)
                self.pass_time(done)
                work -= done
            else:
                exact = work / self.pace.sustained
                self.pass_time(int(exact) + (exact.denominator > 1))
                work = 0

    def pass_time(self, duration: int) -> None:
        cool = min(duration, max(0, self.pace.throttle_after - self.heat))
        self.now += duration
        self.heat += duration
        if self.pace.sustained < 1:
            self.throttled += duration - cool

    def after(self, *, save: bool) -> int:
        """When one more step, and a checkpoint if wanted, would be done."""
        copy = replace(self)
        copy.compute(self.pace.step)
        return copy.now + (self.pace.save if save else 0)


@dataclass
class Log:
    """Every session, and for every step kept when it was made for good."""

    sessions: list[Session] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    reached: dict[int, tuple[int, int]] = field(default_factory=dict)
    stuck: bool = False


def brute_session(
    pace: DeviceTimes, remaining: int, save_every: int | None, heat: int
) -> tuple[Session, list[int]]:
    phone = Phone(pace, heat)
    phone.compute(pace.creation)
    phone.pass_time(pace.load)
    made = kept = writes = 0
    times: list[int] = []
    while kept < remaining and phone.now <= pace.window:
        before = replace(phone)
        phone.compute(pace.step if made else pace.first_step)
        if save_every is None and phone.now + pace.save > pace.window:
            # It knew that: instead of this step it saved, if there was anything to save.
            phone = before
            if made:
                writes, kept = writes + 1, made
                phone.pass_time(pace.save)
            break
        if phone.now > pace.window:
            break
        made += 1
        times.append(phone.now)
        due = made == remaining or (save_every is not None and (made - kept) == save_every)
        if due:
            writes += 1
            phone.pass_time(pace.save)
            if phone.now <= pace.window:
                kept = made
    ended = kept == remaining or (save_every is None and kept)
    duration = phone.now if ended else pace.window
    cool = max(0, pace.throttle_after - heat)
    throttled = max(0, duration - cool) if pace.sustained < 1 else 0
    return Session(made, kept, writes, duration, throttled), times


def brute(pace: DeviceTimes, sizes: list[int], *, save_every: int | None, period: int) -> Log:
    log = Log()
    done = heat = end = 0
    for size in sizes:
        remaining = size
        while remaining:
            start = max(end, len(log.sessions) * period)
            if log.sessions:
                heat = max(0, heat - (start - end))
            session, times = brute_session(pace, remaining, save_every, heat)
            if not session.kept:
                log.stuck = True
                return log
            active = sum(s.duration for s in log.sessions)
            log.sessions.append(session)
            log.starts.append(start)
            for index in range(session.kept):
                log.reached[done + index + 1] = active + times[index], len(log.sessions)
            done += session.kept
            remaining -= session.kept
            end = start + session.duration
            heat = min(pace.throttle_after, heat + session.duration)
    return log


durations = st.integers(0, 60)
paces = st.builds(
    DeviceTimes, creation=durations, load=durations, first_step=st.integers(1, 60),
    step=st.integers(1, 20), save=durations, window=st.one_of(st.just(NEVER), st.integers(1, 600)),
    throttle_after=st.one_of(st.just(NEVER), st.integers(0, 700)),
    sustained=st.sampled_from([Fraction(1), Fraction(3, 4), Fraction(426, 1000), Fraction(1, 3)]),
)  # fmt: skip
save_everies = st.one_of(st.none(), st.integers(1, 40))
pieces = st.lists(st.integers(1, 120), min_size=1, max_size=8)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(paces, st.integers(1, 200), save_everies, st.integers(0, 900))
def test_a_session_is_what_it_is_step_by_step(pace, remaining, save_every, heat):
    expected, _ = brute_session(pace, remaining, save_every, heat)
    assert play_session(pace, remaining, save_every, heat) == expected


@settings(max_examples=600, deadline=None, derandomize=True)
@given(paces, pieces, save_everies, st.integers(1, 2000))
def test_a_training_is_what_it_is_step_by_step(pace, pieces, save_every, period):
    course = play(pace, pieces, save_every=save_every, period=period)
    log = brute(pace, pieces, save_every=save_every, period=period)
    assert (course.stuck is not None) == log.stuck
    assert course.sessions == len(log.sessions)
    assert course.steps == len(log.reached)
    assert course.active == sum(s.duration for s in log.sessions)
    for name in ("made", "kept", "writes", "duration", "throttled"):
        assert course.total(name) == sum(getattr(s, name) for s in log.sessions)
    assert [s for run in course.runs for s in [run.session] * run.count] == log.sessions
    if log.sessions:
        assert course.end == log.starts[-1] + log.sessions[-1].duration
        assert course.longest == max(s.duration for s in log.sessions)
    assert {step: course.reached(step) for step in log.reached} == log.reached


@settings(max_examples=300, deadline=None, derandomize=True)
@given(paces, st.integers(1, 60), save_everies, st.integers(1, 2000))
def test_a_stuck_training_would_be_stuck_for_ever(pace, steps, save_every, period):
    """The proof in words, tried: forty more sessions keep nothing either."""
    course = play(pace, [steps], save_every=save_every, period=period)
    if course.stuck is None:
        return
    heat, remaining = course.stuck
    begin = max(course.sessions * period, course.end)
    for index in range(course.sessions, course.sessions + 40):
        session = play_session(pace, remaining, save_every, heat)
        assert session.kept == 0
        end = begin + session.duration
        begin = max((index + 1) * period, end)
        heat = max(0, min(pace.throttle_after, heat + session.duration) - (begin - end))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(paces, st.integers(1, 400), save_everies)
def test_a_device_twice_as_slow_never_takes_fewer_sessions(pace, steps, save_every):
    slower = replace(
        pace, creation=2 * pace.creation, load=2 * pace.load, first_step=2 * pace.first_step,
        step=2 * pace.step, save=2 * pace.save,
    )  # fmt: skip
    fast, slow = (play(p, [steps], save_every=save_every, period=10_000) for p in (pace, slower))
    if slow.stuck is None:
        assert fast.stuck is None
        assert slow.sessions >= fast.sessions


@settings(max_examples=400, deadline=None, derandomize=True)
@given(paces, st.integers(1, 400), st.integers(1, 12), st.integers(2, 4))
def test_more_frequent_checkpoints_repeat_no_more_where_they_cost_nothing(
    pace, steps, often, factor
):
    pace = replace(pace, save=0)
    rare, frequent = (
        play(pace, [steps], save_every=every, period=10_000) for every in (often * factor, often)
    )
    if rare.stuck is None:
        assert frequent.stuck is None
        assert frequent.total("made") <= rare.total("made")
        assert frequent.sessions <= rare.sessions


def test_more_frequent_checkpoints_may_repeat_more_where_they_cost_time():
    """Six steps and two checkpoints just fit; with three checkpoints only four steps do."""
    pace = DeviceTimes(creation=0, load=0, first_step=10, step=10, save=5, window=70)
    rare, frequent = (play(pace, [12], save_every=every, period=1000) for every in (3, 2))
    assert (rare.sessions, rare.total("made")) == (2, 12)
    assert (frequent.sessions, frequent.total("made")) == (3, 16)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(paces, pieces, st.integers(1, 40))
def test_a_session_repeats_at_most_what_lies_between_two_checkpoints(pace, pieces, save_every):
    course = play(pace, pieces, save_every=save_every, period=10_000)
    for run in course.runs:
        assert 0 <= run.session.made - run.session.kept <= save_every
    if course.stuck is None:
        assert course.sessions >= len(pieces)
        assert course.steps == sum(pieces)
    own = play(pace, pieces, save_every=None, period=10_000)
    assert own.total("made") == own.steps


def test_a_million_steps_are_a_few_runs():
    pace = DeviceTimes(
        50, 20, 300, 100, 30, window=6000, throttle_after=1800, sustained=Fraction(72, 100)
    )
    course = play(pace, [10**6], save_every=7, period=86_400)
    assert course.sessions > 20_000
    assert len(course.runs) <= 3
    assert course.steps == 10**6


def test_heat_is_carried_over_a_short_rest_and_forgotten_in_a_long_one():
    """Sessions of 60, throttling after 100: with a rest of 40 the second starts with 20."""
    pace = DeviceTimes(0, 0, 10, 10, 0, window=60, throttle_after=100, sustained=Fraction(1, 2))
    long, short = (play(pace, [24], save_every=1, period=p) for p in (120, 100))
    assert [(r.heat, r.count, r.session.throttled) for r in long.runs] == [(0, 3, 0), (0, 1, 0)]
    assert [r.heat for r in short.runs] == [0, 20, 40, 60, 60]
    assert [r.session.throttled for r in short.runs] == [0, 0, 0, 20, 0]
    assert [r.session.made for r in short.runs] == [6, 6, 6, 5, 1]


def test_a_late_session_starts_when_the_one_before_ends():
    pace = DeviceTimes(0, 0, 10, 10, 5)
    course = play(pace, [10] * 4, save_every=None, period=60)
    assert (course.active, course.end) == (4 * 105, 4 * 105)
    course = play(pace, [10] * 4, save_every=None, period=200)
    assert (course.active, course.end) == (4 * 105, 3 * 200 + 105)


@pytest.mark.parametrize(
    ("sustained", "work", "slowed"),
    [(Fraction(1), 7, 7), (Fraction(1, 2), 7, 14), (Fraction(3, 4), 7, 10), (Fraction(1, 3), 0, 0)],
)
def test_slowed_work_is_rounded_up(sustained, work, slowed):
    assert DeviceTimes(0, 0, 1, 1, 0, sustained=sustained).slowed(work) == slowed
