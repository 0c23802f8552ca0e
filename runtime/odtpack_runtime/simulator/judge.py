"""Judge a result: budgets become checks, checks become verdicts. Pure and deterministic.

1. Memory limit, per device, always: the measured peak (else the predicted one)
   against what the device gives an app. A killed replay fails.
2. Finite loss, always.
3. Every limit of the budgets. Package size, loss and metric are judged once,
   and once more on a device whose class or own table sets them.
4. A figure that is null gives "not judged", never "pass".
5. Latencies are intervals. The typical figure over the limit fails; only the
   high end over it fails at level "warn": it may be too slow, nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from odtpack_runtime.simulator import advice
from odtpack_runtime.simulator.budget_file import Budgets, PlacedLimit
from odtpack_runtime.simulator.profile import list_profiles
from odtpack_runtime.simulator.result import (
    Check,
    CheckStatus,
    CheckUnit,
    DeviceResult,
    SimulationResult,
    Verdict,
)
from odtpack_runtime.simulator.units import (
    Interval,
    format_bytes,
    format_interval,
    format_limit,
    format_number,
    format_percent,
    format_value,
)

PACKAGE_METRICS = ("package_size", "final_loss", "metric_floor")
DEVICE_METRICS = ("peak_memory", "memory_headroom", "step_latency", "time_to_finish")


def judge(result: SimulationResult, budgets: Budgets | None = None) -> SimulationResult:
    """The same result with all checks and verdicts filled in.

    Args:
        result: What a replay measured; checks and verdicts in it are replaced.
        budgets: Limits; without them only the device's own memory limit and the
            finiteness of the loss are judged.

    Raises:
        OdtpackError: The budgets name a device that is neither in the result nor shipped.
    """
    budgets = budgets or Budgets()
    if budgets.devices:
        budgets.check_devices([device.name for device in result.devices] + list_profiles())
    overall = budgets.overall()
    checks = [_finite_loss(result)]
    checks += [_PACKAGE[key](result, overall[key]) for key in PACKAGE_METRICS if key in overall]
    if not result.devices:
        checks += [_nothing_to_judge(key, overall[key]) for key in DEVICE_METRICS if key in overall]
    devices = [_judge_device(result, device, budgets) for device in result.devices]
    verdicts = [_verdict(checks), *(device.verdict for device in devices)]
    order: tuple[Verdict, ...] = ("fail", "not judged", "warn", "pass")
    worst = next(verdict for verdict in order if verdict in verdicts)
    return result.model_copy(update={"checks": checks, "devices": devices, "verdict": worst})


def _judge_device(result: SimulationResult, device: DeviceResult, budgets: Budgets) -> DeviceResult:
    memory_check, device = _memory_limit(result, device)
    checks = [memory_check]
    training = device.training
    if training and training.outcome == "killed" and device.memory.outcome != "killed":
        checks.append(_interrupted(result, device))
    limits = budgets.for_device(device.name, device.os)
    checks += [_DEVICE[key](result, device, limits[key]) for key in DEVICE_METRICS if key in limits]
    own = budgets.narrowed(device.name, device.os)
    checks += [_PACKAGE[key](result, own[key]) for key in PACKAGE_METRICS if key in own]
    return device.model_copy(update={"checks": checks, "verdict": _verdict(checks)})


def _verdict(checks: Iterable[Check]) -> Verdict:
    """``fail`` before ``not judged`` before ``warn`` before ``pass``."""
    outcomes = {(check.status, check.level) for check in checks}
    if ("fail", "error") in outcomes:
        return "fail"
    if any(status == "not judged" for status, _ in outcomes):
        return "not judged"
    return "warn" if ("fail", "warn") in outcomes else "pass"


def _memory_limit(result: SimulationResult, device: DeviceResult) -> tuple[Check, DeviceResult]:
    """The device's own limit; also settles the outcome stored with the device's memory."""
    memory = device.memory
    peak, limit = memory.peak_bytes, memory.limit_bytes
    how = "predicted" if memory.measured_peak_bytes is None else "measured"
    status: CheckStatus
    hint: str | None = None
    if memory.outcome == "killed":
        status, outcome = "fail", "killed"
        steps = f" after {device.training.steps_done} steps" if device.training else ""
        message = f"the replay hit the memory limit{steps} and was ended"
        hint = advice.for_device_limit(result, device, limit if limit is not None else peak)
    elif limit is None:
        status, outcome = "not judged", "not judged"
        message = f"{how} peak {format_bytes(peak)}; the device's limit is unknown"
    else:
        status = "pass" if peak <= limit else "fail"
        outcome = "fits" if peak <= limit else "over"
        share = format_percent(peak / limit) if limit else "more than 100 %"
        source = " (assumed)" if memory.limit_kind == "assumed" else ""
        message = (
            f"{how} peak {format_bytes(peak)} is {share} of the {format_bytes(limit)}{source} "
            f"that an app gets in the {memory.limit_state}"
        )
        if status == "fail":
            hint = advice.for_device_limit(result, device, limit)
    check = Check(
        metric="memory_limit",
        limit=limit,
        actual=None if memory.outcome == "killed" else peak,
        unit="B",
        level="error",
        status=status,
        message=message,
        advice=hint,
    )
    detail = memory.detail or message
    settled = memory.model_copy(update={"outcome": outcome, "detail": detail})
    return check, device.model_copy(update={"memory": settled})


def _interrupted(result: SimulationResult, device: DeviceResult) -> Check:
    training = device.training
    done = training.steps_done if training else 0
    reason = training.detail if training and training.detail else "the replay was ended"
    return Check(
        metric="steps_done",
        limit=result.data.steps,
        actual=done,
        unit="1",
        level="error",
        status="fail",
        message=f"{reason} ({done} of {result.data.steps} steps)",
    )


def _finite_loss(result: SimulationResult) -> Check:
    bad = sum(loss is None for loss in result.training.losses)
    total = len(result.training.losses)
    status: CheckStatus = "fail" if bad else "pass" if total else "not judged"
    message = f"{total - bad} of {total} training losses are finite" if total else "no step was run"
    return Check(
        metric="finite_loss",
        limit=0,
        actual=bad,
        unit="1",
        level="error",
        status=status,
        message=message,
        advice=advice.for_final_loss(result) if bad else None,
    )


def _nothing_to_judge(metric: str, limit: PlacedLimit) -> Check:
    units: dict[str, CheckUnit] = {
        "peak_memory": "B",
        "memory_headroom": "%",
        "step_latency": "ms",
        "time_to_finish": "s",
    }
    return _check(metric, limit, None, unit=units[metric], message="no device was simulated")


def _check(
    metric: str,
    limit: PlacedLimit,
    actual: float | None,
    *,
    unit: CheckUnit,
    message: str,
    hint: Callable[[], str] | None = None,
    at_least: bool = False,
) -> Check:
    """Compare a figure with its limit; a null figure is not judged and ``message`` says why."""
    status: CheckStatus = "not judged"
    text = message
    if actual is not None:
        kept = actual >= limit.limit if at_least else actual <= limit.limit
        status = "pass" if kept else "fail"
        relation = "at least" if at_least else "at most"
        text = f"{message}, allowed is {relation} {format_limit(limit.limit, unit)}"
    return Check(
        metric=metric,
        limit=limit.limit,
        actual=actual,
        unit=unit,
        level=limit.level,
        status=status,
        message=text,
        advice=hint() if hint is not None and status == "fail" else None,
        budget_location=limit.location,
    )


def _package_size(result: SimulationResult, limit: PlacedLimit) -> Check:
    size = result.package.package_bytes
    message = f"the package takes {format_bytes(size)}"
    return _check(
        "package_size",
        limit,
        size,
        unit="B",
        message=message,
        hint=lambda: advice.for_package_size(result),
    )


def _final_loss(result: SimulationResult, limit: PlacedLimit) -> Check:
    training = result.training
    where = "on held-out samples"
    loss = training.eval_loss_after
    if loss is None and result.data.held_out_samples == 0 and training.losses:
        loss, where = training.losses[-1], "of the last step"
    message = f"the loss {where} is {format_number(loss)}" if loss is not None else "no final loss"
    return _check(
        "final_loss",
        limit,
        loss,
        unit="1",
        message=message,
        hint=lambda: advice.for_final_loss(result),
    )


def _metric_floor(result: SimulationResult, limit: PlacedLimit) -> Check:
    metric = result.training.metric_after
    name = result.training.metric_name or "metric"
    message = (
        f"{name} is {format_number(metric)}" if metric is not None else f"no {name} at the end"
    )
    return _check(
        "metric_floor",
        limit,
        metric,
        unit="1",
        message=message,
        hint=lambda: advice.for_final_loss(result),
        at_least=True,
    )


def _peak_memory(result: SimulationResult, device: DeviceResult, limit: PlacedLimit) -> Check:
    memory = device.memory
    if memory.outcome == "killed":
        reason = "the replay was ended at the device's limit, before its peak was known"
        return _check("peak_memory", limit, None, unit="B", message=reason)
    how = "predicted" if memory.measured_peak_bytes is None else "measured"
    message = f"the {how} peak is {format_bytes(memory.peak_bytes)}"
    return _check(
        "peak_memory",
        limit,
        memory.peak_bytes,
        unit="B",
        message=message,
        hint=lambda: advice.for_memory(result, device, limit.limit),
    )


def _memory_headroom(result: SimulationResult, device: DeviceResult, limit: PlacedLimit) -> Check:
    memory = device.memory
    total = memory.limit_bytes
    if not total:
        reason = "the device's limit is unknown"
        return _check("memory_headroom", limit, None, unit="%", message=reason)
    free = 100.0 * (1.0 - memory.peak_bytes / total)
    if memory.outcome == "killed":
        free = min(free, 0.0)  # whatever was predicted, it reached the limit
    message = f"{format_percent(free / 100)} of {format_bytes(total)} stay free"
    target = total * (1.0 - limit.limit / 100.0)
    return _check(
        "memory_headroom",
        limit,
        free,
        unit="%",
        message=message,
        hint=lambda: advice.for_memory(result, device, target),
        at_least=True,
    )


def _step_latency(result: SimulationResult, device: DeviceResult, limit: PlacedLimit) -> Check:
    return _latency(
        "step_latency",
        limit,
        device.latency.step_ms,
        unit="ms",
        reason=device.latency.not_judged or "the step time is unknown",
        hint=lambda: advice.for_step_latency(result),
    )


def _time_to_finish(result: SimulationResult, device: DeviceResult, limit: PlacedLimit) -> Check:
    return _latency(
        "time_to_finish",
        limit,
        device.latency.finish_s,
        unit="s",
        reason=device.latency.not_judged or "the time to finish is unknown",
        hint=lambda: advice.for_time_to_finish(result, device, limit.limit),
    )


def _latency(
    metric: str,
    limit: PlacedLimit,
    interval: Interval | None,
    *,
    unit: CheckUnit,
    reason: str,
    hint: Callable[[], str],
) -> Check:
    if interval is None:
        return _check(metric, limit, None, unit=unit, message=reason)
    typical = format_value(interval.typical, unit)
    message = f"estimated at {typical} ({format_interval(interval, unit)})"
    check = _check(metric, limit, interval.typical, unit=unit, message=message, hint=hint)
    if check.status == "pass" and interval.high > limit.limit:
        doubt = f"{message}: the high end is over {format_limit(limit.limit, unit)}"
        return check.model_copy(
            update={"status": "fail", "level": "warn", "message": doubt, "advice": hint()}
        )
    return check


_PACKAGE: dict[str, Callable[[SimulationResult, PlacedLimit], Check]] = {
    "package_size": _package_size,
    "final_loss": _final_loss,
    "metric_floor": _metric_floor,
}
_DEVICE: dict[str, Callable[[SimulationResult, DeviceResult, PlacedLimit], Check]] = {
    "peak_memory": _peak_memory,
    "memory_headroom": _memory_headroom,
    "step_latency": _step_latency,
    "time_to_finish": _time_to_finish,
}
