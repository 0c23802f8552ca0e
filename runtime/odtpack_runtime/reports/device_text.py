"""Figures of one device as text: the figure, and a remark (its interval, or why it is unknown)."""

from __future__ import annotations

import math
from typing import Final

from odtpack_runtime.simulator.result import DeviceCampaign, DeviceResult
from odtpack_runtime.simulator.units import (
    Interval,
    format_bytes,
    format_duration,
    format_interval,
    format_limit,
    format_number,
    format_percent,
    format_value,
)

UNKNOWN: Final = "–"


def memory(device: DeviceResult) -> tuple[str, str]:
    """Peak, and its share of the limit."""
    held = device.memory
    peak = format_bytes(held.peak_bytes)
    if held.outcome == "killed" and held.limit_bytes is not None:
        return f"> {format_bytes(held.limit_bytes)}", f"predicted {peak}"
    if held.limit_bytes is None:
        return peak, "limit unknown"
    share = held.peak_bytes / max(1, held.limit_bytes)
    return peak, f"{format_percent(share)} of {format_bytes(held.limit_bytes)}"


def step(device: DeviceResult) -> tuple[str, str]:
    """Typical step time and its interval."""
    return duration(device.latency.step_ms, device.latency.not_judged or "", unit="ms")


def finish(device: DeviceResult) -> tuple[str, str]:
    """Typical active time of the whole training and its interval."""
    return duration(finish_interval(device), _why(device, "active_s"))


def finish_interval(device: DeviceResult) -> Interval | None:
    """Seconds of work until the training is done; None if unknown."""
    if device.campaign is not None:
        return device.campaign.active_s
    # Results from before campaigns carried it with the latency.
    older = getattr(device.latency, "finish_s", None)
    return older if isinstance(older, Interval) else None


def energy(device: DeviceResult) -> tuple[str, str]:
    """Energy above idle, and what share of a full battery that is."""
    campaign = device.campaign or DeviceCampaign()
    if campaign.energy_j is None:
        return UNKNOWN, _why(device, "energy_j")
    remark = joules_interval(campaign.energy_j)
    if campaign.battery_share is not None:
        remark = f"{format_percent(campaign.battery_share.typical)} of a battery"
    return joules(campaign.energy_j.typical), remark


def sessions(device: DeviceResult) -> tuple[str, str]:
    """Number of sessions and the days they take."""
    campaign = device.campaign or DeviceCampaign()
    if campaign.sessions is None:
        return UNKNOWN, _why(device, "sessions")
    if campaign.days is None:
        return whole(campaign.sessions.typical), whole_interval(campaign.sessions)
    days = campaign.days.typical
    plural = "" if abs(days - 1.0) < 0.05 else "s"
    return whole(campaign.sessions.typical), f"in {whole(days)} day{plural}"


def duration(interval: Interval | None, reason: str, *, unit: str = "s") -> tuple[str, str]:
    """A duration in ``unit`` and its interval, or the reason why it is unknown."""
    if interval is None:
        return UNKNOWN, reason
    seconds = interval.typical * {"ms": 1e-3, "s": 1.0}[unit]
    return format_duration(seconds), format_interval(interval, unit)


def joules(value: float) -> str:
    """Energy for people, in three digits: ``38.2 J``, ``4.10 kJ``, ``1.20 MJ``."""
    unit, factor = next(
        ((unit, factor) for unit, factor in (("MJ", 1e6), ("kJ", 1e3)) if value >= 0.9995 * factor),
        ("J", 1.0),
    )
    shown = float(f"{value / factor:.3g}")
    decimals = 0 if shown == 0 else max(0, 2 - math.floor(math.log10(shown)))
    return f"{shown:.{decimals}f} {unit}"


def limit(value: float, unit: str) -> str:
    """A figure somebody chose, without the zeros that would pretend precision."""
    if unit == "J":
        number, _, prefix = joules(value).partition(" ")
        return f"{float(number):g} {prefix}"
    return format_limit(value, unit)


def figure(value: float, unit: str) -> str:
    """A figure of a check, by its unit."""
    return joules(value) if unit == "J" else format_value(value, unit)


def joules_interval(interval: Interval) -> str:
    """Both ends of an energy, in the unit of the high one where the low one has it too."""
    low, high = joules(interval.low), joules(interval.high)
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def whole(value: float) -> str:
    """A count of sessions or days: whole where it is, else with one decimal."""
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
