"""What the reports say, before any format: headline, rows of devices, what to change first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

from odtpack_simulator.budgets.metrics import METRICS, titles
from odtpack_simulator.result.result import (
    Check,
    DeviceMemory,
    DeviceResult,
    SimulationResult,
    Verdict,
)
from odtpack_simulator.values.units import (
    format_bytes,
    format_duration,
    format_interval,
    format_limit,
    format_number,
    format_percent,
    format_value,
)

METRIC_TITLES: Final = titles()
"""Titles in the order of reports; a metric without one is called by its own name."""

AT_LEAST: Final = frozenset(
    {"small_data", "learns"} | {key for key, metric in METRICS.items() if metric.better == "higher"}
)
"""Metrics whose limit is a floor."""

VERDICT_WORDS: Final[dict[Verdict, str]] = {
    "pass": "Pass",
    "warn": "Warning",
    "fail": "Fail",
    "not judged": "Not judged",
}
_SEVERITY: Final = {"fail": 0, "warn": 1, "not judged": 2, "pass": 3}
NOT_VALIDATED: Final = "not validated on hardware"


@dataclass(frozen=True)
class CheckRow:
    """A check as a line of a table; ``note`` says where its device was never compared."""

    state: Verdict
    title: str
    device: str
    actual: str
    limit: str
    message: str
    advice: str | None
    location: str | None
    note: str


@dataclass(frozen=True)
class FirstFix:
    """One thing to change, with the devices it concerns and the worst of them."""

    state: Verdict
    title: str
    devices: str
    message: str
    advice: str
    note: str


def headline(result: SimulationResult) -> str:
    """The verdict in a few words."""
    total = len(result.devices)
    passed = sum(device.verdict == "pass" for device in result.devices)
    if total == 0:
        return "The package passes" if result.verdict == "pass" else "The package does not pass"
    if passed == total:
        many = "Both" if total == 2 else f"All {total}"
        text = "The device passes" if total == 1 else f"{many} devices pass"
        return text if result.verdict == "pass" else f"{text}, the package does not"
    return f"{passed} of {total} devices pass"


def tally(result: SimulationResult) -> list[tuple[Verdict, str]]:
    """How many devices have each verdict but ``pass``, worst first."""
    counts: list[tuple[Verdict, str]] = []
    words: list[tuple[Verdict, str, str]] = [
        ("fail", "fails", "fail"),
        ("warn", "has a warning", "have a warning"),
        ("not judged", "could not be judged", "could not be judged"),
    ]
    for verdict, one, many in words:
        count = sum(device.verdict == verdict for device in result.devices)
        if count:
            counts.append((verdict, f"{count} {one if count == 1 else many}"))
    bad = [check_state(check) for check in result.checks if check_state(check) != "pass"]
    if bad:
        worst = min(bad, key=_SEVERITY.__getitem__)
        verb = {"fail": "fails", "warn": "has a warning"}.get(worst, "could not be judged in full")
        counts.insert(0, (worst, f"the package itself {verb}"))
    return counts


def not_validated_words(result: SimulationResult) -> str:
    """A sentence where verdicts rest on profiles that were not compared with the device."""
    total = len(result.devices)
    open_ones = sum(not device.validated for device in result.devices)
    if not open_ones:
        return ""
    who = "The profile is" if total == 1 else "The profiles are"
    if open_ones < total:
        who = f"{open_ones} of {total} profiles {'is' if open_ones == 1 else 'are'}"
    return f"{who} {NOT_VALIDATED}: times and energy are estimates."


def check_state(check: Check) -> Verdict:
    """A check's status and level as one verdict."""
    if check.status == "fail":
        return "fail" if check.level == "error" else "warn"
    return check.status


def metric_title(metric: str) -> str:
    """What a metric is called in reports."""
    return METRIC_TITLES.get(metric, metric.replace("_", " ").capitalize())


def severity(check: Check) -> int:
    """A number for sorting checks, worst first."""
    return _SEVERITY[check_state(check)]


def check_rows(result: SimulationResult) -> list[CheckRow]:
    """Every check, worst first, else in stored order."""
    rows = [
        CheckRow(
            state=check_state(check),
            title=metric_title(check.metric),
            device=device.title if device else "Package",
            actual=figure_text(result, check, check.actual),
            limit=figure_text(result, check, check.limit, chosen=True),
            message=check.message,
            advice=check.advice,
            location=check.budget_location,
            note=NOT_VALIDATED if device is not None and not device.validated else "",
        )
        for device, check in result.all_checks()
    ]
    return sorted(rows, key=lambda row: _SEVERITY[row.state])


