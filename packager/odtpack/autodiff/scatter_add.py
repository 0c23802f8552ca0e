"""Adds values at indices, which may repeat."""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph.graphs import wider
from odtpack.graph.ops import Ops


def add_at(
    op: Ops, shape: ir.Value, indices: ir.Value, updates: ir.Value, axis: int = 0
) -> ir.Value:
    """Zeros, plus each of ``updates`` at its index along ``axis``.

    ONNX Runtime adds no float16, so such sums run in float32, and are rounded once.

    Args:
        op: Writes the nodes; of opset 16 or later.
        shape: INT64 vector: shape of the result.
        indices: Indices of the shape of ``updates``.
        updates: Values to add; the result is of their type.
        axis: Axis of the result that the indices count along.
    """
    dtype = updates.dtype or ir.DataType.FLOAT
    wide = wider(dtype)
    summed = op.ScatterElements(
        op.zeros(shape, wide), indices, op.cast(updates, wide), axis=axis, reduction="add"
    )
    return op.cast(summed, dtype)
