"""Divergence of a student's scores from a teacher's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from odtpack.losses.common.base import (
    Classes,
    Ops,
    Target,
    Value,
    dims,
    like,
    log_softmax,
    rank,
    shaped,
    target_like,
    without_classes,
)
from odtpack.option import option

_LEAST = 1e-37  # whose logarithm float32 holds

Teacher = Literal["logits", "probabilities"]


@dataclasses.dataclass(frozen=True)
class KLDivergence(Classes):
    """T^2 sum_c q_c (log q_c - log p_c), p = softmax(prediction / T), [N, C, ...].

    q is softmax(target / T) for a teacher that gives logits; for one that gives
    probabilities, target^(1 / T) divided by its sum over the classes. T^2 keeps the size of
    the gradient as T grows. The mean is over everything but the classes; for [N, C] it is
    PyTorch's "batchmean". Source: Hinton, Vinyals and Dean (2015).
    """

    name = "kl_div"
    summary = "Divergence from a teacher."
    formula = "T² Σ q (log q - log softmax(y/T)), q the teacher's softmax(t/T)"
    prediction = "logits [N, C, ...]"
    temperature: float = option(1.0, "Divides the logits.", above=0)
    teacher: Teacher = option("logits", "What the target holds.")

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """The teacher's scores, of the prediction's shape."""
        self.class_axis(predictions[0])  # looks at the rank
        return (target_like(predictions[0]),)

    def terms(self, op: Ops, *values: Value) -> Value:
        (prediction, q), temperature = values, self.temperature

        def tempered(value: Value) -> Value:
            return value if temperature == 1 else like(op.Mul(value, 1 / temperature), prediction)

        log_p, axis = log_softmax(op, tempered(prediction))
        if self.teacher == "logits":
            log_q, _ = log_softmax(op, like(tempered(q), prediction))
            q = op.Exp(log_q)
        else:
            if axis != 1:
                q = op.transpose(q, 0, *range(2, rank(prediction)), 1)
            if temperature != 1:
                power = op.Pow(q, 1 / temperature)
                q = op.Div(power, op.reduce_sum(power, [axis]))
            log_q = op.Log(op.Max(q, _LEAST))
        terms = op.reduce_sum(op.Mul(q, op.Sub(log_q, log_p)), [axis], keepdims=False)
        if temperature != 1:
            terms = op.Mul(terms, temperature**2)
        return shaped(terms, without_classes(dims(prediction)))
