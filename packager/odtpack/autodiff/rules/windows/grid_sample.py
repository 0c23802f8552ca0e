"""Sampling at positions that the model computes: GridSample, and AffineGrid, which makes them."""

from __future__ import annotations

import numpy as np

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.windows import sampling

# Names of the modes; opset 20 renamed two of them.
_MODES = {
    "nearest": sampling.nearest,
    "bilinear": sampling.linear,
    "linear": sampling.linear,
    "bicubic": sampling.cubic,
    "cubic": sampling.cubic,
}


@vjp("GridSample", since=16)
def grid_sample(ctx: Context) -> Cotangents:
    """x [N, C, ...] read at grid [N, ..., r], whose last axis counts from the last to the first.

    A grid of -1 to 1 spans the plane: from the centre of its first element to that of its
    last with align_corners, from edge to edge without.
    """
    op, x, grid, rank = ctx.op, ctx.x(), ctx.x(1), ctx.rank(ctx.x()) - 2
    mode, padding = ctx.string("mode", "linear"), ctx.string("padding_mode", "zeros")
    corners = bool(ctx.int("align_corners", 0))
    if mode not in _MODES or padding not in ("zeros", "border", "reflection"):
        raise ctx.unsupported(f"mode {mode!r} with padding_mode {padding!r}")
    sizes = [sampling.length(op, x, 2 + axis) for axis in range(rank)]
    places = op.reshape(op.cast(grid, ctx.dtype(x)), 0, -1, rank)
    scales, axes = [], []
    for axis, size in enumerate(sizes):
        length = op.cast(size, ctx.dtype(x))
        scale = op.Mul(op.Sub(length, 1.0) if corners else length, 0.5)
        column = op.slice(places, [2], [rank - 1 - axis], [rank - axis])
        at = op.Add(op.Mul(column, scale), op.Mul(op.Sub(length, 1.0), 0.5))
        axes.append(_MODES[mode](op, at, size, padding, corners))
        scales.append(scale)
    taps = sampling.combine(op, axes, sizes)
    dy = op.reshape(ctx.dy(), 0, 0, -1)
    dx = sampling.scatter(op, x, taps, dy) if ctx.needs(0) else None
    if not ctx.needs(1):
        return [dx]
    if mode == "nearest":
        return [dx, op.zeros(op.shape_of(grid), ctx.dtype(grid))]
    share = sampling.shares(op, sampling.rows(op, x, taps), dy)
    found = sampling.position_gradients(op, taps, share)
    columns = [
        op.unsqueeze(op.Mul(slope, scale), 2)
        for slope, scale in zip(found, scales, strict=True)
        if slope is not None
    ]
    dgrid = op.reshape_like(op.Concat(*reversed(columns), axis=2), grid)
    return [dx, op.cast(dgrid, ctx.dtype(grid))]


@vjp("AffineGrid", since=20)
def affine_grid(ctx: Context) -> Cotangents:
    """grid [N, P, r] = base [P, r] A^T + b, where theta [N, r, r + 1] is A with b appended.

    The operator itself makes ``base``: it is the grid of the identity.
    """
    op, theta, rank = ctx.op, ctx.x(), ctx.size(ctx.x(), 1)
    dtype = ctx.dtype(theta)
    identity = op.constant(np.eye(rank, rank + 1, dtype=dtype.numpy())[None])
    one = op.Concat(op.ints(1), op.slice(ctx.x(1), [0], [1], [rank + 2]), axis=0)
    base = op.AffineGrid(identity, one, align_corners=ctx.int("align_corners", 0))
    columns = op.transpose(op.reshape(ctx.dy(), 0, -1, rank), 0, 2, 1)  # [N, r, P]
    matrix = op.MatMul(columns, op.reshape(base, -1, rank))
    return [op.Concat(matrix, op.reduce_sum(columns, [2]), axis=2), None]
