"""Operators that pick elements by index: the cotangent is added where it came from.

ScatterND would be the natural adjoint, but ONNX Runtime runs it in parallel over the
indices without a lock: where an index repeats, as tokens do in a batch, additions are
lost. ScatterElements runs in one thread and loses none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.ops import Dims, wider
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp

non_differentiable("NonZero")

_REDUCTION_SINCE = 16  # opset in which ScatterElements learnt to add


@vjp("Gather")
def gather(ctx: Context) -> Cotangents:
    """y[before, j, after] = x[before, i[j], after], whatever the rank of the indices."""
    op, x, indices, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    dims, axis, size = ctx.dims(x), ctx.axis(), ctx.dims(x)[ctx.axis()]
    index_rank, known = ctx.rank(indices), ctx.constant(1)
    if index_rank == 0:
        dy = op.unsqueeze(dy, axis)
    elif index_rank > 1:
        dy = _join_axes(ctx, dims, axis)
    if known is not None and known.size == 1 and isinstance(size, int):
        before, after = [0] * len(dims), [0] * len(dims)
        before[axis] = int(known.item()) % size
        after[axis] = size - 1 - before[axis]
        return [op.pad(dy, before, after), None]
    flat = op.reshape(op.cast(indices, ir.DataType.INT64), -1)
    if op.opset >= _REDUCTION_SINCE:
        return [_scatter(ctx, flat, dy, axis, "add"), None]
    # Without an adding scatter: once the rows are summed, any may be written last.
    return [_scatter(ctx, flat, _sum_equal_rows(ctx, flat, dy, axis), axis), None]


def _join_axes(ctx: Context, dims: Dims, axis: int) -> ir.Value:
    """The cotangent of a Gather with the axes of the indices as one."""
    op, rest = ctx.op, (*dims[:axis], *dims[axis + 1 :])
    if all(isinstance(dim, int) for dim in rest):
        sizes = [int(dim) if isinstance(dim, int) else -1 for dim in dims]
        return op.reshape(ctx.dy(), *sizes[:axis], -1, *sizes[axis + 1 :])
    shape = op.Shape(ctx.x())
    parts = [op.ints(-1)]
    if axis > 0:
        parts.insert(0, op.slice(shape, [0], [0], [axis]))
    if axis < len(dims) - 1:
        parts.append(op.slice(shape, [0], [axis + 1], [len(dims)]))
    return op.Reshape(ctx.dy(), op.Concat(*parts, axis=0))


def _scatter(
    ctx: Context, indices: ir.Value, rows: ir.Value, axis: int, reduction: str | None = None
) -> ir.Value:
    """Zeros of the table's shape with slice j of ``rows`` along ``axis`` at ``indices[j]``."""
    op, x = ctx.op, ctx.x()
    column = op.reshape(indices, *[1] * axis, -1, *[1] * (ctx.rank(x) - 1 - axis))
    everywhere = op.Expand(column, op.Shape(rows))
    zeros = op.zeros(op.shape_of(x), wider(ctx.dtype(x)))
    return _scatter_into(ctx, zeros, everywhere, rows, axis, reduction)


def _scatter_into(
    ctx: Context,
    zeros: ir.Value,
    indices: ir.Value,
    updates: ir.Value,
    axis: int,
    reduction: str | None,
) -> ir.Value:
    """Updates in the type of ``zeros``, float32 for float16: ONNX Runtime adds no float16."""
    wide = zeros.dtype or ir.DataType.FLOAT
    updates = ctx.op.cast(updates, wide)
    summed = ctx.op.ScatterElements(zeros, indices, updates, axis=axis, reduction=reduction)
    return ctx.op.cast(summed, ctx.dtype(ctx.x()))


def _sum_equal_rows(ctx: Context, indices: ir.Value, dy: ir.Value, axis: int) -> ir.Value:
    """Every slice of ``dy`` along ``axis`` becomes the sum of all slices with its index."""
    op, x, rank = ctx.op, ctx.x(), ctx.rank(ctx.x())
    wrapped = op.Mod(indices, op.Gather(op.shape_of(x), op.ints(axis), axis=0))
    same = op.Equal(op.unsqueeze(wrapped, 1), op.unsqueeze(wrapped, 0))
    first = op.transpose(dy, axis, *range(axis), *range(axis + 1, rank))
    rows = op.MatMul(op.cast(same, ctx.dtype(x)), op.Flatten(first, axis=1))
    back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return op.transpose(op.Reshape(rows, op.Shape(first)), *back)


