"""Judge figures: limits become checks, checks become verdicts. Pure and deterministic.

1. Without any limit: the device's memory limit, finite losses, a loss that falls,
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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from odtpack_simulator.device.app import (
    APP_FOOTPRINTS,
    memory_fit,
    runtime_bytes,
    runtime_words,
    with_margin,
)
from odtpack_simulator.device.profile import list_profiles
from odtpack_simulator.figures import advice
from odtpack_simulator.figures.limits import Budgets, Limit
from odtpack_simulator.figures.metric import Metric, chance, incomparable
from odtpack_simulator.figures.simulated import METRICS, figures_of
from odtpack_simulator.memory.process_memory import MAPPED_FROM
from odtpack_simulator.replay.paired_loss import ENOUGH_GROUPS, FEWEST_GROUPS
from odtpack_simulator.result import (
    DeviceMemory,
    DeviceResult,
    HeldOutFall,
    InterruptionInfo,
    SimulationResult,
    Subject,
)
from odtpack_simulator.values.figure import (
    Check,
    CheckLevel,
    CheckStatus,
    Figure,
    shortened,
    verdict_of,
    worst_of,
)
from odtpack_simulator.values.units import (
    format_bytes,
    format_limit,
    format_number,
    format_percent,
    format_value,
)


def package_checks(result: SimulationResult, *, learns: bool) -> list[Check]:
    """Finite losses, one that falls, memory measured, and equal weights after interruptions."""
    checks = [_finite_loss(result)]
    if result.memory.measured_peak_bytes is None:
        checks.append(
            Check(
                metric="memory_measured",
                status="not judged",
                message="memory is predicted, not measured, and no limit was enforced: "
                "this host cannot",
            )
        )
    if learns and not result.training.diverged:
        training = result.training
        losses = training.eval_loss_before, training.eval_loss_after
        held, advise = result.data.held_out_samples, partial(advice.for_learning, result)
        checks.append(learns_check(training.held_out_fall, losses, held, advise))
    if result.interruption is not None:
        checks.append(_interruption(result.interruption))
    return checks


def device_checks(
    result: SimulationResult, device: DeviceResult, close: CheckLevel
) -> tuple[list[Check], DeviceResult]:
    """What a device must let happen: the checks, and the device with its memory outcome settled."""
    # `close`: What it means that the memory limit is too close to call.
    limit, device = _memory_limit(result, device, close)
    checks = [limit]
    training = device.training
    if training.outcome == "killed" and device.memory.outcome != "killed":
        of = f"{training.steps_done} of {result.data.trained_steps} steps"
        why = shortened(training.detail) if training.detail else "the replay was ended"
        checks.append(
            Check(
                metric="steps_done",
                limit=result.data.trained_steps,
                actual=training.steps_done,
                status="fail",
                message=f"{why} ({of})",
            )
        )
    if device.memory.outcome == "fits" and device.memory.warning_bytes is not None:
        checks.append(_low_memory_warning(result, device, device.memory.warning_bytes))
    if result.memory.gpu_bytes is not None:
        checks.append(_gpu_memory(device.memory, result.memory.gpu_bytes))
    if device.campaign.endless is not None:
        checks.append(_finishes(result, device))
    return checks, device


def _finite_loss(result: SimulationResult) -> Check:
    training = result.training
    bad = sum(loss is None for loss in training.losses)
    total = len(training.losses)
    message = f"{total - bad} of {total} training losses are finite" if total else "no step was run"
    # The last update shows in no training loss. What the model had before any is not its doing.
    later = [point.loss for point in training.curve if point.step]
    lost = sum(loss is None for loss in later)
    if lost:
        message += f", and {lost} of {len(later)} on held-out samples are not"
    if training.skipped_batches:
        number = "1 batch was" if (n := training.skipped_batches) == 1 else f"{n} batches were"
        message += f"; {number} skipped, the last in {training.not_finite}"
    if training.overflows:
        message += f"; {training.overflows} more only lowered the loss scale of mixed precision"
    # Gradients that are not finite show in no loss.
    bad = max(bad, training.skipped_batches) + lost
    status: CheckStatus = "fail" if bad else "pass" if total else "not judged"
    return Check(
        metric="finite_loss",
        limit=0,
        actual=bad,
        status=status,
        message=message,
        advice=advice.for_learning(result) if bad else None,
    )


def _interruption(info: InterruptionInfo) -> Check:
    times = len(info.interruptions)
    what = f"interrupted {times} times" if times != 1 else "interrupted once"
    detail = f": {shortened(info.detail)}" if info.detail else ""
    if info.equal is None:
        status: CheckStatus = "not judged"
        message = f"{what}; equal weights cannot be expected{detail}"
    elif info.equal:
        status, message = "pass", f"{what}, it ends with the same weights{detail}"
    else:
        status, message = "fail", f"{what}, it ends with other weights than undisturbed{detail}"
    return Check(
        metric="interruption",
        actual=times,
        status=status,
        message=message,
        advice=advice.for_interruption(info) if status == "fail" else None,
    )


def _where(memory: DeviceMemory) -> str:
    entitlement = " with the entitlement for more memory" if memory.limit_entitled else ""
    return f"in the {memory.limit_state}{entitlement}"


def _memory_limit(
    result: SimulationResult, device: DeviceResult, close: CheckLevel
) -> tuple[Check, DeviceResult]:
    """The device's own limit; also settles the outcome stored with the device's memory."""
    memory = device.memory
    peak, limit, room, held = (
        memory.peak_bytes, memory.limit_bytes, memory.room_bytes, memory.held_bytes
    )  # fmt: skip
    status: CheckStatus = "fail"
    level: CheckLevel = "error"
    outcome, target = memory.outcome, limit
    if outcome == "killed" and room is not None and held is not None and room > held:
        status = "not judged"
        message = (
            f"the replay was ended at {format_bytes(held)}, and the limit leaves it "
            f"{format_bytes(room)}: simulate with this app_footprint"
        )
    elif outcome == "killed":
        message = (
            f"the replay hit the memory limit after {device.training.steps_done} steps and was "
            "ended, although a peak of "
            f"{format_bytes(peak)} is planned: the plan is too low, please report it"
        )
        if memory.others_bytes and room is not None:
            message += f"; the limit leaves a training {format_bytes(room)}{_beside(memory)}"
    elif limit is None or room is None:
        status, outcome = "not judged", "not judged"
        message = (
            f"{_process(memory)}; the device's limit {_where(memory)} "
            "is unknown: a peak_memory limit in the budgets would stand in for it"
        )
    elif memory.has_no_bound:
        status, outcome = "not judged", "not judged"
        message = f"{_process(memory)} at least: {_UNBOUNDED}, and no replay has measured it"
    else:
        target = min(limit, limit if memory.limit_low_bytes is None else memory.limit_low_bytes)
        at_worst = memory_fit(peak, target - memory.others_bytes)
        typically = memory_fit(peak, limit - memory.others_bytes)
        share = format_percent(memory.need_bytes / limit) if limit else "more than 100 %"
        source = " (assumed)" if memory.limit_kind == "assumed" else ""
        message = (
            f"{_process(memory)} is {share} of the {format_bytes(limit)}{source} "
            f"that an app gets {_where(memory)}"
        )
        message += f"; the highest phase is {memory.phase}"
        outcome = typically
        if at_worst == "fits":
            status = "pass"
        elif typically == "fits":
            outcome, level = "depends", "warn"
            message += (
                f", and more than the {format_bytes(target)} at worst: it depends on the device"
            )
        elif typically == "close":
            level = close
            message += f": {too_close(peak, limit - memory.others_bytes)}"
        if device.os == "linux" and memory.sharing == "none":
            message += (
                f"; under glibc the plan holds with MALLOC_MMAP_THRESHOLD_={MAPPED_FROM} and "
                "MALLOC_ARENA_MAX=1 in the app's environment: without them a training without an "
                "arena took up to 40 % more"
            )
        if memory.unbounded:
            message += f"; {_UNBOUNDED}: the measured peak decides"
    judged = target if target is not None else memory.need_bytes
    check = Check(
        metric="memory_limit",
        limit=limit,
        actual=None if memory.outcome == "killed" else memory.need_bytes,
        unit="B",
        level=level,
        status=status,
        message=message,
        advice=advice.for_device_limit(result, device, judged) if status == "fail" else None,
    )
    settled = memory.model_copy(update={"outcome": outcome, "detail": memory.detail or message})
    return check, device.model_copy(update={"memory": settled})


_UNBOUNDED: Final = "the plan does not know how often a Loop turns, and what it then keeps"


def too_close(peak_bytes: int, limit_bytes: int) -> str:
    """What is missing to a limit that the plan's margin goes beyond."""
    most = with_margin(peak_bytes)
    return (
        f"too close to call: with the plan's margin of {format_bytes(most - peak_bytes)} "
        f"{format_bytes(most - limit_bytes)} is missing"
    )


