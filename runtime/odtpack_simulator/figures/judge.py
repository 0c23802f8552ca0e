"""Judge figures: limits become checks, checks become verdicts. Pure and deterministic.

1. Without any limit (``checks.py``): the device's memory limit, finite losses, a loss that falls,
   equal weights after interruptions, a training that comes to its end.
2. Every limit. What there is one of per package is judged once, and once more on a device whose
   class or own table sets it.
3. A limit against a baseline becomes a figure first: ``"+5 %"`` allows ``baseline + 5 % of
   |baseline|``; ``"-5 %"`` of a floor as much below.
4. A figure that is null gives "not judged", never "pass".
5. A planned peak that is within a limit, but not with the plan's margin, is too close to call. It
   fails, unless the budgets say that it warns.
6. Figures of a device are intervals. The typical figure over the limit fails; only the
   high end over it fails at level "warn": it may be too much, which is not known. A figure
   that is worse than its baseline allows, but by no more than measurements scatter,
   fails at level "warn" as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from odtpack_simulator.device.app_footprint import runtime_bytes
from odtpack_simulator.device.profile import list_profiles
from odtpack_simulator.figures import advice
from odtpack_simulator.figures.checks import device_checks, package_checks, too_close
from odtpack_simulator.figures.limits import Budgets, PlacedLimit
from odtpack_simulator.figures.metric import Metric, chance, incomparable
from odtpack_simulator.figures.simulated import METRICS, figures_of
from odtpack_simulator.result import DeviceResult, SimulationResult, Subject
from odtpack_simulator.values.figure import (
    Check,
    CheckStatus,
    Figure,
    shortened,
    verdict_of,
    worst_of,
)
from odtpack_simulator.values.units import format_limit, format_number, format_percent, format_value

NO_BASELINE: Final = (
    "no baseline was given: odtpack judge RESULT.json --budget budgets.toml --baseline BASE.json"
)
Limits = Mapping[str, Sequence[PlacedLimit]]  # Limits by key of their metric
Source = TypeVar("Source")


def limit_checks(
    metrics: Mapping[str, Metric[Source]],
    figures: Iterable[Figure],
    limits: Limits,
    baseline: Sequence[Figure] | str,
    source: Source,
) -> list[Check]:
    """A check for each limit of each figure of a source."""
    # `baseline`: The same subject's figures that limits such as "+5 %" refer to, or why there are
    # none.
    found = []
    for figure in figures:
        metric = metrics[figure.metric]
        for placed in limits.get(figure.metric, ()):
            limit, base, reason = _resolved(placed, figure, baseline)
            check = _check(metric, placed, figure, limit, base, reason)
            if check.status == "fail" and limit is not None:
                hint = shortened(metric.advise(source, limit)) or None
                check = check.model_copy(update={"advice": hint})
            found.append(check)
    return found


def _resolved(
    placed: PlacedLimit, figure: Figure, baseline: Sequence[Figure] | str
) -> tuple[float | None, Figure | None, str]:
    """The limit in the figure's unit, the baseline's figure, and why there is no limit."""
    if placed.kind == "absolute":
        return placed.limit, None, ""
    if isinstance(baseline, str):
        return None, None, baseline
    base = next(each for each in baseline if each.metric == figure.metric)
    if base.value is None:
        return None, None, f"not known of the baseline: {base.reason}"
    reason = incomparable(base, figure)
    if reason:
        return None, base, reason
    share = abs(base.value) / 100.0 if placed.kind == "percent" else 1.0
    limit = base.value + placed.limit * share
    if not math.isfinite(limit):
        return None, base, "the limit is beyond all numbers"
    return limit, base, ""


def _check(
    metric: Metric[Source],
    placed: PlacedLimit,
    figure: Figure,
    limit: float | None,
    base: Figure | None,
    reason: str,
) -> Check:
    """Compare a figure with its limit; without one of them it is not judged."""
    actual, text = figure.value, metric.describe(figure)
    status: CheckStatus = "not judged"
    level = placed.level
    if actual is None and metric.never:
        status = "fail"
    elif actual is not None and limit is None:
        text = f"{text}; {reason}"
    elif actual is not None and limit is not None:
        status = "pass" if metric.keeps(actual, limit) else "fail"
        relation = "at least" if metric.better == "higher" else "at most"
        allowed = format_limit(limit, figure.unit)
        said, text = text, f"{text}, allowed is {relation} {allowed}"
        if status == "fail" and format_limit(actual, figure.unit) == allowed:
            text += ", missed by less than the displayed precision"
        if base is not None and base.value is not None:
            text += f" ({_against(metric, placed, base)})"
            # Figures of a package repeat with the seed; those of a device are measured.
            noise = chance(metric, base, figure) if metric.scope == "device" else None
            if status == "fail" and noise is not None and abs(actual - base.value) <= noise:
                level = "warn"
                scatter = format_value(noise, figure.unit)
                text += f": as far as the measurement scatters (± {scatter})"
        elif status == "pass" and metric.fit and metric.fit(int(actual), int(limit)) == "close":
            status, level = "fail", placed.close
            text += f": {too_close(int(actual), int(limit))}"
        elif status == "pass" and figure.low is not None and figure.high is None:
            status, text = "not judged", f"at least {figure.shown}: {figure.reason}"
        elif status == "pass" and figure.low is not None and figure.high is not None:
            floor = metric.better == "higher"
            end, side = (figure.low, "low") if floor else (figure.high, "high")
            if not metric.keeps(end, limit):
                status, level = "fail", "warn"
                text = f"{said}: the {side} end is over {allowed}"
    return Check(
        metric=metric.key,
        limit=placed.limit if placed.kind == "absolute" else limit,
        actual=actual,
        baseline=None if base is None else base.value,
        unit=figure.unit,
        level=level,
        status=status,
        message=shortened(text),
        budget_location=shortened(placed.location) or None,
    )


def _against(metric: Metric[Source], placed: PlacedLimit, base: Figure) -> str:
    sign, amount = "-" if metric.better == "higher" else "+", abs(placed.limit)
    change = f"{amount:g} %" if placed.kind == "percent" else format_value(amount, metric.unit)
    return f"{sign}{change} against the {base.shown} of the baseline"


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
    checks = package_checks(result, learns=budgets.defaults.learns)
    checks += _package_limits(result, None, overall, baseline)
    if not result.devices:
        why = "no device was simulated"
        unknown = [
            Figure(metric=metric.key, value=None, unit=metric.unit, reason=why)
            for metric in METRICS.values()
            if metric.scope == "device"
        ]
        checks += limit_checks(METRICS, unknown, overall, NO_BASELINE, Subject(result))
    devices = [_judge_device(result, device, budgets, baseline) for device in result.devices]
    verdict = worst_of([verdict_of(checks), *(device.verdict for device in devices)])
    return result.model_copy(update={"checks": checks, "devices": devices, "verdict": verdict})


def _judge_device(
    result: SimulationResult,
    device: DeviceResult,
    budgets: Budgets,
    baseline: SimulationResult | None,
) -> DeviceResult:
    footprint = budgets.footprint(device.name, device.os)
    if footprint is not None:  # the budgets say what the app holds
        said = {
            "app_bytes": footprint.nbytes,
            "app_kind": footprint.kind,
            "app_source": shortened(footprint.source),
            "runtime_bytes": runtime_bytes(
                device.memory.kit, device.os, device.memory.predicted_peak_bytes
            ),
        }
        memory = device.memory.model_copy(update=said)
        device = device.model_copy(update={"memory": memory})
    checks, device = device_checks(result, device, budgets.defaults.too_close)
    subject, limits = Subject(result, device), budgets.for_device(device.name, device.os)
    base: Sequence[Figure] | str = NO_BASELINE
    if baseline is not None:
        found = [each for each in baseline.devices if each.name == device.name]
        missing = "the baseline does not have this device"
        base = figures_of(baseline, found[0]) if found else missing
    own = limit_checks(METRICS, figures_of(result, device), limits, base, subject)
    checks += _stand_in(own, checks, limits)
    checks += _package_limits(result, device, budgets.narrowed(device.name, device.os), baseline)
    return device.model_copy(update={"checks": checks, "verdict": verdict_of(checks)})


def _package_limits(
    result: SimulationResult,
    device: DeviceResult | None,
    limits: Limits,
    baseline: SimulationResult | None,
) -> list[Check]:
    """Checks of the package's figures, by the budgets of all or of one device."""
    found = []
    base = NO_BASELINE if baseline is None else figures_of(baseline)
    for figure in figures_of(result):
        checks = limit_checks(METRICS, [figure], limits, base, Subject(result, device))
        for check, placed in zip(checks, limits.get(figure.metric, ()), strict=True):
            found.append(check)
            if figure.metric == "accuracy_floor" and check.limit is not None:
                found += _small_data(result, figure, placed, check.limit)
    return found


