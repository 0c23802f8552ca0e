"""Transposed convolution: the gradients of a convolution with input and output swapped."""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.norm import sum_per_channel
from odtpack.autodiff.rules.windows.conv import forms
from odtpack.autodiff.windows import dynamic_windows
from odtpack.autodiff.windows.windows import Windows


@vjp("ConvTranspose")
def conv_transpose(ctx: Context) -> Cotangents:
    """X is scattered to Y through the windows of a convolution; dX is that convolution of dY."""
    op, x, w, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    dx = dw = db = None
    if ctx.needs(2):
        db = sum_per_channel(op, dy, ctx.rank(x))
    if dynamic_windows.is_open(ctx, x) or dynamic_windows.is_open(ctx, ctx.y()):
        return [*_open(ctx), db]
    win = read_windows(ctx)
    if ctx.needs(0):
        dx = op.Conv(
            dy, w, group=win.groups, strides=win.strides, dilations=win.dilations,
            pads=[*win.before, *win.after],
        )  # fmt: skip
    if ctx.needs(1):
        dw = forms(win)[1](op, win, dy, x)
    return [dx, dw, db]


def _open(ctx: Context) -> tuple[ir.Value | None, ir.Value | None]:
    """dX and dW where the size of the plane is known only when the model runs."""
    op, x, w, dy, groups = ctx.op, ctx.x(), ctx.x(1), ctx.dy(), ctx.int("group", 1)
    weight = [ctx.size(w, axis) for axis in range(ctx.rank(w))]
    win = dynamic_windows.transposed_open_windows(ctx, weight[2:])
    dx = dw = None
    if ctx.needs(0):
        dx = op.Conv(win.pad(dy), w, group=groups, strides=win.strides, dilations=win.dilations)
    if ctx.needs(1):
        dw = dynamic_windows.weight_gradient(win, dy, x, groups, weight)
    return dx, dw


def read_windows(ctx: Context) -> Windows:
    """The windows of the convolution from Y [N, O, ...] to X [N, C, ...]; weight [C, O/G, ...].

    After the last window there is only as much padding as it reads.
    """
    x, w, y = ctx.x(), ctx.x(1), ctx.y()
    rank = ctx.rank(x) - 2
    axes = range(2, 2 + rank)
    kernel = tuple(ctx.size(w, axis) for axis in axes)
    size, out = (tuple(ctx.size(value, axis) for axis in axes) for value in (y, x))
    strides, dilations = (ctx.ints(name, (1,) * rank) for name in ("strides", "dilations"))
    groups, mode = ctx.int("group", 1), ctx.string("auto_pad", "NOTSET")
    reads = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in
             zip(out, strides, kernel, dilations, strict=True)]  # fmt: skip
    if mode.startswith("SAME") or "output_shape" in ctx.node.attributes:
        extra = ctx.ints("output_padding", (0,) * rank)
        totals = [max(0, r + e - n) for r, e, n in zip(reads, extra, size, strict=True)]
        before = tuple(t // 2 if mode == "SAME_UPPER" else t - t // 2 for t in totals)
    else:
        before = ctx.ints("pads", (0,) * 2 * rank)[:rank]
    after = tuple(max(0, r - b - n) for r, b, n in zip(reads, before, size, strict=True))
    return Windows(
        kernel, strides, dilations, before, after, size, out, groups,
        channels=ctx.size(y, 1), features=ctx.size(w, 0),
    )  # fmt: skip