def _process(memory: DeviceMemory) -> str:
    """The peak in words, with what the process holds besides."""
    how, measured = "predicted", ""
    if memory.is_measured:
        how, measured = "measured", f" (planned {format_bytes(memory.predicted_peak_bytes)})"
    elif memory.measured_peak_bytes is not None:
        measured = f" (measured {format_bytes(memory.measured_peak_bytes)})"
    peak = f"{how} peak {format_bytes(memory.peak_bytes)}{measured}"
    if not memory.others_bytes:
        return peak
    return f"{peak}{_beside(memory)}, {format_bytes(memory.need_bytes)} in all,"


def _beside(memory: DeviceMemory) -> str:
    """What the process holds besides the training, in words that follow a figure of it."""
    known = memory.app_kind or "by the budgets"
    app = f"{format_bytes(memory.app_bytes)} of the app ({known})"
    runtime = memory.runtime_bytes
    return f" beside {app} and {format_bytes(runtime)} of {runtime_words(memory.kit, runtime)}"


def _low_memory_warning(result: SimulationResult, device: DeviceResult, warning: int) -> Check:
    """A training that fits may still be warned: it must then save, and free what it can."""
    memory = device.memory
    need = memory.need_bytes
    warned = need >= warning
    verb = "reaches" if warned else "stays below"
    return Check(
        metric="low_memory_warning",
        limit=warning,
        actual=need,
        unit="B",
        level="warn",
        status="fail" if warned else "pass",
        message=(
            f"the process's peak of {format_bytes(need)} {verb} the {format_bytes(warning)} from "
            "which the system warns the app that memory is low"
        ),
        advice=advice.for_memory(result, device, warning - memory.others_bytes) if warned else None,
    )


