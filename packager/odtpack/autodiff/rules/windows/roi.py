"""Pools over regions: RoiAlign and MaxRoiPool.

The regions receive no gradient, as in PyTorch: detectors train them by losses of their own.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.scatter_add import add_at
from odtpack.autodiff.windows.sampling import length
from odtpack.graph.ops import Ops

_REDUCTION_SINCE = 16  # opset from which ScatterElements adds


@vjp("RoiAlign", since=10)
def roi_align(ctx: Context) -> Cotangents:
    """The mean or maximum over a grid of linearly interpolated samples in each bin.

    Symbols: R regions, C channels, bins P along an axis, S samples in a bin along an axis.
    """
    mode = ctx.string("mode", "avg")
    if mode not in ("avg", "max"):
        raise ctx.unsupported(f"mode {mode!r}")
    rows = _Samples(ctx, 0, ctx.int("output_height", 1))
    columns = _Samples(ctx, 1, ctx.int("output_width", 1))
    return [(_mean if mode == "avg" else _maximum)(ctx, rows, columns), None, None]


class _Samples:
    """Where the samples lie along one axis.

    Attributes:
        bins: Number P of bins.
        size: INT64 [1]: length of the plane.
        at: Positions [R, P, S], within the plane.
        inside: One for each sample that counts, else 0: [R, P, S].
        taken: Where there are fewer samples than S, which those are: BOOL [R, 1, S], else None.
        share: One by the number of samples in a bin: a number or [R, 1, 1].
    """

    def __init__(self, ctx: Context, axis: int, bins: int) -> None:
        op, rois, dtype = ctx.op, ctx.x(1), ctx.dtype(ctx.x())
        corners = op.Mul(op.cast(rois, dtype), ctx.float("spatial_scale", 1.0))
        default = "half_pixel" if op.opset >= _REDUCTION_SINCE else "output_half_pixel"
        half = ctx.string("coordinate_transformation_mode", default) == "half_pixel"
        if half:
            corners = op.Sub(corners, 0.5)
        start, end = (op.slice(corners, [1], [i], [i + 1]) for i in (1 - axis, 3 - axis))
        extent = op.Sub(end, start) if half else op.Max(op.Sub(end, start), 1.0)
        step = op.unsqueeze(op.Mul(extent, 1 / bins), 2)  # [R, 1, 1]
        each = ctx.int("sampling_ratio", 0)
        self.taken: ir.Value | None = None
        self.share: ir.Value | float = 1 / each if each > 0 else 0.0
        if each > 0:
            offset = op.constant(((np.arange(each) + 0.5) / each).astype(dtype.numpy()))
        else:
            count = op.Ceil(step)
            most = op.cast(op.ReduceMax(op.reshape(count, -1), keepdims=0), ir.DataType.INT64)
            zero, one = (op.constant(np.int64(value)) for value in (0, 1))
            number = op.cast(op.Range(zero, op.Max(most, one), one), dtype)
            self.taken = op.Less(number, count)
            count = op.Max(count, 1.0)
            offset, self.share = op.Div(op.Add(number, 0.5), count), op.Reciprocal(count)
        first = op.constant(np.arange(bins, dtype=dtype.numpy()).reshape(1, bins, 1))
        at = op.Add(op.unsqueeze(start, 2), op.Mul(op.Add(first, offset), step))
        self.bins, self.size = bins, length(op, ctx.x(), 2 + axis)
        last = op.Sub(op.cast(self.size, dtype), 1.0)
        near = op.Not(op.Or(op.Less(at, -1.0), op.Greater(at, op.Add(last, 1.0))))
        self.inside = op.cast(near, dtype)
        self.at = op.Min(op.Max(at, 0.0), last)

    def matrix(self, op: Ops) -> ir.Value:
        """[R, P, size]: how much of each element the mean over a bin's samples holds."""
        dtype = self.at.dtype or ir.DataType.FLOAT
        elements = _numbers(op, self.size, dtype)
        distance = op.Abs(op.Sub(op.unsqueeze(self.at, 3), elements))
        weight = op.Mul(op.Max(op.Sub(1.0, distance), 0.0), op.unsqueeze(self.inside, 3))
        if self.taken is not None:
            weight = op.Mul(weight, op.unsqueeze(op.cast(self.taken, dtype), 3))
        return op.Mul(op.reduce_sum(weight, [2], keepdims=False), self.share)

    def taps(self, op: Ops) -> tuple[ir.Value, ir.Value]:
        """Index and weight [R, P, 2 S] of the elements around each sample."""
        dtype = self.at.dtype or ir.DataType.FLOAT
        low = op.Floor(self.at)
        high = op.Min(op.Add(low, 1.0), op.Sub(op.cast(self.size, dtype), 1.0))
        far = op.Sub(self.at, low)
        index = op.cast(op.Concat(low, high, axis=2), ir.DataType.INT64)
        weight = op.Concat(op.Sub(1.0, far), far, axis=2)
        return index, op.Mul(weight, op.Concat(self.inside, self.inside, axis=2))


