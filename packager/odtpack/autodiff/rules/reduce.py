"""Reductions and Fourier transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import add_at
from odtpack.autodiff.context import Context, Cotangents, non_differentiable, vjp
from odtpack.graph.graphs import Ops, wider

non_differentiable("ArgMax", "ArgMin")

# Reductions. The cotangent is first given back the axes that the reduction removed.
#
# Axes that are known only when the model runs are given back by reducing once more with
# ``keepdims``: the operator itself says which they are.

Axes = Sequence[int] | None


def reduced_axes(ctx: Context) -> Axes:
    """Axes that the node reduces, counted from the front."""
    # Empty means none at all, None that they are known only when the model runs.
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


# The cotangent of x, from x and what gives y and dy with the reduced axes.
_Kept = Callable[[], ir.Value]
_REDUCTIONS: dict[str, Callable[[Ops, ir.Value, _Kept, _Kept], ir.Value]] = {
    "ReduceSum": lambda op, x, y, dy: op.Expand(dy(), op.shape_of(x)),
    "ReduceSumSquare": lambda op, x, y, dy: op.Mul(x, op.Mul(dy(), 2.0)),
    "ReduceL1": lambda op, x, y, dy: op.Mul(op.Sign(x), dy()),
    "ReduceLogSum": lambda op, x, y, dy: op.Expand(op.Div(dy(), op.Exp(y())), op.shape_of(x)),
    # The slope is the softmax over the reduced axes, exp(x - y).
    "ReduceLogSumExp": lambda op, x, y, dy: op.Mul(op.Exp(op.Sub(x, y())), dy()),
}


@vjp(*_REDUCTIONS)
def reduction(ctx: Context) -> Cotangents:
    axes = reduced_axes(ctx)
    y, dy = (functools.partial(keep_axes, ctx, v, axes) for v in (ctx.y(), ctx.dy()))
    return _REDUCTIONS[ctx.node.op_type](ctx.op, ctx.x(), y, dy)


@vjp("ReduceMean")
def reduce_mean(ctx: Context) -> Cotangents:
    op, axes, dtype = ctx.op, reduced_axes(ctx), ctx.dtype(ctx.x())
    wide = wider(dtype)  # float16 cannot count beyond 65504
    dy = op.cast(keep_axes(ctx, ctx.dy(), axes), wide)
    share = op.cast(op.Div(dy, count_averaged(ctx, axes, wide)), dtype)
    return op.Expand(share, op.shape_of(ctx.x()))


@vjp("ReduceL2")
def reduce_l2(ctx: Context) -> Cotangents:
    """x dy / y; zero where the norm is zero, the subgradient that PyTorch takes."""
    op, axes = ctx.op, reduced_axes(ctx)
    norm = keep_axes(ctx, ctx.y(), axes)
    safe = op.Where(op.Equal(norm, 0), 1, norm)
    return op.Mul(ctx.x(), op.Div(keep_axes(ctx, ctx.dy(), axes), safe))


@vjp("ReduceMax", "ReduceMin")
def reduce_extremum(ctx: Context) -> Cotangents:
    """Ties share the cotangent evenly, as in PyTorch's amax; in its max(dim) the first has it."""
    op, x, axes = ctx.op, ctx.x(), reduced_axes(ctx)
    if axes is not None and not axes:
        return ctx.dy()
    kind, call = ctx.node.op_type, ctx.node.metadata_props.get("pkg.torch.onnx.fx_node", "")
    if axes is not None and len(axes) == 1 and ("aten.max.dim" in call or "aten.min.dim" in call):
        first = op.emit(kind.replace("Reduce", "Arg"), [x], axis=axes[0], keepdims=1)[0]
        dy = keep_axes(ctx, ctx.dy(), axes)
        return add_at(op, op.shape_of(x), first, dy, axes[0], reduction=None)
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
    """dx_i is the sum of dy_j y_j over the products j that x_i is in, divided by x_i."""
    # After the first zero nothing counts: every product from there on is zero whatever changes. The
    # first zero itself has the slope of the products without it.
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


non_differentiable("MelWeightMatrix")

