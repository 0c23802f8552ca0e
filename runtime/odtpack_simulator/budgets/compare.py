"""What changed from one result to another: every metric of the package and of each device.

``docs/schemas/comparison.schema.json`` is made from these models. Pure: the same two
results and budgets give the same comparison.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, Literal

from pydantic import Field

from odtpack_simulator.budgets.budget_file import Budgets
from odtpack_simulator.budgets.budget_metric import BudgetMetric, Subject, shortened
from odtpack_simulator.budgets.judge import judge
from odtpack_simulator.budgets.metrics import of_scope
from odtpack_simulator.budgets.regression import chance, incomparable, same_host, same_subject
from odtpack_simulator.result.base import Text
from odtpack_simulator.result.result import Check, CheckUnit, SimulationResult, Verdict
from odtpack_simulator.values.part import Part

Direction = Literal[
    "better", "worse", "same", "within noise", "not compared", "known now", "unknown now"
]
"""``not compared``: both are known, and ``reason`` says why their difference means nothing."""

_SAME: Final = 5e-4  # of the base: shown with one decimal, it is 0.0 %


class Figure(Part):
    """One metric in both results, in ``unit``.

    ``change_percent`` is the change in percent of the base's magnitude; null where the base is 0
    or one of both is unknown. ``noise_percent``: changes up to it can be chance.
    """

    metric: Text
    title: Text
    unit: CheckUnit
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
    budgets and against the base, or by what needs no budget; null where there is no such device.
    """

    name: Text
    title: Text
    validated: bool
    presence: Literal["both", "new", "removed"]
    verdict_before: Verdict | None = None
    verdict: Verdict | None = None
    figures: list[Figure] = Field(default_factory=list)


class FailedCheck(Part):
    """A check of the head under the budgets that did not pass; without a device: the package."""

    device: Text | None
    check: Check


class Comparison(Part):
    """Head against base.

    Attributes:
        tool_version: Version of odtpack that measured the head.
        notes: What makes the results less comparable: data, schedule, policy, host, versions.
        package: Figures of the package.
        devices: Those of the head in their order, then those that only the base has.
        checks: What did not pass; empty without budgets.
        verdict: Of the head under the budgets and against the base; null without budgets.
    """

    schema_version: Literal[1] = 1
    tool_version: Text
    notes: list[Text]
    package: list[Figure]
    devices: list[DeviceComparison]
    checks: list[FailedCheck] = Field(default_factory=list)
    verdict: Verdict | None = None

    @property
    def over_budget(self) -> bool:
        """Whether a check of level ``error`` failed: exit code 1."""
        return self.verdict == "fail"

    def figures(self) -> list[tuple[DeviceComparison | None, Figure]]:
        """Every figure with its device (None: the package), in stored order."""
        whole: list[tuple[DeviceComparison | None, Figure]] = [(None, f) for f in self.package]
        return whole + [(device, figure) for device in self.devices for figure in device.figures]


def compare(
    base: SimulationResult, head: SimulationResult, budgets: Budgets | None = None
) -> Comparison:
    """Compare two results.

    Args:
        base: What was; its own checks do not count.
        head: What is.
        budgets: Limits to judge the head by, with the base as baseline.

    Raises:
        OdtpackError: The budgets name a device that is neither in the head nor shipped.
    """
    budgeted = budgets or Budgets()
    judged = judge(head, budgeted, baseline=base)
    verdicts = {device.name: device.verdict for device in judged.devices}
    verdicts_before = {
        device.name: device.verdict
        for device in judge(base, _of_devices(budgeted, base), baseline=base).devices
    }
    package = [
        figure
        for metric in of_scope("package")
        if (figure := _figure(metric, Subject(base), Subject(head))) is not None
    ]
    devices = []
    for device in head.devices:
        subject = Subject(head, device)
        before = same_subject(subject, base)
        found = [] if before is None else [_figure(m, before, subject) for m in of_scope("device")]
        devices.append(
            DeviceComparison(
                name=device.name,
                title=device.title,
                validated=device.validated,
                presence="new" if before is None else "both",
                verdict_before=verdicts_before.get(device.name),
                verdict=verdicts[device.name],
                figures=[figure for figure in found if figure is not None],
            )
        )
    kept = {device.name for device in head.devices}
    devices += [
        DeviceComparison(
            name=device.name,
            title=device.title,
            validated=device.validated,
            presence="removed",
            verdict_before=verdicts_before[device.name],
        )
        for device in base.devices
        if device.name not in kept
    ]
    checks: list[FailedCheck] = []
    verdict: Verdict | None = None
    if budgets is not None:
        verdict = judged.verdict
        checks = [
            FailedCheck(device=None if device is None else device.title, check=check)
            for device, check in judged.all_checks()
            if check.status != "pass"
        ]
    return Comparison(
        tool_version=head.tool_version,
        notes=_notes(base, head),
        package=package,
        devices=devices,
        checks=checks,
        verdict=verdict,
    )


