"""What to change first when a check fails, from the result alone and with what that would give."""

import math
from itertools import pairwise
from statistics import fmean
from typing import Final, Literal

from odtpack_simulator.device.app import memory_fit, runtime_words
from odtpack_simulator.result import (
    DeviceResult,
    InterruptionInfo,
    PlannedChange,
    SimulationResult,
    Subject,
)
from odtpack_simulator.values.figure import Unit, shortened
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_duration,
    format_limit,
    format_number,
    format_percent,
    format_value,
)

_Z: Final = 1.959964  # of a 95 % interval


def for_device_limit(result: SimulationResult, device: DeviceResult, limit_bytes: float) -> str:
    """How to get under what the device gives an app: by its entitlement, else by less memory."""
    entitled = device.memory.entitled_limit_bytes
    if entitled is not None and limit_bytes < entitled and device.memory.need_bytes <= entitled:
        return (
            "the entitlement for more memory raises this device's limit to about "
            f"{format_bytes(entitled)}, where the replay fits"
        )
    return for_memory(result, device, limit_bytes - device.memory.others_bytes)


def for_memory(result: SimulationResult, device: DeviceResult, limit_bytes: float) -> str:
    """What brings the peak of the training under ``limit_bytes``, by the plans in the result."""
    # The mildest change that is enough, and one of another kind; else what comes nearest. Where the
    # plan is too low, each other plan is taken to be as much too low. A replay that was killed has
    # no measured peak, and is taken to have needed at least the limit.
    changes = result.memory.changes
    others = device.memory.others_bytes
    if limit_bytes <= 0 and others:
        runtime = runtime_words(device.memory.kit, device.memory.runtime_bytes)
        return (
            f"the app and {runtime} alone take {format_bytes(others)}: "
            "app_footprint in the budgets says what the app holds"
        )
    if changes is None:
        return (
            "smaller micro-batches, an optimizer without state and frozen layers are planned where "
            "the package is: odtpack judge, run as odtpack simulate was, says what is enough"
        )
    if not changes:
        return (
            "the model has to be smaller: its batch cannot be cut, the optimizer keeps nothing, "
            "and only one layer is trained"
        )
    # Bytes by which the peak on the device is above the planned one.
    memory = device.memory
    killed_at = memory.room_bytes if memory.outcome == "killed" else None
    more = max(0, max(memory.peak_bytes, killed_at or 0) - memory.predicted_peak_bytes)
    enough = [c for c in changes if memory_fit(c.peak_bytes + more, int(limit_bytes)) == "fits"]
    if not enough:
        least = min(changes, key=lambda each: each.peak_bytes)
        return (
            f"the model has to be smaller: even {_in_words(result, least)} needs about "
            f"{format_bytes(least.peak_bytes + more)}"
        )
    fewest = min(len(_kinds(each)) for each in enough)
    mildest: dict[frozenset[str], PlannedChange] = {}
    for each in enough:  # of a kind, the mildest stands first
        if len(_kinds(each)) == fewest:
            mildest.setdefault(_kinds(each), each)
    texts = [
        f"{_in_words(result, each)} needs about {format_bytes(each.peak_bytes + more)}"
        for each in list(mildest.values())[:2]
    ]
    return " Or: ".join([f"{texts[0]}, which is enough.", *texts[1:]])


def _kinds(change: PlannedChange) -> frozenset[str]:
    """Which of the things that may change it changes."""
    return frozenset(key for key, value in change if key != "peak_bytes" and value)


def _in_words(result: SimulationResult, change: PlannedChange) -> str:
    batch, in_all = result.data.batch_size, result.data.step_samples
    parts = []
    if change.micro_batch:
        size = f"micro-batches of {change.micro_batch} instead of {batch} samples"
        parts.append(f"training in {size}, accumulated to the same {in_all} per update,")
    if change.freeze:
        parts.append(f"freezing {shortened(change.freeze, 200)}")
    if change.stateless_optimizer:
        parts.append("SGD without momentum, which keeps no state,")
    return " and ".join(parts)


