"""Operators that read or write elements by index."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff import context
from odtpack.autodiff.backward import add_at
from odtpack.autodiff.context import Context, Cotangents, non_differentiable, vjp
from odtpack.graph.graphs import Dims, Ops, wider

non_differentiable("NonZero")

# Operators that pick elements by index: the cotangent is added where it came from.
#
# ScatterND would be the natural adjoint, but ONNX Runtime runs it in parallel over the
# indices without a lock: where an index repeats, as tokens do in a batch, additions are
# lost. ScatterElements runs in one thread and loses none.

REDUCTION_SINCE = 16  # opset in which ScatterElements learnt to add


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
        return [context.place(op, dy, before, after, dims), None]
    flat = op.reshape(op.cast(indices, ir.DataType.INT64), -1)
    if op.opset >= REDUCTION_SINCE:
        return [_scatter(ctx, flat, dy, axis, "add"), None]
    # Without an adding scatter: once the rows are summed, any may be written last.
    wrapped = op.Mod(flat, op.Gather(op.shape_of(x), op.ints(axis), axis=0))
    rank = len(dims)
    first = op.transpose(dy, axis, *range(axis), *range(axis + 1, rank))
    rows = _sum_equal_rows(op, wrapped, op.Flatten(first, axis=1), ctx.dtype(x))
    back = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    summed = op.transpose(op.Reshape(rows, op.Shape(first)), *back)
    return [_scatter(ctx, flat, summed, axis), None]


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
    op, x, dtype = ctx.op, ctx.x(), ctx.dtype(ctx.x())
    rows = op.cast(rows, wider(dtype))
    column = op.reshape(indices, *[1] * axis, -1, *[1] * (ctx.rank(x) - 1 - axis))
    everywhere = op.Expand(column, op.Shape(rows))
    return op.cast(add_at(op, op.shape_of(x), everywhere, rows, axis, reduction), dtype)


def _sum_equal_rows(op: Ops, numbers: ir.Value, rows: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Every row of ``rows`` [n, width] becomes the sum of all rows with its number [n]."""
    same = op.Equal(op.unsqueeze(numbers, 1), op.unsqueeze(numbers, 0))
    return op.MatMul(op.cast(same, dtype), rows)


@vjp("GatherElements")
def gather_elements(ctx: Context) -> Cotangents:
    """Scatter along ``axis``; before opset 16 as a product with the one-hot indices."""
    op, x, indices, dy, axis = ctx.op, ctx.x(), ctx.x(1), ctx.dy(), ctx.axis()
    if op.opset >= REDUCTION_SINCE:
        return [add_at(op, op.shape_of(x), indices, dy, axis), None]
    dtype = ctx.dtype(x)
    depth = op.Gather(op.shape_of(x), op.ints(axis), axis=0)
    one_hot = op.OneHot(indices, depth, op.constant(np.array([0, 1], dtype.numpy())), axis=axis)
    one_hot.type = ir.TensorType(dtype)
    picked = op.Mul(one_hot, op.unsqueeze(dy, axis))
    dx = op.reduce_sum(picked, [axis + 1], keepdims=False)
    dims, index_dims = ctx.dims(x), ctx.dims(indices)
    if (*index_dims[:axis], *index_dims[axis + 1 :]) != (*dims[:axis], *dims[axis + 1 :]):
        missing = op.Sub(op.Shape(x), op.Shape(dx))  # the indices end before the data does
        dx = op.Pad(dx, op.Concat(op.ints(*[0] * len(dims)), missing, axis=0))
    return [dx, None]


@vjp("GatherND", since=12)
def gather_nd(ctx: Context) -> Cotangents:
    """Each index tuple becomes its row's number in the table; then as Gather."""
    op, x, dtype = ctx.op, ctx.x(), ctx.dtype(ctx.x())
    numbers, width = row_numbers(ctx, ctx.int("batch_dims", 0))
    rows = as_rows(op, ctx.dy(), width)
    flat = op.Expand(op.reshape(numbers, -1, 1), op.Shape(rows))
    zeros = as_rows(op, op.zeros(op.shape_of(x), wider(dtype)), width)
    reduction = "add" if op.opset >= REDUCTION_SINCE else None
    if reduction is None:
        rows = _sum_equal_rows(op, op.reshape(numbers, -1), rows, dtype)
    rows = op.cast(rows, wider(dtype))
    summed = op.ScatterElements(zeros, flat, rows, axis=0, reduction=reduction)
    return [op.reshape_like(op.cast(summed, dtype), x), None]


