"""What a report says of a simulation: headline, figures, devices against topics, the campaign."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from odtpack_simulator.device.app import judged_peak, runtime_words
from odtpack_simulator.figures.metric import Topic
from odtpack_simulator.figures.simulated import CHECKS
from odtpack_simulator.reports.report import (
    NOT_VALIDATED,
    SEVERITY,
    UNKNOWN,
    VERDICT_WORDS,
    Cell,
    FigureRow,
    MatrixRow,
    Report,
    Suite,
    Table,
    caution,
    figure_text,
    tally,
)
from odtpack_simulator.result import (
    DeviceMemory,
    DeviceResult,
    InterruptionInfo,
    SimulationResult,
)
from odtpack_simulator.values.figure import Check, Verdict, listed
from odtpack_simulator.values.text import counted
from odtpack_simulator.values.units import (
    Interval,
    format_bytes,
    format_duration,
    format_interval,
    format_number,
    format_percent,
    format_value,
)


def simulation_report(result: SimulationResult) -> Report:
    """What a report says of a simulation."""
    devices = result.devices
    learned = _learned(result)
    notes = [("Interruptions", interruption_words(result.interruption))] * bool(result.interruption)
    remarks = filter(None, [result.data.smaller_batch, result.data.small_evaluation])
    notes += [("Batches", f"{remark[0].upper()}{remark[1:]}.") for remark in remarks]
    mapped = mapped_words(result)
    campaigns = campaign_rows(result)
    return Report(
        result=result,
        of="odtpack simulation",
        headline=headline(result),
        tally=tally(result.checks, [device.verdict for device in devices], "the package"),
        caution=caution([device.validated for device in devices]),
        key_figures=key_figures(result),
        summary=_summary(result, learned),
        kinds=CHECKS,
        suites=[
            Suite("Package", "package", result.checks),
            *(
                Suite(
                    device.title,
                    device.name,
                    device.checks,
                    device.validated,
                    is_device=True,
                    properties=[
                        ("device", device.name),
                        ("profile_sha256", device.profile_digest),
                        ("validated", "yes" if device.validated else NOT_VALIDATED),
                    ],
                )
                for device in devices
            ),
        ],
        topics=TOPICS,
        matrix=[
            MatrixRow(device.title, device.validated, device.verdict, cells(result, device))
            for device in devices
        ],
        tables=[
            Table("The whole training on each device", policy_words(result), campaigns, NOT_JUDGED)
        ]
        if campaigns
        else [],
        bars=[
            (device.title, drawn_bar(device.memory), bar_words(device.memory, result))
            for device in devices
        ],
        legend=f"{LEGEND}; {mapped}" if mapped else LEGEND,
        unknown=_without_times(result),
        notes=notes,
    )


def _summary(result: SimulationResult, learned: Sequence[tuple[str, str, str]]) -> str:
    """What was learned, by what it was evaluated on, and that batches are smaller than asked."""
    on: dict[str, list[str]] = {}
    for name, text, where in learned:
        on.setdefault(where, []).append(f"{name.lower()} {text}")
    parts: list[str] = []
    for where, texts in on.items():
        steps = "" if parts else f" in {counted(result.data.steps, 'step')}"
        parts.append(f"on {where}{steps}: {', '.join(texts)}")
    text = "; ".join(
        filter(None, [*parts, result.data.smaller_batch, result.data.small_evaluation])
    )
    return f"{text[:1].upper()}{text[1:]}"


def headline(result: SimulationResult) -> str:
    """The verdict in a few words."""
    total = len(result.devices)
    passed = sum(device.verdict == "pass" for device in result.devices)
    if total == 0:
        return "The package passes" if result.verdict == "pass" else "The package does not pass"
    if passed == total:
        many = "Both" if total == 2 else f"All {total}"
        text = "The device passes" if total == 1 else f"{many} devices pass"
        return text if result.verdict == "pass" else f"{text}, the package does not"
    if result.verdict == "warn" and not passed:
        return "No device fails" if total > 1 else "The device does not fail"
    return f"{passed} of {total} devices pass" if total > 1 else "The device does not pass"


def key_figures(result: SimulationResult) -> list[tuple[str, str, str]]:
    """The handful of figures at the top: (name, figure, remark)."""
    # Memory and time are those of the device that they are worst on; those of this machine stand in
    # the remark, or alone where no device has the figure.
    figures = [("Package", format_bytes(result.package.package_bytes), _parameters(result))]
    figures.append(_peak_figure(result))
    if (on_gpu := result.memory.gpu_bytes) is not None:
        figures.append(("GPU memory", format_bytes(on_gpu), "planned, WebGPU's buffers"))
    figures += _step_figures(result)
    return [*figures, *_learned(result)]


def _parameters(result: SimulationResult) -> str:
    trainable, total = result.package.trainable_parameters, result.package.total_parameters
    adapter, mapped = result.package.adapter_bytes, result.memory.mapped_bytes
    of = "" if trainable == total else f"of {_count(total)} "
    if adapter is None and mapped is None:
        return f"{_count(trainable)} {of}parameters" + (" trained" if of else ", all trained")
    base = "the base is in memory" if mapped is None else f"base mapped: {format_bytes(mapped)}"
    size = [] if adapter is None else [f"the adapter is {format_bytes(adapter)}"]
    return ", ".join([f"{_count(trainable)} {of}parameters trained", *size, base])


def _count(value: int) -> str:
    for unit, factor in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return str(value)


def _peak_figure(result: SimulationResult) -> tuple[str, str, str]:
    memory = result.memory
    predicted, how = memory.predicted.peak_bytes, "predicted, not measured"
    measured = memory.measured_peak_bytes
    peak = judged_peak(predicted, measured)
    if measured is not None:
        how = f"predicted; {measured_words(memory.replayed_bytes, measured)}"
        if memory.replayed_bytes < predicted:
            highest = max(memory.phases, key=lambda phase: phase.predicted_bytes)
            how += f", without {highest.phase}"
    limited = [
        (device.memory.need_bytes / device.memory.limit_bytes, device.name, device)
        for device in result.devices
        if device.memory.limit_bytes
    ]
    if not limited:
        return "Peak memory", format_bytes(peak), how
    share, _, most = max(limited, key=lambda each: each[:2])
    limit, others = most.memory.limit_bytes or 1, most.memory.others_bytes
    app = f" and {format_bytes(others)} of app and library," if others else ""
    remark = f"{format_bytes(peak)}{app} of {format_bytes(limit)} on {most.title}; {how}"
    return "Peak memory, worst device", format_percent(share), remark


def measured_words(predicted: int, measured: int) -> str:
    """What was measured, and how far the prediction is from it."""
    error = 100.0 * (predicted - measured) / max(1, measured)
    return f"measured {format_bytes(measured)} ({error:+.1f} %)"


def _step_figures(result: SimulationResult) -> list[tuple[str, str, str]]:
    host = result.latency_host
    own = format_duration(median(host.steps_ms) / 1e3)
    known = [(device.latency.step_ms, device) for device in result.devices]
    timed = [(step, device) for step, device in known if step is not None]
    if timed:
        step, device = max(timed, key=lambda pair: (pair[0].typical, pair[1].name))
        ends = f"{format_interval(step, 'ms')} on {device.title}"
        figure = format_duration(step.typical / 1e3)
        figures = [("Step, slowest device", figure, f"{ends}; this machine {own}")]
        tokens = result.data.tokens_per_step
        if tokens and step.typical:
            each = step.scaled(1.0 / tokens)  # ms a token, and so s for 1,000 tokens
            ends = f"{format_interval(each, 's')} for 1,000 tokens on {device.title}"
            rate = 1e3 / each.typical
            shown = _count(round(rate)) if rate >= 10 else format_number(rate)
            figures.append(("Tokens a second, slowest device", shown, ends))
        return figures
    first = format_duration(host.first_step_ms / 1e3)
    return [("Step on this machine", own, f"median; first step {first}")]


def _learned(result: SimulationResult) -> list[tuple[str, str, str]]:
    """Loss and metric before and after the training: (name, both, on what)."""
    training, held = result.training, result.data.held_out
    figures = []
    if training.losses:
        first, last, where = training.eval_loss_before, training.eval_loss_after, held
        if first is None or last is None:
            first, last, where = training.losses[0], training.losses[-1], "training samples"
        both = ["not finite" if loss is None else f"{loss:.3g}" for loss in (first, last)]
        figures.append(("Loss", " → ".join(both), where))
    if training.tokens and training.perplexity_after is not None:
        perplexities = (training.perplexity_before, training.perplexity_after)
        both = ["not finite" if each is None else f"{each:.4g}" for each in perplexities]
        figures.append(("Perplexity", " → ".join(both), f"{training.tokens:,} held-out tokens"))
    if training.metric_name and training.metric_after is not None:
        before, text = training.metric_before, metric_text(result, training.metric_after)
        if before is not None:  # a unit stands once, after both
            text = f"{metric_text(result, before).removesuffix(' %')} → {text}"
        figures.append((training.metric_name.capitalize(), text, held))
    return figures


def metric_text(result: SimulationResult, value: float) -> str:
    """A value of the training's metric: an accuracy in percent, any other as a number."""
    return format_value(value, result.training.metric_unit)


