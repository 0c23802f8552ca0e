"""Operators that pick elements by index: the cotangent is added where it came from."""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp

non_differentiable("NonZero")

_REDUCTION_SINCE = 16  # opset in which the scatters learnt to add


def _zeros_like(ctx: Context, value: ir.Value) -> ir.Value:
    assert value.dtype is not None
    return ctx.op.zeros(ctx.op.shape_of(value), value.dtype)


@vjp("Gather")
def gather(ctx: Context) -> Cotangents:
    """Add each row of the cotangent to the row of the table that it was read from."""
    op, table, indices, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    axis, rank = ctx.axis(), ctx.rank(ctx.x())
    dims, index_rank = ctx.dims(table), ctx.rank(ctx.x(1))
    # Bring the gathered axes to the front: rows of the table, one for each index.
    moved = [
        *range(axis, axis + index_rank),
        *range(axis),
        *range(axis + index_rank, ctx.rank(dy) if dy.shape else rank - 1 + index_rank),
    ]
    front = op.transpose(dy, *moved)
    rest = [dim for i, dim in enumerate(dims) if i != axis]
    size = dims[axis]
    if not isinstance(size, int) or not all(isinstance(dim, int) for dim in rest):
        raise ctx.unsupported("the shape of its table is known only when the model runs")
    sizes = [int(dim) for dim in rest if dim is not None]
    rows = op.reshape(front, -1, *sizes)
    flat = op.reshape(indices, -1)
    assert table.dtype is not None
    if op.opset >= _REDUCTION_SINCE:
        zeros = op.zeros(op.ints(size, *sizes), table.dtype)
        summed = op.ScatterND(zeros, op.unsqueeze(flat, 1), rows, reduction="add")
    else:
        # Without an adding scatter: a product with the one-hot matrix of the indices.
        # OneHot reads negative indices from the end, as Gather does.
        import numpy as np

        values = op.constant(np.array([0, 1], table.dtype.numpy()))
        one_hot = op.OneHot(flat, op.constant(np.array(size, np.int64)), values, axis=0)
        one_hot.type = ir.TensorType(table.dtype)
        width = int(np.prod(sizes)) if sizes else 1
        summed = op.reshape(op.MatMul(one_hot, op.reshape(rows, -1, width)), size, *sizes)
    back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return [op.transpose(summed, *back), None]


@vjp("GatherElements")
def gather_elements(ctx: Context) -> Cotangents:
    op, axis = ctx.op, ctx.axis()
    zeros = _zeros_like(ctx, ctx.x())
    if op.opset >= _REDUCTION_SINCE:
        return [op.ScatterElements(zeros, ctx.x(1), ctx.dy(), axis=axis, reduction="add"), None]
    raise ctx.unsupported("before opset 16 no operator adds at repeated indices")


@vjp("GatherND", since=12)
def gather_nd(ctx: Context) -> Cotangents:
    op = ctx.op
    if op.opset < _REDUCTION_SINCE:
        raise ctx.unsupported("before opset 16 no operator adds at repeated indices")
    if ctx.int("batch_dims", 0):
        raise ctx.unsupported("batch_dims is not 0")
    return [op.ScatterND(_zeros_like(ctx, ctx.x()), ctx.x(1), ctx.dy(), reduction="add"), None]