def _of_devices(budgets: Budgets, result: SimulationResult) -> Budgets:
    """The budgets without tables of devices that a result does not have."""
    names = {device.name for device in result.devices}
    own = {name: section for name, section in budgets.devices.items() if name in names}
    return replace(budgets, devices=own)


def _figure(metric: BudgetMetric, base: Subject, head: Subject) -> Figure | None:
    """None where neither result knows the figure."""
    before, now = metric.read(base), metric.read(head)
    if before.actual is None and now.actual is None:
        return None
    direction: Direction
    change = noise = None
    reason: str | None = None
    if before.actual is None:
        direction, reason = "known now", before.text
    elif now.actual is None:
        direction, reason = "unknown now", now.text
    else:
        change, noise = _percent(now.actual - before.actual, before.actual), None
        reason = incomparable(metric, base, head)
        if reason is None:
            apart = chance(metric, base, head)
            noise = None if apart is None else _percent(apart, before.actual)
            direction = _direction(metric, before.actual, now.actual, apart)
        else:
            direction = "not compared"
    return Figure(
        metric=metric.key,
        title=metric.title,
        unit=metric.unit,
        better=metric.better,
        base=before.actual,
        head=now.actual,
        change_percent=change,
        noise_percent=noise,
        direction=direction,
        reason=None if reason is None else shortened(reason),
    )


def _direction(metric: BudgetMetric, base: float, head: float, noise: float | None) -> Direction:
    apart = abs(head - base)
    if apart <= _SAME * abs(base):
        return "same"
    if noise is not None and apart <= noise:
        return "within noise"
    return "better" if metric.keeps(head, base) else "worse"


def _percent(change: float, base: float) -> float | None:
    percent = 100.0 * change / abs(base) if base else math.inf
    return percent if math.isfinite(percent) else None


def _notes(base: SimulationResult, head: SimulationResult) -> list[str]:
    """What else differs, in one sentence each, the most serious first."""
    notes = []
    if not same_host(base.host, head.host):
        notes.append(
            "measured on different hosts, so times are not compared: "
            f"{_host(base)} against {_host(head)}"
        )
    pairs: list[tuple[str, object, object]] = [
        ("ONNX Runtime", base.host.onnxruntime, head.host.onnxruntime),
        ("odtpack", base.tool_version, head.tool_version),
        ("samples", base.data.samples, head.data.samples),
        ("held-out samples", base.data.held_out_samples, head.data.held_out_samples),
        ("seed", base.data.seed, head.data.seed),
        ("samples at once", base.data.batch_size, head.data.batch_size),
        ("accumulated batches", base.data.accumulation_steps, head.data.accumulation_steps),
        ("epochs", base.data.epochs, head.data.epochs),
        ("steps", base.data.steps, head.data.steps),
        ("loss", base.package.loss, head.package.loss),
        ("optimizer", base.package.optimizer, head.package.optimizer),
        ("metric", base.training.metric_name, head.training.metric_name),
        ("parameters", base.package.total_parameters, head.package.total_parameters),
        (
            "trained parameters",
            base.package.trainable_parameters,
            head.package.trainable_parameters,
        ),
        ("state", base.policy.state, head.policy.state),
        ("sessions a day", base.policy.sessions_per_day, head.policy.sessions_per_day),
        ("steps between saves", base.policy.save_every, head.policy.save_every),
        ("pieces of data", base.policy.pieces, head.policy.pieces),
        ("kit", base.policy.kit or "the usual", head.policy.kit or "the usual"),
        (
            "arenas of the sessions",
            base.memory.sharing or "not said",
            head.memory.sharing or "not said",
        ),
    ]
    notes += [
        f"{name}: {_value(before)} before, {_value(now)} now"
        for name, before, now in pairs
        if before != now
    ]
    if base.package.manifest_sha256 == head.package.manifest_sha256:
        notes.append("both results are of the same package")
    return notes


def _host(result: SimulationResult) -> str:
    host = result.host
    return f"{shortened(host.cpu, 100)} ({host.threads} of {host.cores} cores)"


def _value(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else shortened(str(value), 100)
