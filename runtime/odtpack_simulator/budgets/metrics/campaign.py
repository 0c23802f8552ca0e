"""Metrics of the whole training on a device: time, energy, sessions, storage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from odtpack_simulator.budgets import advice_campaign as advice
from odtpack_simulator.budgets.budget_metric import (
    BudgetMetric,
    Reading,
    Subject,
    Topic,
    estimated,
    shortened,
)
from odtpack_simulator.budgets.metrics.latency import timing_noise
from odtpack_simulator.result.result import CheckUnit
from odtpack_simulator.values.units import Interval

Field = Literal[
    "active_s", "energy_j", "battery_share", "battery_share_per_session", "sessions", "days",
    "written_bytes_per_day", "repeated_steps",
]  # fmt: skip


_LEFT_OUT: Final = {
    "session_creation_ms": "opening the sessions",
    "first_step_ms": "a longer first step",
    "checkpoint_load_ms": "loading checkpoints",
    "checkpoint_save_ms": "saving checkpoints",
    "power.idle": "subtracting idle power",
    "sustained_fraction": "throttling",
}
"""What a campaign may leave out, in words that follow "without"."""


def _read(subject: Subject, *, field: Field, unit: CheckUnit, noun: str = "") -> Reading:
    device = subject.on
    campaign = device.campaign
    if campaign is None:
        return Reading(None, device.latency.not_judged or "the result has no campaign")
    interval: Interval | None = (
        campaign.calendar_days if field == "days" else getattr(campaign, field)
    )
    if interval is None:
        reasons = [each.reason for each in campaign.not_judged if each.figure == field]
        reasons += [each.reason for each in campaign.not_judged]
        return Reading(None, next(iter(reasons), "the campaign has no such figure"))
    if unit == "%":
        if not math.isfinite(100.0 * interval.high):
            return Reading(None, "the share is beyond all numbers")
        interval = interval.scaled(100.0)
    reading = estimated(interval, unit, "", noun)
    if unit == "1" or field == "written_bytes_per_day":
        if subject.result.policy.state == "foreground":
            return reading  # no window ends a session: times do not change it
        power = False
    else:
        # The device's idle power only counts where energy does.
        power = unit in ("J", "%")
    unknown = [each.figure for each in campaign.left_out if power or each.figure != "power.idle"]
    if not unknown:
        return reading
    words = [_LEFT_OUT.get(figure, figure.replace("_", " ")) for figure in unknown]
    without = shortened(" and ".join(filter(None, (", ".join(words[:-1]), words[-1]))), 200)
    which = "which are unknown" if len(words) > 1 else "which is unknown"
    return replace(reading, text=f"{reading.text} without {without}, {which}")


def _days_noise(base: Subject, head: Subject) -> float | None:
    """Days that were begun, or not, by a difference in time that is within the noise of times.

    Whole days jump: however little the last session takes longer, it may end on another day.
    """
    before, now = base.on.campaign, head.on.campaign
    if before is None or now is None or before.days is None or now.days is None:
        return None
    elapsed = before.days.typical
    noise = timing_noise(base, head, read=lambda _: Reading(elapsed, ""))
    if noise is None or abs(now.days.typical - elapsed) > noise:
        return None
    return math.ceil(noise) if math.isfinite(noise) else noise


def _metric(
    key: str, title: str, topic: Topic, field: Field, unit: CheckUnit, meaning: str, example: str,
    advise: Callable[[Subject, float, Interval, CheckUnit], str], *, noun: str = "",
    headline: bool = False, suggested: bool = True,
    noise: Callable[[Subject, Subject], float | None] | None = None,
) -> BudgetMetric:  # fmt: skip
    read = partial(_read, field=field, unit=unit, noun=noun)

    def hint(subject: Subject, limit: float) -> str:
        interval = read(subject).interval
        return "" if interval is None else advise(subject, limit, interval, unit)

    return BudgetMetric(
        key=key,
        title=title,
        unit=unit,
        scope="device",
        topic=topic,
        headline=headline,
        meaning=meaning,
        example=example,
        read=read,
        advise=hint,
        noise=noise or partial(timing_noise, read=read),
        timed=True,
        of_profile=True,
        suggested=suggested,
    )


METRICS: Final = (
    _metric(
        "time_to_finish", "Time to finish", "Finish", "active_s", "s",
        "Time that the device works for the whole training: sessions, steps, checkpoints.",
        "10 min", advice.for_time, headline=True,
    ),
    _metric(
        "energy", "Energy", "Energy", "energy_j", "J",
        "Energy of the whole training above that of the idle device.", "20 kJ",
        advice.for_energy, headline=True,
    ),
    _metric(
        "battery_share", "Battery", "Energy", "battery_share", "%",
        "The same as a share of one full battery; over 100 % is more than one charge.", "5 %",
        advice.for_energy, suggested=False,
    ),
    _metric(
        "battery_per_session", "Battery per session", "Energy", "battery_share_per_session", "%",
        "Share of a full battery that one session takes.", "2 %",
        advice.for_battery_per_session,
    ),
    _metric(
        "sessions", "Sessions", "Sessions", "sessions", "1",
        "Sessions in the foreground, or windows in the background, until the training ends.",
        "10", advice.for_sessions, noun=" sessions", headline=True,
    ),
    _metric(
        "days", "Days", "Finish", "days", "1",
        "Days that the training spans, the first and the last included; a day is 24 hours, from "
        "the start of the first session on.",
        "7", advice.for_days, noun=" days", suggested=False, noise=_days_noise,
    ),
    _metric(
        "written_per_day", "Written per day", "Sessions", "written_bytes_per_day", "B",
        "Bytes of checkpoints that are written to storage in a day.", "500 MB",
        advice.for_written,
    ),
    _metric(
        "repeated_steps", "Repeated steps", "Sessions", "repeated_steps", "1",
        "Steps that are made twice because a window ended between two checkpoints.", "50",
        advice.for_repeated_steps, noun=" steps", suggested=False,
    ),
)  # fmt: skip
