"""Normalizations with a skip connection or without a mean.

Means and inverse deviations, which some of them return for training, are not covered.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.contrib.table import (
    Outputs,
    asked_for,
    decomposition,
    known_rank,
    layer_norm,
    rms_norm,
)

_EPSILON = 1e-12  # of ONNX Runtime's kernels, where the attribute is absent
_ONNX_EPSILON = 1e-5


@decomposition("SkipLayerNormalization")
def skip_layer_norm(ctx: Context) -> Outputs | None:
    """Inputs x, skip, scale, bias of the normalization, bias of the sum."""
    if asked_for(ctx, 1) or asked_for(ctx, 2):
        return None
    total = _sum(ctx, ctx.maybe_x(4))
    epsilon = ctx.float("epsilon", _EPSILON)
    return [layer_norm(ctx.op, total, ctx.x(2), ctx.maybe_x(3), epsilon), None, None, total]


@decomposition("SkipSimplifiedLayerNormalization")
def skip_rms_norm(ctx: Context) -> Outputs | None:
    """Inputs x, skip, scale, bias of the sum."""
    if asked_for(ctx, 1) or asked_for(ctx, 2):
        return None
    total = _sum(ctx, ctx.maybe_x(3))
    epsilon = ctx.float("epsilon", _EPSILON)
    return [rms_norm(ctx.op, total, ctx.x(2), [-1], epsilon), None, None, total]


def _sum(ctx: Context, bias: ir.Value | None) -> ir.Value:
    total = ctx.op.Add(ctx.x(), ctx.x(1))
    return total if bias is None else ctx.op.Add(total, bias)


@decomposition("SimplifiedLayerNormalization")
def simplified_layer_norm(ctx: Context) -> Outputs | None:
    """Root mean square normalization over all axes from ``axis`` on."""
    axis, rank = ctx.int("axis", -1), known_rank(ctx.x())
    if asked_for(ctx, 1) or (axis != -1 and rank is None):
        return None
    axes = [-1] if axis == -1 or rank is None else list(range(axis % rank, rank))
    return rms_norm(ctx.op, ctx.x(), ctx.x(1), axes, ctx.float("epsilon", _ONNX_EPSILON))
