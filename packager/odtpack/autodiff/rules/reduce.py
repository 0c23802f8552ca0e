"""Reductions. The cotangent is first given back the axes that the reduction removed.

Axes that are known only when the model runs are given back by reducing once more with
``keepdims``: the operator itself says which they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp
from odtpack.graph.graphs import wider

non_differentiable("ArgMax", "ArgMin")

Axes = Sequence[int] | None


def reduced_axes(ctx: Context) -> Axes:
    """Axes that the node reduces, counted from the front.

    Empty means none at all, None that they are known only when the model runs.
    """
    rank = ctx.rank(ctx.x())
    listed = ctx.node.attributes.get_ints("axes", None)
    if listed is None and ctx.maybe_x(1) is not None:
        constant = ctx.constant(1)
        if constant is None:
            return None
        listed = [int(axis) for axis in constant.reshape(-1)]
    if not listed:
        return [] if ctx.int("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(axis % rank for axis in listed)


def again(ctx: Context, op_type: str, value: ir.Value, axes: Axes) -> ir.Value:
    """Reduce ``value``, of the input's shape, over the node's axes, and keep them."""
    op = ctx.op
    if axes is None:
        noop = ctx.int("noop_with_empty_axes", 0)
        return op.emit(op_type, [value, ctx.x(1)], keepdims=1, noop_with_empty_axes=noop)[0]
    return op.reduce_prod(value, axes) if op_type == "ReduceProd" else op.reduce_sum(value, axes)


def keep_axes(ctx: Context, value: ir.Value, axes: Axes) -> ir.Value:
    """Insert the reduced axes again as axes of length one."""
    if ctx.int("keepdims", 1) or (axes is not None and not axes):
        return value
    if axes is not None:
        return ctx.op.unsqueeze(value, *axes)
    kept = again(ctx, ctx.node.op_type, ctx.x(), axes)
    return ctx.op.Reshape(value, ctx.op.Shape(kept))


def count_averaged(ctx: Context, axes: Axes, dtype: ir.DataType) -> ir.Value | float:
    """Number of elements that one mean runs over."""
    op, dims = ctx.op, ctx.dims(ctx.x())
    if axes is None:
        return op.cast(op.Div(op.Size(ctx.x()), op.Size(ctx.y())), dtype)
    known = [dim for dim in (dims[axis] for axis in axes) if isinstance(dim, int)]
    if len(known) == len(axes):
        return float(math.prod(known))
    wanted = op.Gather(op.Shape(ctx.x()), op.ints(*axes), axis=0)
    return op.cast(op.ReduceProd(wanted, keepdims=0), dtype)


@vjp("ReduceSum")
def reduce_sum(ctx: Context) -> Cotangents:
    axes = reduced_axes(ctx)
    return ctx.op.Expand(keep_axes(ctx, ctx.dy(), axes), ctx.op.shape_of(ctx.x()))


@vjp("ReduceMean")
def reduce_mean(ctx: Context) -> Cotangents:
    op, axes, dtype = ctx.op, reduced_axes(ctx), ctx.dtype(ctx.x())
    wide = wider(dtype)  # float16 cannot count beyond 65504
    dy = op.cast(keep_axes(ctx, ctx.dy(), axes), wide)
    share = op.cast(op.Div(dy, count_averaged(ctx, axes, wide)), dtype)
    return op.Expand(share, op.shape_of(ctx.x()))


@vjp("ReduceSumSquare")
def reduce_sum_square(ctx: Context) -> Cotangents:
    axes = reduced_axes(ctx)
    return ctx.op.Mul(ctx.x(), ctx.op.Mul(keep_axes(ctx, ctx.dy(), axes), 2.0))


@vjp("ReduceL1")
def reduce_l1(ctx: Context) -> Cotangents:
    axes = reduced_axes(ctx)
    return ctx.op.Mul(ctx.op.Sign(ctx.x()), keep_axes(ctx, ctx.dy(), axes))


@vjp("ReduceL2")
def reduce_l2(ctx: Context) -> Cotangents:
    """x dy / y; zero where the norm is zero, the subgradient that PyTorch takes."""
    op, axes = ctx.op, reduced_axes(ctx)
    norm = keep_axes(ctx, ctx.y(), axes)
    safe = op.Where(op.Equal(norm, 0), 1, norm)
    return op.Mul(ctx.x(), op.Div(keep_axes(ctx, ctx.dy(), axes), safe))


@vjp("ReduceLogSum")
def reduce_log_sum(ctx: Context) -> Cotangents:
    op, axes = ctx.op, reduced_axes(ctx)
    share = op.Div(keep_axes(ctx, ctx.dy(), axes), op.Exp(keep_axes(ctx, ctx.y(), axes)))
    return op.Expand(share, op.shape_of(ctx.x()))


@vjp("ReduceLogSumExp")
def reduce_log_sum_exp(ctx: Context) -> Cotangents:
    """The slope is the softmax over the reduced axes, exp(x - y)."""
    op, axes = ctx.op, reduced_axes(ctx)
    soft = op.Exp(op.Sub(ctx.x(), keep_axes(ctx, ctx.y(), axes)))
    return op.Mul(soft, keep_axes(ctx, ctx.dy(), axes))


@vjp("ReduceMax", "ReduceMin")
def reduce_extremum(ctx: Context) -> Cotangents:
    """Ties share the cotangent evenly, as in PyTorch's amax."""
    op, x, axes = ctx.op, ctx.x(), reduced_axes(ctx)
    if axes is not None and not axes:
        return ctx.dy()
    hits = op.cast(op.Equal(x, keep_axes(ctx, ctx.y(), axes)), ctx.dtype(x))
    share = op.Div(keep_axes(ctx, ctx.dy(), axes), again(ctx, "ReduceSum", hits, axes))
    return op.Mul(hits, share)


