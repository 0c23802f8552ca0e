"""Normalizations.

Symbols: ``xhat`` is the normalized input, ``g`` its cotangent dy * scale, and a bar is a
mean over the normalized axes. All of them share dx = inv_std (g - g_bar - xhat (g xhat)_bar).
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.ops import Ops
from odtpack.autodiff.registry import Cotangents, vjp

# Internal operator, lowered to plain ones after differentiation: see passes.batch_norm.
TRAINING_DOMAIN = "odtpack"


@vjp("LayerNormalization", since=17)
def layer_normalization(ctx: Context) -> Cotangents:
    op, x, dy = ctx.op, ctx.x(), ctx.dy()
    rank = ctx.rank(x)
    axes = range(ctx.axis(default=-1), rank)
    mean = ctx.extra_output(1, ir.DataType.FLOAT)
    inv_std = ctx.extra_output(2, ir.DataType.FLOAT)
    assert x.dtype is not None
    xhat = op.Mul(op.Sub(x, op.cast(mean, x.dtype)), op.cast(inv_std, x.dtype))
    dx = dscale = dbias = None
    if ctx.needs(0):
        g = op.Mul(dy, ctx.x(1))
        centered = op.Sub(g, op.reduce_mean(g, axes))
        along = op.Mul(xhat, op.reduce_mean(op.Mul(g, xhat), axes))
        dx = op.Mul(op.Sub(centered, along), op.cast(inv_std, x.dtype))
    if ctx.needs(1):
        dscale = op.sum_to(op.Mul(dy, xhat), ctx.dims(x), ctx.x(1))
    if ctx.needs(2):
        dbias = op.sum_to(dy, ctx.dims(x), ctx.x(2))
    return [dx, dscale, dbias]


def per_channel(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    """View a [C] vector so that it broadcasts over [N, C, ...]."""
    return op.reshape(value, -1, *([1] * (rank - 2))) if rank > 2 else value


@vjp("BatchNormalization", since=9)
def frozen_batch_normalization(ctx: Context) -> Cotangents:
    """Inference mode: the statistics are constants, the node is affine for each channel.

    Training mode never arrives here: passes.batch_norm replaces it first.
    """
    op, x, dy = ctx.op, ctx.x(), ctx.dy()
    rank = ctx.rank(x)
    axes = [0, *range(2, rank)]
    mean, variance = ctx.x(3), ctx.x(4)
    inv_std = op.Reciprocal(op.Sqrt(op.Add(variance, ctx.float("epsilon", 1e-5))))
    dx = dscale = dbias = dmean = dvariance = None
    gain = op.Mul(ctx.x(1), inv_std)
    if ctx.needs(0):
        dx = op.Mul(dy, per_channel(op, gain, rank))
    total = op.reduce_sum(dy, axes, keepdims=False) if any(map(ctx.needs, (1, 2, 3, 4))) else None
    if total is not None:
        dbias = total
        if ctx.needs(1) or ctx.needs(4):
            # sum dy (x - mean) = sum dy x - mean sum dy
            product = op.reduce_sum(op.Mul(dy, x), axes, keepdims=False)
            moment = op.Sub(product, op.Mul(mean, total))
            dscale = op.Mul(moment, inv_std)
            if ctx.needs(4):
                slope = op.Mul(op.Mul(gain, op.Mul(inv_std, inv_std)), -0.5)
                dvariance = op.Mul(moment, slope)
        if ctx.needs(3):
            dmean = op.Neg(op.Mul(total, gain))
    return [dx, dscale, dbias, dmean, dvariance]


@vjp("BatchNormTraining", domain=TRAINING_DOMAIN)
def batch_norm_training(ctx: Context) -> Cotangents:
    """Inputs x, scale, bias, running mean and variance; outputs y, ..., mean, inv_std.

    Written with the sums of dy and dy (x - mean), so that dx is a linear combination of
    dy and x with one coefficient for each channel.
    """
    op, x, dy = ctx.op, ctx.x(), ctx.dy()
    rank = ctx.rank(x)
    axes = [0, *range(2, rank)]
    mean, inv_std = ctx.y(3), ctx.y(4)  # [C]
    total = op.reduce_sum(dy, axes, keepdims=False)
    # Centred before the product: sum dy x - mean sum dy would cancel for large means.
    centered = op.Sub(x, per_channel(op, mean, rank))
    dscale = op.Mul(op.reduce_sum(op.Mul(dy, centered), axes, keepdims=False), inv_std)
    dx = None
    if ctx.needs(0):
        dtype = x.dtype
        assert dtype is not None
        count = op.Div(op.cast(op.Size(x), dtype), op.cast(op.Size(mean), dtype))
        gain = op.Mul(ctx.x(1), inv_std)
        lean = op.Neg(op.Mul(op.Mul(gain, inv_std), op.Div(dscale, count)))
        shift = op.Neg(op.Mul(gain, op.Div(total, count)))
        dx = op.Add(
            op.Add(op.Mul(dy, per_channel(op, gain, rank)), per_channel(op, shift, rank)),
            op.Mul(centered, per_channel(op, lean, rank)),
        )
    return [dx, dscale, total, None, None]
