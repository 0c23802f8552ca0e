"""What a report says of a federation: headline, figures, the way of the clients, and drawings."""

from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from markupsafe import Markup

from odtpack_simulator.fleet.judge import CHECKS, first_change
from odtpack_simulator.fleet.result import DeviceOutcome, FleetResult, band, seed_run
from odtpack_simulator.fleet.round_clock import ANSWERED, NEVER_STARTED, NO_LOSS
from odtpack_simulator.reports.charts import Bar, curve_chart, share_bar
from odtpack_simulator.reports.report import (
    UNKNOWN,
    FigureRow,
    Report,
    Suite,
    Table,
    caution,
    tally,
)
from odtpack_simulator.reports.svg import Axis, rectangle, row
from odtpack_simulator.values.text import counted
from odtpack_simulator.values.units import (
    format_bytes,
    format_duration,
    format_energy,
    format_interval_of,
    format_number,
    format_percent,
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


_DECILES: Final = (
    *("worst", "10 %", "20 %", "30 %", "40 %", "half", "60 %", "70 %", "80 %", "90 %", "best"),
)


def fleet_report(result: FleetResult) -> Report:
    """What a report says of a federation."""
    validated = [each.device.validated for each in result.devices]
    advice = [check.advice for check in result.checks if check.advice]
    return Report(
        result=result,
        of="odtpack fleet",
        headline=headline(result),
        tally=tally([], [check.state for check in result.checks], noun="check"),
        caution=caution(validated),
        key_figures=key_figures(result),
        kinds=CHECKS,
        suites=[
            Suite("Federation", "fleet", result.checks),
            *(
                Suite(each.device.title, each.device.name, [], each.device.validated, True)
                for each in result.devices
            ),
        ],
        tables=[
            Table("What becomes of the clients", "Over all rounds.", way(result)),
            Table(
                "Devices",
                "What each model does and takes.",
                [
                    FigureRow(each.device.title, each.device.validated, "", _device_figures(each))
                    for each in result.devices
                ],
            ),
        ],
        notes=[("Not counted", text) for text in result.unknown]
        + [("Times not judged", text) for text in [result.disturbed] if text],
        advice="" if advice or result.verdict != "fail" else first_change(result),
    )


def headline(result: FleetResult) -> str:
    """What came of the federation, in a sentence."""
    last = result.last_evaluation
    if not result.rounds:
        return "No round took place"
    rounds = counted(len(result.rounds), "round")
    span = f"{rounds} in {result.days:.1f} simulated days" if result.days >= 0.05 else rounds
    if last is None:
        return f"No loss is known after {span}"
    if last.loss is None:
        return f"The loss is not finite after {span}"
    if last.accuracy is not None:
        return f"{format_percent(last.accuracy)} accuracy after {span}"
    return f"Loss {format_number(last.loss)} after {span}"


def key_figures(result: FleetResult) -> list[tuple[str, str, str]]:
    """Name, value and remark of the figures at the top."""
    figures = []
    last = result.last_evaluation
    if last is not None and last.accuracy is not None and result.accuracy_before is not None:
        before = f"{format_percent(result.accuracy_before)} before"
        figures.append(("Accuracy", format_percent(last.accuracy), before))
    ends = [run.accuracy for run in result.seeds if run.accuracy is not None]
    if ends:
        spread = format_interval_of(min(ends), max(ends), "share")
        figures.append(("Over seeds", spread, f"accuracy with {len(ends)} seeds"))
    if result.fairness is not None:
        fair = result.fairness
        of = f"of the clients; mean of all clients: {format_percent(fair.mean)}"
        figures.append(("Accuracy, worst tenth", format_percent(fair.worst_tenth), of))
    took_part, clients = result.took_part, result.plan.clients
    share = format_percent(took_part / clients)
    figures.append(("Took part", share, f"{took_part:,} of {clients:,}"))
    if result.rounds:
        durations = sorted(each.duration_s for each in result.rounds)
        middle, longest = format_duration(durations[len(durations) // 2]), durations[-1]
        figures.append(("A round", middle, f"{format_duration(longest)} at most"))
    counts = result.staleness()
    if sum(counts):
        mean = sum(age * count for age, count in enumerate(counts)) / sum(counts)
        figures.append(("Staleness", f"{mean:.1f}", f"{len(counts) - 1} at most"))
    for name, cost, shown in (
        ("Traffic of a device", result.traffic_bytes, format_bytes),
        ("Energy of a device", result.energy_j, format_energy),
    ):
        if cost is not None:
            figures.append((name, shown(cost.mean), f"{shown(cost.most)} at most"))
    return figures


def way(result: FleetResult) -> list[FigureRow]:
    """From those that were looked at to those whose answers were averaged, over all rounds."""
    absent = Counter[str]()
    for each in result.rounds:
        absent.update(each.absent)
    ends = result.ends()

    def lost(names: Collection[str]) -> dict[str, int]:
        return {WORDS[end]: count for end, count in ends.items() if end in names}

    chosen = sum(ends.values())
    started = chosen - sum(ends.get(end, 0) for end in NEVER_STARTED)
    answered = sum(ends.get(end, 0) for end in ANSWERED)
    rows = []
    for stage, count, losses in (  # how many are there, and how many are lost to what
        ("looked at", sum(each.looked_at for each in result.rounds), absent),
        ("eligible", chosen, lost(NEVER_STARTED)),
        ("started", started, lost(ends.keys() - NEVER_STARTED - ANSWERED)),
        ("answered", answered, lost(ANSWERED - {"averaged"})),
        ("averaged", ends.get("averaged", 0), {}),
    ):
        words = ", ".join(f"{each:,} {reason}" for reason, each in losses.items()) or UNKNOWN
        figures = [("Clients", f"{count:,}", ""), ("Lost on the way to the next", words, "")]
        rows.append(FigureRow(stage, True, "", figures))
    return rows


def _device_figures(each: DeviceOutcome) -> list[tuple[str, str, str]]:
    device = each.device
    chosen = sum(each.ends.values())
    absences = {end: n for end, n in each.ends.items() if end not in NO_LOSS}
    why = max(absences, key=lambda end: absences[end], default=None)
    absent = (UNKNOWN, "") if why is None else (WORDS[why], f"{absences[why]:,}")
    memory, limit = "unknown", ""
    if device.peak_bytes is not None:
        memory = format_bytes(device.peak_bytes)
        limit = "" if device.limit_bytes is None else f"of {format_bytes(device.limit_bytes)}"
    times = (UNKNOWN, "") if each.round_s is None else _answer_times(*each.round_s)
    energy = "unknown" if each.energy_j is None else format_energy(each.energy_j / max(1, chosen))
    return [
        ("Clients", f"{each.clients:,}", ""),
        ("Took part", format_percent(each.participation or 0.0), f"{each.took_part:,}"),
        ("Chosen", f"{chosen:,}", "times"),
        ("Absent most by", *absent),
        ("Answer after", *times),
        ("Memory", memory, limit),
        ("Energy a round", energy, ""),
        ("Traffic a round", format_bytes(each.traffic_bytes / max(1, chosen)), ""),
    ]


def _answer_times(low: float, middle: float, high: float) -> tuple[str, str]:
    """The median time to an answer in words, and where eight of ten answers lie."""
    return format_duration(middle), format_interval_of(low, high, "s")


def fleet_sections(result: FleetResult) -> dict[str, Any]:
    """What the template of a federation draws besides what all reports share."""
    return {
        "curves": _curves(result),
        "participation": [
            Bar(
                each.device.title,
                f"{each.ends.get('averaged', 0):,} of {sum(each.ends.values()):,} invitations "
                "averaged",
                share_bar(each.participation or 0.0),
                format_percent(each.participation or 0.0),
                f"{each.took_part:,} of {each.clients:,}",
            )
            for each in result.devices
        ],
        "times": _times(result),
        "deciles": []
        if result.fairness is None
        else [
            Bar(name, "", share_bar(value), format_percent(value), "")
            for name, value in zip(_DECILES, result.fairness.deciles, strict=True)
        ],
        "refused": [text for each in result.rounds for text in each.refused][:10],
    }


def _curves(result: FleetResult) -> list[tuple[str, str, Markup]]:
    """Accuracy, or the loss, by round and by simulated day: title, name of the axis, drawing."""
    by_accuracy = result.accuracy_before is not None
    name, scale = ("Accuracy, %", 100.0) if by_accuracy else ("Loss", 1.0)
    run = seed_run(result)
    if all((p.accuracy if by_accuracy else p.loss) is None for p in run.points):
        return []

    def curve(title: str, axis: str, *, by_day: bool) -> tuple[str, str, Markup]:
        known = run.curve(by_day=by_day, by_accuracy=by_accuracy)
        points = [(place, scale * value) for place, value in known if value is not None]
        found = band(result.seeds, by_day=by_day, by_accuracy=by_accuracy)
        area = [(place, scale * low, scale * high) for place, low, high in found]
        drawing = curve_chart(points, f"{name} {title}", whole=not by_day, band=area)
        return f"{name} {title}", axis, drawing

    curves = [curve("by round", "rounds", by_day=False)]
    if result.days > 0.01:
        curves.append(curve("by simulated day", "days", by_day=True))
    return curves


def _times(result: FleetResult) -> list[Bar]:
    """For each model the time from a round's start to the answer: 10th, 50th, 90th percentile."""
    known = [(each.device.title, each.round_s) for each in result.devices if each.round_s]
    most = max((times[2] for _, times in known), default=0.0)
    if not most:
        return []
    axis = Axis(0.0, most, ())
    bars = []
    for title, times in known:
        low, middle, high = map(axis.position, times)
        drawing = row(
            rectangle(low, max(0.004, high - low), "track wide", 6, 8),
            rectangle(max(0.0, middle - 0.004), 0.008, "bar", 3, 14),
        )
        bars.append(Bar(title, "", drawing, *_answer_times(*times)))
    return bars
