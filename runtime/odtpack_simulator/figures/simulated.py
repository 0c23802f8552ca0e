"""The metrics of a simulation, by key and in the order of reports, and the figures of a result.

A metric that budgets can limit is one declaration here. The budget file's keys and their schema,
judging, suggesting, comparing, the topic of reports that shows it and the documentation follow.
"""

import hashlib
import math
from collections.abc import Callable
from functools import cache, partial
from types import MappingProxyType
from typing import Final, Literal

from odtpack_simulator.device.app import memory_fit, with_margin
from odtpack_simulator.figures import advice
from odtpack_simulator.figures.metric import (
    CheckKind,
    Metric,
    Topic,
    of_head,
    of_ratio,
    of_repeats,
    read_figures,
)
from odtpack_simulator.result import DeviceResult, HostLatency, SimulationResult, Subject
from odtpack_simulator.values.figure import Basis, Figure, FigureKind, Unit, shortened, without
from odtpack_simulator.values.units import Interval, format_bytes, format_interval_of

Noise = tuple[float, float, float]


def _unknown(reason: str) -> Figure:
    return Figure(value=None, reason=shortened(reason, 4000))


# Of a package, the same on every device.


def _adapter_size(subject: Subject) -> Figure:
    size = subject.result.package.adapter_bytes
    return _unknown("the package trains no adapter") if size is None else Figure(value=size)


def _final_loss(subject: Subject) -> Figure:
    training, where = subject.result.training, "on held-out samples"
    loss = training.eval_loss_after
    if loss is None and subject.result.data.held_out_samples == 0 and training.losses:
        loss, where = training.losses[-1], "of the last step"
    reason = "no final loss" if loss is None else ""
    return Figure(value=loss, kind="measured", basis=Basis(how=where), reason=reason)


def _perplexity(subject: Subject) -> Figure:
    training, data = subject.result.training, subject.result.data
    reason, held = "no perplexity at the end", data.held_out_samples
    if training.perplexity_after is not None:
        reason = ""
    elif subject.result.package.loss != "next_token":
        reason = "the package trains no tokens"
    elif not held:
        reason = "no samples are held out"
    elif held < data.batch_size and not training.curve:
        reason = f"{held} held-out samples are fewer than a batch, which has {data.batch_size}"
    return Figure(value=training.perplexity_after, kind="measured", reason=reason)


def _metric(subject: Subject) -> Figure:
    training = subject.result.training
    after, interval = training.metric_after, training.metric_interval
    name = shortened(training.metric_name or "metric", 100)
    return Figure(
        value=after,
        unit=training.metric_unit,
        kind="measured",
        basis=Basis(how=name),
        noise=None if after is None or interval is None else (interval[0], after, interval[1]),
        reason=f"no {name} at the end" if after is None else "",
    )


# Memory on a device.

_NO_BOUND: Final = "the plan knows no bound of what a Loop keeps, and nothing measured it"


def _peak(subject: Subject) -> Figure:
    memory = subject.on.memory
    if memory.outcome == "killed":
        return _unknown("the replay was ended at the device's limit, before its peak was known")
    if memory.has_no_bound:
        return _unknown(_NO_BOUND)
    kind: FigureKind = "measured" if memory.is_measured else "predicted"
    return Figure(value=memory.peak_bytes, kind=kind, noise=_repeats(subject, memory.peak_bytes))


MEMORY_NOISE: Final = 200_000  # Bytes within which a measured peak repeats, see docs/simulation.md


def _repeats(subject: Subject, value: float, per_byte: float = 1.0) -> Noise | None:
    """Where chance may put a figure that follows from a measured peak."""
    noise = MEMORY_NOISE * per_byte
    return (value - noise, value, value + noise) if subject.on.memory.is_measured else None


