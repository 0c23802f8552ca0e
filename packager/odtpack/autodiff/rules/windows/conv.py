"""Convolutions.

ONNX has no operator for a convolution's weight gradient, and writing it as a convolution
with swapped axes runs at a third of the speed of a matrix product. So it is written as
matrix products over shifted slices ("taps") of the padded input; which of the three
forms is quickest depends on the channels, and ``docs/adr/0002-conv-gradients.md`` has the
measurements behind the thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.norm import sum_per_channel
from odtpack.autodiff.rules.windows import depthwise
from odtpack.autodiff.windows import dynamic_windows, small_conv
from odtpack.autodiff.windows.windows import Windows, conv_windows, transposed_convolution
from odtpack.graph.ops import Ops

Form = Callable[[Ops, Windows, ir.Value, ir.Value], ir.Value]

# Below this many input channels in a group the taps are joined before one product:
# a product for each tap would have too few columns to keep the registers busy.
_FEW_CHANNELS = 16
# Columns from which on patches are cut out in one Transpose, which copies row by row.
_WIDE_PATCH = 4


@vjp("Conv")
def conv(ctx: Context) -> Cotangents:
    """dX by transposed convolution, dW by matrix products, dB by a sum."""
    op, x, w, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    dx = dw = db = None
    if ctx.needs(2):
        db = sum_per_channel(op, dy, ctx.rank(x))
    if dynamic_windows.is_open(ctx, x):
        return [*_open(ctx), db]
    win = conv_windows(ctx)
    input_gradient, weight_gradient = forms(win)
    if ctx.needs(0):
        dx = input_gradient(op, win, w, dy)
    if ctx.needs(1):
        dw = weight_gradient(op, win, x, dy)
    return [dx, dw, db]


def _open(ctx: Context) -> tuple[ir.Value | None, ir.Value | None]:
    """dX and dW where the size of the plane is known only when the model runs."""
    w, dy, groups = ctx.x(1), ctx.dy(), ctx.int("group", 1)
    weight = [ctx.size(w, axis) for axis in range(ctx.rank(w))]
    win = dynamic_windows.open_windows(ctx, weight[2:])
    dx = dw = None
    if ctx.needs(0):
        dx = win.scatter(w, dy, groups)
    if ctx.needs(1):
        dw = dynamic_windows.weight_gradient(win, ctx.x(), dy, groups, weight)
    return dx, dw


def forms(win: Windows) -> tuple[Form, Form]:
    """The quickest ways to write the gradients of the input and of the weight."""
    if small_conv.suits_pointwise(win):
        return small_conv.pointwise_input_gradient, small_conv.pointwise_weight_gradient
    if small_conv.suits_depthwise(win):
        return small_conv.depthwise_input_gradient, small_conv.depthwise_weight_gradient
    if depthwise.suits(win):
        return depthwise.input_gradient, depthwise.weight_gradient
    return _input_gradient, _weight_gradient


def _input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """The transposed convolution; a plain matrix product for 1x1 kernels."""
    if not (win.pointwise and win.groups == 1):
        return transposed_convolution(op, win, w, dy)
    weight = op.transpose(op.reshape(w, win.features, win.channels), 1, 0)
    dx = op.MatMul(weight, op.reshape(dy, -1, win.features, win.pixels))
    return op.reshape(dx, -1, win.channels, *win.size)


def _channels_by_pixels(op: Ops, win: Windows, dy: ir.Value) -> ir.Value:
    """View dY [N, O, p...] as [O, N P]."""
    samples = op.reshape(dy, -1, win.features, win.pixels)
    return op.reshape(op.transpose(samples, 1, 0, 2), win.features, -1)


def _weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """dW[o, c, t] = sum over n, p of dY[n, o, p] X[n, c, stride p + t]."""
    if win.groups > 1:
        return _grouped(op, win, x, dy)
    if win.pointwise:
        return _pointwise(op, win, x, dy)
    if win.tiles and win.kernel[-1] >= _WIDE_PATCH:
        return _patches(op, win, x, dy)
    if win.channels < _FEW_CHANNELS:
        return _joined_taps(op, win, x, dy)
    return _tap_by_tap(op, win, x, dy)


def _pointwise(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    pixels = win.pixels
    shape = (win.features, win.channels, *win.kernel)
    if pixels * (win.features + win.channels) < win.features * win.channels:
        # Few pixels: one product over all samples; the transposes cost less than
        # a product for each sample and the sum of them.
        left = _channels_by_pixels(op, win, dy)
        right = op.transpose(op.reshape(x, -1, win.channels, pixels), 0, 2, 1)
        return op.reshape(op.MatMul(left, op.reshape(right, -1, win.channels)), *shape)
    left = op.reshape(dy, -1, win.features, pixels)
    right = op.transpose(op.reshape(x, -1, win.channels, pixels), 0, 2, 1)
    return op.reshape(op.reduce_sum(op.MatMul(left, right), [0], keepdims=False), *shape)


def _patches(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Windows that tile the plane: dY [O, N P] times the patches [N P, C k...]."""
    tiled = [size for pair in zip(win.out, win.kernel, strict=True) for size in pair]
    blocks = op.reshape(x, -1, win.channels, *tiled)
    places, elements = range(2, 2 + 2 * win.rank, 2), range(3, 3 + 2 * win.rank, 2)
    patches = op.transpose(blocks, 0, *places, 1, *elements)
    patches = op.reshape(patches, -1, win.channels * math.prod(win.kernel))
    dw = op.MatMul(_channels_by_pixels(op, win, dy), patches)
    return op.reshape(dw, win.features, win.channels, *win.kernel)