# Fourier transforms: linear, so that the gradient is the adjoint transform.
#
# With complex numbers as pairs, the adjoint of y_k = sum_n x_n exp(-2 pi i k n / N) is
# sum_k y_k exp(+2 pi i k n / N), which is N times the inverse transform.

_AXIS_INPUT_SINCE = 20


@vjp("DFT", since=17)
def dft(ctx: Context) -> Cotangents:
    op, x, rank = ctx.op, ctx.x(), ctx.rank(ctx.x())
    inverse, axis = bool(ctx.int("inverse", 0)), ctx.axis(default=1)
    if op.opset >= _AXIS_INPUT_SINCE:
        axis = (-2 if ctx.maybe_x(2) is None else _known(ctx, 2, "axis")) % rank
    onesided = bool(ctx.int("onesided", 0))
    if onesided and inverse:
        raise ctx.unsupported("it is one-sided and inverse at once")
    size = ctx.size(x, axis)
    length = size if ctx.maybe_x(1) is None else _known(ctx, 1, "transform")
    dx = _adjoint(op, ctx.dy(), rank, axis, length, inverse=inverse, onesided=onesided)
    parts = ctx.size(x, rank - 1)
    kept = min(size, length)
    dx = op.slice(dx, [axis, rank - 1], [0, 0], [kept, parts])
    return [_pad_end(op, dx, rank, axis, size - kept), None, None]


def _known(ctx: Context, index: int, what: str) -> int:
    constant = ctx.constant(index)
    if constant is None:
        raise ctx.unsupported(f"the {what} length or axis is known only when the model runs")
    return int(constant.item())


def _pad_end(op: Ops, value: ir.Value, rank: int, axis: int, count: int) -> ir.Value:
    return op.pad(value, [0] * rank, [count * (i == axis) for i in range(rank)])


def _adjoint(
    op: Ops, dy: ir.Value, rank: int, axis: int, length: int, *, inverse: bool, onesided: bool
) -> ir.Value:
    """The adjoint of a transform of ``length`` elements along ``axis``, as complex pairs."""
    if onesided:  # what was left out has no cotangent
        dy = _pad_end(op, dy, rank, axis, length - (length // 2 + 1))
    if op.opset >= _AXIS_INPUT_SINCE:
        result = op.DFT(dy, None, op.constant(np.array(axis)), inverse=int(not inverse))
    else:
        result = op.DFT(dy, axis=axis, inverse=int(not inverse))
    return op.Mul(result, 1 / length if inverse else float(length))


@vjp("STFT", since=17)
def stft(ctx: Context) -> Cotangents:
    """Each frame is a window times a piece of the signal; pieces may overlap."""
    op, signal, window, dy = ctx.op, ctx.x(), ctx.maybe_x(2), ctx.dy()
    step = _known(ctx, 1, "step")
    length = _known(ctx, 3, "frame") if ctx.maybe_x(3) is not None else ctx.size(ctx.x(2), 0)
    flat = ctx.rank(signal) == 2  # which ONNX Runtime takes for a real signal, [B, samples, 1]
    samples, parts = ctx.size(signal, 1), 1 if flat else ctx.size(signal, 2)
    frames = (samples - length) // step + 1
    onesided = bool(ctx.int("onesided", 1))
    pieces = _adjoint(op, dy, 4, 2, length, inverse=False, onesided=onesided)
    pieces = op.slice(pieces, [3], [0], [parts])  # [B, frames, length, parts]
    places = op.constant(np.arange(frames)[:, None] * step + np.arange(length))
    dsignal = dwindow = None
    if ctx.needs(0):
        shaped = pieces if window is None else op.Mul(pieces, op.unsqueeze(window, 1))
        rows = op.reshape(shaped, -1, frames * length, parts)
        column = op.Expand(op.reshape(places, 1, -1, 1), op.Shape(rows))
        if flat:
            rows, column = op.squeeze(rows, 2), op.squeeze(column, 2)
        dsignal = add_at(op, op.shape_of(signal), column, rows, axis=1)
    if ctx.needs(2):
        heard = op.Gather(signal, places, axis=1)  # [B, frames, length, parts]
        heard = op.unsqueeze(heard, 3) if flat else heard
        dwindow = op.reduce_sum(op.Mul(pieces, heard), [0, 1, 3], keepdims=False)
    return [dsignal, None, dwindow, None]