def _gpu_memory(memory: DeviceMemory, on_gpu: int) -> Check:
    """A GPU's own memory is a limit by itself; a shared one is that of the app."""
    need, limit, what = on_gpu, memory.gpu_own_bytes, "of the GPU's own memory"
    message = f"{format_bytes(on_gpu)} are planned for the GPU"
    if limit is None:
        need, limit = on_gpu + memory.need_bytes, memory.limit_bytes
        what = f"that an app gets {_where(memory)}"
        message += f", with the {format_bytes(memory.need_bytes)} of a training on the processor"
        message += f" {format_bytes(need)}, as the memory is shared"
    if limit is None:
        status: CheckStatus = "not judged"
        message += ": the limit is unknown"
    else:
        status = "pass" if need <= limit else "fail"
        message += f"; the limit is the {format_bytes(limit)} {what}"
    # On a GPU the processor's share is less, by how much is not planned.
    over = limit is not None and on_gpu > limit
    return Check(
        metric="gpu_memory",
        limit=limit,
        actual=need,
        unit="B",
        level="error" if over else "warn",
        status=status,
        message=message,
    )


def _finishes(result: SimulationResult, device: DeviceResult) -> Check:
    """A training of which every window ends before anything was saved gets nowhere."""
    campaign = device.campaign
    typically = campaign.endless == "typical"
    default = "it never finishes" if typically else "in the worst case it never finishes"
    reasons = (each.reason for each in campaign.not_judged if "never finishes" in each.reason)
    return Check(
        metric="finishes",
        level="error" if typically else "warn",
        status="fail",
        message=shortened(next(reasons, default)),
        advice=advice.for_endless(Subject(result, device)),
    )


LEAST_SHARE: Final = 0.001  # Share of its loss by which a model that learns improves at the least