def _headroom(subject: Subject) -> Figure:
    memory = subject.on.memory
    total = memory.limit_bytes
    if not total:
        return _unknown("the device's limit is unknown")
    if memory.has_no_bound:
        return _unknown(_NO_BOUND)
    need = with_margin(memory.peak_bytes) + memory.others_bytes
    least = min(total, memory.limit_low_bytes or total)
    # Exact where the share is a whole percent.
    low, free = (100.0 * (limit - need) / limit for limit in (least, total))
    if memory.outcome == "killed":  # whatever was predicted, it reached the limit
        low, free = min(low, 0.0), min(free, 0.0)
    limits = format_bytes(total) if least == total else format_interval_of(least, total, "B")
    return Figure(
        value=free,
        low=low,
        high=free,
        kind="measured" if memory.is_measured else "predicted",
        basis=Basis(profile=subject.on.profile_digest),
        noise=_repeats(subject, free, 103.0 / total),
        reason=f"of {limits} stay free",
    )


def _headroom_advice(subject: Subject, limit: float) -> str:
    memory, free = subject.on.memory, _headroom(subject).value
    granted = memory.limit_bytes or 0
    if free is not None and free >= limit:  # only the low end of the device's limit breaks it
        granted = memory.limit_low_bytes or granted
    room = granted * (1.0 - limit / 100.0) - memory.others_bytes
    return advice.for_memory(subject.result, subject.on, room)


# Times on a device, and what follows from them.


def any_step(host: HostLatency) -> Interval | None:
    """What the host's steps leave open about a single one, in ms; None where there is but one."""
    # It can be any of the steps, but for the lowest and highest twentieth.
    steps = sorted(host.steps_ms)
    last = len(steps) - 1
    places = math.floor(0.05 * last), round(0.5 * last), math.ceil(0.95 * last)
    return Interval.of(*(steps[place] for place in places)) if last else None


@cache
def _training_digest(
    manifest: str, data: str, policy: str, tool_version: str, onnxruntime: str
) -> str:
    parts = (manifest, data, policy, tool_version, onnxruntime)
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def _campaign_spread(subject: Subject) -> Interval | None:
    """What the host leaves open about a time of a whole training, as a multiple of the typical."""
    # It is the sum of what each session begins and ends with, which is as uncertain as the creation
    # of the sessions, and of the steps.
    campaign, host = subject.on.campaign, subject.result.latency_host
    steps, created = host.p50_ms, host.session_creation_cpu_ms
    if steps.low <= 0:
        return None
    if not created.typical:  # as a coarse clock says
        created = steps
    sessions, once, whole = campaign.sessions, campaign.restart_s, campaign.active_s
    share = 0.0
    if sessions and once and whole and whole.typical > 0:
        share = min(1.0, sessions.typical * once.typical / whole.typical)
    ends = (steps.low, created.low), (steps.high, created.high)
    low, high = (
        (1 - share) * (step / steps.typical) + share * (creation / created.typical)
        for step, creation in ends
    )
    if not math.isfinite(high):
        return None
    return Interval.of(min(1.0, low), 1.0, max(1.0, high))


def _timed(
    subject: Subject, interval: Interval, spread: Interval | None, middle: float | None = None,
    reason: str = "",
) -> Figure:  # fmt: skip
    """A figure that follows from the host's times, which chance may have put at ``middle``."""
    result, host = subject.result, subject.result.host
    at = interval.typical if middle is None else middle
    noise = None
    if spread is not None and spread.low > 0:
        noise = (at * (spread.low / spread.typical), at, at * (spread.high / spread.typical))
    digest = _training_digest(
        result.package.manifest_sha256, result.data.model_dump_json(),
        result.policy.model_dump_json(), result.tool_version, host.onnxruntime,
    )  # fmt: skip
    return Figure(
        value=interval.typical,
        low=interval.low,
        high=interval.high,
        kind="predicted",
        basis=Basis(
            host=f"{host.cpu[:3900]}, {host.threads} threads of {host.cores} cores",
            profile=subject.on.profile_digest,
            training=digest,
        ),
        noise=noise if noise is not None and all(map(math.isfinite, noise)) else None,
        reason=reason,
    )


