"""Determinants."""

from __future__ import annotations

import numpy as np

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp


@vjp("Det", since=11)
def det(ctx: Context) -> Cotangents:
    """The slope is the matrix of cofactors, signed determinants without one row and column.

    ONNX has no inverse; and unlike y X^-T, cofactors are right for a singular matrix, too.
    """
    op, x, rank = ctx.op, ctx.x(), ctx.rank(ctx.x())
    size = ctx.size(x, rank - 1)
    dy = op.unsqueeze(ctx.dy(), rank - 2, rank - 1)
    if size == 1:
        return dy
    others = np.array([[j for j in range(size) if j != i] for i in range(size)])
    rows = op.Gather(x, op.constant(others), axis=rank - 2)  # [..., i, M - 1, M]
    minors = op.Gather(rows, op.constant(others), axis=rank)  # [..., i, M - 1, j, M - 1]
    minors = op.transpose(minors, *range(rank - 1), rank, rank - 1, rank + 1)
    signs = 1 - 2 * (np.indices((size, size)).sum(0) % 2)
    cofactors = op.Mul(op.Det(minors), op.constant(signs.astype(ctx.dtype(x).numpy())))
    return op.Mul(cofactors, dy)
