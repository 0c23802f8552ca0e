"""Pooling. A maximum gives its cotangent to the first element that attains it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.scatter_add import add_at
from odtpack.autodiff.windows import dynamic_windows
from odtpack.autodiff.windows.windows import (
    Windows,
    check_lengths,
    padding,
    pool_windows,
    transposed_convolution,
)
from odtpack.graph.ops import Ops

MANY_TAPS = 16
"""Kernel elements beyond which MaxPool's indices are quicker than comparing with each."""
_TOO_MANY_TAPS = 1024  # to write nodes for each
_ADDING_SINCE = 16  # ScatterElements


@vjp("MaxPool", since=8)
def max_pool(ctx: Context) -> Cotangents:
    """Compare the output with each tap of the input; MaxPool's own indices are slow.

    Asking the kernel for its indices output makes it 25 times slower than without, on
    all platforms that have a vectorized MaxPool. But the nodes for the taps of a large window
    take longer than that.
    """
    kernel = ctx.ints("kernel_shape", ())
    if math.prod(kernel) > MANY_TAPS and ctx.op.opset >= _ADDING_SINCE:
        return _scatter_by_index(ctx)
    if math.prod(kernel) > _TOO_MANY_TAPS:
        raise ctx.unsupported(
            f"before opset {_ADDING_SINCE} a window of {math.prod(kernel)} elements is too large "
            "(export the model with opset 17 or newer)"
        )
    if dynamic_windows.is_open(ctx, ctx.x()):
        return dynamic_windows.scatter_maxima(ctx, dynamic_windows.open_windows(ctx, kernel))
    win = pool_windows(ctx)
    tiled = win.rank == 2 and win.kernel[0] == win.kernel[1] and win.tiles
    exact = win.size[0] * win.size[-1] < 1 << 24  # positions in a plane, as float32
    if tiled and exact and ctx.x().dtype == ir.DataType.FLOAT:
        return _unpool(ctx, win)
    return _scatter_taps(ctx, win)


def _unpool(ctx: Context, win: Windows) -> ir.Value:
    """Windows that tile the plane: find each maximum's position, then MaxUnpool.

    The positions are found in the forward pass, after the pool, so that they and not the
    pool's input, several times their size, wait in memory for the backward pass.
    """
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
    """Elements from each window's first maximum to the end of the plane, as float32.

    Every element that equals its window's maximum gets that number, all others 0; the first
    of a window has the largest, which one more pool finds. A window without any, which holds
    NaN, takes the last element of the plane.
    """
    scales = op.constant(np.array([1, 1, *win.strides], np.float32))
    region = None if op.opset >= 13 else op.constant(np.empty(0, np.float32))
    peaks = op.Resize(
        y, region, scales,
        mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    plane = np.arange(math.prod(win.size), 0, -1, dtype=np.float32).reshape(win.size)
    hits = op.cast(op.Equal(x, peaks), ir.DataType.FLOAT)
    numbered = op.Mul(hits, op.constant(plane))
    return op.Max(op.MaxPool(numbered, kernel_shape=win.kernel, strides=win.strides), 1)


def _scatter_by_index(ctx: Context) -> ir.Value:
    """Windows of any size: add each cotangent up at the index that the kernel reports.

    A window that sees only padding or minus infinity reports none, and its maximum is the
    lowest number.
    """
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
    if dynamic_windows.is_open(ctx, ctx.x()):
        on = dynamic_windows.open_windows(ctx, ctx.ints("kernel_shape", ()))
        return dynamic_windows.scatter_sums(ctx, on, op.Div(dy, dynamic_windows.counts(ctx, on)))
    win = pool_windows(ctx)
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
    product = axes[0]
    for more in axes[1:]:
        product = product[..., None] * more
    return np.asarray(product, np.float64)


@vjp("GlobalAveragePool")
def global_average_pool(ctx: Context) -> Cotangents:
    op, dims = ctx.op, ctx.dims(ctx.x())
    sizes = [dim for dim in dims[2:] if isinstance(dim, int)]
    if len(sizes) != len(dims) - 2:
        count = op.ReduceProd(dynamic_windows.spatial_shape(op, ctx.x()), keepdims=0)
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