def _latency(
    subject: Subject,
    field: Literal["step_ms", "p90_ms", "first_step_ms"],
    *,
    per_1000_tokens: bool = False,
) -> Figure:
    latency, host = subject.on.latency, subject.result.latency_host
    found: Interval | None = getattr(latency, field)
    tokens = subject.result.data.tokens_per_step
    if per_1000_tokens and tokens is None:
        return _unknown("the data have no tokens")
    if found is None:
        return _unknown(latency.not_judged or "the result has no such time")
    # Milliseconds a token, and so seconds for 1,000 tokens.
    found = found.scaled(1.0 / tokens) if per_1000_tokens and tokens else found
    spreads = {"step_ms": host.p50_ms, "p90_ms": host.p90_ms, "first_step_ms": any_step(host)}
    return _timed(subject, found, spreads[field])


def _campaign(subject: Subject, field: str, unit: Unit) -> Figure:
    campaign = subject.on.campaign
    days = field == "days"
    interval: Interval | None = campaign.calendar_days if days else getattr(campaign, field)
    if interval is None:
        reasons = [each.reason for each in campaign.not_judged if each.figure == field]
        reasons += [each.reason for each in campaign.not_judged]
        return _unknown(next(iter(reasons), "the campaign has no such figure"))
    if unit == "%":
        if not math.isfinite(100.0 * interval.high):
            return _unknown("the share is beyond all numbers")
        interval = interval.scaled(100.0)
    # In the foreground no window ends a session: no time changes what is counted.
    counted = (unit == "1" and field != "days") or field == "written_bytes_per_day"
    if counted and subject.result.policy.state == "foreground":
        profile = Basis(profile=subject.on.profile_digest)
        return Figure(value=interval.typical, low=interval.low, high=interval.high, basis=profile)
    elapsed = campaign.days.typical if days and campaign.days is not None else None
    spread, reason = _campaign_spread(subject), _left_out(subject, field, unit)
    return _timed(subject, interval, spread, elapsed, reason)


def _left_out(subject: Subject, field: str, unit: Unit) -> str:
    """What a campaign's figure does not count because it is unknown; empty without."""
    if field == "days" and subject.result.policy.state == "foreground":
        return ""
    # The device's idle power only counts where energy does.
    power = unit in ("J", "%")
    left_out = [each.figure for each in subject.on.campaign.left_out]
    return without([figure for figure in left_out if power or figure != "power.idle"])


def _days_chance(base: Figure, head: Figure) -> float | None:
    """Days that were begun, or not, by a difference in time that is within the noise of times."""
    # Whole days jump: however little the last session takes longer, it may end on another day.
    noise = of_ratio(base, head)
    if noise is None or base.noise is None or head.noise is None:
        return None
    if abs(head.noise[1] - base.noise[1]) > noise:
        return None
    return math.ceil(noise) if math.isfinite(noise) else noise


def _time(
    key: str, title: str, read: Callable[[Subject], Figure], meaning: str, example: str,
    advise: Callable[[Subject, float], str], *, unit: Unit = "ms", suggested: bool = True,
) -> Metric[Subject]:  # fmt: skip
    return Metric(
        key=key, title=title, unit=unit, scope="device", topic="Step", meaning=meaning,
        headline=key == "step_latency", example=example, read=read, advise=advise,
        words="estimated at {}", chance=of_ratio, suggested=suggested,
    )  # fmt: skip


def _whole(
    key: str, title: str, topic: Topic, field: str, unit: Unit, meaning: str, example: str,
    advise: Callable[[Subject, float, Interval], str], *, noun: str = "",
    headline: bool = False, suggested: bool = True,
    chance: Callable[[Figure, Figure], float | None] = of_ratio,
) -> Metric[Subject]:  # fmt: skip
    """A metric of the whole training on a device."""
    read = partial(_campaign, field=field, unit=unit)

    def hint(subject: Subject, limit: float) -> str:
        found = read(subject)
        if found.value is None or found.low is None or found.high is None:
            return ""
        interval = Interval(low=found.low, typical=found.value, high=found.high)
        return advise(subject, limit, interval)

    return Metric(
        key=key, title=title, unit=unit, scope="device", topic=topic, headline=headline,
        meaning=meaning, example=example, read=read, advise=hint, words="estimated at {}",
        noun=noun, chance=chance, suggested=suggested,
    )  # fmt: skip


