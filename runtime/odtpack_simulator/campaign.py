"""What a whole training takes on a device: time, sessions, days, energy, storage written.

Three scenarios are played on the virtual clock (:mod:`.virtual_clock`): a slow
one, in which every step takes the high end of its interval, the device
throttles early and deeply, and the system grants short windows; a typical one;
and a fast one. A figure's interval spans the three. ``docs/campaign.md`` lists
what is assumed, and why.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, Literal

from pydantic import ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import AppState, DeviceProfile
from odtpack_simulator.result import (
    CampaignPoint,
    DeviceCampaign,
    DeviceLatency,
    EvaluationPoint,
    NotJudged,
    Policy,
)
from odtpack_simulator.values.part import first_problem
from odtpack_simulator.values.text import counted
from odtpack_simulator.values.units import Interval, Unknown, format_duration

# The virtual clock: sessions of a training on a device, exact to the nanosecond.
#
# All times are whole nanoseconds, so that it never depends on rounding whether a step still fits
# into a window. Nothing is simulated step by step: between two events (the device throttles, the
# window ends, the piece of data is trained on) steps and checkpoints repeat, and so do sessions
# that begin equally warm. A million steps cost as little as a hundred. ``docs/campaign.md``
# describes the model.

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


NS: Final = 10**9  # Nanoseconds in a second

LONGEST_WORK: Final = 1000 * 365 * NS_PER_DAY
"""A step or checkpoint that takes longer than a thousand years is a mistake in a profile."""

_End = Literal["low", "typical", "high"]
_SCENARIOS: Final[tuple[tuple[_End, _End], ...]] = (
    ("low", "high"),
    ("typical", "typical"),
    ("high", "low"),
)
"""Fast, typical, slow: which end of figures that cost time, which of figures that give time."""
_TYPICAL: Final = 1

_FIELDS: Final = DeviceCampaign.model_fields.items()
FIGURES: Final = tuple(name for name, each in _FIELDS if each.annotation == Interval | None)
"""The figures of a campaign that may be null, in the order of the record."""

_MANY_STEPS: Final = 10**12  # More than fit into any window


def run_campaign(
    profile: DeviceProfile,
    latency: DeviceLatency,
    policy: Policy,
    *,
    steps: Sequence[int],
    checkpoint_bytes: int,
    curve: Sequence[EvaluationPoint],
) -> DeviceCampaign:
    """Play a whole training on a device's virtual clock. Pure and deterministic.

    Args:
        profile: The device; what it lacks is null in the answer.
        latency: Times on the device.
        policy: How the app trains.
        steps: Optimizer steps of the training on each of the policy's pieces of data, at least
            1, in all epochs: :meth:`.Schedule.steps_by_piece`.
        checkpoint_bytes: Size of a checkpoint with the optimizer's state.
        curve: Evaluations, each at a step from 0 to the sum of ``steps``.

    Raises:
        ValueError: There are more or fewer pieces than the policy has, one of them has no step,
            or an evaluation lies beyond the last step.
    """
    if len(steps) != policy.pieces or min(steps) < 1:
        msg = f"needs the steps of {policy.pieces} pieces, at least 1 for each, found {steps}"
        raise ValueError(msg)
    if any(point.step > sum(steps) for point in curve):
        raise ValueError(f"an evaluation lies beyond step {sum(steps)}, the last")
    figures: _Figures = {}
    period = _nanoseconds(86_400 / policy.sessions_per_day)

    def played(pace: DeviceTimes) -> SimulatedRun:
        return play(pace, steps, save_every=policy.save_every, period=period)

    paces = device_times(profile, latency, policy.state)
    if isinstance(paces, str):
        if policy.state == "foreground":  # no window ends a session: counts need no times
            _count(figures, [played(DeviceTimes(0, 0, 1, 1, 0))] * 3, policy, checkpoint_bytes)
            figures["written_bytes_per_day"] = paces  # a long training spreads over its days
        return _campaign(figures, paces)
    courses = [played(pace) for pace in paces]
    watts = watts_above_idle(profile)
    begin = [p.creation + p.load + max(0, p.first_step - p.step) for p in paces]
    restarts = [(p.save + more) / NS for p, more in zip(paces, begin, strict=True)]
    figures["restart_s"] = _spanning(restarts)
    rest: dict[str, Any] = {
        "curve": _curve(courses[_TYPICAL], curve, watts),
        "left_out": left_out(profile, latency),
    }
    stuck = [course for course in courses if course.stuck is not None]
    if stuck:
        typical = courses[_TYPICAL]
        if typical in stuck:
            return _campaign(figures, _never_finishes(typical), endless="typical", **rest)
        why = (
            f"in the worst case {_never_finishes(stuck[0])}; typically it takes "
            f"{counted(typical.sessions, 'window')} and "
            f"{format_duration(typical.active / NS)} of work"
        )
        return _campaign(figures, why, endless="worst case", **rest)
    _count(figures, courses, policy, checkpoint_bytes)
    figures["active_s"] = _spanning([course.active / NS for course in courses])
    figures["days"] = _spanning([course.end / NS_PER_DAY for course in courses])
    hot = [course.total("throttled") / course.active for course in courses]
    figures["throttled_share"] = _spanning(hot)
    sustained = profile.sustained()
    if sustained is None:
        figures["throttled_share"] = _absent(profile, "sustained_fraction")
    elif profile.throttle_seconds() is None and sustained.low < 1:
        figures["throttled_share"] = _absent(profile, "time_to_throttle")
    _put_energy(figures, profile, courses, watts)
    return _campaign(figures, **rest)


def steps_per_window(profile: DeviceProfile, latency: DeviceLatency) -> Interval | None:
    """Optimizer steps that fit, with one checkpoint after them, into a window on a cool device.

    ``low`` is the worst case: with ``save_every`` above it, a training may never end. None
    where the latency of the device or its window is unknown.
    """
    paces = device_times(profile, latency, "background")
    if isinstance(paces, str) or profile.background_seconds() is None:
        return None
    fast, typical, slow = (float(play_session(pace, _MANY_STEPS, None).kept) for pace in paces)
    return Interval.of(slow, typical, fast)


def device_times(
    profile: DeviceProfile, latency: DeviceLatency, state: AppState
) -> list[DeviceTimes] | str:
    """The device in the fast, the typical and the slow scenario; or what is missing for it."""
    step = latency.step_ms
    if step is None:
        return latency.not_judged or "the time of a step is unknown"
    window = profile.background_seconds()
    if state == "background" and window is None and not profile.background_is_open():
        return _absent(profile, "background_window")
    works = (
        latency.session_creation_ms,
        latency.checkpoint_load_ms,
        latency.first_step_ms,
        step,
        latency.checkpoint_save_ms,
    )
    if any(work is not None and work.high * 1e6 > LONGEST_WORK for work in works):
        return "a step, or a checkpoint, would take more than a thousand years"
    sustained, throttle = profile.sustained(), profile.throttle_seconds()
    paces = []
    for costs, gives in _SCENARIOS:
        creation, load, first, usual, save = (
            0 if work is None else round(getattr(work, costs) * 1e6) for work in works
        )
        share, hot = Fraction(1), NEVER
        if sustained is not None:
            # In millionths or simpler: 0.72 is 18/25, as the profile means it.
            share = Fraction(getattr(sustained, gives)).limit_denominator(10**6)
            share = max(share, Fraction(1, 10**6))
            if throttle is not None:
                hot = _nanoseconds(getattr(throttle, gives))
            else:
                hot = NEVER if costs == "low" else 0
        limit = NEVER
        if state == "background" and window is not None:
            limit = _nanoseconds(getattr(window, gives))
        # A step takes a nanosecond at least: steps are counted by division.
        paces.append(
            DeviceTimes(creation, load, max(1, first), max(1, usual), save, limit, hot, share)
        )
    return paces


def _absent(profile: DeviceProfile, key: str) -> str:
    figure = attrgetter(key)(profile)
    why = f": {figure.unknown}" if isinstance(figure, Unknown) else ""
    return f"the profile gives no {key}{why}"


def _nanoseconds(seconds: float) -> int:
    return round(min(seconds * NS, float(NEVER)))


def left_out(profile: DeviceProfile, latency: DeviceLatency) -> list[NotJudged]:
    """What counts as nothing because it is unknown, which makes the other figures too low."""
    # Without throttling, times are too low. Without the idle power, on the other hand, energy is
    # too high: it is all that the device takes.
    missing: list[tuple[str, str]] = []
    for figure, key in (
        ("checkpoint_load_ms", "storage.read"),
        ("checkpoint_save_ms", "storage.write"),
    ):
        if getattr(latency, figure) is None:
            missing.append((figure, _absent(profile, key)))
    if profile.load_watts() is not None and profile.idle_watts() is None:
        missing.append(("power.idle", _absent(profile, "power.idle")))
    if profile.sustained() is None:
        missing.append(("sustained_fraction", _absent(profile, "sustained_fraction")))
    return [NotJudged(figure=figure, reason=why) for figure, why in missing]


def watts_above_idle(profile: DeviceProfile) -> tuple[float, float, float] | None:
    """Watts of the device under load beyond those at rest: low, typical, high; None if unknown."""
    load, idle = profile.load_watts(), profile.idle_watts()
    if load is None or profile.costs_no_energy():
        return None
    if idle is None:
        return load.low, load.typical, load.high
    low, typical = load.low - idle.high, load.typical - idle.typical
    return max(0.0, low), max(0.0, typical), max(0.0, load.high - idle.low)


def _curve(
    course: SimulatedRun,
    evaluations: Sequence[EvaluationPoint],
    watts: tuple[float, float, float] | None,
) -> list[CampaignPoint]:
    points = []
    for evaluation in evaluations:
        if evaluation.step > course.steps:
            continue  # an endless training never gets there
        active, session = course.reached(evaluation.step) if evaluation.step else (0, 1)
        points.append(
            CampaignPoint(
                step=evaluation.step,
                active_s=active / NS,
                energy_j=None if watts is None else watts[_TYPICAL] * active / NS,
                session=session,
                loss=evaluation.loss,
                metric=evaluation.metric,
            )
        )
    return points


def _never_finishes(course: SimulatedRun) -> str:
    """Why no session keeps a step, and how long a window would have to be."""
    pace = course.pace
    heat, remaining = course.stuck or (0, 1)
    # The least number of steps after which a session writes a checkpoint.
    least = 1 if course.save_every is None else min(course.save_every, remaining)
    needed = play_session(replace(pace, window=NEVER), least, None, heat).duration
    begin = pace.creation + pace.load
    return (
        f"it never finishes: the window of "
        f"{format_duration(pace.window / NS)} ends before a checkpoint is written; "
        f"{format_duration(needed / NS)} are needed for session and checkpoint "
        f"({format_duration(begin / NS)}), {counted(least, 'step')} and the next checkpoint"
        + (", on a device that is still warm from the session before" if heat else "")
    )


_Figures = dict[str, Interval | str]
"""The figures of a campaign by name, or why one is unknown."""


def _spanning(values: Sequence[float]) -> Interval:
    """A figure from the three scenarios: fast, typical, slow."""
    # The interval spans them, because not every figure grows from fast to slow: in a shorter window
    # a device throttles for a smaller share of the time, and may lose fewer steps.
    return Interval.of(min(values), values[_TYPICAL], max(values))


def _campaign(figures: _Figures, unknown: str = "", **rest: Any) -> DeviceCampaign:
    """The record, in which figures without a reason of their own are null by ``unknown``."""
    found = {name: figures.get(name, unknown) for name in FIGURES}
    rest |= {name: each for name, each in found.items() if isinstance(each, Interval)}
    reasons = [NotJudged(figure=k, reason=why) for k, why in found.items() if isinstance(why, str)]
    return DeviceCampaign(not_judged=reasons, **rest)


def _count(
    figures: _Figures, courses: Sequence[SimulatedRun], policy: Policy, checkpoint_bytes: int
) -> None:
    written = [float(course.total("writes") * checkpoint_bytes) for course in courses]
    # A training of less than a day writes all of it in that day.
    days = [
        max(1.0, course.sessions / policy.sessions_per_day, course.end / NS_PER_DAY)
        for course in courses
    ]
    per_day = [total / span for total, span in zip(written, days, strict=True)]
    repeated = [float(course.total("made") - course.steps) for course in courses]
    figures["sessions"] = _spanning([float(course.sessions) for course in courses])
    figures["repeated_steps"] = _spanning(repeated)
    figures["written_bytes"] = _spanning(written)
    figures["written_bytes_per_day"] = _spanning(per_day)


def _put_energy(
    figures: _Figures,
    profile: DeviceProfile,
    courses: Sequence[SimulatedRun],
    watts: tuple[float, float, float] | None,
) -> None:
    shares = ("battery_share", "battery_share_per_session")
    if watts is None:
        why = "the profile's power.idle is not below its power.load"
        if not profile.costs_no_energy():
            why = _absent(profile, "power.load")
        figures.update(dict.fromkeys(("energy_j", *shares), why))
        return
    joules = [w * course.active / NS for w, course in zip(watts, courses, strict=True)]
    figures["energy_j"] = _spanning(joules)
    battery = profile.battery_joules()
    if battery is None:
        figures.update(dict.fromkeys(shares, _absent(profile, "power.battery")))
        return
    per_ns = [
        w / NS / getattr(battery, gives) for w, (_, gives) in zip(watts, _SCENARIOS, strict=True)
    ]
    for name, attribute in zip(shares, ("active", "longest"), strict=True):
        spent = [getattr(course, attribute) for course in courses]
        figures[name] = _spanning([share * ns for share, ns in zip(per_ns, spent, strict=True)])


def make_policy(**values: Any) -> Policy:
    """The policy of these values, see :class:`~odtpack_simulator.result.Policy`."""
    try:
        return Policy(**values)
    except ValidationError as error:
        key, problem = first_problem(error, Policy)
        raise OdtpackError("bad-policy", f"--{key.replace('_', '-')} {problem}") from error
