"""Products, convolutions, activations and normalizations with something fused into them."""

from __future__ import annotations

from typing import Any

from odtpack.autodiff.context import Context
from odtpack.contrib.table import (
    Outputs,
    activate,
    asked_for,
    covers_activation,
    decomposition,
    gelu,
    known_rank,
    layer_norm,
    rms_norm,
    written_norm,
)


@decomposition("Gelu", "BiasGelu", "FastGelu")
def gelus(ctx: Context) -> Outputs:
    """x Phi(x) of the input, with the second one added to it if there is one."""
    x, shift = ctx.x(), ctx.maybe_x(1)
    x = x if shift is None else ctx.op.Add(x, shift)
    return gelu(ctx.op, x, tanh=ctx.node.op_type == "FastGelu")


@decomposition("QuickGelu")
def quick(ctx: Context) -> Outputs:
    """x sigmoid(alpha x)."""
    op, x = ctx.op, ctx.x()
    return op.Mul(x, op.Sigmoid(op.Mul(x, ctx.float("alpha", 1.702))))


@decomposition("FusedMatMul", "TransposeMatMul")
def fused_matmul(ctx: Context) -> Outputs | None:
    """alpha A' B', where ' may transpose the last two axes, or bring the first before the last."""
    op, operands = ctx.op, []
    ranks = [known_rank(ctx.x(i)) for i in (0, 1)]
    for rank, side in zip(ranks, "AB", strict=True):
        moves = ctx.int(f"trans{side}", 0) or ctx.int(f"transBatch{side}", 0)
        if moves and (rank is None or rank < 2):
            return None
    for i, (rank, side) in enumerate(zip(ranks, "AB", strict=True)):
        perm = list(range(rank or 0))
        if ctx.int(f"transBatch{side}", 0):
            perm = [*perm[1:-1], 0, perm[-1]]
        if ctx.int(f"trans{side}", 0):
            perm[-2:] = perm[-1], perm[-2]
        operands.append(op.transpose(ctx.x(i), *perm))
    product = op.MatMul(*operands)
    alpha = ctx.float("alpha", 1.0)
    return product if alpha == 1 else op.Mul(product, alpha)


@decomposition("FusedGemm")
def fused_gemm(ctx: Context) -> Outputs | None:
    name = ctx.string("activation", "")
    parameters = [
        ctx.float(f"activation_{key}", 0.0)
        for key in ("alpha", "beta", "gamma")
        if f"activation_{key}" in ctx.node.attributes
    ]
    if not covers_activation(name, len(parameters)):
        return None
    (y,) = ctx.op.emit("Gemm", ctx.node.inputs, **_without_activation(ctx))
    return activate(ctx.op, y, name, parameters)


@decomposition("FusedConv")
def fused_conv(ctx: Context) -> Outputs | None:
    """A convolution, to whose result a fourth input is added before the activation."""
    op, name = ctx.op, ctx.string("activation", "")
    parameters = list(ctx.node.attributes.get_floats("activation_params", ()))
    if name and not covers_activation(name, len(parameters)):
        return None
    operands = list(ctx.node.inputs[:3])
    while operands[-1] is None:
        operands.pop()
    (y,) = op.emit("Conv", operands, **_without_activation(ctx))
    added = ctx.maybe_x(3)
    y = y if added is None else op.Add(y, added)
    return activate(op, y, name, parameters) if name else y


def _without_activation(ctx: Context) -> dict[str, Any]:
    """Attributes of the operator that the activation is fused into."""
    found = ctx.node.attributes.items()
    return {key: value.value for key, value in found if not key.startswith("activation")}


# Normalizations with a skip connection or without a mean.
#
# Means and inverse deviations, which some of them return for training, are not covered.

_EPSILON = 1e-12  # of ONNX Runtime's kernels, where the attribute is absent
_ONNX_EPSILON = 1e-5


@decomposition("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
def skip_norm(ctx: Context) -> Outputs | None:
    """Inputs x, skip, scale, bias of the normalization if it has one, bias of the sum."""
    if asked_for(ctx, 1) or asked_for(ctx, 2):
        return None
    op, centered = ctx.op, ctx.node.op_type == "SkipLayerNormalization"
    total, bias = op.Add(ctx.x(), ctx.x(1)), ctx.maybe_x(4 if centered else 3)
    total = total if bias is None else op.Add(total, bias)
    scale, epsilon = ctx.x(2), ctx.float("epsilon", _EPSILON)
    if centered:
        return [layer_norm(op, total, scale, ctx.maybe_x(3), epsilon), None, None, total]
    return [rms_norm(op, total, scale, [-1], epsilon), None, None, total]


@decomposition("SimplifiedLayerNormalization")
def simplified_layer_norm(ctx: Context) -> Outputs | None:
    """Root mean square normalization over all axes from ``axis`` on."""
    axes = _axes(ctx)
    if asked_for(ctx, 1) or axes is None:
        return None
    return rms_norm(ctx.op, ctx.x(), ctx.x(1), axes, ctx.float("epsilon", _ONNX_EPSILON))


@decomposition("LayerNormalization")
def layer_normalization(ctx: Context) -> Outputs | None:
    """That of opset 17, which ONNX Runtime has in older ones too."""
    axes, epsilon = _axes(ctx), ctx.float("epsilon", _ONNX_EPSILON)
    if axes is None:
        return None
    return written_norm(ctx.op, ctx.x(), ctx.x(1), ctx.maybe_x(2), axes, epsilon)


def _axes(ctx: Context) -> list[int] | None:
    """All axes from ``axis`` on; None where their number is needed and not known."""
    axis, rank = ctx.int("axis", -1), known_rank(ctx.x())
    if axis < 0:
        return list(range(axis, 0))
    return None if rank is None else list(range(axis, rank))
