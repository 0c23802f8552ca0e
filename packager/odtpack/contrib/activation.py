"""Activations with a bias or a gate."""

from __future__ import annotations

from odtpack.autodiff.context import Context
from odtpack.contrib.table import Outputs, decomposition, gelu


@decomposition("Gelu")
def exact(ctx: Context) -> Outputs:
    return gelu(ctx.op, ctx.x(), tanh=False)


@decomposition("BiasGelu")
def bias(ctx: Context) -> Outputs:
    return gelu(ctx.op, ctx.op.Add(ctx.x(), ctx.x(1)), tanh=False)


@decomposition("FastGelu")
def fast(ctx: Context) -> Outputs:
    x, shift = ctx.x(), ctx.maybe_x(1)
    return gelu(ctx.op, x if shift is None else ctx.op.Add(x, shift), tanh=True)


@decomposition("QuickGelu")
def quick(ctx: Context) -> Outputs:
    """x sigmoid(alpha x)."""
    op, x = ctx.op, ctx.x()
    return op.Mul(x, op.Sigmoid(op.Mul(x, ctx.float("alpha", 1.702))))