def for_step_latency(result: SimulationResult, limit_ms: float, time: Interval | None) -> str:
    """How many samples fit in the time, and which operator to look at."""
    texts = []
    batch = result.data.batch_size
    if time is not None and time.high > 0:
        taken = _taken(limit_ms, time)
        fitting = int(batch * limit_ms / taken) if taken > limit_ms else batch
        if 1 <= fitting < batch:
            texts.append(
                f"a batch of about {fitting} instead of {batch} takes "
                f"{format_limit(limit_ms, 'ms')}{_CASE[_end(limit_ms, time)]}, if the time is "
                "proportional to the batch"
            )
    costs = result.latency_host.by_operator
    if costs:
        worst = max(costs, key=lambda cost: cost.share)
        text = f"{worst.op_type[:100]} takes {format_percent(worst.share)} of the step"
        layers = result.package.trained_layers
        if layers > 1:
            text += (
                f": freeze the first of the {layers} trained layers to drop part of the backward "
                "pass"
            )
        texts.append(text)
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
        "or make one step before the user waits for it"
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


def for_adapter_size(result: SimulationResult) -> str:
    """What an adapter's bytes depend on."""
    count = format_number(result.package.trainable_parameters)
    return f"{count} parameters are trained: take a lower rank, or put it on fewer layers"


def for_learning(result: SimulationResult) -> str:
    """Whether more or fewer steps would help, by the evaluations, else by the training losses."""
    training = result.training
    if training.diverged:
        return "the loss was not finite: lower the learning rate, or clip the gradient norm"
    if training.skipped_batches:
        return "a gradient was not finite: look for samples that are far off, or clip their values"
    points = [(p.step, p.loss) for p in training.curve if p.loss is not None]
    if len(points) >= 2:
        step, lowest = min(points, key=lambda point: (point[1], point[0]))
        last = points[-1][1]
        if step == 0 and last - lowest > 0.02 * abs(lowest):
            return (
                "the loss on held-out samples was lowest before the first step, at "
                f"{format_number(lowest)}: lower the learning rate"
            )
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
    losses = [loss for loss in training.losses if loss is not None]
    tail = len(losses) // 10
    if len(points) < 2 and tail >= 2:
        earlier, later = (fmean(losses[a:b]) for a, b in pairwise((-2 * tail, -tail, len(losses))))
        if later < 0.98 * earlier:
            return "the loss was still falling at the last step: train more steps"
    look = "look at the learning rate and at what is frozen"
    if len(points) < 3:
        few = "there are too few evaluations to tell whether the loss still falls"
        return f"{few}: train more steps, or {look}"
    return f"the loss no longer falls: {look}"


def samples_to_tell(metric: float, floor: float) -> int | None:
    """Held-out samples at which a floor lies outside the 95 % interval of a share of right ones."""
    # Where the Wilson score interval of ``metric`` ends at ``floor``: ``n = z² floor
    # (1 - floor) / (metric - floor)²`` (E. B. Wilson, JASA 22, 1927: the interval holds
    # the shares whose own normal interval would hold the metric). None where no number is
    # enough, or where the metric is not a share.
    distance = abs(metric - floor)
    if not (0.0 <= metric <= 1.0 and 0.0 <= floor <= 1.0) or distance < 1e-6:
        return None
    return max(1, math.ceil(_Z**2 * floor * (1.0 - floor) / distance**2))


def for_small_data(result: SimulationResult, floor: float) -> str:
    """How many samples to hold out so that the metric is significant."""
    metric, held = result.training.metric_after, result.data.evaluated_samples
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


End = Literal["typical", "high"]
_CASE: Final[dict[End, str]] = {"typical": "", "high": " in the worst case"}


def _end(limit: float, interval: Interval) -> End:
    """Which figure is too high: the typical one, or only the high end."""
    return "typical" if interval.typical > limit else "high"


def _taken(limit: float, interval: Interval) -> float:
    return float(getattr(interval, _end(limit, interval)))


def _times(numerator: float, denominator: float) -> float:
    """A ratio without an infinite end: limits may be as small as they like."""
    return min(1e6, numerator / denominator) if denominator > 0 else 1e6