def _joined_taps(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Few channels: all taps side by side [N, T C, P], one product with dY^T [N, P, O]."""
    taps, pixels = win.taps(), win.pixels
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
    columns = op.Concat(*(win.tap(op, padded, win.spatial, tap) for tap in taps), axis=1)
    columns = op.reshape(columns, -1, len(taps) * win.channels, pixels)
    rows = op.transpose(op.reshape(dy, -1, win.features, pixels), 0, 2, 1)
    summed = op.reduce_sum(op.MatMul(columns, rows), [0], keepdims=False)
    by_tap = op.reshape(summed, len(taps), win.channels, win.features)
    shape = (win.features, win.channels, *win.kernel)
    return op.reshape(op.transpose(by_tap, 2, 1, 0), *shape)


def _tap_by_tap(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Many channels: channels last, and for each tap dY [O, N P] times X_tap [N P, C]."""
    last = op.transpose(x, 0, *win.spatial, 1)
    padded = op.pad(last, [0, *win.before, 0], [0, *win.after, 0])
    axes = range(1, 1 + win.rank)
    rows = op.reshape(op.transpose(dy, 1, 0, *win.spatial), win.features, -1)
    products = []
    for tap in win.taps():
        columns = op.reshape(win.tap(op, padded, axes, tap), -1, win.channels)
        products.append(op.MatMul(rows, columns))
    by_tap = op.reshape(op.join(products, 0), len(products), win.features, win.channels)
    shape = (win.features, win.channels, *win.kernel)
    return op.reshape(op.transpose(by_tap, 1, 2, 0), *shape)


def _grouped(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Taps joined as above, with a batch axis for the groups."""
    taps, pixels, groups = win.taps(), win.pixels, win.groups
    inner, outer = win.channels // groups, win.features // groups
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
    split = [
        op.reshape(win.tap(op, padded, win.spatial, tap), -1, groups, inner, pixels) for tap in taps
    ]
    columns = op.Concat(*split, axis=2) if len(split) > 1 else split[0]
    rows = op.transpose(op.reshape(dy, -1, groups, outer, pixels), 0, 1, 3, 2)
    summed = op.reduce_sum(op.MatMul(columns, rows), [0], keepdims=False)
    by_tap = op.reshape(summed, groups, len(taps), inner, outer)
    shape = (win.features, inner, *win.kernel)
    return op.reshape(op.transpose(by_tap, 0, 3, 2, 1), *shape)
