"""Normalizations and quantization."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN, Context, Cotangents, non_differentiable, vjp
from odtpack.autodiff.rules.reduce import count_averaged
from odtpack.graph.graphs import Ops, wider

# Symbols: ``xhat`` is the normalized input, ``g`` its cotangent dy * scale, and a bar is a
# mean over the normalized axes. All of them share dx = inv_std (g - g_bar - xhat (g xhat)_bar).


@vjp("LayerNormalization", since=17)
def layer_normalization(ctx: Context) -> Cotangents:
    """The loss may depend on the outputs 1 and 2, mean and inverse deviation, as well."""
    op, x, dy = ctx.op, ctx.x(), ctx.maybe_dy(0)
    axes = range(ctx.axis(default=-1), ctx.rank(x))
    dtype = ctx.dtype(x)
    mean, inv_std = (op.cast(value, dtype) for value in _row_statistics(ctx, axes))
    xhat = op.Mul(op.Sub(x, mean), inv_std)
    parts: list[ir.Value] = []
    dscale = dbias = None
    if ctx.needs(0):
        if dy is not None:
            g = op.Mul(dy, ctx.x(1))
            centered = op.Sub(g, op.reduce_mean(g, axes))
            along = op.Mul(xhat, op.reduce_mean(op.Mul(g, xhat), axes))
            parts.append(op.Mul(op.Sub(centered, along), inv_std))
        parts += _through_row_statistics(ctx, axes, inv_std, xhat)
    if ctx.needs(1) and dy is not None:
        dscale = op.sum_to(op.Mul(dy, xhat), ctx.dims(x), ctx.x(1))
    if ctx.needs(2) and dy is not None:
        dbias = op.sum_to(dy, ctx.dims(x), ctx.x(2))
    return [functools.reduce(op.Add, parts) if parts else None, dscale, dbias]


def _through_row_statistics(
    ctx: Context, axes: range, inv_std: ir.Value, xhat: ir.Value
) -> list[ir.Value]:
    """What reaches x by the mean, d mean / n, and by r = inv_std, -dr r^2 xhat / n."""
    op, x = ctx.op, ctx.x()
    dtype, wide, parts = ctx.dtype(x), wider(ctx.dtype(x)), []
    dmean, dinv_std = (
        None if dy is None else op.Div(op.cast(dy, wide), count_averaged(ctx, axes, wide))
        for dy in (ctx.maybe_dy(1), ctx.maybe_dy(2))
    )
    if dmean is not None:
        parts.append(op.Expand(op.cast(dmean, dtype), op.shape_of(x)))
    if dinv_std is not None:
        slope = op.Mul(op.cast(dinv_std, dtype), op.Mul(inv_std, inv_std))
        parts.append(op.Neg(op.Mul(slope, xhat)))
    return parts


def _row_statistics(ctx: Context, axes: range) -> tuple[ir.Value, ir.Value]:
    """Mean and inverse deviation: outputs of the node, which has them in float32 at most."""
    op, x = ctx.op, ctx.x()
    if ctx.dtype(x) != ir.DataType.DOUBLE:
        row = (*ctx.dims(x)[: axes.start], *[1] * len(axes))
        mean, inv_std = (ctx.extra_output(i, ir.DataType.FLOAT, row) for i in (1, 2))
        return mean, inv_std
    mean = op.reduce_mean(x, axes)
    centered = op.Sub(x, mean)
    return mean, _inverse_deviation(ctx, op.reduce_mean(op.Mul(centered, centered), axes))


def _inverse_deviation(ctx: Context, variance: ir.Value) -> ir.Value:
    return ctx.op.Reciprocal(ctx.op.Sqrt(ctx.op.Add(variance, ctx.float("epsilon", 1e-5))))


def per_channel(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    """View a [C] vector so that it broadcasts over [N, C, ...]."""
    return op.reshape(value, -1, *([1] * (rank - 2))) if rank > 2 else value


def sum_per_channel(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    """Sum [N, C, ...] to [C]: over space first, then over samples."""
    # Two short sums lose less to rounding than a long one, and run no slower.
    if rank > 2:
        value = op.reduce_sum(value, range(2, rank), keepdims=False)
    return op.reduce_sum(value, [0], keepdims=False)


@vjp("BatchNormalization", since=9)
def frozen_batch_normalization(ctx: Context) -> Cotangents:
    """Inference mode: the statistics are constants, the node is affine for each channel."""
    # Training mode never arrives here: passes.batch_norm replaces it first. Scale and statistics of
    # a float16 input may be float32, and the sums are too.
    op, wide = ctx.op, wider(ctx.dtype(ctx.x()))
    x, scale, mean, variance = (op.cast(ctx.x(i), wide) for i in (0, 1, 3, 4))
    dy, rank = op.cast(ctx.dy(), wide), ctx.rank(ctx.x())
    inv_std = _inverse_deviation(ctx, variance)
    dx = dscale = dbias = dmean = dvariance = None
    gain = op.Mul(scale, inv_std)
    if ctx.needs(0):
        dx = op.Mul(dy, per_channel(op, gain, rank))
    total = sum_per_channel(op, dy, rank) if any(map(ctx.needs, (1, 2, 3, 4))) else None
    if total is not None:
        dbias = total
        if ctx.needs(1) or ctx.needs(4):
            # sum dy (x - mean) = sum dy x - mean sum dy
            product = sum_per_channel(op, op.Mul(dy, x), rank)
            moment = op.Sub(product, op.Mul(mean, total))
            dscale = op.Mul(moment, inv_std)
            if ctx.needs(4):
                slope = op.Mul(op.Mul(gain, op.Mul(inv_std, inv_std)), -0.5)
                dvariance = op.Mul(moment, slope)
        if ctx.needs(3):
            dmean = op.Neg(op.Mul(total, gain))
    return as_inputs(ctx, dx, dscale, dbias, dmean, dvariance)


def as_inputs(ctx: Context, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    """Each cotangent in the type of its input."""
    return [
        None if value is None else ctx.op.cast(value, ctx.dtype(ctx.x(index)))
        for index, value in enumerate(cotangents)
    ]


@vjp("BatchNormTraining", domain=INTERNAL_DOMAIN)
def batch_norm_training(ctx: Context) -> Cotangents:
    """Inputs x, scale, bias, running mean and variance; outputs y, ..., mean, inv_std, count."""
    # With g = scale inv_std and a bar for means over samples and space, dx = g dy - (g dy_bar + g
    # inv_std^2 (dy (x - mean))_bar (x - mean)).
    op, wide, rank = ctx.op, wider(ctx.dtype(ctx.x())), ctx.rank(ctx.x())
    x, dy = op.cast(ctx.x(), wide), op.cast(ctx.dy(), wide)
    mean, inv_std = ctx.y(3), ctx.y(4)  # [C], wide
    dbias = sum_per_channel(op, dy, rank)
    centered = op.Sub(x, per_channel(op, mean, rank))
    moment = sum_per_channel(op, op.Mul(dy, centered), rank)
    dscale = op.Mul(moment, inv_std)
    dx = None
    if ctx.needs(0):
        channels = ctx.size(ctx.x(), 1)
        gain = op.Mul(op.cast(ctx.x(1), wide), inv_std)
        share = op.Div(gain, ctx.y(5))
        slope = op.Mul(op.Mul(share, inv_std), dscale)
        shift = op.Mul(share, dbias)
        # centered * slope + shift in one pass, by an inference-mode normalization.
        zeros, ones = (op.constant(f(channels, wide.numpy())) for f in (np.zeros, np.ones))
        along = op.BatchNormalization(centered, slope, shift, zeros, ones, epsilon=0.0)
        dx = op.Sub(op.Mul(dy, per_channel(op, gain, rank)), along)
    return as_inputs(ctx, dx, dscale, dbias)


@vjp("InstanceNormalization", since=6)
def instance_normalization(ctx: Context) -> Cotangents:
    """Mean and variance over the space of each sample and channel."""
    op, x, dy, rank = ctx.op, ctx.x(), ctx.dy(), ctx.rank(ctx.x())
    axes = range(2, rank)
    centered = op.Sub(x, op.reduce_mean(x, axes))
    inv_std = _inverse_deviation(ctx, op.reduce_mean(op.Mul(centered, centered), axes))
    xhat = op.Mul(centered, inv_std)
    along = op.Mul(dy, xhat)
    free = op.Sub(dy, op.Add(op.reduce_mean(dy, axes), op.Mul(xhat, op.reduce_mean(along, axes))))
    gain = op.Mul(inv_std, per_channel(op, ctx.x(1), rank))
    return [op.Mul(free, gain), sum_per_channel(op, along, rank), sum_per_channel(op, dy, rank)]


@vjp("LpNormalization")
def lp_normalization(ctx: Context) -> Cotangents:
    """y = x / n: dx = (dy - dn sum(y dy)) / n, where dn is sign(x) for p = 1, y for p = 2."""
    op, x, y, dy = ctx.op, ctx.x(), ctx.y(), ctx.dy()
    axes, manhattan = [ctx.axis(default=-1)], ctx.int("p", 2) == 1
    norm = op.reduce_sum(op.Abs(x) if manhattan else op.Mul(x, x), axes)
    norm = norm if manhattan else op.Sqrt(norm)
    slope = op.Sign(x) if manhattan else y
    free = op.Sub(dy, op.Mul(slope, op.reduce_sum(op.Mul(y, dy), axes)))
    return op.Div(free, op.Where(op.Equal(norm, 0), 1, norm))


@vjp("LRN")
def local_response_normalization(ctx: Context) -> Cotangents:
    """y = x D^-b, D = k + a/n W x^2, where W says which channels are neighbours."""
    op, x, y, dy = ctx.op, ctx.x(), ctx.y(), ctx.dy()
    size, beta = ctx.int("size", 1), ctx.float("beta", 0.75)
    share = ctx.float("alpha", 1e-4) / size
    below, above = (size - 1) // 2, size // 2

    def mean_near(value: ir.Value, below: int, above: int) -> ir.Value:
        rows = op.unsqueeze(op.reshape(value, 0, 0, -1), 1)  # [N, 1, C, ...]
        pooled = op.AveragePool(
            rows, kernel_shape=[size, 1], pads=[below, 0, above, 0], count_include_pad=1
        )
        return op.reshape_like(pooled, x)

    squares = mean_near(op.Mul(x, x), below, above)
    bracket = op.Add(op.Mul(squares, share * size), ctx.float("bias", 1.0))
    spread = mean_near(op.Div(op.Mul(dy, y), bracket), above, below)
    straight = op.Mul(dy, op.Pow(bracket, -beta))
    return op.Sub(straight, op.Mul(op.Mul(x, spread), 2 * share * beta * size))


# Integers in, integers out: parameters before them cannot be trained through them.
non_differentiable(
    "ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"
)

# Quantization.
#
# Rounding has no useful slope, and QuantizeLinear, whose result is an integer, none at all.
# Followed by a DequantizeLinear of the same scale it simulates quantization; ``passes.patterns``
# recognizes such pairs, and the straight-through estimator differentiates them: as if
# rounding were the identity. The cotangent passes where the level is representable.

Spread = Callable[[ir.Value], ir.Value]


@vjp("DequantizeLinear", since=10)
def dequantize_linear(ctx: Context) -> Cotangents:
    """y = (x - zero point) scale: the scale's slope is y / scale, taken from the integers."""
    op, x, scale, zero = ctx.op, ctx.x(), ctx.x(1), ctx.maybe_x(2)
    dtype = ctx.dtype(scale)
    spread, collect = _blocks(ctx, scale)
    levels = op.cast(x, dtype)
    if zero is not None:
        levels = op.Sub(levels, spread(op.cast(zero, dtype)))
    return [None, collect(op.Mul(op.cast(ctx.dy(), dtype), levels)), None]


