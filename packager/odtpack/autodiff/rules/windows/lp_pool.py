"""Pools that take the p-norm of what they see: y = (sum |x|^p)^(1/p)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.windows import dynamic_windows
from odtpack.autodiff.windows.windows import pool_windows, transposed_convolution


@vjp("LpPool", since=2)
def lp_pool(ctx: Context) -> Cotangents:
    """dx = sign(x) |x|^(p-1) times the sum of dy y^(1-p) over the windows that see x."""
    op, x, share = ctx.op, ctx.x(), _share(ctx)
    if dynamic_windows.is_open(ctx, x):
        win = dynamic_windows.open_windows(ctx, ctx.ints("kernel_shape", ()))
        return op.Mul(_slope(ctx), dynamic_windows.scatter_sums(ctx, win, share))
    fixed = pool_windows(ctx)
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