# One device: each figure with a remark, which is its interval or why it is unknown.


def shown(interval: Interval | None, unit: str, reason: str = "") -> tuple[str, str]:
    """The typical figure and both ends in a unit, ``count`` for sessions, days and steps."""
    if interval is None:
        return UNKNOWN, reason
    if unit != "count":
        return format_value(interval.typical, unit), format_interval(interval, unit)
    low, high = _whole(interval.low), _whole(interval.high)
    return _whole(interval.typical), low if low == high else f"{low} to {high}"


def _whole(value: float) -> str:
    """A count of sessions, days or steps: whole where it is, else with one decimal."""
    if value >= 1e4:
        return format_number(value)
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def memory_words(device: DeviceResult) -> tuple[str, str]:
    """Peak of the training, and the share of the limit that the whole process takes."""
    held = device.memory
    peak = format_bytes(held.peak_bytes)
    if held.outcome == "killed" and held.room_bytes is not None:
        return f"> {format_bytes(held.room_bytes)}", f"predicted {peak}"
    if held.limit_bytes is None:
        return peak, "limit unknown"
    share = held.need_bytes / max(1, held.limit_bytes)
    app = " with the app" if held.others_bytes else ""
    return peak, f"{format_percent(share)} of {format_bytes(held.limit_bytes)}{app}"


