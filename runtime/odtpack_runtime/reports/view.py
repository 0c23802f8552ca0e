"""What the reports say, before any format: headline, rows of devices, what to change first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from odtpack_runtime.simulator.result import Check, DeviceResult, SimulationResult, Verdict
from odtpack_runtime.simulator.units import (
    format_bytes,
    format_duration,
    format_interval,
    format_limit,
    format_percent,
    format_value,
)

METRIC_TITLES: Final = {
    "memory_limit": "Device memory limit",
    "finite_loss": "Finite loss",
    "steps_done": "Replay completed",
    "package_size": "Package size",
    "peak_memory": "Peak memory",
    "memory_headroom": "Memory headroom",
    "step_latency": "Step latency",
    "time_to_finish": "Time to finish",
    "final_loss": "Final loss",
    "metric_floor": "Metric floor",
}
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
    """A check as a line of a table; ``state`` is a verdict, ``count`` how many devices share it."""

    state: Verdict
    title: str
    device: str
    actual: str
    limit: str
    message: str
    advice: str | None
    location: str | None


@dataclass(frozen=True)
class FirstFix:
    """One thing to change, with the devices it concerns and the worst of them."""

    state: Verdict
    title: str
    devices: str
    message: str
    advice: str


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


def check_state(check: Check) -> Verdict:
    """A check's status and level as one verdict."""
    if check.status == "fail":
        return "fail" if check.level == "error" else "warn"
    return check.status


def check_rows(result: SimulationResult) -> list[CheckRow]:
    """Every check, worst first, else in stored order."""
    rows = [
        CheckRow(
            state=check_state(check),
            title=METRIC_TITLES.get(check.metric, check.metric),
            device=device.title if device else "Package",
            actual="–" if check.actual is None else format_value(check.actual, check.unit),
            limit="–" if check.limit is None else format_limit(check.limit, check.unit),
            message=check.message,
            advice=check.advice,
            location=check.budget_location,
        )
        for device, check in result.all_checks()
    ]
    return sorted(rows, key=lambda row: _SEVERITY[row.state])


def first_fixes(result: SimulationResult) -> list[FirstFix]:
    """What to change first: one entry per failing metric, each from its worst device."""
    groups: dict[str, list[tuple[DeviceResult | None, Check]]] = {}
    for device, check in result.all_checks():
        if check.status == "fail" and check.advice and check.metric in METRIC_TITLES:
            groups.setdefault(check.metric, []).append((device, check))
    fixes = []
    for metric, members in groups.items():
        device, check = max(members, key=lambda member: _excess(member[1]))
        names = [other.title for other, _ in members if other]
        where = _names([device.title, *(n for n in names if n != device.title)]) if device else ""
        states = [check_state(other) for _, other in members]
        fixes.append(
            FirstFix(
                state=min(states, key=_SEVERITY.__getitem__),
                title=METRIC_TITLES[metric],
                devices=where,
                message=check.message,
                advice=check.advice or "",
            )
        )
    titles = list(METRIC_TITLES.values())
    return sorted(fixes, key=lambda fix: (_SEVERITY[fix.state], titles.index(fix.title)))


def _excess(check: Check) -> float:
    """How far a failing check is off; larger is worse, a killed replay (no limit) is worst."""
    if check.actual is None or not check.limit:
        return float("inf")
    ratio = abs(check.actual / check.limit)
    return 1.0 / max(ratio, 1e-12) if ratio < 1.0 else ratio


def _names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def memory_text(device: DeviceResult) -> tuple[str, str]:
    """Peak against limit, and the share of the limit in words."""
    memory = device.memory
    peak = format_bytes(memory.peak_bytes)
    if memory.outcome == "killed" and memory.limit_bytes is not None:
        return f"over {format_bytes(memory.limit_bytes)}", f"predicted {peak}"
    if memory.limit_bytes is None:
        return f"{peak} of unknown", "limit unknown"
    text = f"{peak} of {format_bytes(memory.limit_bytes)}"
    share = memory.peak_bytes / max(1, memory.limit_bytes)
    return text, f"{format_percent(share)} of the limit"


def step_text(device: DeviceResult) -> tuple[str, str]:
    """Typical step time and its interval, or "not judged" and the reason."""
    interval = device.latency.step_ms
    if interval is None:
        return "not judged", device.latency.not_judged or ""
    return format_duration(interval.typical / 1e3), format_interval(interval, "ms")


def finish_text(device: DeviceResult) -> tuple[str, str]:
    """Typical time of the whole training and its interval, or "not judged"."""
    interval = device.latency.finish_s
    if interval is None:
        return "not judged", ""
    return format_duration(interval.typical), format_interval(interval, "s")


def replay_text(device: DeviceResult, steps: int) -> tuple[str, str]:
    """Steps that the replay made, and how it ended."""
    training = device.training
    if training is None:
        return "not run", ""
    ending = "completed" if training.outcome == "completed" else "ended early"
    return f"{training.steps_done} of {steps}", ending


def key_figures(result: SimulationResult) -> list[tuple[str, str, str]]:
    """The handful of figures at the top: (name, figure, remark)."""
    memory = result.memory
    predicted = memory.predicted.peak_bytes
    peak = predicted if memory.measured_peak_bytes is None else memory.measured_peak_bytes
    if memory.measured_peak_bytes is None:
        remark = "predicted, not measured"
    else:
        error = 100.0 * (predicted - peak) / max(1, peak)
        remark = f"measured; predicted {format_bytes(predicted)} ({error:+.1f} %)"
    figures = [
        ("Package", format_bytes(result.package.package_bytes), _parameters(result)),
        ("Peak memory", format_bytes(peak), remark),
    ]
    steps = result.latency_host.steps_ms
    if steps:
        first = result.latency_host.first_step_ms
        later = f"first step {format_duration(first / 1e3)}" if first is not None else ""
        figures.append(
            ("Step on the host", format_duration(median(steps) / 1e3), f"median; {later}")
        )
    training = result.training
    if training.losses:
        first_loss: float | None
        last_loss: float | None
        if training.eval_loss_after is not None and training.eval_loss_before is not None:
            first_loss, last_loss, where = (
                training.eval_loss_before,
                training.eval_loss_after,
                "held-out samples",
            )
        else:
            first_loss, last_loss, where = training.losses[0], training.losses[-1], "training steps"
        text = f"{_loss(first_loss)} → {_loss(last_loss)}"
        figures.append(("Loss", text, f"{where}, {result.data.steps} steps"))
    if training.metric_name and training.metric_after is not None:
        before = training.metric_before
        start = f"{before:.3g} → " if before is not None else ""
        figures.append(
            (
                training.metric_name.capitalize(),
                f"{start}{training.metric_after:.3g}",
                f"{result.data.held_out_samples} held-out samples",
            )
        )
    return figures


def _parameters(result: SimulationResult) -> str:
    trainable, total = result.package.trainable_parameters, result.package.total_parameters
    if trainable == total:
        return f"{_count(total)} parameters, all trained"
    return f"{_count(trainable)} of {_count(total)} parameters trained"


def _count(value: int) -> str:
    for unit, factor in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return str(value)


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
