"""Checks that need no budget: whether a training ends at all, ends right, and teaches the model."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.device.app_footprint import runtime_words
from odtpack_simulator.figures import advice
from odtpack_simulator.replay.paired_loss import ENOUGH_GROUPS, FEWEST_GROUPS
from odtpack_simulator.result import (
    DeviceCampaign,
    DeviceMemory,
    DeviceResult,
    HeldOutFall,
    InterruptionInfo,
    SimulationResult,
    Subject,
)
from odtpack_simulator.values.figure import Check, CheckLevel, CheckStatus, shortened
from odtpack_simulator.values.memory_fit import MARGIN, memory_fit, with_margin
from odtpack_simulator.values.units import format_bytes, format_number, format_percent


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
        checks.append(learns_check(result))
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
    if training and training.outcome == "killed" and device.memory.outcome != "killed":
        of = f"{training.steps_done} of {result.data.made_steps} steps"
        why = shortened(training.detail) if training.detail else "the replay was ended"
        checks.append(
            Check(
                metric="steps_done",
                limit=result.data.made_steps,
                actual=training.steps_done,
                status="fail",
                message=f"{why} ({of})",
            )
        )
    if device.memory.outcome == "fits" and device.memory.warning_bytes is not None:
        checks.append(_low_memory_warning(result, device, device.memory.warning_bytes))
    if result.memory.gpu_bytes is not None:
        checks.append(_gpu_memory(device.memory, result.memory.gpu_bytes))
    if device.campaign is not None and device.campaign.endless is not None:
        checks.append(_finishes(result, device, device.campaign))
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
        steps = f" after {device.training.steps_done} steps" if device.training else ""
        message = (
            f"the replay hit the memory limit{steps} and was ended, although a peak of "
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
        if memory.phase is not None:
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
    detail = memory.detail or message
    settled = memory.model_copy(update={"outcome": outcome, "detail": detail})
    return check, device.model_copy(update={"memory": settled})


def too_close(peak_bytes: int, limit_bytes: int) -> str:
    """What is missing to a limit that the plan's margin goes beyond."""
    missing = format_bytes(with_margin(peak_bytes) - limit_bytes)
    return (
        f"too close to call: with the plan's margin of {format_percent(MARGIN)} {missing} is "
        "missing"
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
    app = f"{format_bytes(memory.app_bytes or 0)} of the app ({known})"
    runtime = memory.runtime_bytes or 0
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


def _finishes(result: SimulationResult, device: DeviceResult, campaign: DeviceCampaign) -> Check:
    """A training of which every window ends before anything was saved gets nowhere."""
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


def learns_check(result: SimulationResult) -> Check:
    """Whether the loss on held-out samples fell by more than its noise."""
    # It passes where the whole interval of the fall is above zero, and fails where none of it is,
    # or where the fall is less than a thousandth of the loss: any difference shows if only the
    # samples agree on it. In between the samples do not show it: with ENOUGH_GROUPS of them to
    # compare, a training that is worth shipping would show, and the check fails; with fewer it is
    # not judged.
    fall = result.training.held_out_fall
    status, message = _outcome(result, fall)
    return Check(
        metric="learns",
        limit=None if fall is None else fall.fall - fall.low,
        actual=None if fall is None else fall.fall,
        status=status,
        message=message,
        advice=advice.for_learning(result) if status == "fail" else None,
    )


def _outcome(result: SimulationResult, fall: HeldOutFall | None) -> tuple[CheckStatus, str]:
    held, training = result.data.held_out_samples, result.training
    if held and training.eval_loss_before == training.eval_loss_after == 0:
        return "fail", (
            "the loss on held-out samples is exactly 0 before and after: it does not depend on "
            "the labels, or their axes are confused"
        )
    if fall is None or fall.groups < FEWEST_GROUPS:
        if held and (training.eval_loss_before is None or training.eval_loss_after is None):
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
    if training.eval_loss_before is not None and training.eval_loss_after is not None:
        start, end = map(format_number, (training.eval_loss_before, training.eval_loss_after))
        change += f" ({start} to {end})"
    what = f"the loss on {fall.samples} held-out samples {change}"
    least = LEAST_SHARE * abs(training.eval_loss_before or 0.0)
    if fall.low > 0 and fall.fall <= least:
        return "fail", f"{what}, less than a thousandth: the model learned nothing to speak of"
    if fall.low > 0:
        return "pass", f"{what}; ± {noise} would be noise"
    if fall.high <= 0:
        return "fail", f"{what}: the training does not improve the model"
    if fall.groups >= ENOUGH_GROUPS:
        return "fail", f"{what}, and ± {noise} is noise: nothing shows that the model learned"
    return "not judged", (
        f"{what}, and ± {noise} is noise on so few: hold out more samples to tell"
    )