@vjp("ReduceProd")
def reduce_prod(ctx: Context) -> Cotangents:
    """The slope is the product of the others: y / x, and where x is 0 what y is without it."""
    op, x, axes = ctx.op, ctx.x(), reduced_axes(ctx)
    if axes is not None and not axes:
        return ctx.dy()
    zero = op.Equal(x, 0)
    safe = op.Where(zero, 1, x)
    others = op.Div(again(ctx, "ReduceProd", safe, axes), safe)
    zeros = op.cast(zero, ctx.dtype(x))
    more = op.Sub(again(ctx, "ReduceSum", zeros, axes), zeros)
    slope = op.Where(op.Equal(more, 0), others, 0)
    return op.Mul(slope, keep_axes(ctx, ctx.dy(), axes))


@vjp("CumSum", since=11)
def cumulative_sum(ctx: Context) -> Cotangents:
    """Element i is in the sums from i on: a sum in the other direction."""
    reverse, exclusive = ctx.int("reverse", 0), ctx.int("exclusive", 0)
    return ctx.op.CumSum(ctx.dy(), ctx.x(1), reverse=1 - reverse, exclusive=exclusive)


@vjp("CumProd", since=26)
def cumulative_product(ctx: Context) -> Cotangents:
    """dx_i is the sum of dy_j y_j over the products j that x_i is in, divided by x_i.

    After the first zero nothing counts: every product from there on is zero whatever
    changes. The first zero itself has the slope of the products without it.
    """
    op, x, axis, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    reverse, exclusive = ctx.int("reverse", 0), ctx.int("exclusive", 0)

    def slope(products: ir.Value) -> ir.Value:
        terms = op.Mul(dy, products)
        return op.CumSum(terms, axis, reverse=1 - reverse, exclusive=exclusive)

    zero = op.Equal(x, 0)
    zeros = op.CumSum(op.cast(zero, ctx.dtype(x)), axis, reverse=reverse)
    first = op.And(zero, op.Equal(zeros, 1))
    factors = op.Where(zero, 1, x)
    others = op.CumProd(op.Where(first, 1, x), axis, reverse=reverse, exclusive=exclusive)
    before = op.Where(op.Equal(zeros, 0), op.Div(slope(ctx.y()), factors), 0)
    return [op.Where(first, slope(others), before), None]