def _stand_in(own: list[Check], always: list[Check], limits: Limits) -> list[Check]:
    """Let a budget for the peak take the place of a device's limit that is unknown."""
    # Removes the open check of the limit from `always`, and says so in the budget's. The budget
    # must be able to fail by itself: absolute, and at level `error`.
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


def _small_data(
    result: SimulationResult, figure: Figure, placed: PlacedLimit, floor: float
) -> list[Check]:
    """Whether the held-out samples are enough to distinguish the metric from its floor."""
    if figure.noise is None:
        return []
    low, metric, high = figure.noise
    inside = low < floor < high
    shown = format_percent if figure.unit == "share" else format_number
    ends, least = f"{shown(low)} to {shown(high)}", shown(floor)
    held, name = result.data.held_out_samples, figure.basis.how
    message = f"the floor {least} lies outside the 95 % interval of {name}, {ends}"
    if inside:
        message = (
            f"the floor {least} lies inside the 95 % interval of {name}, {ends}: "
            f"{held} held-out samples do not tell whether it is kept"
        )
    needed = advice.samples_to_tell(metric, floor)
    return [
        Check(
            metric="small_data",
            limit=max(needed, held + 1) if inside and needed is not None else None,
            actual=held,
            level="warn",
            status="fail" if inside else "pass",
            message=message,
            advice=advice.for_small_data(result, floor) if inside else None,
            budget_location=shortened(placed.location),
        )
    ]