def row_numbers(ctx: Context, batch: int = 0) -> tuple[ir.Value, ir.Value | int]:
    """Number the rows that index tuples (input 1) mean in a table (input 0) of rows."""
    # Returns the number of each tuple's row, of the shape of the tuples; the length of a row, a
    # number or an INT64 vector of one element. A row is what a tuple leaves open.
    op, x, depth = ctx.op, ctx.x(), ctx.dims(ctx.x(1))[-1]
    if not isinstance(depth, int):
        raise ctx.unsupported("the length of its index tuples is known only when the model runs")
    dims, end = ctx.dims(x), batch + depth
    shape = op.shape_of(x)

    def count(first: int, last: int) -> ir.Value | int:
        known = [dim for dim in dims[first:last] if isinstance(dim, int)]
        if len(known) == last - first:
            return math.prod(known)
        return op.reduce_prod(op.slice(shape, [0], [first], [last]), [0])

    strides = join(op, *(count(axis + 1, end) for axis in range(batch, end)))
    wrapped = op.Mod(ctx.x(1), op.slice(shape, [0], [batch], [end]))
    numbers = op.reduce_sum(op.Mul(wrapped, strides), [-1], keepdims=False)
    if batch:
        leading = op.slice(shape, [0], [0], [batch])
        samples = op.Range(0, op.ReduceProd(leading, keepdims=0), 1)
        ones = op.ints(*[1] * (ctx.rank(ctx.x(1)) - 1 - batch))
        offsets = op.Reshape(op.Mul(samples, count(batch, end)), op.Concat(leading, ones, axis=0))
        numbers = op.Add(numbers, offsets)
    return numbers, count(end, len(dims))


def join(op: Ops, *parts: ir.Value | int) -> ir.Value:
    """An INT64 vector of numbers and of vectors that are known when the model runs."""
    known = [part for part in parts if isinstance(part, int)]
    if len(known) == len(parts):
        return op.ints(*known)
    return op.Concat(*(op.ints(p) if isinstance(p, int) else p for p in parts), axis=0)


def as_rows(op: Ops, value: ir.Value, width: ir.Value | int) -> ir.Value:
    """Reshape to rows of the length that :func:`row_numbers` gives."""
    return op.Reshape(value, join(op, -1, width))


@vjp("Compress", since=9)
def compress(ctx: Context) -> Cotangents:
    """Back to where the condition holds, along one axis or in the flattened input."""
    op, x = ctx.op, ctx.x()
    kept = op.reshape(op.NonZero(ctx.x(1)), -1)
    if "axis" in ctx.node.attributes:
        return [_scatter(ctx, kept, ctx.dy(), ctx.axis()), None]
    zeros = op.reshape(op.zeros(op.shape_of(x), ctx.dtype(x)), -1)
    return [op.reshape_like(op.ScatterElements(zeros, kept, ctx.dy(), axis=0), x), None]


@vjp("Unique", since=11)
def unique(ctx: Context) -> Cotangents:
    """Elements (slices, along an axis) that are equal share the cotangent of their value."""
    op, x, flat = ctx.op, ctx.x(), "axis" not in ctx.node.attributes
    inverse = ctx.extra_output(2, ir.DataType.INT64)
    counts = op.cast(ctx.extra_output(3, ir.DataType.INT64), ctx.dtype(x))
    axis = 0 if flat else ctx.axis()
    if not flat:
        counts = op.reshape(counts, -1, *[1] * (ctx.rank(x) - 1 - axis))
    dx = op.Gather(op.Div(ctx.dy(), counts), inverse, axis=axis)
    return op.reshape_like(dx, x) if flat else dx


@vjp("OneHot", since=11)
def one_hot(ctx: Context) -> Cotangents:
    """values = (off, on): each receives the cotangents of the elements that are it."""
    op, axis = ctx.op, ctx.int("axis", -1)
    sums = []
    for off, on in ((1, 0), (0, 1)):
        values = op.constant(np.array([off, on], ctx.dtype(ctx.x(2)).numpy()))
        chosen = op.OneHot(ctx.x(0), ctx.x(1), values, axis=axis)
        chosen.type = ir.TensorType(ctx.dtype(ctx.x(2)))
        sums.append(op.reduce_sum(op.reshape(op.Mul(ctx.dy(), chosen), -1), [0]))
    return [None, None, op.Concat(*sums, axis=0)]


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


# Operators that write elements by index.
#
# Where an index repeats without a reduction, which element is written last is undefined, and
# so is the gradient. Sums, products and extrema over repeated indices have exact gradients,
# also where factors are zero; elements that are an extremum together share the cotangent.

Parts = tuple[ir.Value | None, ir.Value | None]  # cotangents of data and of updates


@vjp("ScatterElements", "ScatterND", since=11)
def scatter(ctx: Context) -> Cotangents:
    """Updates read dy where they were written; data keeps it where it was not overwritten."""
    op, data, indices, updates, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.x(2), ctx.dy()
    reduction, elements = ctx.string("reduction", "none"), ctx.node.op_type == "ScatterElements"
    if reduction in ("mul", "max", "min"):
        if not elements:
            return _reduced_rows(ctx)
        written = _Written(op, data, indices, updates, ctx.y(), dy, ctx.axis())
        ddata, dupdates = _reduced(ctx, written)
        return [ddata, None, dupdates]
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


