"""Matrix products and convolutions with transposition or activation."""

from __future__ import annotations

from typing import Any

from odtpack.autodiff.context import Context
from odtpack.contrib.table import Outputs, activate, covers_activation, decomposition, known_rank


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
    (y,) = ctx.op.emit("Gemm", ctx.node.inputs, **_without(ctx, "activation"))
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
    (y,) = op.emit("Conv", operands, **_without(ctx, "activation"))
    added = ctx.maybe_x(3)
    y = y if added is None else op.Add(y, added)
    return activate(op, y, name, parameters) if name else y


def _without(ctx: Context, prefix: str) -> dict[str, Any]:
    """Attributes that do not begin with ``prefix``."""
    found = ctx.node.attributes.items()
    return {key: value.value for key, value in found if not key.startswith(prefix)}
