"""Matrix products."""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.ops import Ops
from odtpack.autodiff.registry import Cotangents, vjp


def swap_last(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    """Transpose the last two axes."""
    perm = list(range(rank))
    perm[-2:] = perm[-1], perm[-2]
    return op.transpose(value, *perm)


@vjp("MatMul")
def matmul(ctx: Context) -> Cotangents:
    """dA = dY B^T, dB = A^T dY, summed over the axes that broadcast."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    rank_a, rank_b = ctx.rank(a), ctx.rank(b)
    if rank_a == 1 or rank_b == 1:
        return _vector_product(ctx)
    y = ctx.y()
    da = db = None
    if ctx.needs(0):
        dims = (*ctx.dims(y)[:-1], ctx.dims(a)[-1])
        da = op.sum_to(op.MatMul(dy, swap_last(op, b, rank_b)), dims, a)
    if ctx.needs(1):
        if rank_b == 2 and rank_a > 2:
            # A weight shared by a batch: one product over all rows, not one for each.
            rows, columns = ctx.dims(a)[-1], ctx.dims(y)[-1]
            if isinstance(rows, int) and isinstance(columns, int):
                flat_a, flat_dy = op.reshape(a, -1, rows), op.reshape(dy, -1, columns)
                return [da, op.MatMul(op.transpose(flat_a, 1, 0), flat_dy)]
        dims = (*ctx.dims(y)[:-2], ctx.dims(b)[-2], ctx.dims(b)[-1])
        db = op.sum_to(op.MatMul(swap_last(op, a, rank_a), dy), dims, b)
    return [da, db]


def _vector_product(ctx: Context) -> Cotangents:
    """One operand is a vector, which MatMul reads as a row (left) or a column (right)."""
    op, a, b, y = ctx.op, ctx.x(0), ctx.x(1), ctx.y()
    dims_a, dims_b, dims_y = ctx.dims(a), ctx.dims(b), ctx.dims(y)
    dy = ctx.dy()
    if len(dims_a) == 1 and len(dims_b) == 1:
        return [op.Mul(dy, b), op.Mul(dy, a)]
    if len(dims_a) == 1:  # y[..., n] = sum_k a[k] b[..., k, n]
        column = op.unsqueeze(a, 1)
        da = op.reduce_sum(op.Mul(b, op.unsqueeze(dy, len(dims_y) - 1)), [len(dims_b) - 1])
        da = op.squeeze(da, len(dims_b) - 1)
        return [op.sum_to(da, dims_b[:-1], a), op.Mul(column, op.unsqueeze(dy, len(dims_y) - 1))]
    wide = op.unsqueeze(dy, len(dims_y))  # y[..., m] = sum_k a[..., m, k] b[k]
    db = op.sum_to(op.Mul(a, wide), dims_a, b)
    return [op.Mul(wide, b), db]


@vjp("Gemm")
def gemm(ctx: Context) -> Cotangents:
    """Y = alpha A' B' + beta C, where ' may transpose."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    alpha, beta = ctx.float("alpha", 1.0), ctx.float("beta", 1.0)
    trans_a, trans_b = ctx.int("transA", 0), ctx.int("transB", 0)

    def product(left: ir.Value, right: ir.Value, trans_left: int, trans_right: int) -> ir.Value:
        return op.Gemm(left, right, alpha=alpha, transA=trans_left, transB=trans_right)

    da = db = dc = None
    if ctx.needs(0):
        da = product(b, dy, trans_b, 1) if trans_a else product(dy, b, 0, 1 - trans_b)
    if ctx.needs(1):
        db = product(dy, a, 1, trans_a) if trans_b else product(a, dy, 1 - trans_a, 0)
    if ctx.needs(2):
        scaled = dy if beta == 1 else op.Mul(dy, beta)
        dc = op.sum_to(scaled, ctx.dims(ctx.y()), ctx.x(2))
    return [da, db, dc]