def _opening(subject: Subject, end: End) -> float:
    """Share of the work that goes into opening and saving, however few steps are made."""
    # A piece of data takes a session at least, each of which is opened and saved once.
    restart, active = subject.on.campaign.restart_s, subject.on.campaign.active_s
    if restart is None or active is None or active.typical <= 0:
        return 0.0
    share: float = getattr(restart, end) / getattr(active, end)
    return min(1.0, subject.result.policy.pieces * share)


def _fewer_steps(subject: Subject, limit: float, interval: Interval, shown: str) -> str:
    """How many steps keep the limit, and what the training had reached by then."""
    end = _end(limit, interval)
    total = subject.result.data.steps
    opening = _opening(subject, end)
    left = min(1.0, max(0.0, _times(limit, getattr(interval, end)))) - opening
    steps = int(total * left / (1.0 - opening)) if left > 0 and opening < 1 else 0
    if steps < 1:
        if left > 0 or not opening:
            return (
                "shorten the steps or raise the limit: not even one step fits in "
                f"{shown}{_CASE[end]}"
            )
        pieces = subject.result.policy.pieces
        if pieces > 1:
            return (
                f"the {pieces} pieces of data take {pieces} sessions, and opening them alone takes "
                f"more than {shown}{_CASE[end]}: train on fewer pieces, each of more data"
            )
        return f"raise the limit: opening a session alone takes more than {shown}{_CASE[end]}"
    text = f"about {steps} of the {total} steps fit in {shown}{_CASE[end]}"
    training = subject.result.training
    reached = [p for p in training.curve if 0 < p.step <= steps and p.metric is not None]
    if reached and training.metric_after is not None:
        last, unit = reached[-1], training.metric_unit
        text += (
            f"; after {last.step} steps {shortened(training.metric_name or 'the metric', 100)} is "
            f"{format_value(last.metric or 0.0, unit)}, at the end "
            f"{format_value(training.metric_after, unit)}"
        )
    return text


def for_time(subject: Subject, limit: float, interval: Interval) -> str:
    """Fewer steps; where the device throttles for long, pauses."""
    text = _fewer_steps(subject, limit, interval, format_limit(limit, "s"))
    throttled = subject.on.campaign.throttled_share
    if throttled is not None and throttled.typical >= 0.2:
        share = format_percent(throttled.typical)
        text += f"; the device throttles for {share} of the time: shorter sessions let it cool"
    return text


def for_energy(subject: Subject, limit: float, interval: Interval, unit: Unit) -> str:
    """Fewer steps; freezing where everything is trained."""
    text = _fewer_steps(subject, limit, interval, format_limit(limit, unit))
    package = subject.result.package
    if package.trainable_parameters == package.total_parameters:
        text += "; frozen early layers drop part of the backward pass"
    return text


def for_battery_per_session(subject: Subject, limit: float, interval: Interval) -> str:
    """In how many shorter sessions the training would keep the limit."""
    campaign = subject.on.campaign
    sessions, active = campaign.sessions, campaign.active_s
    if limit <= 0 or sessions is None or active is None:
        return "shorter sessions, or train while the device charges"
    end, shown = _end(limit, interval), format_limit(limit, "%")
    sessions_now = min(1e9, max(1.0, getattr(sessions, end)))
    opening = getattr(campaign.restart_s, end) if campaign.restart_s else 0.0
    active_s = getattr(active, end)
    length = active_s / sessions_now / _times(getattr(interval, end), limit)
    if length <= opening:
        return (
            f"opening and saving a session takes more than {shown}"
            f"{_CASE[end] or ' already'}: train while the device charges"
        )
    work = max(0.0, active_s - sessions_now * opening)
    count = math.ceil(min(1e9, max(sessions_now, work / (length - opening))))
    return (
        f"end a session after about {format_duration(length)}: {count} sessions instead of "
        f"{format_number(sessions_now)} take {shown} each{_CASE[end]}; "
        "or train while the device charges"
    )