@vjp("FakeQuant", domain=INTERNAL_DOMAIN)
def fake_quant(ctx: Context) -> Cotangents:
    """y = s clip(round(x / s), low, high), whose bounds are those of the type less zero point."""
    # dx = dy inside the bounds. ds = dy (y - x) / s inside, dy y / s outside: the learned step size
    # quantization of Esser et al., 2020.
    op, x, scale, y, dy = ctx.op, ctx.x(), ctx.x(1), ctx.y(), ctx.dy()
    spread, collect = _blocks(ctx, scale)
    wide, zero = spread(scale), ctx.maybe_x(2)
    levels = op.Round(op.Div(x, wide))
    if zero is not None:
        levels = op.Add(levels, spread(op.cast(zero, ctx.dtype(x))))
    low, high = (
        op.constant(np.asarray(ctx.int(name, 0), ctx.dtype(x).numpy())) for name in ("low", "high")
    )
    inside = op.cast(op.Equal(levels, op.Clip(levels, low, high)), ctx.dtype(x))
    dscale = None
    if ctx.needs(1):
        slope = op.Div(op.Sub(y, op.Mul(inside, x)), wide)
        dscale = collect(op.Mul(dy, slope))
    return [op.Mul(dy, inside), dscale, None]


def _blocks(ctx: Context, scale: ir.Value) -> tuple[Spread, Spread]:
    """How scales reach the elements, and how the elements' cotangents reach the scales."""
    # A scale is one for all, one for each slice along an axis, or one for each block of
    # ``block_size`` elements along it.
    op, x, scales = ctx.op, ctx.x(), ctx.dims(scale)
    rank = ctx.rank(x)
    if scales in ((), (1,)):

        def total(value: ir.Value) -> ir.Value:
            return op.reshape_like(op.reduce_sum(op.reshape(value, -1), [0]), scale)

        return (lambda value: op.reshape(value, *[1] * rank) if scales else value), total
    axis, block = ctx.axis(default=1), ctx.int("block_size", 0)
    if not block:
        rest = [i for i in range(rank) if i != axis]
        return (
            lambda value: op.reshape(value, -1, *[1] * (rank - 1 - axis)),
            lambda value: op.reduce_sum(value, rest, keepdims=False) if rest else value,
        )
    size = ctx.size(x, axis)
    numbers = np.arange(size) // block
    last = [i for i in range(rank) if i != axis] + [axis]

    def sums(value: ir.Value) -> ir.Value:
        missing = [(-size % block) * (i == axis) for i in range(rank)]
        moved = op.transpose(op.pad(value, [0] * rank, missing), *last)
        parts = op.reshape(moved, *[0] * (rank - 1), -1, block)
        summed = op.reduce_sum(parts, [rank], keepdims=False)
        return op.transpose(summed, *(last.index(i) for i in range(rank)))

    return lambda value: op.Gather(value, op.constant(numbers), axis=axis), sums
