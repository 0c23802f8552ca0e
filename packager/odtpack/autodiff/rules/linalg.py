"""Matrix products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.graph.ops import Ops


def swap_last(op: Ops, value: ir.Value, rank: int) -> ir.Value:
    """Transpose the last two axes."""
    perm = list(range(rank))
    perm[-2:] = perm[-1], perm[-2]
    return op.transpose(value, *perm)


def multiply_axis(op: Ops, value: ir.Value, rank: int, axis: int, matrix: np.ndarray) -> ir.Value:
    """Multiply a constant [old, new] onto one axis: sum over i of value[.., i, ..] matrix[i]."""
    if axis == rank - 2:
        return op.MatMul(op.constant(np.ascontiguousarray(matrix.T)), value)
    last = [i for i in range(rank) if i != axis] + [axis]
    product = op.MatMul(op.transpose(value, *last), op.constant(matrix))
    return op.transpose(product, *(last.index(i) for i in range(rank)))


@vjp("MatMul")
def matmul(ctx: Context) -> Cotangents:
    """dA = dY B^T, dB = A^T dY, summed over the axes that broadcast."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    dims_a, dims_b, dims_y = ctx.dims(a), ctx.dims(b), ctx.dims(ctx.y())
    if len(dims_a) == 1 or len(dims_b) == 1:
        return _vector_product(ctx)
    rows, columns = dims_b[-2:]
    if len(dims_b) == 2 and isinstance(rows, int) and isinstance(columns, int):
        return _shared_weight(ctx, rows, columns)
    da = db = None
    if ctx.needs(0):
        product = op.MatMul(dy, swap_last(op, b, len(dims_b)))
        da = op.sum_to(product, (*dims_y[:-1], dims_a[-1]), a)
    if ctx.needs(1):
        product = op.MatMul(swap_last(op, a, len(dims_a)), dy)
        db = op.sum_to(product, (*dims_y[:-2], *dims_b[-2:]), b)
    return [da, db]


def _shared_weight(ctx: Context, rows: int, columns: int) -> Cotangents:
    """The right operand is a matrix: one product over all rows, not one for each sample.

    Gemm transposes as it reads, so that no transposed copy is made.
    """
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    da = db = None
    matrix = ctx.rank(a) == 2
    flat_dy = dy if matrix else op.reshape(dy, -1, columns)
    if ctx.needs(0):
        da = op.Gemm(flat_dy, b, transB=1)
        da = da if matrix else op.reshape_like(da, a)
    if ctx.needs(1):
        db = op.Gemm(a if matrix else op.reshape(a, -1, rows), flat_dy, transA=1)
    return [da, db]


def _vector_product(ctx: Context) -> Cotangents:
    """One operand is a vector, which MatMul reads as a row (left) or a column (right)."""
    op, a, b, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    dims_a, dims_b, rank = ctx.dims(a), ctx.dims(b), ctx.rank(ctx.y())
    if len(dims_a) == 1 and len(dims_b) == 1:
        return [op.Mul(dy, b), op.Mul(dy, a)]
    if len(dims_a) == 1:  # y[..., n] = sum_k a[k] b[..., k, n]
        row = op.unsqueeze(dy, rank - 1)
        da = op.reduce_sum(op.Mul(b, row), [len(dims_b) - 1], keepdims=False)
        return [op.sum_to(da, dims_b[:-1], a), op.Mul(op.unsqueeze(a, 1), row)]
    column = op.unsqueeze(dy, rank)  # y[..., m] = sum_k a[..., m, k] b[k]
    return [op.Mul(column, b), op.sum_to(op.Mul(a, column), dims_a, b)]


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
        dc = op.sum_to(dy, ctx.dims(ctx.y()), ctx.x(2))
        dc = dc if beta == 1 else op.Mul(dc, beta)
    return [da, db, dc]
