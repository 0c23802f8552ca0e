"""Cross-entropy of class numbers, or of probabilities of classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from odtpack.losses.common.base import (
    Ops,
    Target,
    Value,
    dims,
    log_softmax,
    rank,
    shaped,
    target_like,
    without_classes,
)
from odtpack.losses.nll import NegativeLogLikelihood
from odtpack.option import option

Labels = Literal["numbers", "probabilities"]


@dataclasses.dataclass(frozen=True)
class CrossEntropy(NegativeLogLikelihood):
    """-w[label] log softmax(prediction)[label], the prediction being logits [N, C, ...].

    With label smoothing e, (1 - e) of that plus e times the mean over classes c of
    -w[c] log softmax(prediction)[c]. Source: PyTorch's CrossEntropyLoss, after Szegedy et
    al. (2016).

    Labels that are probabilities q [N, C, ...], soft or one-hot, give -sum of w[c] q[c] log
    softmax(prediction)[c]. Smoothing makes q (1 - e) q + e / C; the mean is over all but the
    classes. So does PyTorch.
    """

    name = "cross_entropy"
    summary = "Cross-entropy of labels, from logits."
    formula = "-w[t] log softmax(y)[t], smoothed by `label_smoothing`"
    prediction = "logits [N, C, ...]"
    label_smoothing: float = option(
        0.0, "How much of a label is spread over all classes.", least=0, most=1
    )
    labels: Labels = option(
        "numbers",
        "What the labels are: numbers of classes, or `probabilities`, `target` [N, C, ...], soft "
        "or one-hot.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels == "probabilities" and self.ignore_index is not None:
            raise self._bad("ignore_index", "left out where the labels are probabilities")

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """Class numbers, or probabilities of the prediction's shape."""
        if self.labels == "numbers":
            return super().targets(predictions)
        self.class_axis(predictions[0])  # looks at the rank
        return (target_like(predictions[0]),)

    def label_facts(self, predictions: Sequence[Value]) -> dict[str, int]:
        return super().label_facts(predictions) if self.labels == "numbers" else {}

    def _sum_and_count(self, op: Ops, *values: Value) -> tuple[Value, Value | None]:
        if self.labels == "numbers":
            return super()._sum_and_count(op, *values)
        prediction, q = values
        log_p, axis = log_softmax(op, prediction)
        if axis != 1:
            q = op.transpose(q, 0, *range(2, rank(q)), 1)
        classes = self._class_weights(op, prediction)
        weighted = self._weighted(op, log_p, axis, classes)
        terms = op.Neg(op.reduce_sum(op.Mul(q, weighted), [axis], keepdims=False))
        terms = self._smooth(op, terms, log_p, axis, classes)
        return shaped(terms, without_classes(dims(prediction))), None

    def _log_probabilities(self, op: Ops, prediction: Value) -> tuple[Value, int]:
        return log_softmax(op, prediction)

    def _smooth(
        self, op: Ops, terms: Value, log_p: Value, axis: int, classes: Value | None
    ) -> Value:
        if not self.label_smoothing:
            return terms
        spread = op.reduce_mean(self._weighted(op, log_p, axis, classes), [axis], keepdims=False)
        smooth = self.label_smoothing
        return op.Sub(op.Mul(terms, 1 - smooth), op.Mul(spread, smooth))

    @staticmethod
    def _weighted(op: Ops, log_p: Value, axis: int, classes: Value | None) -> Value:
        if classes is None:
            return log_p
        beside = [1] * rank(log_p)
        beside[axis] = -1
        return op.Mul(log_p, op.reshape(classes, *beside))