def _of_campaign(device: DeviceResult, name: str, unit: str) -> tuple[str, str]:
    """A figure of the campaign; of energy the share of a battery, of sessions the days."""
    campaign = device.campaign
    reasons = (entry.reason for entry in campaign.not_judged if entry.figure == name)
    why = next(reasons, device.latency.not_judged or "")
    figure, remark = shown(getattr(campaign, name), unit, why)
    days, battery = campaign.calendar_days, campaign.battery_share
    if name == "energy_j" and campaign.energy_j is not None and battery is not None:
        remark = f"{format_percent(battery.typical)} of a battery"
    if name == "sessions" and campaign.sessions is not None and days is not None:
        remark = f"in {_whole(days.typical)} day{'' if days.typical == 1 else 's'}"
    return figure, remark


def _without_times(result: SimulationResult) -> list[tuple[str, str]]:
    """Which times are missing that no budget asks for, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for device in result.devices:
        if device.latency.step_ms is None:
            what, why = "times", device.latency.not_judged or ""
        elif device.campaign.active_s is None:
            what, why = "finish", _of_campaign(device, "active_s", "s")[1]
        else:
            continue
        if not any(c.status == "not judged" and c.message == why for c in device.checks):
            reasons.setdefault((what, why), []).append(device.title)
    return [(f"{what} of {', '.join(titles)}", why) for (what, why), titles in reasons.items()]


# Devices against topics: one cell per device and topic, as state, figure and words.


def cells(result: SimulationResult, device: DeviceResult) -> list[Cell]:
    """One cell per topic of :data:`TOPICS`; the metric is judged once for all devices."""
    found = []
    for topic, figure in _TOPIC_FIGURES.items():
        checks = [check for check in device.checks if _topic(check) == topic]
        if topic == "Metric" and not _ended_early(device):
            checks += [check for check in result.checks if _topic(check) == topic]
        cell = _cell(figure(result, device), checks)
        if topic == "Step" and device.latency.step_ms is not None:
            cell = replace(cell, ends=format_interval(device.latency.step_ms, "ms"))
        elif topic == "Memory" and not cell.ends:
            cell = replace(cell, ends=_TRAINING)
        found.append(cell)
    return found


_TRAINING: Final = "training only"
_MEMORY_OF: Final = {
    "memory_limit": "whole process",
    "low_memory_warning": "whole process",
    "peak_memory": _TRAINING,
}
"""What the figure of a judged memory is that of."""


def _topic(check: Check) -> Topic | None:
    return CHECKS[check.metric].topic if check.metric in CHECKS else None


def _ended_early(device: DeviceResult) -> bool:
    return device.training.outcome == "killed"


def _cell(figure: tuple[str, str], checks: Sequence[Check]) -> Cell:
    text, reason = figure
    if not checks:
        known = "no budget" if text != UNKNOWN else "unknown"
        return Cell(None, text, "" if text == "ended early" else known, reason)
    worst = min(checks, key=lambda check: SEVERITY[check.state])
    state = worst.state
    # Where several checks pass, one of the figure that somebody wrote a budget for says more.
    if state == "pass":
        own = [check for check in checks if CHECKS[check.metric].headline] or checks
        worst = next((check for check in own if check.budget_location), own[0])
    if state == "not judged":
        has = text != UNKNOWN
        return Cell(state, text if has else state, state if has else "", worst.message)
    ends = ""
    if _topic(worst) == "Memory" and worst.actual is not None:
        text = figure_text(worst, worst.actual)  # what was compared: often the whole process
        ends = _MEMORY_OF.get(worst.metric, CHECKS[worst.metric].title)
    words = _judged_words(worst, state)
    if worst.metric == "small_data" and state == "warn":
        words = "Too few held-out samples"
        if worst.limit is not None and worst.actual is not None:
            words += f": {worst.actual:.0f} of about {worst.limit:.0f} needed"
    elif not CHECKS[worst.metric].headline:  # the figure is that of another metric
        words = f"{CHECKS[worst.metric].title}: {words}"
    return Cell(state, text, words, worst.message, ends)


def _judged_words(check: Check, state: Verdict) -> str:
    if check.limit is None or check.metric in {"finite_loss", "learns", "steps_done"}:
        return VERDICT_WORDS[state].lower()
    limit = figure_text(check, check.limit, chosen=True)
    floor = CHECKS[check.metric].better == "higher"
    if state == "pass":
        return f"{'at least' if floor else 'within'} {limit}"
    if check.actual is None:
        return "ended there"
    kept = check.actual >= check.limit if floor else check.actual <= check.limit
    words = ("may be below", "below") if floor else ("may exceed", "over")
    return f"{words[not kept]} {limit}"


def _metric(result: SimulationResult, device: DeviceResult) -> tuple[str, str]:
    if _ended_early(device):
        return "ended early", device.training.detail
    info = result.training
    if info.metric_name and info.metric_after is not None:
        return metric_text(result, info.metric_after), info.metric_name
    if info.eval_loss_after is not None:
        return f"loss {format_number(info.eval_loss_after)}", "held-out loss"
    return UNKNOWN, "no held-out samples"


_TOPIC_FIGURES: Final[dict[Topic, Callable[[SimulationResult, DeviceResult], tuple[str, str]]]] = {
    "Memory": lambda _, device: memory_words(device),
    "Step": lambda _, device: shown(device.latency.step_ms, "ms", device.latency.not_judged or ""),
    "Finish": lambda _, device: _of_campaign(device, "active_s", "s"),
    "Energy": lambda _, device: _of_campaign(device, "energy_j", "J"),
    "Sessions": lambda _, device: _of_campaign(device, "sessions", "count"),
    "Metric": _metric,
}
TOPICS: Final[tuple[str, ...]] = tuple(_TOPIC_FIGURES)
"""Topics that are columns, in their order; the checks of others have parts of their own."""


# The whole training on each device.

_CAMPAIGN: Final = {
    "active_s": ("Active time", "s"),
    "sessions": ("Sessions", "count"),
    "days": ("Days", "count"),
    "energy_j": ("Energy", "J"),
    "battery_share": ("Battery", "share"),
    "battery_share_per_session": ("Per session", "share"),
    "written_bytes_per_day": ("Written per day", "B"),
    "throttled_share": ("Throttled", "share"),
    "repeated_steps": ("Repeated steps", "count"),
}
_WORDS: Final = {
    "battery_share_per_session": "battery per session",
    "written_bytes": "bytes written",
    "throttled_share": "throttling",
    "restart_s": "time to restart",
    "checkpoint_load_ms": "loading checkpoints",
    "checkpoint_save_ms": "saving checkpoints",
    "power.idle": "power without load",
    "sustained_fraction": "throttling",
}
"""Figures that have no column, or a title that says nothing without its neighbours."""


def campaign_rows(result: SimulationResult) -> list[FigureRow]:
    """One row per device with a figure of its campaign, in stored order."""
    rows = []
    for device in result.devices:
        campaign = device.campaign
        intervals = {
            key: campaign.calendar_days if key == "days" else getattr(campaign, key)
            for key in _CAMPAIGN
        }
        figures = [(title, *shown(intervals[k], unit)) for k, (title, unit) in _CAMPAIGN.items()]
        if any(figure != UNKNOWN for _, figure, _ in figures):  # else unknown_rows has reasons
            rows.append(FigureRow(device.title, device.validated, "", figures))
    return rows


@dataclass(frozen=True)
class Unknown:
    """Something unknown, what it leads to, and on which devices."""

    outcome: str
    figures: str
    devices: str
    reason: str


NOT_JUDGED: Final = "not judged"
AS_NOTHING: Final = "counted as nothing"


def unknown_rows(result: SimulationResult) -> list[Unknown]:
    """What is not judged, and what counts as nothing in the figures of campaigns."""
    # Without a figure counted as nothing times and energy are too low by what it takes; without the
    # power that a device takes at rest energy is too high.
    groups: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for outcome in (NOT_JUDGED, AS_NOTHING):
        for device in result.devices:
            campaign = device.campaign
            reasons: dict[str, list[str]] = {}
            for entry in campaign.not_judged if outcome == NOT_JUDGED else campaign.left_out:
                title = _CAMPAIGN.get(entry.figure, (entry.figure, ""))[0]
                named = _WORDS.get(entry.figure, title).replace("_", " ").lower()
                reasons.setdefault(entry.reason, []).append(named)
            for reason, figures in reasons.items():
                groups.setdefault((outcome, reason, tuple(figures)), []).append(device.title)
    return [
        Unknown(outcome, ", ".join(figures), ", ".join(devices), reason)
        for (outcome, reason, figures), devices in groups.items()
    ]


def policy_words(result: SimulationResult) -> str:
    """How the app trains, in a sentence."""
    policy = result.policy
    rate = format_number(policy.sessions_per_day)
    what = "session" if policy.state == "foreground" else "background window"
    saves = "a checkpoint at the end of each"
    if policy.save_every is not None:
        saves = f"a checkpoint every {counted(policy.save_every, 'step')}"
    text = f"{rate} {what}{'' if rate == '1' else 's'} a day, {saves}"
    if policy.entitled:
        text += ", with the entitlement for more memory where it is known"
    if policy.pieces > 1:
        text += f", data arriving in {policy.pieces} pieces"
    return f"{text}. Figures are typical, with the profile's best and worst case."


def interruption_words(info: InterruptionInfo | None) -> str:
    """How often the training was ended on purpose, and whether it came to the same weights."""
    if info is None:
        return ""
    kinds = Counter(entry.at for entry in info.interruptions)
    phrases = {
        "step": "killed between two steps",
        "save": "killed while it wrote a checkpoint",
        "memory warning": "warned that memory was low",
    }
    parts = []
    for kind, phrase in phrases.items():
        count = kinds[kind]  # type: ignore[index]
        if count:
            parts.append(f"{phrase} {({1: 'once', 2: 'twice'}).get(count, f'{count} times')}")
    what = f"The training was {listed(parts) or 'not interrupted'}"
    repeated = sum(entry.repeated_steps for entry in info.interruptions)
    end = {
        True: ", and ended with the same weights as without, bit for bit",
        False: ", and did not end with the same weights as without",
        None: "; whether it ended with the same weights was not judged",
    }[info.equal]
    text = f"{what}; it repeated {counted(repeated, 'step')}{end}."
    if not info.detail:
        return text
    # Only the first letter: units keep theirs.
    return f"{text} {info.detail[:1].upper()}{info.detail[1:].rstrip('.')}."


# What a process holds at the peak of a training, part by part, against its limit.

_BAR_WIDTH: Final = 24
_SHARING: Final = {"shared": "one arena", "own": "an arena for each session", "none": "no arena"}
LEGEND: Final = "a = the app, r = ONNX Runtime, t = the training, . = free, | = the limit"
"""What the characters of a drawn bar are."""


def drawn_bar(memory: DeviceMemory) -> str:
    """The memory of an app's process in characters, see :data:`LEGEND`."""
    # It is as long as the limit, or as the need where that is more; each part that is not
    # nothing has a character at least.
    need, limit = memory.need_bytes, memory.limit_bytes
    whole = max(need, limit or 0, 1)
    parts = ((memory.app_bytes, "a"), (memory.runtime_bytes, "r"), (memory.peak_bytes, "t"))
    text = "".join(
        mark * max(1, round(_BAR_WIDTH * nbytes / whole)) for nbytes, mark in parts if nbytes
    )
    if limit is None:
        return text
    if need <= limit:
        return f"{text.ljust(_BAR_WIDTH, '.')}|"
    inside = round(_BAR_WIDTH * limit / whole)
    return f"{text[:inside]}|{text[inside:]}"