Losses = tuple[float | None, float | None]  # On held-out samples, before and after


def learns_check(
    fall: HeldOutFall | None, losses: Losses, held_out: int, advise: Callable[[], str]
) -> Check:
    """Whether the loss on held-out samples fell by more than its noise."""
    # It passes where the whole interval of the fall is above zero, and fails where none of it is,
    # or where the fall is less than a thousandth of the loss: any difference shows if only the
    # samples agree on it. In between the samples do not show it: with ENOUGH_GROUPS of them to
    # compare, a training that is worth shipping would show, and the check fails; with fewer it is
    # not judged.
    status, message = _outcome(fall, losses, held_out)
    return Check(
        metric="learns",
        limit=None if fall is None else fall.fall - fall.low,
        actual=None if fall is None else fall.fall,
        status=status,
        message=message,
        advice=advise() if status == "fail" else None,
    )


def _outcome(fall: HeldOutFall | None, losses: Losses, held: int) -> tuple[CheckStatus, str]:
    before, after = losses
    if held and before == after == 0:
        return "fail", (
            "the loss on held-out samples is exactly 0 before and after: it does not depend on "
            "the labels, or their axes are confused"
        )
    if fall is None or fall.groups < FEWEST_GROUPS:
        if held and (before is None or after is None):
            return "not judged", "the loss on held-out samples is not known before and after"
        groups = 0 if fall is None else fall.groups
        what = (
            f"{groups} batches of held-out samples" if held > groups else f"{held} held-out samples"
        )
        return "not judged", (
            f"{what} are too few to tell whether the model learned: "
            f"at least {FEWEST_GROUPS} are needed"
        )
    noise = format_number(fall.fall - fall.low)
    change = f"{'fell' if fall.fall > 0 else 'rose'} by {format_number(abs(fall.fall))}"
    if fall.fall == 0:
        change = "did not change"
    if before is not None and after is not None:
        change += f" ({format_number(before)} to {format_number(after)})"
    what = f"the loss on {fall.samples} held-out samples {change}"
    if fall.low > 0 and fall.fall <= LEAST_SHARE * abs(before or 0.0):
        return "fail", f"{what}, less than a thousandth: the model hardly learned"
    if fall.low > 0:
        return "pass", f"{what}; ± {noise} would be noise"
    if fall.high <= 0:
        return "fail", f"{what}: the training does not improve the model"
    if fall.groups >= ENOUGH_GROUPS:
        return "fail", f"{what}, and ± {noise} is noise: nothing shows that the model learned"
    return "not judged", (
        f"{what}, and ± {noise} is noise on so few: hold out more samples to tell"
    )


NO_BASELINE: Final = (
    "no baseline was given: odtpack judge RESULT.json --budget budgets.toml --baseline BASE.json"
)
Limits = Mapping[str, Sequence[Limit]]  # Limits by key of their metric
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
    placed: Limit, figure: Figure, baseline: Sequence[Figure] | str
) -> tuple[float | None, Figure | None, str]:
    """The limit in the figure's unit, the baseline's figure, and why there is no limit."""
    if placed.kind == "absolute":
        return placed.figure, None, ""
    if isinstance(baseline, str):
        return None, None, baseline
    base = next(each for each in baseline if each.metric == figure.metric)
    if base.value is None:
        return None, None, f"not known of the baseline: {base.reason}"
    reason = incomparable(base, figure)
    if reason:
        return None, base, reason
    share = abs(base.value) / 100.0 if placed.kind == "percent" else 1.0
    limit = base.value + placed.figure * share
    if not math.isfinite(limit):
        return None, base, "the limit is beyond all numbers"
    return limit, base, ""


def _check(
    metric: Metric[Source],
    placed: Limit,
    figure: Figure,
    limit: float | None,
    base: Figure | None,
    reason: str,
) -> Check:
    """Compare a figure with its limit; without one of them it is not judged."""
    actual, text = figure.value, metric.describe(figure)
    status: CheckStatus = "not judged"
    level = placed.level
    if actual is None and figure.never:
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
            if status == "fail" and noise is not None and abs(actual - limit) <= noise:
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
            end, side = (
                (figure.low, "low end is under") if floor else (figure.high, "high end is over")
            )
            if not metric.keeps(end, limit):
                status, level = "fail", "warn"
                text = f"{said}: the {side} {allowed}"
    return Check(
        metric=metric.key,
        limit=placed.figure if placed.kind == "absolute" else limit,
        actual=actual,
        baseline=None if base is None else base.value,
        unit=figure.unit,
        level=level,
        status=status,
        message=shortened(text),
        budget_location=shortened(placed.location) or None,
    )


