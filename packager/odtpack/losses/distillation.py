"""Distillation: a teacher's scores and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from odtpack.losses.common.base import (
    Classes,
    Ops,
    Target,
    Value,
    facts_of_labels,
    like,
    target_like,
)
from odtpack.losses.cross_entropy import CrossEntropy
from odtpack.losses.kl_div import KLDivergence, Teacher
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class Distillation(Classes):
    """a kl_div(prediction, target) + (1 - a) cross_entropy(prediction, labels).

    Source: Hinton, Vinyals and Dean (2015).
    """

    name = "distillation"
    summary = "Divergence from a teacher, and cross-entropy of labels."
    formula = "alpha kl_div + (1 - alpha) cross_entropy"
    prediction = "logits [N, C, ...]"
    target = "`labels`, `target`"
    alpha: float = option(0.5, "How much the teacher counts.", least=0, most=1)
    temperature: float = option(2.0, "Divides the logits.", above=0)
    teacher: Teacher = option("logits", "What the target holds.")
    ignore_index: int | None = option(
        None, "Label of samples for which only the teacher counts.", whole=True
    )

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """Class numbers, and the teacher's scores."""
        return (self.label_target(predictions[0]), target_like(predictions[0]))

    def label_facts(self, predictions: Sequence[Value]) -> dict[str, int]:
        """Number of classes, where it is known, and the label that does not count."""
        axis = self.class_axis(predictions[0])
        return facts_of_labels(predictions[0], axis, self.ignore_index)

    def terms(self, op: Ops, *values: Value) -> Value:
        return dataclasses.replace(self, reduction="none").reduced(op, *values)

    def reduced(self, op: Ops, *values: Value) -> Value:
        """Write both losses, each with its own mean."""
        prediction, labels, target = values
        soft = KLDivergence(self.reduction, temperature=self.temperature, teacher=self.teacher)
        hard = CrossEntropy(self.reduction, ignore_index=self.ignore_index)
        near = soft.reduced(op, prediction, target)
        right = hard.reduced(op, prediction, labels)
        return like(op.Add(op.Mul(near, self.alpha), op.Mul(right, 1 - self.alpha)), near)
