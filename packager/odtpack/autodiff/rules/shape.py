"""Operators that move, join, cut out, pad or repeat elements."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from odtpack.autodiff import context
from odtpack.autodiff.backward import add_at
from odtpack.autodiff.context import Context, Cotangents, non_differentiable, vjp
from odtpack.autodiff.rules.index import REDUCTION_SINCE
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
    values = [value for value in ctx.node.inputs if value is not None]
    sizes = [ctx.dims(value)[axis] for value in values]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return op.split(ctx.dy(), axis, known)
    lengths = [op.Gather(op.Shape(value), op.ints(axis), axis=0) for value in values]
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
    parts = [
        ctx.maybe_dy(index) or op.zeros(op.shape_of(output), ctx.dtype(output))
        for index, output in enumerate(ctx.node.outputs)
    ]
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


@vjp("Slice", since=10)
def slice_(ctx: Context) -> Cotangents:
    """Zeros around the cotangent, and between its elements where the step is not 1."""
    op, x, rank, starts = ctx.op, ctx.x(), ctx.rank(ctx.x()), ctx.constant(1)
    bounds = [ctx.constant(i) if ctx.maybe_x(i) is not None else () for i in (2, 3, 4)]
    ends, axes, steps = (None if b is None else [int(i) for i in b] for b in bounds)
    count = len(axes or ()) or (ctx.dims(ctx.x(1))[0] if starts is None else len(starts))
    if axes is None or steps is None or not isinstance(count, int):
        return _from_positions(ctx)
    axes = [axis % rank for axis in axes] or list(range(count))
    steps = steps or [1] * count
    sizes = [ctx.dims(x)[axis] for axis in axes]
    known = [size for size in sizes if isinstance(size, int)]
    if starts is None or ends is None or len(known) < len(sizes):
        if any(step != 1 for step in steps):
            return _from_positions(ctx)
        return op.Pad(ctx.dy(), _pads_at_run_time(ctx, axes))
    dx, before, after = ctx.dy(), [0] * rank, [0] * rank
    for axis, size, *bound in zip(axes, known, starts.tolist(), ends, steps, strict=True):
        picked = range(size)[slice(*bound)]
        if picked.step == 1 and picked:
            before[axis], after[axis] = picked.start, size - picked.stop
        else:
            # Element k goes to ``picked[k]``; the others read a zero put after the last.
            source = np.full(size, len(picked), np.int64)
            source[list(picked)] = np.arange(len(picked))
            padded = op.pad(dx, [0] * rank, [int(i == axis) for i in range(rank)])
            dx = op.Gather(padded, op.constant(source), axis=axis)
    return context.place(op, dx, before, after, ctx.dims(x))


def _pads_at_run_time(ctx: Context, axes: list[int]) -> ir.Value:
    """Pads that undo a Slice of step 1 whose bounds or sizes are not known before."""
    op = ctx.op
    shape, short = op.Shape(ctx.x()), op.Shape(ctx.dy())
    starts = op.cast(ctx.x(1), ir.DataType.INT64)
    before = [op.ints(0)] * ctx.rank(ctx.x())
    for i, axis in enumerate(axes):
        size, start = op.slice(shape, [0], [axis], [axis + 1]), op.slice(starts, [0], [i], [i + 1])
        start = op.Where(op.Less(start, 0), op.Add(start, size), start)
        before[axis] = op.Max(op.Min(start, size), 0)
    front = op.Concat(*before, axis=0)
    return op.Concat(front, op.Sub(op.Sub(shape, short), front), axis=0)


@vjp("Pad", since=11)
def pad(ctx: Context) -> Cotangents:
    """Cut the border off again; in the other modes add it to what it was copied from."""
    op, mode = ctx.op, ctx.string("mode", "constant")
    if mode != "constant":
        return _copied_border(ctx, mode)
    pads, known = ctx.x(1), ctx.constant(1)
    cut = op.Neg(pads) if known is None else op.constant(-known)
    dx = op.Pad(ctx.dy(), cut, *([None, ctx.x(3)] if ctx.maybe_x(3) is not None else []))
    dvalue = None
    if ctx.needs(2):
        sums = [op.reduce_sum(op.reshape(value, -1), [0]) for value in (ctx.dy(), dx)]
        dvalue = op.reshape_like(op.Sub(*sums), ctx.x(2))
    return [dx, None, dvalue]


def _copied_border(ctx: Context, mode: str) -> Cotangents:
    """Along each axis the sum of the pieces of dy that were copied from the same elements."""
    op, rank, dims, pads = ctx.op, ctx.rank(ctx.x()), ctx.dims(ctx.x()), ctx.constant(1)
    axes = ctx.constant(3) if ctx.maybe_x(3) is not None else np.arange(rank)
    if pads is None or axes is None or (pads < 0).any():
        return _from_positions(ctx, add=True, mode=mode)
    padded = [row for row in zip(axes % rank, *pads.reshape(2, -1), strict=True) if any(row[1:])]
    if not all(isinstance(dims[axis], int) for axis, _, _ in padded):
        return _from_positions(ctx, add=True, mode=mode)
    dx = ctx.dy()
    for axis, before, after in padded:
        size = ctx.size(ctx.x(), int(axis))
        source = np.pad(np.arange(size), (before, after), cast("Any", mode))
        pieces = [_piece(ctx, dx, int(axis), *run) for run in _runs(source.tolist())]
        dx = functools.reduce(op.Add, pieces)
    return dx


def _runs(source: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Where runs of numbers that go up, go down or stay begin, their length, first and step."""
    start = 0
    while start < len(source):
        end = start + 1
        step = source[end] - source[start] if end < len(source) else 1
        step = step if abs(step) <= 1 else 1
        while end < len(source) and source[end] - source[end - 1] == step:
            end += 1
        yield start, end - start, source[start], step
        start = end


