"""What losses over scores of classes [N, C, ...] share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odtpack.errors import OdtpackError
from odtpack.losses.common.base import Target, dims, rank, require_rank, shaped, whole_numbers

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Dims
    from odtpack.graph.ops import Ops


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
            f"{prediction.name!r} {shape_text(shape)} that axis has any length: the labels "
            "cannot be known from it",
            hint="transpose the output in the model so that the classes are on axis 1, or name "
            "another value as the loss's input",
        )
    return whole_numbers("labels", "labels", without_classes(shape))


def label_metadata(prediction: ir.Value, ignore_index: int | None) -> dict[str, str]:
    """What a runtime needs to check labels."""
    classes = dims(prediction)[1]
    found = {}
    if isinstance(classes, int):
        found["odtpack.class_count"] = str(classes)
    if ignore_index is not None:
        found["odtpack.ignore_index"] = str(ignore_index)
    return found


def shape_text(shape: Dims) -> str:
    """A shape for people."""
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def without_classes(shape: Dims) -> Dims:
    """The shape of labels: that of scores [N, C, ...] without axis 1."""
    return (shape[0], *shape[2:])
