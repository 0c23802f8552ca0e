"""Deformable convolution: a convolution whose taps are read at positions that are learnt."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.norm import sum_per_channel
from odtpack.autodiff.windows import sampling


@vjp("DeformConv", since=19)
def deform_conv(ctx: Context) -> Cotangents:
    """y[o, p] = b[o] + sum over c, k of w[o, c, k] m[k, p] x[c] at position (k, p).

    Samples and offset groups together are the planes [N D, C / D, H, W] of
    :mod:`odtpack.autodiff.windows.sampling`; each has K P samples.
    """
    op, x, w, mask = ctx.op, ctx.x(), ctx.x(1), ctx.maybe_x(4)
    outer, inner, *kernel = (ctx.size(w, axis) for axis in range(ctx.rank(w)))
    if len(kernel) != 2:
        raise ctx.unsupported("only two spatial axes")
    groups, shared = ctx.int("group", 1), ctx.int("offset_group", 1)
    channels, count = inner * groups, int(np.prod(kernel))
    plane = op.slice(op.shape_of(x), [0], [2], [4])
    planes = op.Reshape(x, op.Concat(op.ints(-1, channels // shared), plane, axis=0))
    taps = _taps(ctx, planes, kernel)
    dy = op.reshape(ctx.dy(), 0, groups, outer // groups, -1)  # [N, G, O / G, P]
    pixels = op.slice(op.Shape(dy), [0], [3], [4])

    def samples(value: ir.Value, each: int) -> ir.Value:
        """View anything of ``each`` channels in each plane as [N D, each, K P]."""
        return op.Reshape(value, op.Concat(op.ints(-1, each), op.Mul(pixels, count), axis=0))

    # The cotangent of what the taps read: dread[c, k, p] = sum over o of w[o, c, k] dy[o, p].
    weight = op.transpose(op.reshape(w, groups, outer // groups, inner * count), 0, 2, 1)
    dread = samples(op.MatMul(weight, dy), channels // shared)
    factor = None if mask is None else samples(mask, 1)
    dmasked = dread if factor is None else op.Mul(dread, factor)
    dx = dw = doffset = db = dmask = None
    if ctx.needs(0):
        dx = op.reshape_like(sampling.scatter(op, planes, taps, dmasked), x)
    if ctx.needs(3):
        db = sum_per_channel(op, ctx.dy(), 4)
    if not any(map(ctx.needs, (1, 2, 4))):
        return [dx, None, None, db, None]
    read = sampling.rows(op, planes, taps)
    if ctx.needs(1):
        values = op.reduce_sum(op.Mul(read, op.unsqueeze(taps.weight, 3)), [2], keepdims=False)
        columns = op.transpose(values, 0, 2, 1)  # [N D, C / D, K P]
        columns = columns if factor is None else op.Mul(columns, factor)
        shape = op.Concat(op.ints(-1, groups, inner * count), pixels, axis=0)
        product = op.MatMul(dy, op.transpose(op.Reshape(columns, shape), 0, 1, 3, 2))
        dw = op.reshape_like(op.reduce_sum(product, [0], keepdims=False), w)
    if ctx.needs(2):
        found = sampling.position_gradients(op, taps, sampling.shares(op, read, dmasked))
        pairs = [op.reshape(value, 0, count, 1, -1) for value in found if value is not None]
        doffset = op.reshape_like(op.Concat(*pairs, axis=2), ctx.x(2))
    if mask is not None and ctx.needs(4):
        share = op.Mul(sampling.shares(op, read, dread), taps.weight)
        dmask = op.reshape_like(op.reduce_sum(share, [2], keepdims=False), mask)
    return [dx, dw, doffset, db, dmask]


def _taps(ctx: Context, planes: ir.Value, kernel: list[int]) -> sampling.Taps:
    """What the samples [N D, K P] read: the grid of an ordinary convolution plus the offsets."""
    op, dtype, count = ctx.op, ctx.dtype(ctx.x()), int(np.prod(kernel))
    strides, dilations = ctx.ints("strides", (1, 1)), ctx.ints("dilations", (1, 1))
    pads = ctx.ints("pads", (0,) * 4)
    taps = np.array(list(itertools.product(*map(range, kernel)))) * dilations - pads[:2]
    plane = op.slice(op.shape_of(ctx.dy()), [0], [2], [4])
    pairs = op.Reshape(ctx.x(2), op.Concat(op.ints(-1, count, 2), plane, axis=0))
    offsets = op.split(pairs, 2, [1, 1])  # [N D, K, 1, oh, ow] each
    axes, sizes = [], []
    for axis, moved in enumerate(offsets):
        number = op.squeeze(sampling.length(op, ctx.dy(), 2 + axis), 0)
        steps = op.Range(op.constant(np.int64(0)), number, op.constant(np.int64(1)))
        starts = op.cast(op.Mul(steps, strides[axis]), dtype)
        corner = op.reshape(starts, *((-1, 1) if axis == 0 else (1, -1)))
        tap = op.constant(taps[:, axis].astype(dtype.numpy()).reshape(-1, 1, 1, 1))
        at = op.Add(op.Add(moved, tap), corner)
        size = sampling.length(op, ctx.x(), 2 + axis)
        axes.append(sampling.linear(op, op.reshape(at, 0, -1, 1), size, "zeros", corners=False))
        sizes.append(size)
    return sampling.combine(op, axes, sizes)