def _piece(
    ctx: Context, dy: ir.Value, axis: int, start: int, count: int, first: int, step: int
) -> ir.Value:
    """What a run of ``dy`` adds to the elements from which it was copied, zero elsewhere."""
    op, rank, size = ctx.op, ctx.rank(ctx.x()), ctx.size(ctx.x(), axis)
    last = first + (count - 1) * step
    if step < 0:
        end = start - 1 if start else np.iinfo(np.int64).min + 1
        part = op.slice(dy, [axis], [start + count - 1], [end], [-1])
    else:
        part = op.slice(dy, [axis], [start], [start + count])
    if step == 0:
        part = op.reduce_sum(part, [axis])
    low, high = sorted((first, last))
    before, after = [0] * rank, [0] * rank
    before[axis], after[axis] = low, size - 1 - high
    return op.pad(part, before, after)


def _from_positions(ctx: Context, add: bool = False, mode: str | None = None) -> ir.Value:
    """For bounds that are known only when the model runs: cut or pad the elements' numbers."""
    # The node's operator, applied to the number of each element instead of the element, says where
    # every element of the result comes from.
    op, x = ctx.op, ctx.x()
    if add and op.opset < REDUCTION_SINCE:
        raise ctx.unsupported(
            f"before opset {REDUCTION_SINCE} its pads and sizes must be known before the model runs"
        )
    numbers = op.Reshape(op.Range(0, op.Size(x), 1), op.Shape(x))
    parameters = [None if v is not None and v.dtype == x.dtype else v for v in ctx.node.inputs[1:]]
    (source,) = op.emit(ctx.node.op_type, [numbers, *parameters], mode=mode)
    flat, dy = op.reshape(source, -1), op.reshape(ctx.dy(), -1)
    if add:
        return op.reshape_like(add_at(op, op.unsqueeze(op.Size(x), 0), flat, dy), x)
    zeros = op.reshape(op.zeros(op.Shape(x), ctx.dtype(x)), -1)
    return op.reshape_like(op.ScatterElements(zeros, flat, dy, axis=0), x)


@vjp("Tile")
def tile(ctx: Context) -> Cotangents:
    """Fold each axis into (repeat, size) and sum over the repeats."""
    op, dims = ctx.op, ctx.dims(ctx.x())
    repeats = ctx.constant(1)
    if repeats is None or sum(not isinstance(dim, int) for dim in dims) > 1:
        pairs = op.Concat(op.unsqueeze(ctx.x(1), 1), op.unsqueeze(op.Shape(ctx.x()), 1), axis=1)
        parts = op.Reshape(ctx.dy(), op.reshape(pairs, -1))
        return op.reduce_sum(parts, range(0, 2 * len(dims), 2), keepdims=False)
    folded: list[int] = []
    axes: list[int] = []
    for dim, repeat in zip(dims, repeats, strict=True):
        if repeat != 1:
            axes.append(len(folded))
            folded.append(int(repeat))
        folded.append(dim if isinstance(dim, int) else -1)
    if not axes:
        return ctx.dy()
    return op.reduce_sum(op.reshape(ctx.dy(), *folded), axes, keepdims=False)
