"""Resize: along each axis a product with the matrix of interpolation weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.linalg import multiply_axis
from odtpack.autodiff.windows.resize_weights import Axis, Kernel, weights
from odtpack.autodiff.windows.sampling import length
from odtpack.graph.ops import Ops


@vjp("Resize", since=11)
def resize(ctx: Context) -> Cotangents:
    """All modes are separable: y = M x along each axis, so dx = M^T dy.

    M is a constant where the sizes and the scale of an axis are known; else the graph
    computes it. Sizes, scales and the region of tf_crop_and_resize receive no gradient.
    """
    op, x, rank, dx = ctx.op, ctx.x(), ctx.rank(ctx.x()), ctx.dy()
    kernel = Kernel.of(ctx)
    for position, axis in enumerate(_listed(ctx)):
        old, new = ctx.dims(x)[axis], ctx.dims(ctx.y())[axis]
        scale = _scale(ctx, position)
        if scale == 1 or (_stretched(ctx) and old is not None and old == new):
            continue
        if axis == 0 and rank > 2 and kernel.mode != "nearest":
            continue  # of which the runtime resizes no samples
        region = _region(ctx, position)
        if (
            isinstance(old, int)
            and isinstance(new, int)
            and not isinstance(scale, ir.Value)
            and not isinstance(region, ir.Value)
        ):
            constant = _known_weights(op, kernel, old, new, scale, region)
            dx = multiply_axis(op, dx, rank, axis, constant.astype(ctx.dtype(x).numpy()))
            continue
        axes = Axis(length(op, x, axis), length(op, ctx.dy(), axis), scale, region)
        matrix = weights(op, kernel, axes, ctx.dtype(x))
        last = [i for i in range(rank) if i != axis] + [axis]
        product = op.MatMul(op.transpose(dx, *last), matrix)
        dx = op.transpose(product, *(last.index(i) for i in range(rank)))
    return [dx, None, None, None]


def _listed(ctx: Context) -> list[int]:
    rank = ctx.rank(ctx.x())
    return [axis % rank for axis in ctx.ints("axes", range(rank))]


def _has_scales(ctx: Context) -> bool:
    return ctx.maybe_x(2) is not None and ctx.dims(ctx.x(2)) != (0,)


def _stretched(ctx: Context) -> bool:
    """Whether each axis has the scale that its sizes say."""
    policy = ctx.string("keep_aspect_ratio_policy", "stretch")
    return not _has_scales(ctx) and policy == "stretch"


def _scale(ctx: Context, position: int) -> float | ir.Value | None:
    """Scale of the listed axis ``position``, if it is not what its sizes say."""
    if _stretched(ctx):
        return None
    op, dtype = ctx.op, ctx.dtype(ctx.x())
    if _has_scales(ctx):
        scales = ctx.constant(2)
        if scales is not None:
            return float(scales[position])
        return op.cast(op.slice(ctx.x(2), [0], [position], [position + 1]), dtype)
    axes, sizes, dims = _listed(ctx), ctx.constant(3), ctx.dims(ctx.x())
    smaller = ctx.string("keep_aspect_ratio_policy", "stretch") == "not_larger"
    known = [dim for dim in (dims[axis] for axis in axes) if isinstance(dim, int)]
    if sizes is not None and len(known) == len(axes):
        ratios = [float(size) / old for size, old in zip(sizes, known, strict=True)]
        return min(ratios) if smaller else max(ratios)
    old = op.Gather(op.Shape(ctx.x()), op.ints(*axes), axis=0)
    ratio = op.Div(op.cast(ctx.x(3), dtype), op.cast(old, dtype))
    return op.ReduceMin(ratio, keepdims=1) if smaller else op.ReduceMax(ratio, keepdims=1)


def _region(ctx: Context, position: int) -> tuple[float, float] | ir.Value | None:
    """Start and end of the part that tf_crop_and_resize resizes, as shares of the axis."""
    if ctx.string("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        return None
    count, region = len(_listed(ctx)), ctx.constant(1)
    if region is not None:
        return float(region[position]), float(region[count + position])
    picked = ctx.op.ints(position, count + position)
    return ctx.op.cast(ctx.op.Gather(ctx.x(1), picked, axis=0), ctx.dtype(ctx.x()))


def _known_weights(
    op: Ops,
    kernel: Kernel,
    old: int,
    new: int,
    scale: float | None,
    region: tuple[float, float] | None,
) -> np.ndarray:
    """The result [new, old] of the nodes that would compute the weights."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": op.opset}, name="weights")
    inner = Ops(graph)
    axis = Axis(inner.ints(old), inner.ints(new), scale, region)
    graph.outputs.append(weights(inner, kernel, axis, ir.DataType.DOUBLE))
    model = ir.to_proto(ir.Model(graph, ir_version=8))
    results: Any = ReferenceEvaluator(model).run(None, {})  # its stubs say it may be a dict
    return np.asarray(results[0])