def _numbers(op: Ops, count: ir.Value, dtype: ir.DataType) -> ir.Value:
    """0, 1, ... below ``count`` [1]."""
    zero, one = (op.constant(np.int64(value)) for value in (0, 1))
    return op.cast(op.Range(zero, op.squeeze(count, 0), one), dtype)


def _mean(ctx: Context, rows: _Samples, columns: _Samples) -> ir.Value:
    """y[r] = A_r x[batch r] B_r^T, so dx[n] = sum over the r of n of A_r^T dy[r] B_r.

    The sum over regions and bins is one product of a matrix [N H, R P], which holds A_r
    for the sample that region r lies in, with the rest.
    """
    op, x, dy, dtype = ctx.op, ctx.x(), ctx.dy(), ctx.dtype(ctx.x())
    samples = length(op, x, 0)
    batch = op.unsqueeze(op.cast(ctx.x(2), ir.DataType.INT64), 1)
    mine = op.Equal(batch, _numbers(op, samples, ir.DataType.INT64))  # [R, N]
    mine = op.unsqueeze(op.transpose(op.cast(mine, dtype), 1, 0), 1, 3)  # [N, 1, R, 1]
    left = op.unsqueeze(op.transpose(rows.matrix(op), 2, 0, 1), 0)  # [1, H, R, P]
    height, width = rows.size, columns.size
    bands = op.Reshape(op.Mul(mine, left), op.Concat(op.Mul(samples, height), op.ints(-1), axis=0))
    right = op.MatMul(dy, op.unsqueeze(columns.matrix(op), 1))  # [R, C, P, W]
    channels = length(op, x, 1)
    flat = op.Concat(op.ints(-1), op.Mul(channels, width), axis=0)
    product = op.MatMul(bands, op.Reshape(op.transpose(right, 0, 2, 1, 3), flat))
    shape = op.Concat(samples, height, channels, width, axis=0)
    return op.transpose(op.Reshape(product, shape), 0, 2, 1, 3)


def _maximum(ctx: Context, rows: _Samples, columns: _Samples) -> ir.Value:
    """ONNX Runtime's maximum: over the weighted elements around the samples, not their sums."""
    op, x, dtype = ctx.op, ctx.x(), ctx.dtype(ctx.x())
    bins = rows.bins * columns.bins
    (row, by_row), (column, by_column) = rows.taps(op), columns.taps(op)
    start = op.Mul(row, columns.size)

    def join(kind: str, left: ir.Value, right: ir.Value) -> ir.Value:
        """[R, P, 1, S, 1] with [R, 1, Q, 1, T] to [R, P Q, S T]."""
        both = op.emit(kind, [op.unsqueeze(left, 2, 4), op.unsqueeze(right, 1, 3)])[0]
        merged = op.slice(op.Shape(both), [0], [3], [5])
        each = op.ReduceProd(merged, keepdims=1)
        return op.Reshape(both, op.Concat(op.ints(-1, bins), each, axis=0))

    index, weight = join("Add", start, column), join("Mul", by_row, by_column)
    channels = length(op, x, 1)
    table = op.Gather(op.reshape(x, 0, 0, -1), ctx.x(2), axis=0)  # [R, C, H W]
    flat = op.unsqueeze(op.reshape(index, 0, -1), 1)  # [R, 1, PQ ST]
    shape = op.Concat(op.Shape(ctx.x(2)), channels, op.slice(op.Shape(flat), [0], [2], [3]), axis=0)
    values = op.GatherElements(table, op.Expand(flat, shape), axis=2)
    each = op.slice(op.Shape(index), [0], [2], [3])
    shape = op.Concat(op.Shape(ctx.x(2)), channels, op.ints(bins), each, axis=0)
    values = op.Mul(op.Reshape(values, shape), op.unsqueeze(weight, 1))  # [R, C, PQ, ST]
    if rows.taken is not None and columns.taken is not None:
        both = [op.Concat(taken, taken, axis=2) for taken in (rows.taken, columns.taken)]
        taken = op.And(op.unsqueeze(both[0], 2, 4), op.unsqueeze(both[1], 1, 3))
        taken = op.unsqueeze(op.reshape(taken, 0, 1, -1), 1)
        values = op.Where(taken, values, op.constant(np.array(-np.inf, dtype.numpy())))
    best = op.ArgMax(values, axis=3, keepdims=0)  # [R, C, PQ]
    picked = op.transpose(best, 0, 2, 1)  # [R, PQ, C]
    place, factor = (op.GatherElements(v, picked, axis=2) for v in (index, weight))
    updates = op.Mul(op.reshape(ctx.dy(), 0, 0, -1), op.transpose(factor, 0, 2, 1))
    return _put(ctx, op.transpose(place, 0, 2, 1), updates, ctx.x(2))