_ALL: Final[tuple[Metric[Subject], ...]] = (
    Metric(
        key="package_size", title="Package size", unit="B", scope="package", topic="Package",
        words="the package takes {}",
        meaning="Bytes of all files of the package together.", example="12 MB",
        read=lambda subject: Figure(value=subject.result.package.package_bytes),
        advise=lambda subject, _: advice.for_package_size(subject.result),
    ),
    Metric(
        key="adapter_size", title="Adapter size", unit="B", scope="package", topic="Package",
        words="the adapter takes {}",
        meaning="Bytes of the adapter's parameters: what a device saves beside the optimizer's "
        "state, and sends.",
        example="5 MB", read=_adapter_size, suggested=False,
        advise=lambda subject, _: advice.for_adapter_size(subject.result),
    ),
    Metric(
        key="final_loss", title="Final loss", unit="1", scope="package", topic="Metric",
        words="the loss {how} is {}",
        meaning="Loss on the held-out samples at the end, or of the last step where none are "
        "held out.",
        example="0.5", read=_final_loss,
        advise=lambda subject, _: advice.for_learning(subject.result),
    ),
    Metric(
        key="perplexity", title="Perplexity", unit="1", scope="package", topic="Metric",
        words="the perplexity on held-out samples is {}",
        meaning="exp(mean loss over all labelled tokens) of the held-out samples at the end, for a "
        "package with the loss `next_token`.",
        example="12", read=_perplexity, suggested=False,
        advise=lambda subject, _: advice.for_learning(subject.result),
    ),
    Metric(
        key="accuracy_floor", title="Accuracy floor", unit="1", scope="package", topic="Metric",
        headline=True, better="higher", words="{how} is {}",
        meaning="Smallest metric on the held-out samples at the end.", example="0.9",
        read=_metric, chance=of_head, most=1.0,
        advise=lambda subject, _: advice.for_learning(subject.result),
    ),
    Metric(
        key="peak_memory", title="Peak memory", unit="B", scope="device", topic="Memory",
        headline=True, words="the {kind} peak is {}",
        meaning="The planned peak of the training alone, without the app around it; the measured "
        "one where a replay took more than the plan's margin allows.",
        example="200 MB", read=_peak, fit=memory_fit, chance=of_repeats,
        advise=lambda subject, limit: advice.for_memory(subject.result, subject.on, limit),
    ),
    Metric(
        key="memory_headroom", title="Memory headroom", unit="%", scope="device", topic="Memory",
        headline=True, better="higher", words="{}",
        meaning="Share of the memory that the device grants the app, in the foreground or in the "
        "background as it trains, that must stay free, the app itself (`app_footprint`) and the "
        "plan's margin counted.",
        example="20 %", read=_headroom, suggested=False, below=100.0, chance=of_repeats,
        advise=_headroom_advice,
    ),
    _time(
        "step_latency", "Step latency", partial(_latency, field="step_ms"),
        "Median time of a training step on the device, before it throttles.", "50 ms",
        lambda subject, limit: advice.for_step_latency(
            subject.result, limit, subject.on.latency.step_ms
        ),
    ),
    _time(
        "step_latency_p90", "Step latency, P90", partial(_latency, field="p90_ms"),
        "Time that nine of ten training steps keep on the device.", "60 ms",
        lambda subject, limit: advice.for_step_latency(
            subject.result, limit, subject.on.latency.p90_ms
        ),
        suggested=False,
    ),
    _time(
        "first_step", "First step", partial(_latency, field="first_step_ms"),
        "Time of the first training step on the device, which allocates what later ones find.",
        "200 ms", lambda subject, _: advice.for_first_step(subject.result, subject.on),
    ),
    _time(
        "time_per_1000_tokens", "Time for 1,000 tokens",
        partial(_latency, field="step_ms", per_1000_tokens=True),
        "Time in which a language model trains on a thousand tokens, padding included: the median "
        "step over the tokens of `input_ids` in it.", "20 s",
        lambda subject, _: advice.for_step_latency(subject.result, 0.0, None),
        unit="s", suggested=False,
    ),
    _whole(
        "time_to_finish", "Time to finish", "Finish", "active_s", "s",
        "Time that the device works for the whole training: sessions, steps, checkpoints.",
        "10 min", advice.for_time, headline=True,
    ),
    _whole(
        "energy", "Energy", "Energy", "energy_j", "J",
        "Energy of the whole training above that of the idle device.", "20 kJ",
        partial(advice.for_energy, unit="J"), headline=True,
    ),
    _whole(
        "battery_share", "Battery", "Energy", "battery_share", "%",
        "The same as a share of one full battery; over 100 % is more than one charge.", "5 %",
        partial(advice.for_energy, unit="%"), suggested=False,
    ),
    _whole(
        "battery_per_session", "Battery per session", "Energy", "battery_share_per_session", "%",
        "Share of a full battery that one session takes.", "2 %",
        advice.for_battery_per_session,
    ),
    _whole(
        "sessions", "Sessions", "Sessions", "sessions", "1",
        "Sessions in the foreground, or windows in the background, until the training ends.",
        "10", advice.for_sessions, noun=" sessions", headline=True,
    ),
    _whole(
        "days", "Days", "Finish", "days", "1",
        "Days that the training spans, the first and the last included; a day is 24 hours, from "
        "the start of the first session on.",
        "7", advice.for_days, noun=" days", suggested=False, chance=_days_chance,
    ),
    _whole(
        "written_per_day", "Written per day", "Sessions", "written_bytes_per_day", "B",
        "Bytes of checkpoints that are written to storage in a day.", "500 MB",
        advice.for_written,
    ),
    _whole(
        "repeated_steps", "Repeated steps", "Sessions", "repeated_steps", "1",
        "Steps that are made twice because a window ended between two checkpoints.", "50",
        advice.for_repeated_steps, noun=" steps", suggested=False,
    ),
)  # fmt: skip