def for_sessions(subject: Subject, limit: float, interval: Interval) -> str:
    """Fewer steps, or what each window loses."""
    pieces = subject.result.policy.pieces
    if pieces == 1 > limit:
        return "no training takes less than one session: raise the limit"
    if limit < pieces:
        return (
            f"each of the {pieces} pieces of data takes a session at least: train when more of "
            "them have arrived"
        )
    many = "session" if limit == 1 else "sessions"
    texts = [_fewer_steps(subject, limit, interval, f"{format_number(limit)} {many}")]
    repeated = subject.on.campaign.repeated_steps
    steps = subject.result.data.steps
    if repeated is not None and steps and repeated.typical >= 0.05 * steps:
        texts.append(_save_more_often(subject, repeated))
    if subject.result.policy.state == "background":
        texts.append("in the foreground a session lasts as long as the training needs")
    return "; ".join(texts)


def for_days(subject: Subject, limit: float, interval: Interval) -> str:
    """More sessions a day, or fewer in all."""
    sessions = subject.on.campaign.sessions
    whole = math.floor(limit)
    if whole < 1 or sessions is None:
        return for_sessions(subject, limit, interval)
    end = _end(limit, interval)
    count = getattr(sessions, end)
    many = "day" if whole == 1 else "days"
    return (
        f"{format_number(math.ceil(count / whole))} sessions a day instead of "
        f"{format_number(subject.result.policy.sessions_per_day)} end it in {whole} {many}"
        f"{_CASE[end]}"
    )


def for_written(subject: Subject, limit: float, interval: Interval) -> str:
    """Fewer checkpoints, or smaller ones."""
    texts = []
    known = subject.on.campaign.sessions
    size, every = subject.result.latency_host.checkpoint_bytes, subject.result.policy.save_every
    if known is not None and size:
        sessions = max(1.0, known.typical)
        a_day = math.ceil(min(sessions, subject.result.policy.sessions_per_day))
        allowed = int(min(1e9, _times(limit, size)))  # checkpoints in a day
        of_each = allowed // a_day
        if of_each >= 1 and every is not None:
            often = math.ceil(subject.result.data.steps / sessions / of_each)
            if often > every:
                texts.append(f"save every {often} instead of every {every} steps")
        elif allowed < 1:
            texts.append(f"a single checkpoint takes {format_bytes(size)}")
        elif of_each < 1:
            texts.append(
                f"save only at the end of a session, and train in {allowed} instead of {a_day} "
                "sessions a day"
            )
    parts = subject.result.memory.predicted.breakdown
    stored = parts.parameters + parts.optimizer_state
    if parts.optimizer_state:
        share = format_percent(parts.optimizer_state / stored)
        texts.append(f"SGD keeps no optimizer state, which is {share} of a checkpoint")
    return "; ".join(texts) or "freeze parameters: a checkpoint is as large as what it holds"


def for_repeated_steps(subject: Subject, limit: float, interval: Interval) -> str:
    """How often to save."""
    every = subject.result.policy.save_every
    if every is not None and every > 1:
        often = max(1, int(every * min(1.0, _times(limit, _taken(limit, interval)))))
        return f"save every {often} instead of every {every} steps"
    return _save_more_often(subject, interval)


def _save_more_often(subject: Subject, repeated: Interval) -> str:
    share = format_percent(repeated.typical / max(1, subject.result.data.steps))
    every = subject.result.policy.save_every
    now = "at the end of a session" if every is None else f"every {every} steps"
    if every == 1:
        return f"{share} of the steps are made twice although every one is saved: shorten them"
    return f"{share} of the steps are made twice: save more often than {now}"


def for_endless(subject: Subject) -> str:
    """What fills a window in which the training gets nowhere."""
    latency = subject.on.latency
    parts = [
        ("opening the sessions", latency.session_creation_ms),
        ("loading the checkpoint", latency.checkpoint_load_ms),
        ("a step", latency.step_ms),
        ("saving", latency.checkpoint_save_ms),
    ]
    known = [f"{name} {format_duration(t.typical / 1e3)}" for name, t in parts if t is not None]
    text = f" ({', '.join(known)})" if known else ""
    advice = ["smaller micro-batches make the steps shorter"]
    if subject.result.policy.save_every != 1:
        advice.insert(0, "save after every step")
    if subject.result.policy.state == "background":
        advice.insert(0, "train in the foreground, where a session lasts as long as it needs")
    return f"a session must be long enough to open, step and save{text}: {'; or '.join(advice)}"
