"""The whole training on each device as text: figures, intervals, and why some are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from odtpack_simulator.reports.view import device_text
from odtpack_simulator.result.result import (
    DeviceCampaign,
    DeviceResult,
    InterruptionInfo,
    NotJudged,
    SimulationResult,
)
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_duration,
    format_energy,
    format_interval,
    format_percent,
)

_FIGURES: Final = {
    "active_s": "Active time",
    "sessions": "Sessions",
    "days": "Days",
    "energy_j": "Energy",
    "battery_share": "Battery",
    "battery_share_per_session": "Per session",
    "written_bytes_per_day": "Written per day",
    "throttled_share": "Throttled",
    "repeated_steps": "Repeated steps",
}
_WORDS: Final = {
    "battery_share_per_session": "battery per session",
    "written_bytes": "bytes written",
    "throttled_share": "throttling",
    "restart_s": "time to restart",
    "session_creation_ms": "creating sessions",
    "first_step_ms": "what the first step takes longer",
    "checkpoint_load_ms": "loading checkpoints",
    "checkpoint_save_ms": "saving checkpoints",
    "power.idle": "power without load",
    "sustained_fraction": "throttling",
}
"""Figures that have no column, or a title that says nothing without its neighbours."""


@dataclass(frozen=True)
class CampaignRow:
    """A device, and its figures as (name, typical, interval)."""

    title: str
    validated: bool
    remark: str
    figures: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Missing:
    """Figures that are not judged for one reason, and on which devices."""

    figures: str
    devices: str
    reason: str


def campaign_rows(result: SimulationResult) -> list[CampaignRow]:
    """One row per device with a figure of its campaign, in stored order."""
    rows = []
    for device in result.devices:
        if device.campaign is not None:
            figures = tuple(
                (title, *_figure(key, _interval(device.campaign, key)))
                for key, title in _FIGURES.items()
            )
            if all(figure == device_text.UNKNOWN for _, figure, _ in figures):
                continue  # only reasons, which missing_figures lists
            rows.append(CampaignRow(device.title, device.validated, "", figures))
    return rows


@dataclass(frozen=True)
class Unknown:
    """Something unknown, what it leads to, and on which devices."""

    outcome: str
    figures: str
    devices: str
    reason: str


NOT_JUDGED: Final = "not judged"
AS_NOTHING: Final = "counted as nothing"


def unknown_rows(result: SimulationResult) -> list[Unknown]:
    """What is not judged, and what counts as nothing in the figures of campaigns.

    Without a figure counted as nothing times and energy are too low by what it takes; without
    the power that a device takes at rest energy is too high.
    """
    sources: tuple[tuple[str, Callable[[DeviceCampaign], list[NotJudged]]], ...] = (
        (NOT_JUDGED, lambda campaign: campaign.not_judged),
        (AS_NOTHING, lambda campaign: campaign.left_out),
    )
    return [
        Unknown(outcome, entry.figures, entry.devices, entry.reason)
        for outcome, pick in sources
        for entry in _by_reason(result, pick)
    ]


def _by_reason(
    result: SimulationResult, entries: Callable[[DeviceCampaign], list[NotJudged]]
) -> list[Missing]:
    groups: dict[tuple[str, tuple[str, ...]], list[DeviceResult]] = {}
    for device in result.devices:
        reasons: dict[str, list[str]] = {}
        for entry in entries(device.campaign) if device.campaign else ():
            named = _WORDS.get(entry.figure) or _FIGURES.get(entry.figure, entry.figure)
            reasons.setdefault(entry.reason, []).append(named.replace("_", " ").lower())
        for reason, figures in reasons.items():
            groups.setdefault((reason, tuple(figures)), []).append(device)
    return [
        Missing(", ".join(figures), ", ".join(device.title for device in devices), reason)
        for (reason, figures), devices in groups.items()
    ]


def policy_words(result: SimulationResult) -> str:
    """How the app trains, in a sentence."""
    policy = result.policy
    rate = device_text.whole(policy.sessions_per_day)
    many = "" if rate == "1" else "s"
    what = "session" if policy.state == "foreground" else "background window"
    saves = (
        "a checkpoint at the end of each"
        if policy.save_every is None
        else f"a checkpoint every {policy.save_every} steps"
    )
    text = f"{rate} {what}{many} a day, {saves}"
    if policy.entitled:
        text += ", with the entitlement for more memory where it is known"
    if policy.pieces > 1:
        text += f", data arriving in {policy.pieces} pieces"
    return f"{text}. Figures are typical, with the profile's best and worst case."


def interruption_words(info: InterruptionInfo) -> str:
    """How often the training was ended on purpose, and whether it came to the same weights."""
    kinds = Counter(entry.at for entry in info.interruptions)
    phrases: dict[Literal["step", "save", "memory warning"], str] = {
        "step": "killed between two steps",
        "save": "killed while it wrote a checkpoint",
        "memory warning": "warned that memory was low",
    }
    parts = [f"{phrases[kind]} {_times(kinds[kind])}" for kind in phrases if kinds[kind]]
    what = f"The training was {_listed(parts)}" if parts else "The training was not interrupted"
    repeated = sum(entry.repeated_steps for entry in info.interruptions)
    end = {
        True: "and ended with the same weights as without, bit for bit",
        False: "and did not end with the same weights as without",
        None: "; whether it ended with the same weights was not judged",
    }[info.equal]
    glue = "" if info.equal is None else ", "
    text = f"{what}; it repeated {repeated} steps{glue}{end}."
    if not info.detail:
        return text
    # Only the first letter: units keep theirs.
    return f"{text} {info.detail[:1].upper()}{info.detail[1:].rstrip('.')}."


def _interval(campaign: DeviceCampaign, key: str) -> Interval | None:
    found: Interval | None = campaign.calendar_days if key == "days" else getattr(campaign, key)
    return found


def _figure(key: str, interval: Interval | None) -> tuple[str, str]:
    if interval is None:
        return device_text.UNKNOWN, ""
    if key == "active_s":
        return format_duration(interval.typical), format_interval(interval, "s")
    if key == "energy_j":
        return format_energy(interval.typical), format_interval(interval, "J")
    if key == "written_bytes_per_day":
        return format_bytes(interval.typical), format_interval(interval, "B")
    if key in {"sessions", "days", "repeated_steps"}:
        return device_text.whole(interval.typical), device_text.whole_interval(interval)
    low = _share(interval.low).partition(" ")[0]
    return _share(interval.typical), f"{low} to {_share(interval.high)}"


def _share(value: float) -> str:
    """A share in percent, with two digits where one decimal would leave nothing of it."""
    return f"{100 * value:.2g} %" if 0 < value < 0.01 else format_percent(value)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
