"""Losses that compare a student's scores with a teacher's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import onnx_ir as ir

from odtpack.graph.ops import Ops
from odtpack.losses.base import (
    Loss,
    Reduction,
    Target,
    dims,
    like,
    rank,
    require_rank,
    shaped,
    target_like,
)
from odtpack.losses.classification import CrossEntropy, label_metadata, label_target, log_softmax
from odtpack.losses.options import check_choice, check_number, check_whole

_LEAST = 1e-37  # whose logarithm float32 holds

Teacher = Literal["logits", "probabilities"]


@dataclasses.dataclass(frozen=True)
class KLDivergence(Loss):
    """T^2 sum_c q_c (log q_c - log p_c), p = softmax(prediction / T), [N, C, ...].

    q is softmax(target / T) for a teacher that gives logits; for one that gives
    probabilities, target^(1 / T) divided by its sum over the classes. T^2 keeps the size of
    the gradient as T grows. The mean is over everything but the classes; for [N, C] it is
    PyTorch's "batchmean". Source: Hinton, Vinyals and Dean (2015).

    Attributes:
        temperature: T.
        teacher: What the target holds.
    """

    name: ClassVar[str] = "kl_div"
    temperature: float = 1.0
    teacher: Teacher = "logits"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "temperature", self.temperature, above=0)
        check_choice(self.name, "teacher", self.teacher, ("logits", "probabilities"))

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """The teacher's scores, of the prediction's shape."""
        require_rank(self.name, predictions[0], "[N, C, ...]", 2, None)
        return (target_like(predictions[0]),)

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the divergence of every sample."""
        prediction, target = values
        return divergence(op, prediction, target, self.temperature, self.teacher)


@dataclasses.dataclass(frozen=True)
class Distillation(Loss):
    """a kl_div(prediction, target) + (1 - a) cross_entropy(prediction, labels).

    Source: Hinton, Vinyals and Dean (2015).

    Attributes:
        alpha: a, from 0 to 1: how much the teacher counts.
        temperature: T of the divergence.
        teacher: What the target holds.
        ignore_index: Label of samples for which only the teacher counts.
    """

    name: ClassVar[str] = "distillation"
    alpha: float = 0.5
    temperature: float = 2.0
    teacher: Teacher = "logits"
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "alpha", self.alpha, at_least=0, at_most=1)
        check_number(self.name, "temperature", self.temperature, above=0)
        check_choice(self.name, "teacher", self.teacher, ("logits", "probabilities"))
        if self.ignore_index is not None:
            check_whole(self.name, "ignore_index", self.ignore_index)

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """Class numbers, and the teacher's scores."""
        return (label_target(self.name, predictions[0]), target_like(predictions[0]))

    def metadata(self, predictions: Sequence[ir.Value]) -> dict[str, str]:
        """Number of classes, where it is known, and the label that does not count."""
        return label_metadata(predictions[0], self.ignore_index)

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss of every sample."""
        return self._mix(op, "none", *values)

    def reduced(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write both losses, each with its own mean."""
        return self._mix(op, self.reduction, *values)

    def _mix(
        self,
        op: Ops,
        reduction: Reduction,
        prediction: ir.Value,
        labels: ir.Value,
        target: ir.Value,
    ) -> ir.Value:
        soft = KLDivergence(reduction, self.temperature, self.teacher)
        hard = CrossEntropy(reduction, ignore_index=self.ignore_index)
        near = soft.reduced(op, prediction, target)
        right = hard.reduced(op, prediction, labels)
        return like(op.Add(op.Mul(near, self.alpha), op.Mul(right, 1 - self.alpha)), near)


def divergence(
    op: Ops, prediction: ir.Value, target: ir.Value, temperature: float, teacher: Teacher
) -> ir.Value:
    """T^2 KL(teacher || student) of every sample: [N, ...]."""
    shape = dims(prediction)

    def tempered(value: ir.Value) -> ir.Value:
        return value if temperature == 1 else like(op.Mul(value, 1 / temperature), prediction)

    log_p, axis = log_softmax(op, tempered(prediction))
    if teacher == "logits":
        log_q, _ = log_softmax(op, like(tempered(target), prediction))
        q = op.Exp(log_q)
    else:
        q = target
        if axis != 1:
            q = op.transpose(q, 0, *range(2, rank(prediction)), 1)
        if temperature != 1:
            power = op.Pow(q, 1 / temperature)
            q = op.Div(power, op.reduce_sum(power, [axis]))
        log_q = op.Log(op.Max(q, _LEAST))
    terms = op.reduce_sum(op.Mul(q, op.Sub(log_q, log_p)), [axis], keepdims=False)
    if temperature != 1:
        terms = op.Mul(terms, temperature**2)
    return shaped(terms, (shape[0], *shape[2:]))
