"""What reports on a federation say: headline, figures, rows, and the flow of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from odtpack_simulator.fleet.outcome.judge import TITLES, first_change
from odtpack_simulator.fleet.outcome.result import DeviceOutcome, FleetResult
from odtpack_simulator.fleet.round_clock import ANSWERED, NEVER_STARTED, NO_LOSS
from odtpack_simulator.reports.view.view import VERDICT_WORDS, check_state
from odtpack_simulator.result.result import Check, Verdict
from odtpack_simulator.values.units import (
    format_bytes,
    format_duration,
    format_energy,
    format_limit,
    format_number,
    format_percent,
    format_value,
)

WORDS: Final = {
    "over memory": "memory too small",
    "no data": "too few samples",
    "window ended": "system window ended",
    "battery low": "battery low",
    "left": "user came back, unplugged, or left the network",
    "lost": "fell silent",
    "unfinished": "still at work at the end",
    "late": "after the deadline",
    "stale": "from a model that is too old",
    "surplus": "not needed any more",
    "given up": "in a round with too few answers",
    "refused": "refused",
    "averaged": "averaged",
}
"""What became of a client, for people."""


@dataclass(frozen=True)
class Row:
    """A check as a line."""

    state: Verdict
    words: str
    title: str
    actual: str
    limit: str
    message: str
    advice: str | None


@dataclass(frozen=True)
class Stage:
    """A stage of the clients' way: how many are there, and how many it loses to what."""

    name: str
    count: int
    losses: tuple[tuple[str, int], ...] = ()


def headline(result: FleetResult) -> str:
    """What came of the federation, in a sentence."""
    last = result.last_evaluation
    if last is None:
        return "No round took place"
    rounds = f"{len(result.rounds):,} round{'s' * (len(result.rounds) != 1)}"
    span = f"{rounds} in {result.days:.1f} simulated days" if result.days >= 0.05 else rounds
    if last.accuracy is not None:
        return f"{format_percent(last.accuracy)} accuracy after {span}"
    return f"Loss {format_number(last.loss or 0.0)} after {span}"


def key_figures(result: FleetResult) -> list[tuple[str, str, str]]:
    """Name, value and remark of the figures at the top."""
    figures = []
    last = result.last_evaluation
    if last is not None and last.accuracy is not None and result.accuracy_before is not None:
        figures.append(
            (
                "Accuracy",
                format_percent(last.accuracy),
                f"{format_percent(result.accuracy_before)} before",
            )
        )
    ends = [run.accuracy for run in result.seeds if run.accuracy is not None]
    if ends:
        figures.append(
            (
                "Over seeds",
                f"{format_percent(min(ends))} to {format_percent(max(ends))}",
                f"accuracy with {len(ends)} seeds",
            )
        )
    if result.fairness is not None:
        fair = result.fairness
        figures.append(
            (
                "Worst tenth",
                format_percent(fair.worst_tenth),
                f"of clients; {format_percent(fair.mean)} on average",
            )
        )
    share = result.took_part / result.plan.clients
    figures.append(
        ("Took part", format_percent(share), f"{result.took_part:,} of {result.plan.clients:,}")
    )
    if result.rounds:
        durations = sorted(each.duration_s for each in result.rounds)
        middle = format_duration(durations[len(durations) // 2])
        longest = format_duration(durations[-1])
        figures.append(("A round", middle, f"{longest} at most"))
    counts = result.staleness()
    if sum(counts):
        mean = sum(age * count for age, count in enumerate(counts)) / sum(counts)
        figures.append(("Staleness", f"{mean:.1f}", f"{len(counts) - 1} at most"))
    traffic = result.traffic_bytes
    figures.append(
        ("Traffic of a device", format_bytes(traffic.mean), f"{format_bytes(traffic.most)} at most")
    )
    if result.energy_j is not None:
        energy = result.energy_j
        figures.append(
            (
                "Energy of a device",
                format_energy(energy.mean),
                f"{format_energy(energy.most)} at most",
            )
        )
    return figures


def check_rows(result: FleetResult) -> list[Row]:
    """Every check, in stored order."""
    return [
        Row(
            check_state(check),
            VERDICT_WORDS[check_state(check)],
            TITLES[check.metric],
            _figure(check, check.actual),
            _figure(check, check.limit, chosen=True),
            check.message,
            check.advice,
        )
        for check in result.checks
    ]


def advice(result: FleetResult) -> str:
    """What to change first."""
    return next((check.advice for check in result.checks if check.advice), first_change(result))


def stages(result: FleetResult) -> list[Stage]:
    """From those that were looked at to those whose answers were averaged, over all rounds."""
    looked_at = sum(each.looked_at for each in result.rounds)
    absent: dict[str, int] = {}
    for each in result.rounds:
        for reason, count in each.absent.items():
            absent[reason] = absent.get(reason, 0) + count
    ends = result.ends()
    chosen = sum(ends.values())

    def lost(names: set[str] | frozenset[str]) -> tuple[tuple[str, int], ...]:
        return tuple((WORDS[end], count) for end, count in ends.items() if end in names)

    before = set(ends) - NEVER_STARTED - ANSWERED
    started = chosen - sum(ends.get(end, 0) for end in NEVER_STARTED)
    answered = sum(ends.get(end, 0) for end in ANSWERED)
    return [
        Stage("looked at", looked_at, tuple(absent.items())),
        Stage("eligible", chosen, lost(NEVER_STARTED)),
        Stage("started", started, lost(before)),
        Stage("answered", answered, lost(ANSWERED - {"averaged"})),
        Stage("averaged", ends.get("averaged", 0)),
    ]


def device_rows(result: FleetResult) -> list[tuple[str, bool, list[tuple[str, str, str]]]]:
    """For each model of device its title, whether it is validated, and figures with remarks."""
    return [
        (each.device.title, each.device.validated, _device_figures(each)) for each in result.devices
    ]


def _device_figures(each: DeviceOutcome) -> list[tuple[str, str, str]]:
    device = each.device
    chosen = sum(each.ends.values())
    absences = {end: n for end, n in each.ends.items() if end not in NO_LOSS}
    why = max(absences, key=lambda end: absences[end], default=None)
    share = each.took_part / each.clients if each.clients else 0.0
    memory, limit = "unknown", ""
    if device.peak_bytes is not None:
        memory = format_bytes(device.peak_bytes)
        if device.limit_bytes is not None:
            limit = f"of {format_bytes(device.limit_bytes)}"
    times, spread = "–", ""
    if each.round_s is not None:
        times = format_duration(each.round_s[1])
        spread = f"{format_duration(each.round_s[0])} to {format_duration(each.round_s[2])}"
    energy = "unknown" if each.energy_j is None else format_energy(each.energy_j / max(1, chosen))
    return [
        ("Clients", f"{each.clients:,}", ""),
        ("Took part", format_percent(min(1.0, share)), f"{each.took_part:,}"),
        ("Chosen", f"{chosen:,}", "times"),
        ("Absent most by", "–" if why is None else WORDS[why], f"{absences[why]:,}" if why else ""),
        ("Answer after", times, spread),
        ("Memory", memory, limit),
        ("Energy a round", energy, ""),
        ("Traffic a round", format_bytes(each.traffic_bytes / max(1, chosen)), ""),
    ]


def _figure(check: Check, value: float | None, *, chosen: bool = False) -> str:
    if value is None:
        return "–"
    return format_limit(value, check.unit) if chosen else format_value(value, check.unit)
