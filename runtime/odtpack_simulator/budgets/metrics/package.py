"""Metrics of a package, the same on every device: its size, and what it learned."""

from __future__ import annotations

from typing import Final

from odtpack_simulator.budgets import advice
from odtpack_simulator.budgets.budget_metric import BudgetMetric, Reading, Subject, shortened
from odtpack_simulator.values.units import format_bytes, format_number, format_percent


def _package_size(subject: Subject) -> Reading:
    size = subject.result.package.package_bytes
    return Reading(size, f"the package takes {format_bytes(size)}")


def _adapter_size(subject: Subject) -> Reading:
    size = subject.result.package.adapter_bytes
    if size is None:
        return Reading(None, "the package trains no adapter")
    return Reading(size, f"the adapter takes {format_bytes(size)}")


def _final_loss(subject: Subject) -> Reading:
    training = subject.result.training
    where = "on held-out samples"
    loss = training.eval_loss_after
    if loss is None and subject.result.data.held_out_samples == 0 and training.losses:
        loss, where = training.losses[-1], "of the last step"
    text = "no final loss" if loss is None else f"the loss {where} is {format_number(loss)}"
    return Reading(loss, text, basis=where)


def _metric(subject: Subject) -> Reading:
    training = subject.result.training
    name = shortened(training.metric_name or "metric", 100)
    if training.metric_after is None:
        return Reading(None, f"no {name} at the end")
    shown = format_percent if name == "accuracy" else format_number
    return Reading(
        training.metric_after,
        f"{name} is {shown(training.metric_after)}",
        basis=name,
        share=name == "accuracy",
    )


def _metric_noise(base: Subject, head: Subject) -> float | None:
    """How far the head's metric is from the end of its interval that looks at the base's."""
    interval = head.result.training.metric_interval
    after, before = head.result.training.metric_after, base.result.training.metric_after
    if interval is None or after is None or before is None:
        return None
    return max(0.0, after - interval[0] if before < after else interval[1] - after)


METRICS: Final = (
    BudgetMetric(
        key="package_size",
        title="Package size",
        unit="B",
        scope="package",
        topic="Package",
        meaning="Bytes of all files of the package together.",
        example="12 MB",
        read=_package_size,
        advise=lambda subject, _: advice.for_package_size(subject.result),
    ),
    BudgetMetric(
        key="adapter_size",
        title="Adapter size",
        unit="B",
        scope="package",
        topic="Package",
        meaning="Bytes of the adapter's parameters: what a device saves beside the optimizer's "
        "state, and sends.",
        example="5 MB",
        read=_adapter_size,
        advise=lambda subject, _: advice.for_adapter_size(subject.result),
        suggested=False,
    ),
    BudgetMetric(
        key="final_loss",
        title="Final loss",
        unit="1",
        scope="package",
        topic="Metric",
        meaning="Loss on the held-out samples at the end, or of the last step where none are "
        "held out.",
        example="0.5",
        read=_final_loss,
        advise=lambda subject, _: advice.for_learning(subject.result),
    ),
    BudgetMetric(
        key="accuracy_floor",
        title="Accuracy floor",
        unit="1",
        scope="package",
        topic="Metric",
        headline=True,
        better="higher",
        meaning="Smallest metric on the held-out samples at the end.",
        example="0.9",
        read=_metric,
        advise=lambda subject, _: advice.for_learning(subject.result),
        noise=_metric_noise,
    ),
)
