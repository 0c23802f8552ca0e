"""Losses that compare scores of classes with class numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Dims
from odtpack.graph.ops import Ops
from odtpack.losses.base import Loss, Target, dims, rank, require_rank, shaped
from odtpack.losses.options import Numbers, check_number, check_whole, numbers


@dataclasses.dataclass(frozen=True)
class NegativeLogLikelihood(Loss):
    """-w[label] prediction[label], the prediction being log-probabilities [N, C, ...].

    The mean divides by the sum of w[label] over the labels that count. Where none counts
    loss and gradient are 0.

    Attributes:
        weight: w, one number a class; all 1 if None.
        ignore_index: Label of samples that do not count; it need not be a class.
    """

    name: ClassVar[str] = "nll"
    weight: Numbers | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None:
            weight = numbers(self.name, "weight", self.weight, rank=1)
            object.__setattr__(self, "weight", weight)
        if self.ignore_index is not None:
            check_whole(self.name, "ignore_index", self.ignore_index)

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """Class numbers: the prediction's dimensions without axis 1."""
        return (label_target(self.name, predictions[0]),)

    def assumption(self, predictions: Sequence[ir.Value]) -> str | None:
        """On which axis the classes are, where there are more than two."""
        prediction = predictions[0]
        shape = dims(prediction)
        if len(shape) < 3:
            return None
        return (
            f"{self.name} takes axis 1 of {prediction.name!r} {_text(shape)} for the classes, as "
            f"PyTorch does, and labels {_text(_without_classes(shape))}; where the classes are on "
            "the last axis, transpose the output in the model"
        )

    def metadata(self, predictions: Sequence[ir.Value]) -> dict[str, str]:
        """Number of classes, where it is known, and the label that does not count."""
        return label_metadata(predictions[0], self.ignore_index)

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss of every sample."""
        return self._sum_and_count(op, *values)[0]

    def reduced(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the terms and their reduction; the mean is over labels that count."""
        if self.reduction != "mean":
            return super().reduced(op, *values)
        terms, weights = self._sum_and_count(op, *values)
        axes = range(rank(terms))
        if weights is None:
            return shaped(op.reduce_mean(terms, axes, keepdims=False), ())
        total = op.reduce_sum(terms, axes, keepdims=False)
        count = op.reduce_sum(weights, axes, keepdims=False)
        return shaped(op.Div(total, op.Where(op.Equal(count, 0), 1, count)), ())

    def _log_probabilities(self, op: Ops, prediction: ir.Value) -> tuple[ir.Value, int]:
        """Log-probabilities, and the axis of the classes."""
        return prediction, 1

    def _sum_and_count(self, op: Ops, *values: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Terms, and the weight of each; None where all are 1."""
        prediction, labels = values
        shape = _without_classes(dims(prediction))
        log_p, axis = self._log_probabilities(op, prediction)
        labels = op.cast(labels, ir.DataType.INT64)
        counts: ir.Value | None = None
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
            ones = op.cast(counts, log_p.dtype or ir.DataType.FLOAT)
            weights = ones if weights is None else op.Mul(weights, ones)
        return shaped(terms, shape), weights

    def _class_weights(self, op: Ops, prediction: ir.Value) -> ir.Value | None:
        if self.weight is None:
            return None
        array = np.asarray(self.weight, (prediction.dtype or ir.DataType.FLOAT).numpy())
        classes = dims(prediction)[1]
        if isinstance(classes, int) and classes != array.size:
            raise self._bad("weight", f"one number for each of the {classes} classes")
        return op.constant(array)

    def _smooth(
        self,
        op: Ops,
        terms: ir.Value,
        log_p: ir.Value,
        axis: int,
        classes: ir.Value | None,
    ) -> ir.Value:
        return terms


@dataclasses.dataclass(frozen=True)
class CrossEntropy(NegativeLogLikelihood):
    """-w[label] log softmax(prediction)[label], the prediction being logits [N, C, ...].

    With label smoothing e, (1 - e) of that plus e times the mean over classes c of
    -w[c] log softmax(prediction)[c]. Source: PyTorch's CrossEntropyLoss, after Szegedy et
    al. (2016).

    Attributes:
        label_smoothing: e, from 0 to 1.
    """

    name: ClassVar[str] = "cross_entropy"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        smoothing = self.label_smoothing
        check_number(self.name, "label_smoothing", smoothing, at_least=0, at_most=1)

    def _log_probabilities(self, op: Ops, prediction: ir.Value) -> tuple[ir.Value, int]:
        return log_softmax(op, prediction)

    def _smooth(
        self,
        op: Ops,
        terms: ir.Value,
        log_p: ir.Value,
        axis: int,
        classes: ir.Value | None,
    ) -> ir.Value:
        if not self.label_smoothing:
            return terms
        if classes is not None:
            beside = [1] * rank(log_p)
            beside[axis] = -1
            log_p = op.Mul(log_p, op.reshape(classes, *beside))
        spread = op.reduce_mean(log_p, [axis], keepdims=False)
        smooth = self.label_smoothing
        return op.Sub(op.Mul(terms, 1 - smooth), op.Mul(spread, smooth))


def log_softmax(op: Ops, logits: ir.Value) -> tuple[ir.Value, int]:
    """Log-probabilities of logits [N, C, ...], and the axis on which the classes are."""
    axes = rank(logits)
    if op.opset < 13 and axes > 2:
        # Before opset 13 LogSoftmax takes every axis from `axis` on as one.
        shape = dims(logits)
        moved = op.transpose(logits, 0, *range(2, axes), 1)
        log_p = op.LogSoftmax(moved, axis=axes - 1)
        return shaped(log_p, (shape[0], *shape[2:], shape[1])), axes - 1
    log_p = op.LogSoftmax(logits, axis=1)
    log_p.shape = logits.shape
    return log_p, 1


def label_target(loss: str, prediction: ir.Value) -> Target:
    """The graph input for class numbers: they drop the class axis of the prediction.

    Raises:
        OdtpackError: The prediction has fewer than two axes.
    """
    require_rank(loss, prediction, "[N, C, ...]", 2, None)
    shape = dims(prediction)
    if not isinstance(shape[1], int) and any(isinstance(dim, int) for dim in shape[2:]):
        raise OdtpackError(
            "classes-unknown",
            f"{loss} takes axis 1 of its prediction [N, C, ...] for the classes, and of "
            f"{prediction.name!r} {_text(shape)} that axis has any length: the labels cannot be "
            "known from it",
        )
    return Target("labels", "labels", ir.DataType.INT64, _without_classes(dims(prediction)))


def label_metadata(prediction: ir.Value, ignore_index: int | None) -> dict[str, str]:
    """What a runtime needs to check labels."""
    classes = dims(prediction)[1]
    found = {}
    if isinstance(classes, int):
        found["odtpack.class_count"] = str(classes)
    if ignore_index is not None:
        found["odtpack.ignore_index"] = str(ignore_index)
    return found


def _text(shape: Dims) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def _without_classes(shape: Dims) -> Dims:
    return (shape[0], *shape[2:])
