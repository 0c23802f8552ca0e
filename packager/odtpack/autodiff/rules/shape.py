"""Operators that move, cut, join or repeat elements."""

from __future__ import annotations

import itertools

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp
from odtpack.graph.graphs import dims_of

non_differentiable(
    "Shape", "Size", "ConstantOfShape", "Constant", "EyeLike",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli",
    "Multinomial",
)  # fmt: skip


@vjp("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(ctx: Context) -> Cotangents:
    return ctx.op.reshape_like(ctx.dy(), ctx.x())


@vjp("Transpose")
def transpose(ctx: Context) -> Cotangents:
    rank = ctx.rank(ctx.x())
    perm = ctx.ints("perm", range(rank - 1, -1, -1))
    return ctx.op.transpose(ctx.dy(), *(perm.index(axis) for axis in range(rank)))


@vjp("Expand")
def expand(ctx: Context) -> Cotangents:
    return ctx.op.sum_to(ctx.dy(), dims_of(ctx.y()), ctx.x())


@vjp("Concat")
def concat(ctx: Context) -> Cotangents:
    op, axis = ctx.op, ctx.axis()
    sizes = [ctx.dims(value)[axis] for value in ctx.node.inputs if value is not None]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return op.split(ctx.dy(), axis, known)
    lengths = [
        op.Gather(op.Shape(value), op.ints(axis), axis=0)
        for value in ctx.node.inputs
        if value is not None
    ]
    if op.opset < 13:  # Split's sizes are an attribute: cut part by part
        ends = list(itertools.accumulate(lengths, op.Add))
        bounds = zip([op.ints(0), *ends[:-1]], ends, strict=True)
        return [op.Slice(ctx.dy(), start, end, op.ints(axis)) for start, end in bounds]
    joined = op.Concat(*lengths, axis=0)
    return op.emit("Split", [ctx.dy(), joined], outputs=len(sizes), axis=axis)


@vjp("Split")
def split(ctx: Context) -> Cotangents:
    """An unused output contributes zeros."""
    op, axis = ctx.op, ctx.axis()
    parts = []
    for index, output in enumerate(ctx.node.outputs):
        cotangent = ctx.maybe_dy(index)
        parts.append(cotangent or op.zeros(op.shape_of(output), ctx.dtype(output)))
    return op.Concat(*parts, axis=axis)


@vjp("DepthToSpace")
def depth_to_space(ctx: Context) -> Cotangents:
    """SpaceToDepth undoes it; mode CRD orders the channels the other way round."""
    op, size = ctx.op, ctx.int("blocksize", 1)
    dx = op.SpaceToDepth(ctx.dy(), blocksize=size)
    if ctx.string("mode", "DCR") == "DCR":
        return dx
    channels = ctx.size(ctx.x(), 1)
    blocks = op.reshape(dx, 0, size * size, channels // size**2, -1)
    return op.reshape_like(op.transpose(blocks, 0, 2, 1, 3), ctx.x())


@vjp("SpaceToDepth")
def space_to_depth(ctx: Context) -> Cotangents:
    """DepthToSpace of the same mode undoes it; before opset 28 there was DCR alone."""
    mode = ctx.string("mode", "DCR")
    return ctx.op.DepthToSpace(ctx.dy(), blocksize=ctx.int("blocksize", 1), mode=mode)


@vjp("Trilu")
def trilu(ctx: Context) -> Cotangents:
    return [ctx.op.Trilu(ctx.dy(), ctx.maybe_x(1), upper=ctx.int("upper", 1)), None]