def bar_words(memory: DeviceMemory, result: SimulationResult) -> str:
    """The parts of a bar, the limit and the kit in words."""
    runtime = memory.runtime_bytes
    parts = (
        f"app {format_bytes(memory.app_bytes)} + "
        f"{runtime_words(memory.kit, runtime)} {format_bytes(runtime)} + "
        f"training {format_bytes(memory.peak_bytes)} = {format_bytes(memory.need_bytes)}"
    )
    limit = "unknown" if memory.limit_bytes is None else format_bytes(memory.limit_bytes)
    return f"{parts}; limit {limit}; {kit_words(memory, result)}"


def mapped_words(result: SimulationResult) -> str:
    """What lies in a mapped file and so in no bar; empty where nothing does."""
    mapped = result.memory.mapped_bytes
    if not mapped:
        return ""
    return (
        f"base mapped: {format_bytes(mapped)} of frozen weights in a file; the system drops their "
        "pages and reads them again, and they count towards no limit"
    )


_LOOPS: Final = {"step": "steps with the step model", "train": "steps with the training model"}
_NATIVE: Final = {None: "", True: ", native kernels", False: ", without native kernels"}


def kit_words(memory: DeviceMemory, result: SimulationResult) -> str:
    """The kit, its threads and what its sessions share."""
    options = ", ONNX Runtime's default options" * (result.policy.session_options == "default")
    how = f"{_SHARING[memory.sharing]}, {_LOOPS[memory.loop]}{_NATIVE[memory.native]}{options}"
    return f"{memory.kit} kit, {counted(result.host.threads, 'thread')}, {how}"
