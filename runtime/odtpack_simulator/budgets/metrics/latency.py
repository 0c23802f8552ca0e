"""Metrics of the time of a step on a device, and how far such times repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from odtpack_simulator.budgets import advice
from odtpack_simulator.budgets.budget_metric import BudgetMetric, Reading, Subject, estimated
from odtpack_simulator.result.result import CheckUnit, HostLatency
from odtpack_simulator.values.units import Interval

Sample = Literal["median", "p90", "single"]


def host_interval(host: HostLatency, sample: Sample) -> Interval | None:
    """What the host's steps leave open about a time that was taken from them, in ms.

    The interval of the median or of the 90th percentile as it was measured, or, for a
    result without one, between two order statistics of the steps: for the quantile q of
    n steps those at n q ± 1.96 √(n q (1 - q)), which cover it with 95 % (binomial). A
    single step can be any of the steps, but for the lowest and highest twentieth.
    """
    steps = sorted(host.steps_ms)
    if sample == "single":
        return _between(steps, 0.05, 0.5, 0.95)
    known = host.p50_ms if sample == "median" else host.p90_ms
    if known is not None:
        return known
    q, n = (0.5 if sample == "median" else 0.9), len(steps)
    half = 1.96 * math.sqrt(q * (1.0 - q) / n) if n else 0.0
    return _between(steps, q - half, q, q + half)


def _between(steps: list[float], low: float, middle: float, high: float) -> Interval | None:
    last = len(steps) - 1
    if last < 1:
        return None
    ends = (math.floor(low * last), round(middle * last), math.ceil(high * last))
    low_ms, typical_ms, high_ms = (steps[min(last, max(0, index))] for index in ends)
    return Interval(low=low_ms, typical=typical_ms, high=high_ms)


def timing_noise(
    base: Subject, head: Subject, *, read: Callable[[Subject], Reading], sample: Sample = "median"
) -> float | None:
    """How much slower or faster the head may seem without being so, in the metric's unit.

    A time on a device is the host's time, carried over; what is uncertain about the
    device is the same in base and head, and cancels. What is left is how well the host's
    times are known: the head's at the end of its interval against the base's at the
    opposite end of its own, and the larger way of the two.
    """
    figure = read(base).actual
    ends = [host_interval(each.result.latency_host, sample) for each in (base, head)]
    if figure is None or any(end is None or end.low <= 0 for end in ends):
        return None
    (base_low, base_high), (head_low, head_high) = (
        (end.low / end.typical, end.high / end.typical) for end in ends if end is not None
    )
    if min(base_low, head_low) <= 0.0:  # the ends of a file lie too far apart for a ratio
        return None
    return figure * max(head_high / base_low - 1.0, base_high / head_low - 1.0)


def _reader(field: Literal["step_ms", "p90_ms", "first_step_ms"]) -> Callable[[Subject], Reading]:
    def read(subject: Subject) -> Reading:
        latency = subject.on.latency
        reason = latency.not_judged or "the result has no such time"
        return estimated(getattr(latency, field), "ms", reason)

    return read


def _per_1000_tokens(subject: Subject) -> Reading:
    tokens = subject.result.data.tokens_per_step
    if tokens is None:
        return Reading(None, "the data have no tokens")
    latency = subject.on.latency
    if latency.step_ms is None:
        return Reading(None, latency.not_judged or "the result has no such time")
    return estimated(latency.step_ms.scaled(1.0 / tokens), "s", "")


_step, _p90, _first = _reader("step_ms"), _reader("p90_ms"), _reader("first_step_ms")


def _metric(
    key: str, title: str, read: Callable[[Subject], Reading], sample: Sample, meaning: str,
    example: str, advise: Callable[[Subject, float], str], *, unit: CheckUnit = "ms",
    suggested: bool = True,
) -> BudgetMetric:  # fmt: skip
    return BudgetMetric(
        key=key,
        title=title,
        unit=unit,
        scope="device",
        topic="Step",
        headline=key == "step_latency",
        meaning=meaning,
        example=example,
        read=read,
        advise=advise,
        noise=partial(timing_noise, read=read, sample=sample),
        timed=True,
        of_profile=True,
        suggested=suggested,
    )


METRICS: Final = (
    _metric(
        "step_latency", "Step latency", _step, "median",
        "Median time of a training step on the device, before it throttles.", "50 ms",
        lambda subject, limit: advice.for_step_latency(
            subject.result, limit, _step(subject).interval
        ),
    ),
    _metric(
        "step_latency_p90", "Step latency, P90", _p90, "p90",
        "Time that nine of ten training steps keep on the device.", "60 ms",
        lambda subject, limit: advice.for_step_latency(
            subject.result, limit, _p90(subject).interval
        ),
        suggested=False,
    ),
    _metric(
        "first_step", "First step", _first, "single",
        "Time of the first training step on the device, which allocates what later ones find.",
        "200 ms",
        lambda subject, _: advice.for_first_step(subject.result, subject.on),
    ),
    _metric(
        "time_per_1000_tokens", "Time for 1,000 tokens", _per_1000_tokens, "median",
        "Time in which a language model trains on a thousand tokens, padding included: the median "
        "step over the tokens of `input_ids` in it.", "20 s",
        lambda subject, _: advice.for_step_latency(subject.result, 0.0, None),
        unit="s", suggested=False,
    ),
)  # fmt: skip