def figure_text(
    result: SimulationResult, check: Check, value: float | None, *, chosen: bool = False
) -> str:
    """A figure of a check, or a limit that somebody chose; a dash where there is none."""
    if value is None:
        return "–"
    share = check.metric == "accuracy_floor" and result.training.metric_name == "accuracy"
    value, unit = (100 * value, "%") if share else (value, check.unit)
    return format_limit(value, unit) if chosen else format_value(value, unit)


def first_fixes(result: SimulationResult) -> list[FirstFix]:
    """What to change first: one entry per failing metric, each from its worst device."""
    groups: dict[str, list[tuple[DeviceResult | None, Check]]] = {}
    for device, check in result.all_checks():
        if check.status == "fail" and check.advice:
            groups.setdefault(check.metric, []).append((device, check))
    fixes = []
    for metric, members in groups.items():
        device, check = worst(members)
        names = [other.title for other, _ in members if other]
        where = (
            name_list([device.title, *(n for n in names if n != device.title)]) if device else ""
        )
        states = [check_state(other) for _, other in members]
        fixes.append(
            FirstFix(
                state=min(states, key=_SEVERITY.__getitem__),
                title=metric_title(metric),
                devices=where,
                message=check.message,
                advice=check.advice or "",
                note=NOT_VALIDATED if any(d and not d.validated for d, _ in members) else "",
            )
        )
    order = {title: place for place, title in enumerate(METRIC_TITLES.values())}
    return sorted(
        fixes, key=lambda fix: (_SEVERITY[fix.state], order.get(fix.title, len(order)), fix.title)
    )


Whose = TypeVar("Whose")


def worst(members: Sequence[tuple[Whose, Check]]) -> tuple[Whose, Check]:
    """The check of one metric that is furthest off, failures before warnings."""
    return max(members, key=lambda member: (-severity(member[1]), _excess(member[1])))


def _excess(check: Check) -> tuple[float, float]:
    """How far a failing check is off; larger is worse, a killed replay (no figure) is worst.

    Of several that were killed the one with the least room is the worst.
    """
    if check.actual is None or not check.limit:
        return float("inf"), -(check.limit or 0.0)
    ratio = max(0.0, check.actual / check.limit)
    return (1.0 / max(ratio, 1e-12) if check.metric in AT_LEAST else ratio), 0.0


@dataclass(frozen=True)
class Open:
    """Checks that could not be judged for one reason, on the same devices."""

    titles: str
    devices: str
    reason: str


def not_judged(result: SimulationResult) -> list[Open]:
    """Why checks could not be judged, one entry per reason and set of devices, in stored order."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for device, check in result.all_checks():
        if check.status == "not judged":
            reason = check.message
            if check.actual is not None:
                # The figure stands before the reason, and differs from device to device.
                reason = reason.partition("; ")[2] or reason
            if reason.startswith("the profile gives no"):
                reason = reason.partition(": ")[0]
            named = reasons.setdefault((reason, metric_title(check.metric)), [])
            named += [device.title] if device else []
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, title), devices in reasons.items():
        groups.setdefault((reason, tuple(devices)), []).append(title)
    return [
        Open(", ".join(titles), name_list(devices), reason)
        for (reason, devices), titles in groups.items()
    ]


def name_list(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many there are more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def subject_words(result: SimulationResult) -> str:
    """Of which commit the result is, and when it was made; empty where that is unknown."""
    origin = result.origin
    parts = [f"commit {origin.commit[:12]}"] if origin.commit else []
    if origin.date:
        parts.append(origin.date.replace("T", " ").replace("+00:00", " UTC"))
    return ", ".join(parts)


def metric_text(result: SimulationResult, value: float) -> str:
    """A value of the training's metric: an accuracy in percent, any other as a number."""
    if result.training.metric_name == "accuracy":
        return format_percent(value)
    return f"{value:.3g}"


def learned_figures(result: SimulationResult) -> list[tuple[str, str, str]]:
    """Loss and metric before and after the training: (name, both, on what)."""
    training, held = result.training, f"{result.data.held_out_samples} held-out samples"
    figures = []
    if training.losses:
        first, last, where = training.eval_loss_before, training.eval_loss_after, held
        if first is None or last is None:
            first, last, where = training.losses[0], training.losses[-1], "training samples"
        figures.append(("Loss", f"{_loss(first)} → {_loss(last)}", where))
    if training.metric_name and training.metric_after is not None:
        before = training.metric_before
        start = ""
        if before is not None:  # a unit stands once, after both
            start = f"{metric_text(result, before).removesuffix(' %')} → "
        text = f"{start}{metric_text(result, training.metric_after)}"
        figures.append((training.metric_name.capitalize(), text, held))
    return figures