METRICS: Final = MappingProxyType({metric.key: metric for metric in _ALL})  # Key -> metric

ALWAYS: Final = MappingProxyType(
    {
        "memory_limit": CheckKind(title="Device memory limit", topic="Memory", headline=True),
        "memory_measured": CheckKind(title="Memory measured", topic="Memory"),
        "finite_loss": CheckKind(title="Finite loss", topic="Metric", headline=True),
        "learns": CheckKind(title="Learns", topic="Metric", better="higher"),
        "steps_done": CheckKind(title="Replay completed", topic="Sessions"),
        "finishes": CheckKind(title="Training comes to its end", topic="Finish"),
        "interruption": CheckKind(title="Interruption", topic="Interruptions"),
        "gpu_memory": CheckKind(title="GPU memory", topic="Memory"),
        "low_memory_warning": CheckKind(title="Low memory warning", topic="Memory"),
        "small_data": CheckKind(title="Small data", topic="Metric", better="higher"),
    }
)
"""The checks that need no budget, by metric."""

CHECKS: Final = MappingProxyType({**ALWAYS, **METRICS})
"""All that is judged, in the order of reports."""


def figures_of(result: SimulationResult, device: DeviceResult | None = None) -> list[Figure]:
    """The figures of a result's package, or of one of its devices, in the order of reports."""
    return read_figures(METRICS, Subject(result, device), None if device is None else device.name)


def all_figures(result: SimulationResult) -> list[Figure]:
    """Every figure of a simulation: those of the package, then those of each device.

    A figure that is unknown is among them, with the reason.
    """
    found = figures_of(result)
    return [*found, *(each for device in result.devices for each in figures_of(result, device))]