@dataclasses.dataclass(frozen=True)
class _Written:
    """Elements written along one axis: ``indices`` has the shape of ``updates``."""

    op: Ops
    data: ir.Value
    indices: ir.Value
    updates: ir.Value
    y: ir.Value
    dy: ir.Value
    axis: int

    def collect(self, updates: ir.Value, reduction: str) -> ir.Value:
        """What the updates that hit each element of the data make together; 0 or 1 if none."""
        op, neutral = self.op, np.ones if reduction == "mul" else np.zeros
        dtype = (self.data.dtype or ir.DataType.FLOAT).numpy()
        start = op.ConstantOfShape(op.shape_of(self.data), value=ir.tensor(neutral(1, dtype)))
        return op.ScatterElements(start, self.indices, updates, axis=self.axis, reduction=reduction)

    def read(self, value: ir.Value) -> ir.Value:
        """For each update the element of ``value`` that it hits."""
        return self.op.GatherElements(value, self.indices, axis=self.axis)


def _reduced_rows(ctx: Context) -> Cotangents:
    """ScatterND writes whole rows: the same with data and updates as tables of rows."""
    op, data, updates, (numbers, width) = ctx.op, ctx.x(0), ctx.x(2), row_numbers(ctx)
    given = (data, updates, ctx.y(), ctx.dy())
    table, rows, y, dy = (as_rows(op, value, width) for value in given)
    indices = op.Expand(op.reshape(numbers, -1, 1), op.Shape(rows))
    found = _reduced(ctx, _Written(op, table, indices, rows, y, dy, 0))
    ddata, dupdates = (
        None if value is None else op.reshape_like(value, like)
        for value, like in zip(found, (data, updates), strict=True)
    )
    return [ddata, None, dupdates]


def _reduced(ctx: Context, written: _Written) -> Parts:
    """An extremum is shared by all that attain it; a product see below."""
    if ctx.string("reduction", "none") == "mul":
        return _product(ctx, written)
    op, dtype = written.op, ctx.dtype(written.data)
    kept = op.cast(op.Equal(written.data, written.y), dtype)
    hits = op.cast(op.Equal(written.updates, written.read(written.y)), dtype)
    share = op.Div(written.dy, op.Add(kept, written.collect(hits, "add")))
    return op.Mul(kept, share), op.Mul(hits, written.read(share))


def _product(ctx: Context, written: _Written) -> Parts:
    """The slope of a factor is the product of the others."""
    # Where a factor u is zero, that is not y / u: so zeros are counted, and left out of the
    # product. A slope is zero if another factor than its own is.
    op, updates = written.op, written.updates
    ddata = dupdates = None
    if ctx.needs(0):
        ddata = op.Mul(written.dy, written.collect(updates, "mul"))
    if ctx.needs(2):
        zero = op.Equal(updates, 0)
        factors, zeros = op.Where(zero, 1, updates), op.cast(zero, ctx.dtype(updates))
        others = op.Sub(written.read(written.collect(zeros, "add")), zeros)
        weighted = op.Mul(op.Mul(written.dy, written.data), written.collect(factors, "mul"))
        slope = op.Div(written.read(weighted), factors)
        dupdates = op.Where(op.Equal(others, 0), slope, 0)
    return ddata, dupdates


@vjp("TensorScatter", since=24)
def tensor_scatter(ctx: Context) -> Cotangents:
    """A cache whose steps ``write_indices[b] + 0, 1, ...`` of sample b are overwritten."""
    op, cache, update, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    starts, rank = ctx.maybe_x(2), ctx.rank(cache)
    axis = ctx.axis(default=-2)
    dcache = dupdate = None
    if ctx.needs(0):
        zeros = op.zeros(op.shape_of(update), ctx.dtype(cache))
        attributes = {"axis": axis, "mode": ctx.string("mode", "linear")}
        dcache = op.TensorScatter(dy, zeros, starts, **attributes)
    if ctx.needs(1):
        zero, one = op.constant(np.array(0)), op.constant(np.array(1))
        length = op.squeeze(op.slice(op.shape_of(update), [0], [axis], [axis + 1]), 0)
        steps = op.reshape(op.Range(zero, length, one), -1, *[1] * (rank - 1 - axis))
        if starts is not None:
            steps = op.Add(op.reshape(starts, -1, *[1] * (rank - 1)), steps)
        if ctx.string("mode", "linear") == "circular":
            steps = op.Mod(steps, op.slice(op.shape_of(cache), [0], [axis], [axis + 1]))
        dupdate = op.GatherElements(dy, op.Expand(steps, op.shape_of(update)), axis=axis)
    return [dcache, dupdate, None]
