"""Figures of one device as text: the figure, and a remark (its interval, or why it is unknown)."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.result.result import DeviceCampaign, DeviceResult
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_duration,
    format_energy,
    format_interval,
    format_number,
    format_percent,
)

UNKNOWN: Final = "–"


def memory(device: DeviceResult) -> tuple[str, str]:
    """Peak of the training, and the share of the limit that the whole process takes."""
    held = device.memory
    peak = format_bytes(held.peak_bytes)
    if held.outcome == "killed" and held.room_bytes is not None:
        return f"> {format_bytes(held.room_bytes)}", f"predicted {peak}"
    if held.limit_bytes is None:
        return peak, "limit unknown"
    share = held.need_bytes / max(1, held.limit_bytes)
    app = " with the app" if held.others_bytes else ""
    return peak, f"{format_percent(share)} of {format_bytes(held.limit_bytes)}{app}"


def step(device: DeviceResult) -> tuple[str, str]:
    """Typical step time and its interval."""
    return duration(device.latency.step_ms, device.latency.not_judged or "", unit="ms")


def finish(device: DeviceResult) -> tuple[str, str]:
    """Typical active time of the whole training and its interval."""
    return duration(finish_interval(device), _why(device, "active_s"))


def finish_interval(device: DeviceResult) -> Interval | None:
    """Seconds of work until the training is done; None if unknown."""
    return None if device.campaign is None else device.campaign.active_s


def energy(device: DeviceResult) -> tuple[str, str]:
    """Energy above idle, and what share of a full battery that is."""
    campaign = device.campaign or DeviceCampaign()
    if campaign.energy_j is None:
        return UNKNOWN, _why(device, "energy_j")
    remark = format_interval(campaign.energy_j, "J")
    if campaign.battery_share is not None:
        remark = f"{format_percent(campaign.battery_share.typical)} of a battery"
    return format_energy(campaign.energy_j.typical), remark


def sessions(device: DeviceResult) -> tuple[str, str]:
    """Number of sessions and the days they take."""
    campaign = device.campaign or DeviceCampaign()
    if campaign.sessions is None:
        return UNKNOWN, _why(device, "sessions")
    days = campaign.calendar_days
    if days is None:
        return whole(campaign.sessions.typical), whole_interval(campaign.sessions)
    plural = "" if days.typical == 1 else "s"
    return whole(campaign.sessions.typical), f"in {whole(days.typical)} day{plural}"


def duration(interval: Interval | None, reason: str, *, unit: str = "s") -> tuple[str, str]:
    """A duration in ``unit`` and its interval, or the reason why it is unknown."""
    if interval is None:
        return UNKNOWN, reason
    seconds = interval.typical * {"ms": 1e-3, "s": 1.0}[unit]
    return format_duration(seconds), format_interval(interval, unit)


def whole(value: float) -> str:
    """A count of sessions, days or steps: whole where it is, else with one decimal."""
    if value >= 1e4:
        return format_number(value)
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def whole_interval(interval: Interval) -> str:
    """Both ends of a count; one where they are the same."""
    low, high = whole(interval.low), whole(interval.high)
    return low if low == high else f"{low} to {high}"


def _why(device: DeviceResult, figure: str) -> str:
    """Why a figure of the campaign is null."""
    for entry in device.campaign.not_judged if device.campaign else ():
        if entry.figure == figure:
            return entry.reason
    return device.latency.not_judged or ""
