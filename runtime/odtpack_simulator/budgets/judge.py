"""Judge a result: budgets become checks, checks become verdicts. Pure and deterministic.

1. Without any budget (``checks_always.py``): the device's memory limit, finite losses,
   a loss that falls, equal weights after interruptions, a training that comes to its end.
2. Every limit of the budgets. What there is one of per package is judged once, and
   once more on a device whose class or own table sets it.
3. A limit against a baseline becomes a figure first (``regression.py``).
4. A figure that is null gives "not judged", never "pass".
5. Figures of a device are intervals. The typical figure over the limit fails; only the
   high end over it fails at level "warn": it may be too much, which is not known. A figure
   that is worse than its baseline allows, but by no more than measurements scatter,
   fails at level "warn" as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from odtpack_simulator.budgets import advice
from odtpack_simulator.budgets.budget_file import Budgets, PlacedLimit
from odtpack_simulator.budgets.budget_metric import BudgetMetric, Reading, Subject, shortened
from odtpack_simulator.budgets.checks_always import device_checks, package_checks
from odtpack_simulator.budgets.metrics import of_scope
from odtpack_simulator.budgets.regression import Resolved, resolve
from odtpack_simulator.device.app_footprint import RUNTIME_LIBRARY_BYTES, AppFootprint
from odtpack_simulator.device.profile import list_profiles
from odtpack_simulator.result.result import (
    Check,
    CheckLevel,
    CheckStatus,
    DeviceResult,
    SimulationResult,
    Verdict,
)
from odtpack_simulator.values.units import format_limit, format_number, format_percent, format_value

_Limits = Mapping[str, tuple[PlacedLimit, ...]]


def judge(
    result: SimulationResult,
    budgets: Budgets | None = None,
    *,
    baseline: SimulationResult | None = None,
) -> SimulationResult:
    """The same result with all checks and verdicts filled in.

    Args:
        result: What a replay measured; checks and verdicts in it are replaced.
        budgets: Limits; without them only what needs none is judged.
        baseline: An earlier result that limits such as "+5 %" refer to; its own checks
            do not count. Without it such limits are not judged.

    Raises:
        OdtpackError: The budgets name a device that is neither in the result nor shipped.
    """
    budgets = budgets or Budgets()
    if budgets.devices:
        budgets.check_devices([device.name for device in result.devices] + list_profiles())
    overall = budgets.overall()
    checks = package_checks(result, learns=budgets.learns)
    checks += _limit_checks("package", overall, Subject(result), baseline)
    if not result.devices:
        checks += [
            _check(metric, placed, Reading(None, "no device was simulated"), Resolved(None))
            for metric in of_scope("device")
            for placed in overall.get(metric.key, ())
        ]
    devices = [_judge_device(result, device, budgets, baseline) for device in result.devices]
    verdicts = [_verdict(checks), *(device.verdict for device in devices)]
    order: tuple[Verdict, ...] = ("fail", "not judged", "warn", "pass")
    worst = next(verdict for verdict in order if verdict in verdicts)
    return result.model_copy(update={"checks": checks, "devices": devices, "verdict": worst})


def _judge_device(
    result: SimulationResult,
    device: DeviceResult,
    budgets: Budgets,
    baseline: SimulationResult | None,
) -> DeviceResult:
    device = _with_footprint(device, budgets.footprint(device.name, device.os))
    checks, device = device_checks(result, device)
    subject = Subject(result, device)
    limits = budgets.for_device(device.name, device.os)
    checks += _stand_in(_limit_checks("device", limits, subject, baseline), checks, limits)
    own = budgets.narrowed(device.name, device.os)
    checks += _limit_checks("package", own, subject, baseline)
    return device.model_copy(update={"checks": checks, "verdict": _verdict(checks)})


def _with_footprint(device: DeviceResult, footprint: AppFootprint | None) -> DeviceResult:
    """The device with what the budgets say that the app holds, if they do."""
    if footprint is None:
        return device
    said = {
        "app_bytes": footprint.nbytes,
        "app_kind": footprint.kind,
        "app_source": shortened(footprint.source),
        "runtime_bytes": RUNTIME_LIBRARY_BYTES,
    }
    return device.model_copy(update={"memory": device.memory.model_copy(update=said)})


def _stand_in(own: list[Check], always: list[Check], limits: _Limits) -> list[Check]:
    """Let a budget for the peak take the place of a device's limit that is unknown.

    Removes the open check of the limit from ``always``, and says so in the budget's. The
    budget must be able to fail by itself: absolute, and at level ``error``.
    """
    placed = limits.get("peak_memory", ())
    if not any(each.kind == "absolute" and each.level == "error" for each in placed):
        return own
    unknown = [c for c in always if c.metric == "memory_limit" and c.status == "not judged"]
    for check in unknown:
        always.remove(check)
    note = "; it stands in for the device's own limit, which is unknown"
    return [
        check.model_copy(update={"message": shortened(check.message) + note})
        if unknown and check.metric == "peak_memory" and check.baseline is None
        else check
        for check in own
    ]


def _verdict(checks: Iterable[Check]) -> Verdict:
    """``fail`` before ``not judged`` before ``warn`` before ``pass``."""
    outcomes = {(check.status, check.level) for check in checks}
    if ("fail", "error") in outcomes:
        return "fail"
    if any(status == "not judged" for status, _ in outcomes):
        return "not judged"
    return "warn" if ("fail", "warn") in outcomes else "pass"


def _limit_checks(
    scope: str, limits: _Limits, subject: Subject, baseline: SimulationResult | None
) -> list[Check]:
    checks = []
    for metric in of_scope(scope):
        reading = metric.read(subject)
        for placed in limits.get(metric.key, ()):
            # A package's figures lie in the result, even where a device's table limits them.
            whose = Subject(subject.result) if scope == "package" else subject
            resolved = resolve(metric, placed, whose, baseline)
            check = _check(metric, placed, reading, resolved)
            if check.status == "fail" and resolved.limit is not None:
                hint = shortened(metric.advise(subject, resolved.limit)) or None
                check = check.model_copy(update={"advice": hint})
            checks.append(check)
            if metric.key == "accuracy_floor" and resolved.limit is not None:
                checks += _small_data(subject.result, placed, resolved.limit)
    return checks


def _check(
    metric: BudgetMetric,
    placed: PlacedLimit,
    reading: Reading,
    resolved: Resolved,
) -> Check:
    """Compare a figure with its limit; without one of them it is not judged."""
    actual, limit = reading.actual, resolved.limit
    status: CheckStatus = "not judged"
    level: CheckLevel = placed.level
    text = reading.text
    if actual is not None and limit is None:
        text = f"{text}; {resolved.reason}"
    elif actual is not None and limit is not None:
        status = "pass" if metric.keeps(actual, limit) else "fail"
        relation = "at least" if metric.better == "higher" else "at most"
        allowed = format_limit(*_in_percent(limit, metric, reading))
        text = f"{text}, allowed is {relation} {allowed}"
        if status == "fail" and format_limit(*_in_percent(actual, metric, reading)) == allowed:
            text += ", missed by less than the displayed precision"
        if resolved.baseline is not None:
            text += f" ({_against(metric, placed, reading, resolved.baseline)})"
            # Figures of a package repeat with the seed; those of a device are measured.
            noise = resolved.noise if metric.scope == "device" else None
            change = abs(actual - resolved.baseline)
            if status == "fail" and noise is not None and change <= noise:
                level = "warn"
                text += f": as far as the measurement scatters (± {_shown(noise, metric)})"
        elif status == "pass" and reading.interval is not None:
            end = metric.worse_end(reading.interval)
            if not metric.keeps(end, limit):
                status, level = "fail", "warn"
                side = "low" if metric.better == "higher" else "high"
                text = f"{reading.text}: the {side} end is over {allowed}"
    return Check(
        metric=metric.key,
        limit=placed.limit if placed.kind == "absolute" else limit,
        actual=actual,
        baseline=resolved.baseline,
        unit=metric.unit,
        level=level,
        status=status,
        message=shortened(text),
        budget_location=shortened(placed.location),
    )


def _in_percent(value: float, metric: BudgetMetric, reading: Reading) -> tuple[float, str]:
    """A figure and its unit as people read it."""
    return (100 * value, "%") if reading.share else (value, metric.unit)


def _against(metric: BudgetMetric, placed: PlacedLimit, reading: Reading, baseline: float) -> str:
    sign = "-" if metric.better == "higher" else "+"
    amount = abs(placed.limit)
    change = f"{amount:g} %" if placed.kind == "percent" else _shown(amount, metric)
    base = format_value(*_in_percent(baseline, metric, reading))
    return f"{sign}{change} against the {base} of the baseline"


def _shown(value: float, metric: BudgetMetric) -> str:
    return format_value(value, metric.unit)


def _small_data(result: SimulationResult, placed: PlacedLimit, floor: float) -> list[Check]:
    """Whether the held-out samples are enough to distinguish the metric from its floor."""
    interval, metric = result.training.metric_interval, result.training.metric_after
    if interval is None or metric is None:
        return []
    inside = interval[0] < floor < interval[1]
    share = result.training.metric_name == "accuracy"
    shown = format_percent if share else format_number
    ends, least = f"{shown(interval[0])} to {shown(interval[1])}", shown(floor)
    held = result.data.held_out_samples
    name = shortened(result.training.metric_name or "the metric", 100)
    message = (
        f"the floor {least} lies inside the 95 % interval of {name}, {ends}: "
        f"{held} held-out samples do not tell whether it is kept"
        if inside
        else f"the floor {least} lies outside the 95 % interval of {name}, {ends}"
    )
    needed = advice.samples_to_tell(metric, floor)
    return [
        Check(
            metric="small_data",
            limit=max(needed, held + 1) if inside and needed is not None else None,
            actual=held,
            unit="1",
            level="warn",
            status="fail" if inside else "pass",
            message=message,
            advice=advice.for_small_data(result, floor) if inside else None,
            budget_location=shortened(placed.location),
        )
    ]