@vjp("GatherElements")
def gather_elements(ctx: Context) -> Cotangents:
    """Scatter along ``axis``; before opset 16 as a product with the one-hot indices."""
    op, x, indices, dy, axis = ctx.op, ctx.x(), ctx.x(1), ctx.dy(), ctx.axis()
    dtype = ctx.dtype(x)
    if op.opset >= _REDUCTION_SINCE:
        zeros = op.zeros(op.shape_of(x), wider(dtype))
        return [_scatter_into(ctx, zeros, indices, dy, axis, "add"), None]
    dims, index_dims = ctx.dims(x), ctx.dims(indices)
    if (*index_dims[:axis], *index_dims[axis + 1 :]) != (*dims[:axis], *dims[axis + 1 :]):
        raise ctx.unsupported("before opset 16 its indices must be as large as its data")
    depth = op.Gather(op.shape_of(x), op.ints(axis), axis=0)
    one_hot = op.OneHot(indices, depth, op.constant(np.array([0, 1], dtype.numpy())), axis=axis)
    one_hot.type = ir.TensorType(dtype)
    picked = op.Mul(one_hot, op.unsqueeze(dy, axis))
    return [op.reduce_sum(picked, [axis + 1], keepdims=False), None]


@vjp("GatherND", since=12)
def gather_nd(ctx: Context) -> Cotangents:
    """Each index tuple becomes its row's number in the table; then as Gather."""
    op, x, indices = ctx.op, ctx.x(), ctx.x(1)
    dims, batch, depth = ctx.dims(x), ctx.int("batch_dims", 0), ctx.dims(indices)[-1]
    if op.opset < _REDUCTION_SINCE:
        raise ctx.unsupported("before opset 16 no operator adds at repeated indices")
    if not isinstance(depth, int):
        raise ctx.unsupported("the length of its index tuples is known only when the model runs")
    end = batch + depth
    inner = [dim for dim in (*dims[max(1, batch) : end], *dims[end:]) if isinstance(dim, int)]
    if len(inner) != len(dims) - max(1, batch):
        raise ctx.unsupported("its sizes must be known (only the first axis may vary)")
    sizes = inner[: end - max(1, batch)]
    strides = [math.prod(sizes[i:]) for i in range(len(sizes) - depth + 1, len(sizes) + 1)]
    shape = op.shape_of(x)
    wrapped = op.Mod(indices, op.slice(shape, [0], [batch], [end]))
    number = op.reduce_sum(op.Mul(wrapped, op.ints(*strides)), [-1], keepdims=False)
    if batch:
        number = _add_batch_offsets(ctx, number, batch, math.prod(sizes))
    width = math.prod(dim for dim in dims[end:] if isinstance(dim, int))
    rows = op.reshape(ctx.dy(), -1, width)
    flat = op.Expand(op.reshape(number, -1, 1), op.Shape(rows))
    zeros = op.reshape(op.zeros(shape, wider(ctx.dtype(x))), -1, width)
    summed = _scatter_into(ctx, zeros, flat, rows, 0, "add")
    return [op.reshape_like(summed, x), None]


def _add_batch_offsets(ctx: Context, number: ir.Value, batch: int, rows: int) -> ir.Value:
    """Add the number of the first row of each sample of the batch axes."""
    op = ctx.op
    leading = op.slice(op.shape_of(ctx.x()), [0], [0], [batch])
    count = op.ReduceProd(leading, keepdims=0)
    samples = op.Range(op.constant(np.array(0)), count, op.constant(np.array(1)))
    ones = op.ints(*[1] * (ctx.rank(ctx.x(1)) - 1 - batch))
    offsets = op.Reshape(op.Mul(samples, rows), op.Concat(leading, ones, axis=0))
    return op.Add(number, offsets)


@vjp("ScatterElements", "ScatterND", since=11)
def scatter(ctx: Context) -> Cotangents:
    """Updates read dy where they were written; data keeps it where it was not overwritten."""
    op, data, indices, updates, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.x(2), ctx.dy()
    reduction, elements = ctx.string("reduction", "none"), ctx.node.op_type == "ScatterElements"
    if reduction not in ("none", "add"):
        raise ctx.unsupported(f"reduction {reduction!r}")
    axis: dict[str, Any] = {"axis": ctx.axis()} if elements else {}
    ddata = dupdates = None
    if ctx.needs(0) and reduction == "add":
        ddata = dy
    elif ctx.needs(0):
        zeros = op.zeros(op.shape_of(updates), ctx.dtype(data))
        ddata = op.emit(ctx.node.op_type, [dy, indices, zeros], **axis)[0]
    if ctx.needs(2):
        gather = "GatherElements" if elements else "GatherND"
        dupdates = op.emit(gather, [dy, indices], **axis)[0]
    return [ddata, None, dupdates]


@vjp("TopK", since=11)
def top_k(ctx: Context) -> Cotangents:
    """Back to where the values stood, which the second output says."""
    op, x = ctx.op, ctx.x()
    zeros = op.zeros(op.shape_of(x), ctx.dtype(x))
    axis = ctx.axis(default=-1)
    return [op.ScatterElements(zeros, ctx.y(1), ctx.dy(), axis=axis), None]


@vjp("ReverseSequence")
def reverse_sequence(ctx: Context) -> Cotangents:
    """Its own inverse."""
    axes = {"batch_axis": ctx.int("batch_axis", 1), "time_axis": ctx.int("time_axis", 0)}
    return [ctx.op.ReverseSequence(ctx.dy(), ctx.x(1), **axes), None]
