"""What to change first when a check fails: one sentence, from the result alone."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

from odtpack_runtime.simulator.result import DeviceResult, SimulationResult
from odtpack_runtime.simulator.units import format_bytes, format_limit

_MARGIN = 0.95  # aim below a limit: the split into parts is a prediction


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
    """How to bring the peak on a device under ``limit_bytes``.

    Inputs and activations grow with the batch, the rest does not. From that
    split follows the largest batch that should fit; where even a batch of one
    does not, what does not scale has to shrink. A replay that was killed has no
    measured peak: it is taken to have needed at least the limit.
    """
    memory = device.memory
    peak = memory.peak_bytes
    if memory.outcome == "killed" and memory.limit_bytes is not None:
        peak = max(peak, memory.limit_bytes)
    target = _MARGIN * limit_bytes
    parts = result.memory.predicted.breakdown
    scaling = parts.inputs + parts.activations
    fixed = peak - scaling
    batch = result.data.batch_size
    if scaling > 0 and batch > 1:
        fitting = int(batch * (target - fixed) / scaling)
        if 1 <= fitting < batch:
            share = round(100 * scaling / max(1, peak))
            return (
                f"inputs and activations are {share} % of the peak and grow with the batch: "
                f"about {fitting} instead of {batch} samples per batch should fit"
            )
    if parts.optimizer_state > 0 and peak - parts.optimizer_state <= target:
        saved = format_bytes(parts.optimizer_state)
        return f"SGD keeps no optimizer state and saves {saved}, which is enough"
    state = parts.parameters + parts.gradients + parts.optimizer_state
    return (
        f"parameters, gradients and optimizer state alone take {format_bytes(state)}: "
        "freeze parameters, a frozen one needs neither gradient nor optimizer state"
    )


def for_step_latency(result: SimulationResult) -> str:
    """Which operator to look at, by its share of the host's step."""
    costs = result.latency_host.by_operator
    if not costs:
        return "a smaller batch shortens the step"
    worst = max(costs, key=lambda cost: cost.share)
    return (
        f"{worst.op_type} takes {round(100 * worst.share)} % of the step: "
        "freeze early layers to drop part of the backward pass, or use a smaller batch"
    )


def for_time_to_finish(result: SimulationResult, device: DeviceResult, limit_s: float) -> str:
    """How many steps fit in the time."""
    latency = device.latency
    if latency.finish_s is None or latency.finish_s.typical <= 0:
        return "train fewer steps"
    finish = latency.finish_s.typical
    if finish <= limit_s:  # only the high end is over
        finish = latency.finish_s.high
    steps = int(result.data.steps * limit_s / finish)
    if steps < 1:
        return "not even one step fits in this time"
    return f"about {steps} of the {result.data.steps} steps fit in {format_limit(limit_s, 's')}"


def for_package_size(result: SimulationResult) -> str:
    """What the package's bytes are."""
    stored = format_bytes(result.package.parameter_bytes)
    return (
        f"its {result.package.total_parameters} parameters take {stored} "
        f"of {format_bytes(result.package.package_bytes)}: a smaller model is the way to a "
        "smaller package"
    )


def for_final_loss(result: SimulationResult) -> str:
    """Whether more steps would help, by the trend of the last fifth of the losses."""
    losses = [loss for loss in result.training.losses if loss is not None]
    if result.training.diverged:
        return "the loss was not finite: lower the learning rate, or clip the gradient norm"
    tail = len(losses) // 10
    if tail >= 2:
        before, last = (fmean(losses[a:b]) for a, b in pairwise((-2 * tail, -tail, len(losses))))
        if last < 0.98 * before:
            return "the loss was still falling at the last step: train more steps"
    return "the loss no longer falls: look at the learning rate and at what is frozen"
