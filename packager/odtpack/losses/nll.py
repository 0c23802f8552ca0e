"""Negative log-likelihood of class numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from odtpack.losses.common.base import (
    Classes,
    Numbers,
    Ops,
    Target,
    Value,
    dims,
    facts_of_labels,
    rank,
    reduce,
    shape_text,
    shaped,
    without_classes,
)
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class NegativeLogLikelihood(Classes):
    """-w[label] prediction[label], the prediction being log-probabilities [N, C, ...].

    The mean divides by the sum of w[label] over the labels that count. Where none counts
    loss and gradient are 0.
    """

    name = "nll"
    summary = "Negative log-likelihood of labels, from log-probabilities."
    formula = "-w[t] y[t]"
    prediction = "log-probabilities [N, C, ...]"
    target = "`labels` [N, ...]"
    weight: Numbers | None = option(None, "A number for each class.", least=0, axes=1)
    ignore_index: int | None = option(None, "Label of samples that do not count.", whole=True)

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """Class numbers: the prediction's dimensions without those of the classes."""
        return (self.label_target(predictions[0]),)

    def assumption(self, predictions: Sequence[Value]) -> str | None:
        """On which axis the classes are, where there are more than two."""
        prediction = predictions[0]
        shape = dims(prediction)
        if len(shape) < 3 or self.layout is not None:
            return None
        axis = self.class_axis(prediction)
        which, how = ("axis 1", "as PyTorch does, ") if axis == 1 else ("the last axis", "")
        others = "where the classes are on the last axis, use --loss-option layout=NLC"
        return (
            f"{self.name} takes {which} of {prediction.name!r} {shape_text(shape)} for the "
            f"classes, {how}and labels {shape_text(without_classes(shape, axis))}"
            + (f"; {others}" if axis == 1 else "")
        )

    def label_facts(self, predictions: Sequence[Value]) -> dict[str, int]:
        """Number of classes, where it is known, and the label that does not count."""
        axis = self.class_axis(predictions[0])
        return facts_of_labels(predictions[0], axis, self.ignore_index)

    def terms(self, op: Ops, *values: Value) -> Value:
        return self._sum_and_count(op, *values)[0]

    def reduced(self, op: Ops, *values: Value) -> Value:
        """Write the terms and their reduction; the mean is over labels that count."""
        terms, weights = self._sum_and_count(op, *values)
        if self.reduction != "mean" or weights is None:
            return reduce(op, terms, self.reduction)
        axes = range(rank(terms))
        total = op.reduce_sum(terms, axes, keepdims=False)
        count = op.reduce_sum(weights, axes, keepdims=False)
        return shaped(op.Div(total, op.Where(op.Equal(count, 0), 1, count)), ())

    def _log_probabilities(self, op: Ops, prediction: Value) -> tuple[Value, int]:
        """Log-probabilities, and the axis of the classes."""
        return prediction, 1

    def _sum_and_count(self, op: Ops, *values: Value) -> tuple[Value, Value | None]:
        """Terms, and the weight of each; None where all are 1."""
        prediction, labels = values
        shape = without_classes(dims(prediction))
        log_p, axis = self._log_probabilities(op, prediction)
        labels = op.cast(labels, op.INT64)
        counts: Value | None = None
        if self.ignore_index is not None:
            counts = op.Not(op.Equal(labels, self.ignore_index))
            labels = op.Where(counts, labels, 0)
        classes = self._class_weights(op, prediction)
        weights = None if classes is None else op.Gather(classes, labels, axis=0)
        index = op.unsqueeze(labels, axis)
        terms = op.Neg(op.squeeze(op.GatherElements(log_p, index, axis=axis), axis))
        if weights is not None:
            terms = op.Mul(terms, weights)
        terms = self._smooth(op, terms, log_p, axis, classes)
        if counts is not None:
            # Not a product with 0: an ignored sample may hold anything.
            terms = op.Where(counts, terms, 0)
            ones = op.cast(counts, op.type_of(log_p))
            weights = ones if weights is None else op.Mul(weights, ones)
        return shaped(terms, shape), weights

    def _class_weights(self, op: Ops, prediction: Value) -> Value | None:
        if self.weight is None:
            return None
        array = np.asarray(self.weight, op.type_of(prediction).numpy())
        classes = dims(prediction)[1]
        if isinstance(classes, int) and classes != array.size:
            raise self._bad("weight", f"one number for each of the {classes} classes")
        return op.constant(array)

    def _smooth(
        self, op: Ops, terms: Value, log_p: Value, axis: int, classes: Value | None
    ) -> Value:
        return terms