def _put(ctx: Context, place: ir.Value, updates: ir.Value, batch: ir.Value) -> ir.Value:
    """Zeros like x, plus ``updates`` [R, C, P] at ``place`` in the planes of sample ``batch``."""
    op, x = ctx.op, ctx.x()
    if op.opset < _REDUCTION_SINCE:
        raise ctx.unsupported("before opset 16 no operator adds at repeated indices")
    channels = length(op, x, 1)
    plane = op.Mul(length(op, x, 2), length(op, x, 3))
    first = op.Mul(op.reshape(op.cast(batch, ir.DataType.INT64), -1, 1), channels)
    number = op.Add(first, _numbers(op, channels, ir.DataType.INT64))  # [R, C]
    flat = op.Add(place, op.unsqueeze(op.Mul(number, plane), 2))
    size = op.Mul(op.Mul(length(op, x, 0), channels), plane)
    summed = add_at(op, size, op.reshape(flat, -1), op.reshape(updates, -1))
    return op.reshape_like(summed, x)


@vjp("MaxRoiPool")
def max_roi_pool(ctx: Context) -> Cotangents:
    """The first maximum of each bin, found along the rows and then along the column of those."""
    op, x, rois = ctx.op, ctx.x(), ctx.x(1)
    bins = ctx.ints("pooled_shape", ())
    batch = op.reshape(op.cast(op.slice(rois, [1], [0], [1]), ir.DataType.INT64), -1)
    table = op.Gather(x, batch, axis=0)  # [R, C, H, W]
    lowest = op.constant(np.array(-np.inf, ctx.dtype(x).numpy()))
    columns = op.unsqueeze(_covered(ctx, 1, bins[1]), 1, 2)  # [R, 1, 1, Q, W]
    values = op.Where(columns, op.unsqueeze(table, 3), lowest)
    column = op.ArgMax(values, axis=4, keepdims=0)  # [R, C, H, Q]
    peaks = op.transpose(op.GatherElements(values, op.unsqueeze(column, 4), axis=4), 0, 1, 4, 3, 2)
    rows = op.unsqueeze(_covered(ctx, 0, bins[0]), 1, 3)  # [R, 1, P, 1, H]
    values = op.Where(rows, peaks, lowest)
    row = op.ArgMax(values, axis=4, keepdims=0)  # [R, C, P, Q]
    place = op.Add(op.Mul(row, length(op, x, 3)), op.GatherElements(column, row, axis=2))
    peak = op.squeeze(op.GatherElements(values, op.unsqueeze(row, 4), axis=4), 4)
    dy = op.Where(op.Equal(peak, lowest), 0, ctx.dy())
    count = math.prod(bins)
    place, updates = (op.reshape(value, 0, 0, count) for value in (place, dy))
    return [_put(ctx, place, updates, batch), None]


def _covered(ctx: Context, axis: int, bins: int) -> ir.Value:
    """BOOL [R, P, size]: which elements each bin covers; regions are rounded to elements."""
    op, dtype = ctx.op, ctx.dtype(ctx.x())
    scaled = op.Mul(op.cast(ctx.x(1), dtype), ctx.float("spatial_scale", 1.0))
    rounded = op.Mul(op.Sign(scaled), op.Floor(op.Add(op.Abs(scaled), 0.5)))
    start, end = (op.slice(rounded, [1], [i], [i + 1]) for i in (2 - axis, 4 - axis))
    step = op.Mul(op.Max(op.Add(op.Sub(end, start), 1.0), 1.0), 1 / bins)  # [R, 1]
    first = op.constant(np.arange(bins, dtype=dtype.numpy()).reshape(1, bins))
    low = op.Add(start, op.Floor(op.Mul(step, first)))
    high = op.Add(start, op.Ceil(op.Mul(step, op.Add(first, 1.0))))
    element = _numbers(op, length(op, ctx.x(), 2 + axis), dtype)
    low, high = op.unsqueeze(low, 2), op.unsqueeze(high, 2)
    return op.And(op.Not(op.Less(element, low)), op.Less(element, high))
