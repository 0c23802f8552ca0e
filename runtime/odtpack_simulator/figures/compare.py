"""What changed from one result to another: every figure of the whole and of each device.

``docs/schemas/comparison.schema.json`` is made from these models. Pure: the same two
results and budgets give the same comparison.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from pydantic import Field

from odtpack_simulator.figures.judge import for_each, judge
from odtpack_simulator.figures.limits import Budgets
from odtpack_simulator.figures.metric import Metric, chance, incomparable
from odtpack_simulator.figures.simulated import CHECKS, METRICS, figures_of
from odtpack_simulator.result import DeviceMemory, HostInfo, SimulationResult
from odtpack_simulator.values.figure import Check, Figure, Text, Unit, Verdict, shortened
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.units import format_bytes

Direction = Literal[
    "better", "worse", "same", "within noise", "not compared", "known now", "unknown now"
]
"""``not compared``: both are known, and ``reason`` says why their difference means nothing."""

_SAME: Final = 5e-4  # of the base: shown with one decimal, it is 0.0 %
Source = TypeVar("Source")


class Change(Part):
    """One metric in both results, in ``unit``.

    ``change_percent`` is the change in percent of the base's magnitude; null where the base is 0
    or one of both is unknown. ``noise_percent``: changes up to it can be chance.
    """

    metric: Text
    title: Text
    unit: Unit
    better: Literal["lower", "higher"]
    base: float | None
    head: float | None
    change_percent: float | None = None
    noise_percent: float | None = None
    direction: Direction
    reason: Text | None = None


class DeviceComparison(Part):
    """One device: its figures, or that only one of the results has it.

    ``verdict_before`` is that of the base and ``verdict`` that of the head, under the same
    budgets and against the base, or by what needs no budget; null where there is no such device,
    or where devices are not judged one by one.
    """

    name: Text
    title: Text
    validated: bool
    presence: Literal["both", "new", "removed"]
    verdict_before: Verdict | None = None
    verdict: Verdict | None = None
    figures: list[Change] = Field(default_factory=list)


class FailedCheck(Part):
    """A check of the head under the budgets that did not pass; without a device: the package."""

    device: Text | None
    title: Text
    check: Check


class Comparison(Part):
    """Head against base.

    Attributes:
        of: What was compared: simulations, or federations.
        tool_version: Version of odtpack that measured the head.
        notes: What makes the results less comparable: data, schedule, policy, host, versions.
        accuracy: Of federations, what rounds and days are counted until.
        package: Figures of the package, or of the federation.
        devices: Those of the head in their order, then those that only the base has.
        checks: What did not pass; empty without budgets.
        verdict_before: Of the base under its own budgets; null where it counts for nothing.
        verdict: Of the head under the budgets and against the base; null without budgets.
    """

    schema_version: Literal[2] = 2
    of: Literal["simulation", "fleet"] = "simulation"
    tool_version: Text
    notes: list[Text]
    accuracy: float | None = Field(default=None, ge=0, le=1)
    package: list[Change]
    devices: list[DeviceComparison]
    checks: list[FailedCheck] = Field(default_factory=list)
    verdict_before: Verdict | None = None
    verdict: Verdict | None = None

    @property
    def over_budget(self) -> bool:
        """Whether a check of level ``error`` failed: exit code 1."""
        return self.verdict == "fail"

    def figures(self) -> list[tuple[DeviceComparison | None, Change]]:
        """Every change with its device (None: the package), in stored order."""
        whole: list[tuple[DeviceComparison | None, Change]] = [(None, f) for f in self.package]
        return whole + [(device, figure) for device in self.devices for figure in device.figures]


def changes(
    metrics: Mapping[str, Metric[Source]], base: Iterable[Figure], head: Sequence[Figure]
) -> list[Change]:
    """How the figures of one subject changed, but for those that neither result knows."""
    before = {figure.metric: figure for figure in base}
    return [
        _change(metrics[now.metric], before[now.metric], now)
        for now in head
        if before[now.metric].value is not None or now.value is not None
    ]


def _change(metric: Metric[Source], before: Figure, now: Figure) -> Change:
    direction: Direction = "not compared"
    percent = noise = None
    reason: str | None = None
    if before.value is None:
        direction, reason = "better" if before.never else "known now", before.reason
    elif now.value is None:
        direction, reason = "worse" if now.never else "unknown now", now.reason
    else:
        percent = _percent(now.value - before.value, before.value)
        reason = incomparable(before, now)
        if reason is None:
            chances, apart = chance(metric, before, now), abs(now.value - before.value)
            noise = None if chances is None else _percent(chances, before.value)
            if apart <= _SAME * abs(before.value):
                direction = "same"
            elif chances is not None and apart <= chances:
                direction = "within noise"
            else:
                direction = "better" if metric.keeps(now.value, before.value) else "worse"
    return Change(
        metric=metric.key,
        title=metric.title.removesuffix(" floor"),  # it is the figure, and no limit
        unit=now.unit,
        better=metric.better,
        base=before.value,
        head=now.value,
        change_percent=percent,
        noise_percent=noise,
        direction=direction,
        reason=None if reason is None else shortened(reason),
    )


def _percent(change: float, base: float) -> float | None:
    percent = 100.0 * change / abs(base) if base else math.inf
    return percent if math.isfinite(percent) else None


class Compared(NamedTuple):
    """A device in one of two results, and what it is compared by."""

    title: str
    validated: bool
    figures: Sequence[Figure]
    verdict: Verdict | None = None


def compared_devices(
    metrics: Mapping[str, Metric[Source]],
    base: Mapping[str, Compared],
    head: Mapping[str, Compared],
) -> list[DeviceComparison]:
    """The devices of the head by their names, then those that only the base has."""
    found = []
    for name, each in {**head, **{k: v for k, v in base.items() if k not in head}}.items():
        before, now = base.get(name), head.get(name)
        found.append(
            DeviceComparison(
                name=name,
                title=each.title,
                validated=each.validated,
                presence="both" if before and now else "new" if now else "removed",
                verdict_before=before and before.verdict,
                verdict=now and now.verdict,
                figures=changes(metrics, before.figures, now.figures) if before and now else [],
            )
        )
    return found


def differences(pairs: Iterable[tuple[str, object, object]]) -> list[str]:
    """A sentence for each name whose values before and now differ."""
    return [
        f"{name}: {_value(before)} before, {_value(now)} now"
        for name, before, now in pairs
        if before != now
    ]


def _value(value: object) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value)) or "nothing"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else shortened(str(value), 100)


def compare(
    base: SimulationResult, head: SimulationResult, budgets: Budgets | None = None
) -> Comparison:
    """Compare two results."""
    # `base`: The baseline result; its own checks do not count.
    of_base, of_head = (None, None) if budgets is None else for_each(budgets, (base, head))
    judged_before, judged = judge(base, of_base, baseline=base), judge(head, of_head, baseline=base)
    before, now = (
        {
            d.name: Compared(d.title, d.validated, figures_of(result, d), d.verdict)
            for d in result.devices
        }
        for result in (judged_before, judged)
    )
    return Comparison(
        tool_version=head.tool_version,
        notes=_notes(judged_before, judged),
        package=changes(METRICS, figures_of(base), figures_of(head)),
        devices=compared_devices(METRICS, before, now),
        checks=[
            FailedCheck(
                device=None if device is None else device.title,
                title=CHECKS[check.metric].title,
                check=check,
            )
            for device, check in judged.all_checks()
            if check.status != "pass"
        ]
        if budgets is not None
        else [],
        verdict=None if budgets is None else judged.verdict,
    )


def _notes(base: SimulationResult, head: SimulationResult) -> list[str]:
    """What else differs, in one sentence each, the most serious first."""

    def host(of: HostInfo) -> tuple[str, int, int]:
        return of.cpu, of.threads, of.cores

    notes = []
    if host(base.host) != host(head.host):
        which = [
            f"{shortened(cpu, 100)} ({threads} of {cores} cores)"
            for cpu, threads, cores in (host(base.host), host(head.host))
        ]
        notes.append(
            f"measured on different hosts, so times are not compared: {' against '.join(which)}"
        )
    rows: tuple[tuple[str, Callable[[SimulationResult], object]], ...] = (
        ("ONNX Runtime", lambda r: r.host.onnxruntime),
        ("odtpack", lambda r: r.tool_version),
        ("samples", lambda r: r.data.samples),
        ("held-out samples", lambda r: r.data.held_out_samples),
        ("evaluated on", lambda r: "a file" if r.data.evaluated_apart else "a share of the data"),
        ("seed", lambda r: r.data.seed),
        ("samples at once", lambda r: r.data.batch_size),
        ("accumulated batches", lambda r: r.data.accumulation_steps),
        ("epochs", lambda r: r.data.epochs),
        ("steps", lambda r: r.data.steps),
        ("loss", lambda r: r.package.loss),
        ("optimizer", lambda r: r.package.optimizer),
        ("metric", lambda r: r.training.metric_name),
        ("parameters", lambda r: r.package.total_parameters),
        ("trained parameters", lambda r: r.package.trainable_parameters),
        ("state", lambda r: r.policy.state),
        ("sessions a day", lambda r: r.policy.sessions_per_day),
        ("steps between saves", lambda r: r.policy.save_every),
        ("pieces of data", lambda r: r.policy.pieces),
        ("kit", lambda r: r.policy.kit or "the usual"),
        ("loop", lambda r: r.policy.loop),
        ("session options", lambda r: r.policy.session_options),
        ("entitled to more memory", lambda r: "yes" if r.policy.entitled else "no"),
        ("native kernels", lambda r: "the kit's" if r.policy.native is None else r.policy.native),
        ("learning rate", lambda r: r.training.learning_rate),
        ("SHA-256 of the data", lambda r: r.data.sha256),
    )
    notes += differences((name, read(base), read(head)) for name, read in rows)
    memories = {device.name: device.memory for device in base.devices}
    pairs = [(memories[d.name], d.memory) for d in head.devices if d.name in memories]
    of_memory: tuple[tuple[str, Callable[[DeviceMemory], str]], ...] = (
        ("arenas of the sessions", lambda memory: memory.sharing),
        ("app around the training", lambda memory: format_bytes(memory.app_bytes)),
    )
    for name, of in of_memory:
        changed = [sides for each in pairs if (sides := (of(each[0]), of(each[1])))[0] != sides[1]]
        if changed:
            before, now = (sorted(set(side)) for side in zip(*changed, strict=True))
            notes += differences([(name, before, now)])
    if base.package.manifest_sha256 == head.package.manifest_sha256:
        notes.append("both results are of the same package")
    return notes
