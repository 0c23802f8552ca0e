"""The virtual clock: sessions of a training on a device, exact to the nanosecond.

All times are whole nanoseconds, so that it never depends on rounding whether a
step still fits into a window. Nothing is simulated step by step: between two
events (the device throttles, the window ends, the piece of data is trained on)
steps and checkpoints repeat, and so do sessions that begin equally warm. A
million steps cost as little as a hundred. ``docs/campaign.md`` describes the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from typing import Final

NEVER: Final = 10**60  # Later than any training ends

NS_PER_DAY: Final = 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """How fast a device works, and when it slows down or stops."""

    creation: int  # Creating the sessions of the package
    load: int  # Reading a checkpoint
    first_step: int  # The first step of a session
    step: int  # Every other step, before the device throttles
    save: int  # Writing a checkpoint
    window: int = NEVER  # Longest session that the system allows
    throttle_after: int = NEVER  # Load from a cool start until the device throttles
    sustained: Fraction = Fraction(1)  # Share of the computing rate that is left then, in (0, 1]

    def slowed(self, work: int) -> int:
        """Time for computing that takes ``work`` on a cool device, once it throttles."""
        return -(-work * self.sustained.denominator // self.sustained.numerator)


@dataclass(frozen=True, slots=True)
class Session:
    """What one session does."""

    made: int  # Steps completed in it
    kept: int  # Those of them that a completed checkpoint holds
    writes: int  # Checkpoints begun; one that the window's end cuts off counts
    duration: int  # From its start to its end; a session that is cut off lasts the whole window
    throttled: int  # The part of it in which the device throttles


def play_session(
    pace: DeviceTimes, remaining: int, save_every: int | None, heat: int = 0
) -> Session:
    """Play one session: create, load, then steps and checkpoints until done or cut off."""
    # `save_every`: Steps between two checkpoints. None: only one, when the session ends; the app
    # then makes no step after which the checkpoint would not fit into the window.
    # `heat`: Load that the device has not recovered from when the session starts.
    hot_at = max(0, pace.throttle_after - heat)
    slow_step = pace.slowed(pace.step)
    every = remaining if save_every is None else save_every
    deadline = pace.window - pace.save if save_every is None else pace.window

    def computed(start: int, work: int) -> int:
        """When computing that starts then is done; storage is no slower on a hot device."""
        cool = min(work, max(0, hot_at - start))
        return start + cool + pace.slowed(work - cool)

    now = computed(0, pace.creation) + pace.load
    made = kept = writes = 0
    while kept < remaining:
        unsaved = made - kept
        if unsaved and (unsaved == every or made == remaining):
            writes += 1
            if now + pace.save > pace.window:
                break
            now, kept = now + pace.save, made
            continue
        cool = now < hot_at
        step = pace.step if cool else slow_step
        room = (min(hot_at, deadline) if cool else deadline) - now
        cycles = steps = 0
        if made:
            # As many as repeat at this rate: whole cycles of steps and a checkpoint, or steps.
            if not unsaved:
                cycles = min((remaining - made) // every, room // (every * step + pace.save))
            steps = min(remaining - made, every - unsaved, room // step)
        if cycles > 0:
            now += cycles * (every * step + pace.save)
            made = kept = made + cycles * every
            writes += cycles
        elif steps > 0:
            now, made = now + steps * step, made + steps
        else:
            end = computed(now, pace.step if made else pace.first_step)
            if end > deadline:
                break
            now, made = end, made + 1
    if kept < remaining:
        if save_every is None and made:
            writes, kept, now = writes + 1, made, now + pace.save
        else:
            now = pace.window
    throttled = max(0, now - hot_at) if pace.sustained < 1 else 0
    return Session(made, kept, writes, now, throttled)


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` equal sessions in a row, and where the training stands before the first."""

    session: Session  # What each of them does
    count: int  # Their number
    sessions: int  # Sessions before
    steps: int  # Steps kept before
    active: int  # Nanoseconds of work before
    heat: int  # At the start of each


@dataclass(slots=True)
class SimulatedRun:
    """The sessions of a whole training."""

    pace: DeviceTimes  # The device
    save_every: int | None  # See play_session
    runs: list[Run] = field(default_factory=list)  # The sessions in order
    sessions: int = 0  # Their number
    steps: int = 0  # Steps kept
    active: int = 0  # Nanoseconds of work, of all sessions together
    end: int = 0  # When the last session ends, from the start of the first
    # Of a session that keeps no step: heat at its start, and steps that remained of its piece.
    # Every later session would start as warm or warmer, so the training never ends. None if it
    # does.
    stuck: tuple[int, int] | None = None

    def total(self, name: str) -> int:
        """Sum of an attribute of :class:`Session` over all sessions."""
        return sum(run.count * getattr(run.session, name) for run in self.runs)

    @property
    def longest(self) -> int:
        """Nanoseconds of the longest session."""
        return max(run.session.duration for run in self.runs)

    def reached(self, step: int) -> tuple[int, int]:
        """When and where a step is made for good."""
        # `step`: From 1 to `steps`.
        # Returns: Nanoseconds of work until it is completed (its checkpoint comes after), and the
        # session, counted from 1.
        run = self.runs[bisect_left(self.runs, step, key=lambda run: run.steps) - 1]
        before, within = divmod(step - run.steps - 1, run.session.kept)
        # A session that ends right there: the same, with a checkpoint after the step.
        part = play_session(self.pace, within + 1, self.save_every, run.heat)
        active = run.active + before * run.session.duration + part.duration - self.pace.save
        return active, run.sessions + before + 1


def play(
    pace: DeviceTimes, pieces: Iterable[int], *, save_every: int | None, period: int
) -> SimulatedRun:
    """Play a training from its first session to its last."""
    # A session starts every `period`, or when the one before it ends if that is later. Heat is load
    # that the device has not recovered from: it grows with time under load, up to
    # `pace.throttle_after`, and falls as fast at rest.
    # `pieces`: Optimizer steps of each piece in which the data arrive, at least 1; a piece ends its
    # session.
    # `period`: Nanoseconds between the starts of two sessions.
    course = SimulatedRun(pace, save_every)
    session_of = cache(partial(play_session, pace, save_every=save_every))
    heat = 0
    for goal in accumulate(pieces):
        while course.steps < goal:
            remaining = goal - course.steps
            session = session_of(remaining, heat=heat)
            if not session.kept:
                course.stuck = heat, remaining
                return course
            due = course.sessions * period
            start = max(due, course.end)
            end = start + session.duration
            rest = max(0, due + period - end)
            next_heat = max(0, min(pace.throttle_after, heat + session.duration) - rest)
            count = 1
            spacing = max(period, session.duration)
            # Later sessions are equal if they begin as warm, rest as long, and still have
            # more to do than this one made: then none of them reaches the end of the piece.
            if next_heat == heat and (start == due or session.duration >= period):
                count += max(0, (remaining - session.made - 1) // session.kept)
            course.runs.append(
                Run(session, count, course.sessions, course.steps, course.active, heat)
            )
            course.sessions += count
            course.steps += count * session.kept
            course.active += count * session.duration
            course.end = end + (count - 1) * spacing
            heat = next_heat
    return course
