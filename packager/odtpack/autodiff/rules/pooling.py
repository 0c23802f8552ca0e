"""Pooling, unpooling, and pools over regions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff import windows
from odtpack.autodiff.backward import add_at
from odtpack.autodiff.context import Context, Cotangents, vjp
from odtpack.autodiff.rules.index import REDUCTION_SINCE
from odtpack.autodiff.sampling import length, numbers
from odtpack.autodiff.windows import (
    Windows,
    check_lengths,
    padding,
    pool_windows,
    transposed_convolution,
)
from odtpack.graph.graphs import Ops

# Pooling. A maximum gives its cotangent to the first element that attains it.

MANY_TAPS = 16  # beyond which MaxPool's indices are quicker than comparing with each
TOO_MANY_TAPS = 1024  # to write nodes for each


@vjp("MaxPool", since=8)
def max_pool(ctx: Context) -> Cotangents:
    """Find maxima by a second pool where windows tile the plane, else by MaxPool's own indices."""
    # Asking the kernel for its indices output makes it 6 to 25 times slower than without, on all
    # platforms that have a vectorized MaxPool. But the nodes that compare the output with each tap
    # of the input, as before opset 16, take twice as long as that, and several times the memory.
    kernel = ctx.ints("kernel_shape", ())
    if math.prod(kernel) > MANY_TAPS and ctx.op.opset >= REDUCTION_SINCE:
        return _scatter_by_index(ctx)
    if math.prod(kernel) > TOO_MANY_TAPS:
        raise ctx.unsupported(
            f"before opset {REDUCTION_SINCE} a window of {math.prod(kernel)} elements is too large "
            "(export the model with opset 17 or newer)"
        )
    if windows.is_open(ctx, ctx.x()):
        return windows.scatter_maxima(ctx, windows.open_windows(ctx, kernel))
    win = pool_windows(ctx)
    windows.check_pool(ctx, win)
    tiled = win.rank == 2 and win.kernel[0] == win.kernel[1] and win.tiles
    exact = win.size[0] * win.size[-1] < 1 << 24  # positions in a plane, as float32
    if tiled and exact and ctx.x().dtype == ir.DataType.FLOAT:
        return _unpool(ctx, win)
    return _scatter_by_index(ctx) if ctx.op.opset >= REDUCTION_SINCE else _scatter_taps(ctx, win)


def _unpool(ctx: Context, win: Windows) -> ir.Value:
    """Windows that tile the plane: find each maximum's position, then MaxUnpool."""
    # The positions are found in the forward pass, after the pool, so that they and not the pool's
    # input, several times their size, wait in memory for the backward pass.
    op, x, y = ctx.op, ctx.x(), ctx.y()
    plane = math.prod(win.size)
    readers = list(y.consumers())
    with op.after(ctx.node):
        samples = op.Gather(op.Shape(y), op.ints(0), axis=0)  # [1]
        planes = op.squeeze(op.Mul(samples, op.ints(win.channels)), 0)
        numbers = op.Range(op.constant(np.int64(1)), op.Add(planes, 1), op.constant(np.int64(1)))
        end = op.Mul(numbers, op.constant(np.int64(plane)))
        end.type = ir.TensorType(ir.DataType.INT64)
        # As integers from here on: a position in the whole tensor may exceed float32.
        to_end = op.cast(_first_maximum(op, win, x, y), ir.DataType.INT64)
        position = op.Sub(op.reshape(end, -1, win.channels, 1, 1), to_end)
        op.run_before(position, y, readers)
    # Not Shape(x): x would have to wait for it.
    shape = op.Concat(samples, op.ints(win.channels, *win.size), axis=0)
    return op.MaxUnpool(ctx.dy(), position, shape, kernel_shape=win.kernel, strides=win.strides)


def _first_maximum(op: Ops, win: Windows, x: ir.Value, y: ir.Value) -> ir.Value:
    """Elements from each window's first maximum to the end of the plane, as float32."""
    # Every element that equals its window's maximum gets that number, all others 0; the first of a
    # window has the largest, which one more pool finds. A window without any, which holds NaN,
    # takes the last element of the plane.
    peaks = enlarged(op, y, win.strides)
    plane = np.arange(math.prod(win.size), 0, -1, dtype=np.float32).reshape(win.size)
    hits = op.cast(op.Equal(x, peaks), ir.DataType.FLOAT)
    numbered = op.Mul(hits, op.constant(plane))
    return op.Max(op.MaxPool(numbered, kernel_shape=win.kernel, strides=win.strides), 1)


