"""The campaign in a result: the whole training on a device, on a virtual clock."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from odtpack_simulator.device.kits import Kit
from odtpack_simulator.device.profile import AppState
from odtpack_simulator.result.base import Count, Loss, NonNegative, NotJudged
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.units import Interval


class Policy(Part):
    """How the app trains: in which state, how often, and what it keeps."""

    state: AppState = "foreground"
    """In the foreground a session lasts as long as the training needs; in the background the
    system grants a window."""
    entitled: bool = False
    """The app has the platform's entitlement for more memory, which holds in the foreground."""
    kit: Kit | None = None
    """The kit that the app trains with; null for the usual one of each device's system."""
    sessions_per_day: float = Field(default=1.0, gt=0, le=1440)
    """Sessions (foreground) or windows (background) per day."""
    save_every: int | None = Field(default=None, ge=1, le=2**31)
    """Optimizer steps between two checkpoints; null for one at the end of every session."""
    pieces: int = Field(default=1, ge=1, le=10_000)
    """The training data arrive in so many pieces of equal size (the first ones may have a sample
    more), one per session at most, and each is trained on for the epochs by itself when it is
    there."""


class CampaignPoint(Part):
    """Where the training stands after so many steps, in the typical case."""

    step: Count
    active_s: NonNegative
    energy_j: NonNegative | None
    session: int = Field(ge=1)
    loss: Loss = None
    metric: float | None = None


class DeviceCampaign(Part):
    """What the whole training takes on one device. A null figure stands in ``not_judged``.

    Attributes:
        active_s: Seconds of work: sessions created, checkpoints loaded and saved, steps
            slowed down once the device throttles, steps repeated after a window ended.
        sessions: Number of sessions or windows.
        days: Elapsed days of 24 hours, from the start of the first session to the end of the last.
            Reports and budgets count whole days, the first and the last included: 1.2 are 2.
        energy_j: Joules above idle of all sessions.
        battery_share: The same as a share of one full battery.
        battery_share_per_session: Share of one full battery that the longest session takes.
        written_bytes: Bytes of checkpoints written in all, and in a day.
        written_bytes_per_day: See written_bytes.
        throttled_share: Share of the active time in which the device throttles.
        repeated_steps: Steps that are made twice because a window ended between two checkpoints.
        restart_s: Seconds that one low-memory warning adds, on which the app saves, frees
            everything and starts anew: they are not part of ``active_s``.
        endless: Which case never finishes, because windows end before a checkpoint is written.
            The figures are null then: an interval has no end that is infinite.
        curve: The training in the typical case, at the evaluated steps that it reaches.
        left_out: What the figures above count as nothing because it is unknown, and why.
        not_judged: What is null, and why.
    """

    active_s: Interval | None = None
    sessions: Interval | None = None
    days: Interval | None = None
    energy_j: Interval | None = None
    battery_share: Interval | None = None
    battery_share_per_session: Interval | None = None
    written_bytes: Interval | None = None
    written_bytes_per_day: Interval | None = None
    throttled_share: Interval | None = None
    repeated_steps: Interval | None = None
    restart_s: Interval | None = None
    endless: Literal["typical", "worst case"] | None = None
    curve: list[CampaignPoint] = Field(default_factory=list)
    left_out: list[NotJudged] = Field(default_factory=list)
    not_judged: list[NotJudged] = Field(default_factory=list)

    @property
    def calendar_days(self) -> Interval | None:
        """Whole days that the training spans, the first and the last included.

        A day lasts 24 hours, from the start of the first session on. Three sessions at two a
        day start after 0, 12 and 24 hours: the third is on the second day.
        """
        days = self.days
        if days is None:
            return None
        low, typical, high = (max(1, math.ceil(d)) for d in (days.low, days.typical, days.high))
        return Interval(low=low, typical=typical, high=high)
