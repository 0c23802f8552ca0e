"""What to change first when the whole training takes too much: time, energy, sessions, bytes."""

from __future__ import annotations

import math

from odtpack_runtime.simulator.metric import Subject, shortened
from odtpack_runtime.simulator.result import CheckUnit
from odtpack_runtime.simulator.units import (
    Interval,
    format_duration,
    format_limit,
    format_number,
    format_percent,
)


def _taken(limit: float, interval: Interval) -> float:
    """The figure that is too high: the typical one, or only the high end."""
    return interval.typical if interval.typical > limit else interval.high


def _times(numerator: float, denominator: float) -> float:
    """A ratio without an infinite end: limits may be as small as they like."""
    return min(1e6, numerator / denominator) if denominator > 0 else 1e6


def _fewer_steps(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """How many steps keep the limit, and what the training had reached by then."""
    taken = _taken(limit, interval)
    total = subject.result.data.steps
    steps = int(total * min(1.0, max(0.0, _times(limit, taken))))
    shown = format_limit(limit, unit)
    if steps < 1:
        return f"not even one step fits in {shown}"
    text = f"about {steps} of the {total} steps fit in {shown}"
    training = subject.result.training
    reached = [p for p in training.curve if 0 < p.step <= steps and p.metric is not None]
    if reached and training.metric_after is not None:
        last = reached[-1]
        text += (
            f"; after {last.step} steps {shortened(training.metric_name or 'the metric', 100)} is "
            f"{format_number(last.metric or 0.0)}, at the end "
            f"{format_number(training.metric_after)}"
        )
    return text


def for_time(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer steps; where the device throttles for long, pauses."""
    text = _fewer_steps(subject, limit, interval, unit)
    campaign = subject.on.campaign
    throttled = campaign.throttled_share if campaign else None
    if throttled is not None and throttled.typical >= 0.2:
        share = format_percent(throttled.typical)
        text += f"; the device throttles for {share} of the time: shorter sessions let it cool"
    return text


def for_energy(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer steps; freezing where everything is trained."""
    text = _fewer_steps(subject, limit, interval, unit)
    package = subject.result.package
    if package.trainable_parameters == package.total_parameters:
        text += "; frozen early layers drop part of the backward pass"
    return text


def for_battery_per_session(
    subject: Subject, limit: float, interval: Interval, unit: CheckUnit
) -> str:
    """In how many shorter sessions the training would keep the limit."""
    campaign = subject.on.campaign
    sessions, active = (campaign.sessions, campaign.active_s) if campaign else (None, None)
    if limit <= 0 or sessions is None or active is None:
        return "shorter sessions, or train while the device charges"
    count = math.ceil(min(1e9, max(1.0, sessions.typical)) * _times(_taken(limit, interval), limit))
    length = format_duration(active.typical / count)
    return (
        f"end a session after about {length}: {count} sessions instead of "
        f"{format_number(sessions.typical)} take {format_limit(limit, unit)} each; "
        "or train while the device charges"
    )


def for_sessions(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer steps, or what each window loses."""
    texts = [_fewer_steps(subject, limit, interval, unit).replace(" fit in ", " fit in sessions: ")]
    repeated = subject.on.campaign.repeated_steps if subject.on.campaign else None
    steps = subject.result.data.steps
    if repeated is not None and steps and repeated.typical >= 0.05 * steps:
        texts.append(_save_more_often(subject, repeated))
    if subject.result.policy.state == "background":
        texts.append("in the foreground a session lasts as long as the training needs")
    return "; ".join(texts)


def for_days(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """More sessions a day, or fewer in all."""
    per_day = subject.result.policy.sessions_per_day
    if limit > 0:
        more = per_day * _times(_taken(limit, interval), limit)
        return (
            f"{format_number(math.ceil(more))} sessions a day instead of "
            f"{format_number(per_day)} end it in {format_number(limit)} days"
        )
    return for_sessions(subject, limit, interval, unit)


def for_written(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer checkpoints, or smaller ones."""
    del unit
    texts = []
    every = subject.result.policy.save_every
    if every is not None and limit > 0:
        fewer = math.ceil(every * _times(_taken(limit, interval), limit))
        texts.append(f"save every {fewer} instead of every {every} steps")
    parts = subject.result.memory.predicted.breakdown
    stored = parts.parameters + parts.optimizer_state
    if parts.optimizer_state:
        share = format_percent(parts.optimizer_state / stored)
        texts.append(f"SGD keeps no optimizer state, which is {share} of a checkpoint")
    return "; ".join(texts) or "freeze parameters: a checkpoint is as large as what it holds"


def for_repeated_steps(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """How often to save."""
    del unit
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
