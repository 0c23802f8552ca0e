"""What to change first when a check fails: from the result alone, with what it would save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

from odtpack_simulator.result.result import DeviceResult, InterruptionInfo, SimulationResult
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_limit,
    format_number,
    format_percent,
)

_MARGIN = 0.95  # aim below a limit: the split into parts is a prediction
_SHOWN: Final = 3
_MOST_PIECES: Final = 4096
_Z: Final = 1.959964  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change: what, how many bytes it saves, and whether that alone is enough."""

    sentence: str
    saves: float
    enough: bool


def for_device_limit(result: SimulationResult, device: DeviceResult, limit_bytes: float) -> str:
    """How to get under what the device gives an app: by its entitlement, else by less memory."""
    entitled = device.memory.entitled_limit_bytes
    if entitled is not None and limit_bytes < entitled and device.memory.peak_bytes <= entitled:
        return (
            "the entitlement for more memory raises this device's limit to about "
            f"{format_bytes(entitled)}, where the replay fits"
        )
    return for_memory(result, device, limit_bytes)


def for_memory(result: SimulationResult, device: DeviceResult, limit_bytes: float) -> str:
    """The changes of :func:`memory_changes` in words, at most three."""
    changes = memory_changes(result, device, limit_bytes)
    if not changes:
        return "a smaller model: neither batch nor optimizer leave anything to save"
    if changes[0].enough:
        rest = [each.sentence for each in changes[1:2]]
        return " Or: ".join([f"{changes[0].sentence}, which is enough.", *rest])
    text = "; ".join(each.sentence for each in changes[:_SHOWN])
    over = _over(device, limit_bytes)
    if sum(each.saves for each in changes) < over:
        return f"{text}; all of it is not enough: the model has to be smaller"
    return f"{text}; one alone is not enough, together they are"