def _against(metric: Metric[Source], placed: Limit, base: Figure) -> str:
    sign, amount = "-" if metric.better == "higher" else "+", abs(placed.figure)
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
        budgets: Limits, and what the app holds; without them only what needs none is judged, with
            the app that the result was measured for.
        baseline: An earlier result that limits such as "+5 %" refer to; its own checks
            do not count. Without it such limits are not judged.

    Raises:
        OdtpackError: The budgets name a device that is neither in the result nor shipped.
    """
    given, budgets = budgets, budgets or Budgets()
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
    devices = [_judge_device(result, device, given, baseline) for device in result.devices]
    verdict = worst_of([verdict_of(checks), *(device.verdict for device in devices)])
    return result.model_copy(update={"checks": checks, "devices": devices, "verdict": verdict})


def for_each(budgets: Budgets, results: Sequence[SimulationResult]) -> list[Budgets]:
    """Budgets for each result, without the tables of devices that it does not have."""
    devices = [[device.name for device in result.devices] for result in results]
    budgets.check_devices([*chain(*devices), *list_profiles()])
    return [budgets.only(names) for names in devices]


def _judge_device(
    result: SimulationResult,
    device: DeviceResult,
    given: Budgets | None,
    baseline: SimulationResult | None,
) -> DeviceResult:
    device = _with_app(device, given)
    budgets = given or Budgets()
    checks, device = device_checks(result, device, budgets.defaults.too_close)
    subject, limits = Subject(result, device), budgets.for_device(device.name, device.os)
    base: Sequence[Figure] | str = NO_BASELINE
    if baseline is not None:
        found = [each for each in baseline.devices if each.name == device.name]
        missing = "the baseline does not have this device"
        base = figures_of(baseline, _with_app(found[0], given)) if found else missing
    own = limit_checks(METRICS, figures_of(result, device), limits, base, subject)
    checks += _stand_in(own, checks, limits)
    checks += _package_limits(result, device, budgets.narrowed(device.name, device.os), baseline)
    return device.model_copy(update={"checks": checks, "verdict": verdict_of(checks)})


def _with_app(device: DeviceResult, budgets: Budgets | None) -> DeviceResult:
    """The device with what the budgets say that the app holds, or as measured without budgets."""
    memory = device.memory
    said = None if budgets is None else budgets.footprint(device.name, device.os)
    if said is None and budgets is not None and memory.app_kind is None:
        said = APP_FOOTPRINTS[device.os]  # other budgets said it, and they do not count here
    if said is None:
        return device
    update = {
        "app_bytes": said.nbytes,
        "app_kind": said.kind,
        "app_source": shortened(said.source),
        "runtime_bytes": runtime_bytes(memory.kit, device.os, memory.predicted_peak_bytes),
    }
    return device.model_copy(update={"memory": memory.model_copy(update=update)})


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
    unknown = [
        c
        for c in always
        if c.metric == "memory_limit" and c.status == "not judged" and c.limit is None
    ]
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
    result: SimulationResult, figure: Figure, placed: Limit, floor: float
) -> list[Check]:
    """Whether the held-out samples are enough to distinguish the metric from its floor."""
    if figure.noise is None:
        return []
    low, metric, high = figure.noise
    inside = low < floor < high
    shown = format_percent if figure.unit == "share" else format_number
    ends, least = f"{shown(low)} to {shown(high)}", shown(floor)
    held, name = result.data.evaluated_samples, figure.basis.how
    message = f"the floor {least} lies outside the 95 % interval of {name}, {ends}"
    if inside:
        message = (
            f"the floor {least} lies inside the 95 % interval of {name}, {ends}: "
            f"{result.data.held_out} do not tell whether it is kept"
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
