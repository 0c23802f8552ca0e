"""What to change first when the whole training takes too much: time, energy, sessions, bytes."""

from __future__ import annotations

import math

from odtpack_simulator.budgets.budget_metric import Subject, shortened
from odtpack_simulator.result.result import CheckUnit
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
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


def _opening(subject: Subject) -> float:
    """Share of the work that goes into opening and saving, however few steps are made.

    A piece of data takes a session at least, each of which is opened and saved once.
    """
    campaign = subject.on.campaign
    if campaign is None or campaign.restart_s is None or campaign.active_s is None:
        return 0.0
    active = campaign.active_s.typical
    if active <= 0:
        return 0.0
    return min(1.0, subject.result.policy.pieces * campaign.restart_s.typical / active)


def _fewer_steps(subject: Subject, limit: float, interval: Interval, shown: str) -> str:
    """How many steps keep the limit, and what the training had reached by then."""
    taken = _taken(limit, interval)
    total = subject.result.data.steps
    opening = _opening(subject)
    left = min(1.0, max(0.0, _times(limit, taken))) - opening
    steps = int(total * left / (1.0 - opening)) if left > 0 and opening < 1 else 0
    if steps < 1:
        pieces = subject.result.policy.pieces
        if pieces > 1 and opening > 0:
            return (
                f"the {pieces} pieces of data take {pieces} sessions, and opening them alone takes "
                f"more than {shown}: train on fewer pieces, each of more data"
            )
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
    text = _fewer_steps(subject, limit, interval, format_limit(limit, unit))
    campaign = subject.on.campaign
    throttled = campaign.throttled_share if campaign else None
    if throttled is not None and throttled.typical >= 0.2:
        share = format_percent(throttled.typical)
        text += f"; the device throttles for {share} of the time: shorter sessions let it cool"
    return text


def for_energy(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer steps; freezing where everything is trained."""
    text = _fewer_steps(subject, limit, interval, format_limit(limit, unit))
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
    sessions_now = min(1e9, max(1.0, sessions.typical))
    opening = campaign.restart_s.typical if campaign and campaign.restart_s else 0.0
    length = active.typical / sessions_now / _times(_taken(limit, interval), limit)
    if length <= opening:
        return (
            f"opening and saving a session takes more than {format_limit(limit, unit)} already: "
            "train while the device charges"
        )
    work = max(0.0, active.typical - sessions_now * opening)
    count = math.ceil(min(1e9, max(sessions_now, work / (length - opening))))
    return (
        f"end a session after about {format_duration(length)}: {count} sessions instead of "
        f"{format_number(sessions.typical)} take {format_limit(limit, unit)} each; "
        "or train while the device charges"
    )


def for_sessions(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer steps, or what each window loses."""
    del unit
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
    repeated = subject.on.campaign.repeated_steps if subject.on.campaign else None
    steps = subject.result.data.steps
    if repeated is not None and steps and repeated.typical >= 0.05 * steps:
        texts.append(_save_more_often(subject, repeated))
    if subject.result.policy.state == "background":
        texts.append("in the foreground a session lasts as long as the training needs")
    return "; ".join(texts)


def for_days(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """More sessions a day, or fewer in all."""
    campaign = subject.on.campaign
    sessions = campaign.sessions if campaign else None
    whole = math.floor(limit)
    if whole < 1 or sessions is None:
        return for_sessions(subject, limit, interval, unit)
    count = sessions.typical if interval.typical > limit else sessions.high
    many = "day" if whole == 1 else "days"
    return (
        f"{format_number(math.ceil(count / whole))} sessions a day instead of "
        f"{format_number(subject.result.policy.sessions_per_day)} end it in {whole} {many}"
    )


def for_written(subject: Subject, limit: float, interval: Interval, unit: CheckUnit) -> str:
    """Fewer checkpoints, or smaller ones."""
    del unit
    texts = []
    campaign = subject.on.campaign
    size, every = subject.result.latency_host.checkpoint_bytes, subject.result.policy.save_every
    if campaign is not None and campaign.sessions is not None and size:
        sessions = max(1.0, campaign.sessions.typical)
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