def enlarged(op: Ops, value: ir.Value | None, strides: Sequence[int]) -> ir.Value:
    """Every element of [N, C, h, w] as often as windows are steps apart."""
    scales = op.constant(np.array([1, 1, *strides], np.float32))
    region = None if op.opset >= 13 else op.constant(np.empty(0, np.float32))
    return op.Resize(
        value, region, scales,
        mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip


def _scatter_by_index(ctx: Context) -> ir.Value:
    """Windows of any size: add each cotangent up at the index that the kernel reports."""
    # A window that sees only padding or minus infinity reports none, and its maximum is the lowest
    # number.
    op, x, y, dy = ctx.op, ctx.x(), ctx.y(), ctx.dy()
    check_lengths(ctx, len(ctx.ints("kernel_shape", ())), ctx.rank(x) - 2)
    if ctx.int("storage_order", 0):  # which only says how indices count
        names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
        given: dict[str, Any] = {n: ctx.node.attributes.get(n) for n in names}
        index = op.emit("MaxPool", [x], outputs=2, **given)[1]
        index.type = ir.TensorType(ir.DataType.INT64)
    else:
        index = ctx.extra_output(1, ir.DataType.INT64, ctx.dims(y))
    lowest = float(np.finfo(ctx.dtype(x).numpy()).min)
    found = op.reshape(op.Where(op.Greater(y, lowest), dy, 0), -1)
    index = op.reshape(op.Max(index, op.constant(np.int64(0))), -1)
    sizes = [dim for dim in ctx.dims(x)[1:] if isinstance(dim, int)]
    if len(sizes) == ctx.rank(x) - 1:
        # Not Shape(x): x would have to wait for it.
        shape = op.Concat(op.Gather(op.Shape(dy), op.ints(0), axis=0), op.ints(*sizes), axis=0)
    else:
        shape = op.Shape(x)
    size = op.ReduceProd(shape, keepdims=1)
    return op.Reshape(add_at(op, size, index, found), shape)


def _scatter_taps(ctx: Context, win: Windows) -> ir.Value:
    """Any windows: split the cotangent among the taps, then one transposed convolution."""
    op, x, y = ctx.op, ctx.x(), ctx.y()
    dtype = ctx.dtype(x)
    pads = op.ints(0, 0, *win.before, 0, 0, *win.after)
    lowest = op.constant(np.array(-np.inf, dtype.numpy()))
    padded = op.Pad(x, pads, lowest) if any(win.before + win.after) else x
    parts, left = [], ctx.dy()
    for tap in win.taps():
        hit = op.cast(op.Equal(win.tap(op, padded, win.spatial, tap), y), dtype)
        part = op.Mul(hit, left)
        left = op.Sub(left, part)
        parts.append(op.unsqueeze(part, 2))
    count = len(parts)
    joined = op.Concat(*parts, axis=2) if count > 1 else parts[0]
    joined = op.reshape(joined, -1, win.channels * count, *win.out)
    # Input channel (c, t) of group c lands on the window's element t.
    select = np.tile(np.eye(count), (win.channels, 1)).reshape(-1, 1, *win.kernel)
    return transposed_convolution(op, win, op.constant(select.astype(dtype.numpy())), joined)


@vjp("AveragePool", since=7)
def average_pool(ctx: Context) -> Cotangents:
    """Every element of a window receives the same share."""
    op, dy = ctx.op, ctx.dy()
    if windows.is_open(ctx, ctx.x()):
        on = windows.open_windows(ctx, ctx.ints("kernel_shape", ()))
        return windows.scatter_sums(ctx, on, op.Div(dy, windows.counts(ctx, on)))
    win = pool_windows(ctx)
    windows.check_pool(ctx, win)
    dtype = ctx.dtype(ctx.x())
    number = counts(ctx, win)
    share = np.float64(1.0)
    if np.all(number == number.flat[0]):
        share = 1.0 / number.flat[0]
    else:
        dy = op.Mul(dy, op.constant((1.0 / number)[None, None].astype(dtype.numpy())))
    weight = np.full((win.channels, 1, *win.kernel), share, dtype.numpy())
    return transposed_convolution(op, win, op.constant(weight), dy)


def counts(ctx: Context, win: Windows) -> np.ndarray:
    """Number of elements that each window's mean runs over, [out...]."""
    axes = []
    include = ctx.int("count_include_pad", 0)
    # Padding that ceil_mode adds never counts; declared padding does if included.
    _, pads = padding(ctx, win.kernel, win.strides, win.size)
    for axis in range(win.rank):
        low = -win.before[axis] if include else 0
        high = win.size[axis] + (pads[axis] if include else 0)
        starts = np.arange(win.out[axis]) * win.strides[axis] - win.before[axis]
        taps = starts[:, None] + np.arange(win.kernel[axis]) * win.dilations[axis]
        axes.append(((taps >= low) & (taps < high)).sum(1))
    return np.asarray(functools.reduce(np.multiply.outer, axes), np.float64)


@vjp("GlobalAveragePool")
def global_average_pool(ctx: Context) -> Cotangents:
    op, dims = ctx.op, ctx.dims(ctx.x())
    sizes = [dim for dim in dims[2:] if isinstance(dim, int)]
    if len(sizes) != len(dims) - 2:
        count = op.ReduceProd(windows.spatial_shape(op, ctx.x()), keepdims=0)
        mean = op.Div(ctx.dy(), op.cast(count, ctx.dtype(ctx.x())))
        return op.Expand(mean, op.Shape(ctx.x()))
    return op.Expand(op.Mul(ctx.dy(), 1 / math.prod(sizes)), op.shape_of(ctx.x()))


@vjp("GlobalMaxPool")
def global_max_pool(ctx: Context) -> Cotangents:
    """Ties share evenly: PyTorch's choice depends on the size of the plane."""
    op, x, y = ctx.op, ctx.x(), ctx.y()
    hits = op.cast(op.Equal(x, y), ctx.dtype(x))
    axes = range(2, ctx.rank(x))
    return op.Mul(hits, op.Div(ctx.dy(), op.reduce_sum(hits, axes)))


# Pools that take the p-norm of what they see: y = (sum |x|^p)^(1/p).


@vjp("LpPool", since=2)
def lp_pool(ctx: Context) -> Cotangents:
    """dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p) over the windows that see x."""
    op, x, share = ctx.op, ctx.x(), _share(ctx)
    if windows.is_open(ctx, x):
        win = windows.open_windows(ctx, ctx.ints("kernel_shape", ()))
        return op.Mul(_slope(ctx), windows.scatter_sums(ctx, win, share))
    fixed = pool_windows(ctx)
    windows.check_pool(ctx, fixed)
    ones = np.ones((fixed.channels, 1, *fixed.kernel), ctx.dtype(x).numpy())
    return op.Mul(_slope(ctx), transposed_convolution(op, fixed, op.constant(ones), share))


@vjp("GlobalLpPool", since=2)
def global_lp_pool(ctx: Context) -> Cotangents:
    return ctx.op.Mul(_slope(ctx), _share(ctx))


def _slope(ctx: Context) -> ir.Value:
    """sign(x) |x|^(p-1)."""
    op, x, p = ctx.op, ctx.x(), ctx.int("p", 2)
    if p == 2:
        return x
    sign = op.Sign(x)
    return sign if p == 1 else op.Mul(sign, op.Pow(op.Abs(x), p - 1))


def _share(ctx: Context) -> ir.Value:
    """dy y^(1-p); zero for a window of zeros, where the norm has a kink."""
    op, y, dy, p = ctx.op, ctx.y(), ctx.dy(), ctx.int("p", 2)
    if p == 1:
        return dy
    zero = op.Equal(y, 0)
    norm = op.Where(zero, 1, y)
    share = op.Div(dy, norm if p == 2 else op.Pow(norm, p - 1))
    return op.Where(zero, 0, share)


@vjp("MaxUnpool", since=9)
def max_unpool(ctx: Context) -> Cotangents:
    """Each element reads the cotangent of where it was put, as in PyTorch."""
    # Overlapping windows put the same maximum to the same place more than once; each of them then
    # receives the whole cotangent.
    op = ctx.op
    return [op.Gather(op.reshape(ctx.dy(), -1), ctx.x(1), axis=0), None, None]


@vjp("Col2Im", since=18)
def col_to_im(ctx: Context) -> Cotangents:
    """x [N, C taps, L] is summed onto planes: dx is what every tap reads of dy."""
    op, dy, block = ctx.op, ctx.dy(), ctx.constant(2)
    if block is None:
        raise ctx.unsupported("its block shape is known only when the model runs")
    win = windows.column_windows(ctx, [int(size) for size in block])
    padded = win.pad(dy)
    taps = [op.unsqueeze(op.reshape(win.tap(padded, tap), 0, 0, -1), 2) for tap in win.taps()]
    joined = op.Concat(*taps, axis=2) if len(taps) > 1 else taps[0]
    return [op.reshape_like(joined, ctx.x()), None, None]


# Pools over regions: RoiAlign and MaxRoiPool.
#
# The regions receive no gradient, as in PyTorch: detectors train them by losses of their own.


@vjp("RoiAlign", since=10)
def roi_align(ctx: Context) -> Cotangents:
    """The mean or maximum over a grid of linearly interpolated samples in each bin."""
    # Symbols: R regions, C channels, bins P along an axis, S samples in a bin along an axis.
    mode = ctx.string("mode", "avg")
    if mode not in ("avg", "max"):
        raise ctx.unsupported(f"mode {mode!r}")
    rows = _Samples(ctx, 0, ctx.int("output_height", 1))
    columns = _Samples(ctx, 1, ctx.int("output_width", 1))
    return [(_mean if mode == "avg" else _maximum)(ctx, rows, columns), None, None]


class _Samples:
    """Where the samples lie along one axis."""

    # bins: Number P of bins. size: INT64 [1]: length of the plane.

    def __init__(self, ctx: Context, axis: int, bins: int) -> None:
        op, rois, dtype = ctx.op, ctx.x(1), ctx.dtype(ctx.x())
        corners = op.Mul(op.cast(rois, dtype), ctx.float("spatial_scale", 1.0))
        default = "half_pixel" if op.opset >= 16 else "output_half_pixel"  # RoiAlign's default
        half = ctx.string("coordinate_transformation_mode", default) == "half_pixel"
        if half:
            corners = op.Sub(corners, 0.5)
        start, end = (op.slice(corners, [1], [i], [i + 1]) for i in (1 - axis, 3 - axis))
        extent = op.Sub(end, start) if half else op.Max(op.Sub(end, start), 1.0)
        step = op.unsqueeze(op.Mul(extent, 1 / bins), 2)  # [R, 1, 1]
        each = ctx.int("sampling_ratio", 0)
        # Where there are fewer samples than S, which those are: BOOL [R, 1, S], else None.
        self.taken: ir.Value | None = None
        # One by the number of samples in a bin: a number or [R, 1, 1].
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
        self.inside = op.cast(near, dtype)  # one for each sample that counts, else 0: [R, P, S]
        self.at = op.Min(op.Max(at, 0.0), last)  # positions [R, P, S], within the plane

    def matrix(self, op: Ops) -> ir.Value:
        """[R, P, size]: how much of each element the mean over a bin's samples holds."""
        dtype = self.at.dtype or ir.DataType.FLOAT
        elements = numbers(op, self.size, dtype)
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


def _mean(ctx: Context, rows: _Samples, columns: _Samples) -> ir.Value:
    """y[r] = A_r x[batch r] B_r^T, so dx[n] = sum over the r of n of A_r^T dy[r] B_r."""
    # The sum over regions and bins is one product of a matrix [N H, R P], which holds A_r for the
    # sample that region r lies in, with the rest.
    op, x, dy, dtype = ctx.op, ctx.x(), ctx.dy(), ctx.dtype(ctx.x())
    samples = length(op, x, 0)
    batch = op.unsqueeze(op.cast(ctx.x(2), ir.DataType.INT64), 1)
    mine = op.Equal(batch, numbers(op, samples, ir.DataType.INT64))  # [R, N]
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
    if op.opset < REDUCTION_SINCE:
        raise ctx.unsupported("before opset 16 no operator adds at repeated indices")
    channels = length(op, x, 1)
    plane = op.Mul(length(op, x, 2), length(op, x, 3))
    first = op.Mul(op.reshape(op.cast(batch, ir.DataType.INT64), -1, 1), channels)
    number = op.Add(first, numbers(op, channels, ir.DataType.INT64))  # [R, C]
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
    element = numbers(op, length(op, ctx.x(), 2 + axis), dtype)
    low, high = op.unsqueeze(low, 2), op.unsqueeze(high, 2)
    return op.And(op.Not(op.Less(element, low)), op.Less(element, high))