def memory_changes(
    result: SimulationResult, device: DeviceResult, limit_bytes: float
) -> list[Change]:
    """What brings the peak on a device under ``limit_bytes``: what is enough first, then by effect.

    Inputs and activations grow with the samples at once, the rest does not: from
    that split follows the largest micro-batch that should fit. Gradients and
    optimizer state belong to trained parameters only. A replay that was killed has
    no measured peak: it is taken to have needed at least the limit.
    """
    over = _over(device, limit_bytes)
    parts = result.memory.predicted.breakdown
    changes = []
    batch = result.data.batch_size
    scaling = parts.inputs + parts.activations
    if batch > 1 and scaling > 0:
        # A file may name any batch: nobody accumulates more than a few thousand times.
        pieces = (count for count in range(2, min(batch, _MOST_PIECES) + 1) if batch % count == 0)
        sizes = [batch // count for count in pieces]
        fitting = [size for size in sizes if scaling * (1.0 - size / batch) >= over]
        size = max(fitting) if fitting else min(sizes, default=1)
        saves = scaling * (1.0 - size / batch)
        samples = batch * result.data.accumulation_steps
        changes.append(
            Change(
                f"micro-batches of {size} instead of {batch} samples, accumulated to the same "
                f"{samples} per update, save about {format_bytes(saves)}",
                saves,
                saves >= over,
            )
        )
    if parts.optimizer_state > 0:
        saved = format_bytes(parts.optimizer_state)
        changes.append(
            Change(
                f"SGD keeps no optimizer state and saves {saved}",
                parts.optimizer_state,
                parts.optimizer_state >= over,
            )
        )
    state = parts.gradients + parts.optimizer_state
    if state > 0 and result.package.trainable_parameters > 1:
        share = min(1.0, over / state)
        if share < 1.0:
            sentence = (
                f"freeze about {math.ceil(100 * share)} % of the trained parameters: a frozen one "
                "needs neither gradient nor optimizer state"
            )
        else:
            sentence = (
                "freeze parameters: a frozen one needs neither gradient nor optimizer state, "
                f"which take {format_bytes(state)}"
            )
        # The optimizer's state is counted with the optimizer, where that is a change of its own.
        changes.append(Change(sentence, parts.gradients if share >= 1 else over, share < 1.0))
    return sorted(changes, key=lambda each: (not each.enough, -each.saves))


def _over(device: DeviceResult, limit_bytes: float) -> float:
    """Bytes to save, with a margin."""
    memory = device.memory
    peak = memory.peak_bytes
    if memory.outcome == "killed" and memory.limit_bytes is not None:
        peak = max(peak, memory.limit_bytes)
    return max(0.0, peak - _MARGIN * limit_bytes)


def for_step_latency(result: SimulationResult, limit_ms: float, time: Interval | None) -> str:
    """How many samples fit in the time, and which operator to look at."""
    texts = []
    batch = result.data.batch_size
    if time is not None and time.high > 0:
        taken = time.typical if time.typical > limit_ms else time.high
        fitting = int(batch * limit_ms / taken) if taken > limit_ms else batch
        if 1 <= fitting < batch:
            texts.append(
                f"about {fitting} instead of {batch} samples at once take "
                f"{format_limit(limit_ms, 'ms')}, if the time goes with the batch"
            )
    costs = result.latency_host.by_operator
    if costs:
        worst = max(costs, key=lambda cost: cost.share)
        texts.append(
            f"{worst.op_type[:100]} takes {round(100 * worst.share)} % of the step: "
            "freeze early layers to drop part of the backward pass"
        )
    return "; ".join(texts) or "a smaller batch shortens the step"


def for_first_step(result: SimulationResult, device: DeviceResult) -> str:
    """How the first step compares with the others."""
    steady, first = device.latency.step_ms, device.latency.first_step_ms
    if steady is None or first is None or steady.typical <= 0:
        return "keep the sessions open between trainings: only their first step is slow"
    times = first.typical / steady.typical
    if times < 1.5:
        return f"it is no slower than the others: {for_step_latency(result, 0.0, None)}"
    return (
        f"it takes {times:.1f} times a later one: keep the sessions open between trainings, "
        "or make one step ahead, before anybody waits for it"
    )


def for_package_size(result: SimulationResult) -> str:
    """What the package's bytes are, and what storing frozen weights smaller would save."""
    package = result.package
    text = (
        f"its {package.total_parameters} parameters take {format_bytes(package.parameter_bytes)} "
        f"of {format_bytes(package.package_bytes)}"
    )
    frozen = package.total_parameters - package.trainable_parameters
    if frozen > 0 and package.parameter_bytes >= 4 * package.total_parameters:
        stored = package.parameter_bytes * frozen / package.total_parameters
        return (
            f"{text}, {format_percent(frozen / package.total_parameters)} of them frozen: "
            f'frozen_dtype = "float16" saves about {format_bytes(stored / 2)}, '
            f'"int8" about {format_bytes(stored * 0.75)}'
        )
    return f"{text}: a smaller model is the way to a smaller package"


def for_learning(result: SimulationResult) -> str:
    """Whether more or fewer steps would help, by the evaluations, else by the training losses."""
    training = result.training
    if training.diverged:
        return "the loss was not finite: lower the learning rate, or clip the gradient norm"
    points = [(p.step, p.loss) for p in training.curve if p.loss is not None]
    if len(points) >= 3:
        step, lowest = min(points, key=lambda point: (point[1], point[0]))
        last = points[-1][1]
        if step < points[-1][0] and last - lowest > 0.02 * abs(lowest):
            return (
                f"the loss on held-out samples was lowest after {step} of "
                f"{result.data.steps} steps, at {format_number(lowest)}: train fewer"
            )
        before = points[-2][1]
        if before - last > 0.02 * abs(before):
            fallen = format_percent((before - last) / abs(before)) if before else "much"
            return (
                f"the loss was still falling, by {fallen} in the last "
                f"{points[-1][0] - points[-2][0]} steps: train more steps"
            )
        return "the loss no longer falls: look at the learning rate and at what is frozen"
    losses = [loss for loss in training.losses if loss is not None]
    tail = len(losses) // 10
    if tail >= 2:
        earlier, later = (fmean(losses[a:b]) for a, b in pairwise((-2 * tail, -tail, len(losses))))
        if later < 0.98 * earlier:
            return "the loss was still falling at the last step: train more steps"
    return "the loss no longer falls: look at the learning rate and at what is frozen"


def samples_to_tell(metric: float, floor: float) -> int | None:
    """Held-out samples at which a floor lies outside of the 95 % interval of a share of right ones.

    Where the Wilson score interval of ``metric`` ends at ``floor``: ``n = z² floor
    (1 - floor) / (metric - floor)²`` (E. B. Wilson, JASA 22, 1927: the interval holds
    the shares whose own normal interval would hold the metric). None where no number is
    enough, or where the metric is no share.
    """
    distance = abs(metric - floor)
    if not (0.0 <= metric <= 1.0 and 0.0 <= floor <= 1.0) or distance < 1e-6:
        return None
    return max(1, math.ceil(_Z**2 * floor * (1.0 - floor) / distance**2))


def for_small_data(result: SimulationResult, floor: float) -> str:
    """How many samples to hold out so that the metric tells."""
    metric, held = result.training.metric_after, result.data.held_out_samples
    needed = None if metric is None else samples_to_tell(metric, floor)
    if needed is None or needed <= held:
        return "hold out more samples, or set the floor further below what was reached"
    return f"hold out about {needed} samples instead of {held}, or lower the floor"


def for_interruption(info: InterruptionInfo) -> str:
    """Where to look when an interrupted training ends with other weights."""
    kinds = sorted({each.at for each in info.interruptions})
    where = " and ".join(kinds) if kinds else "the interruption"
    return (
        f"something that training needs is not in the checkpoint (interrupted at: {where}): the "
        "optimizer's state, the step of the schedule and the order of the samples must be restored"
    )