def learned_words(result: SimulationResult) -> str:
    """The same in a sentence; empty where nothing was trained."""
    figures = learned_figures(result)
    texts = ", ".join(f"{name.lower()} {text}" for name, text, _ in figures)
    return f"On {figures[0][2]} in {result.data.steps} steps: {texts}" if figures else ""


def key_figures(result: SimulationResult) -> list[tuple[str, str, str]]:
    """The handful of figures at the top: (name, figure, remark).

    Memory and time are those of the device that they are worst on; those of this machine
    stand in the remark, or alone where no device has the figure.
    """
    figures = [("Package", format_bytes(result.package.package_bytes), _parameters(result))]
    figures += [_peak_figure(result), *_step_figures(result)]
    return [*figures, *learned_figures(result)]


def _peak_figure(result: SimulationResult) -> tuple[str, str, str]:
    memory = result.memory
    predicted = memory.predicted.peak_bytes
    peak = predicted if memory.measured_peak_bytes is None else memory.measured_peak_bytes
    if memory.measured_peak_bytes is None:
        how = "predicted, not measured"
    else:
        error = 100.0 * (predicted - peak) / max(1, peak)
        how = f"measured; predicted {format_bytes(predicted)} ({error:+.1f} %)"
    limited = [device for device in result.devices if device.memory.limit_bytes]
    if not limited:
        return "Peak memory", format_bytes(peak), how
    most = max(limited, key=lambda device: (limit_share(device.memory), device.name))
    limit, others = most.memory.limit_bytes or 1, most.memory.others_bytes
    share = format_percent(limit_share(most.memory))
    app = f" and {format_bytes(others)} besides," if others else ""
    remark = f"{format_bytes(peak)}{app} of {format_bytes(limit)} on {most.title}; {how}"
    return "Peak memory, worst device", share, remark


def limit_share(memory: DeviceMemory) -> float:
    """What the process needs as a share of its limit; 0 where that is unknown."""
    return memory.need_bytes / memory.limit_bytes if memory.limit_bytes else 0.0


def _step_figures(result: SimulationResult) -> list[tuple[str, str, str]]:
    host = result.latency_host.steps_ms
    own = f"this machine {format_duration(median(host) / 1e3)}" if host else ""
    known = [(device.latency.step_ms, device) for device in result.devices]
    timed = [(step, device) for step, device in known if step is not None]
    if timed:
        step, device = max(timed, key=lambda pair: (pair[0].typical, pair[1].name))
        ends = f"{format_interval(step, 'ms')} on {device.title}"
        figure = format_duration(step.typical / 1e3)
        figures = [("Step, slowest device", figure, "; ".join(filter(None, (ends, own))))]
        tokens = result.data.tokens_per_step
        if tokens and step.typical:
            each = step.scaled(1.0 / tokens)  # ms a token, and so s for 1,000 tokens
            ends = f"{format_interval(each, 's')} for 1,000 tokens on {device.title}"
            rate = 1e3 / each.typical
            shown = _count(round(rate)) if rate >= 10 else format_number(rate)
            figures.append(("Tokens a second, slowest device", shown, ends))
        return figures
    if not host:
        return []
    first = result.latency_host.first_step_ms
    later = f"; first step {format_duration(first / 1e3)}" if first is not None else ""
    return [("Step on this machine", format_duration(median(host) / 1e3), f"median{later}")]


def _parameters(result: SimulationResult) -> str:
    trainable, total = result.package.trainable_parameters, result.package.total_parameters
    adapter, mapped = result.package.adapter_bytes, result.memory.mapped_bytes
    of = "" if trainable == total else f"of {_count(total)} "
    if adapter is None and mapped is None:
        return f"{_count(trainable)} {of}parameters" + (" trained" if of else ", all trained")
    base = "the base is in memory" if mapped is None else f"base mapped: {format_bytes(mapped)}"
    size = [] if adapter is None else [f"the adapter is {format_bytes(adapter)}"]
    return ", ".join([f"{_count(trainable)} {of}parameters trained", *size, base])


def _count(value: int) -> str:
    for unit, factor in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return str(value)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
