"""Quantization.

Rounding has no useful slope, and QuantizeLinear, whose result is an integer, none at all.
Followed by a DequantizeLinear of the same scale it simulates quantization; ``passes.fake_quant``
recognizes such pairs, and the straight-through estimator differentiates them: as if
rounding were the identity. The cotangent passes where the level is representable.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import INTERNAL_DOMAIN, Cotangents, non_differentiable, vjp
from odtpack.autodiff.rules.linalg import multiply_axis

# Integers in, integers out: parameters before them cannot be trained through them.
non_differentiable("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul")

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
    """y = s clip(round(x / s), low, high), whose bounds are those of the type less zero point.

    dx = dy inside the bounds. ds = dy (y - x) / s inside, dy y / s outside: the learned step
    size quantization of Esser et al., 2020.
    """
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
    """How scales reach the elements, and how the elements' cotangents reach the scales.

    A scale is one for all, one for each slice along an axis, or one for each block of
    ``block_size`` elements along it.
    """
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
    matrix = (numbers[:, None] == np.arange(-(-size // block))).astype(ctx.dtype(scale).numpy())
    return (
        lambda value: op.Gather(value, op.constant(numbers), axis=axis),
        lambda value: multiply_axis(op, value, rank, axis, matrix),
    )
