"""Losses: one function each, which writes the nodes from prediction and target to a scalar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from odtpack.autodiff.ops import Ops, dims_of
from odtpack.errors import OdtpackError

Writer = Callable[[Ops, ir.Value, ir.Value], ir.Value]


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss by name.

    Attributes:
        name: As the manifest and the command line have it.
        write: Writes the nodes; returns the loss, a scalar.
        labels: The target holds class numbers (INT64) instead of values like the prediction.
    """

    name: str
    write: Writer
    labels: bool = False

    @property
    def target_name(self) -> str:
        """Name of the graph input that the loss adds, as in the reference."""
        return "labels" if self.labels else "target"


def _rank(value: ir.Value) -> int:
    dims = dims_of(value)
    if dims is None:
        raise OdtpackError(
            "unknown-rank",
            f"the rank of the prediction {value.name!r} is unknown",
            hint="export the model with shapes",
        )
    return len(dims)


def _mean(op: Ops, value: ir.Value) -> ir.Value:
    return op.reduce_mean(value, range(_rank(value)), keepdims=False)


def _like(value: ir.Value, model: ir.Value) -> ir.Value:
    """Give an elementwise result the shape of its operand."""
    value.shape = model.shape
    return value


def cross_entropy(op: Ops, logits: ir.Value, labels: ir.Value) -> ir.Value:
    """Mean of -log softmax(logits)[label] over samples (and pixels).

    Args:
        op: Where to write.
        logits: [N, C, ...], classes on axis 1.
        labels: INT64 [N, ...], in 0 to C - 1.
    """
    rank = _rank(logits)
    axis = 1
    if op.opset < 13 and rank > 2:
        # Before opset 13 LogSoftmax takes every axis from `axis` on as one.
        axis = rank - 1
        log_p = op.LogSoftmax(op.transpose(logits, 0, *range(2, rank), 1), axis=axis)
    else:
        log_p = op.LogSoftmax(logits, axis=axis)
    picked = op.GatherElements(log_p, op.unsqueeze(labels, axis), axis=axis)
    return op.Neg(op.reduce_mean(picked, range(rank), keepdims=False))


def mean_squared_error(op: Ops, prediction: ir.Value, target: ir.Value) -> ir.Value:
    """Mean of (prediction - target)^2."""
    difference = _like(op.Sub(prediction, target), prediction)
    return _mean(op, _like(op.Mul(difference, difference), prediction))


def binary_cross_entropy_with_logits(op: Ops, logits: ir.Value, target: ir.Value) -> ir.Value:
    """Mean of softplus(x) - x t, which is -t log s(x) - (1 - t) log(1 - s(x)), never NaN."""
    terms = op.Sub(op.Softplus(logits), op.Mul(logits, target))
    return _mean(op, _like(terms, logits))


def l1(op: Ops, prediction: ir.Value, target: ir.Value) -> ir.Value:
    """Mean of |prediction - target|."""
    difference = _like(op.Abs(op.Sub(prediction, target)), prediction)
    return _mean(op, difference)


LOSSES = {
    loss.name: loss
    for loss in (
        Loss("mse", mean_squared_error),
        Loss("cross_entropy", cross_entropy, labels=True),
        Loss("bce_with_logits", binary_cross_entropy_with_logits),
        Loss("l1", l1),
    )
}


def target_input(loss: Loss, prediction: ir.Value) -> ir.Value:
    """The graph input for the target: labels drop the class axis of the prediction.

    Raises:
        OdtpackError: The prediction of a classification loss has fewer than two axes.
    """
    rank = _rank(prediction)
    dims = dims_of(prediction) or ()
    if not loss.labels:
        return ir.val(loss.target_name, dtype=prediction.dtype, shape=ir.Shape(dims))
    if rank < 2:
        raise OdtpackError(
            "prediction-rank",
            f"{loss.name} needs a prediction [N, C, ...]; {prediction.name!r} has rank {rank}",
        )
    return ir.val(loss.target_name, dtype=ir.DataType.INT64, shape=ir.Shape((dims[0], *dims[2:])))
