"""Operators that write elements by index.

Where an index repeats without a reduction, which element is written last is undefined, and
so is the gradient. Sums, products and extrema over repeated indices have exact gradients,
also where factors are zero; elements that are an extremum together share the cotangent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.index import as_rows, row_numbers
from odtpack.graph.ops import Ops

Parts = tuple[ir.Value | None, ir.Value | None]  # cotangents of data and of updates


@vjp("ScatterElements", "ScatterND", since=11)
def scatter(ctx: Context) -> Cotangents:
    """Updates read dy where they were written; data keeps it where it was not overwritten."""
    op, data, indices, updates, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.x(2), ctx.dy()
    reduction, elements = ctx.string("reduction", "none"), ctx.node.op_type == "ScatterElements"
    if reduction in ("mul", "max", "min"):
        return _reduced_elements(ctx, reduction) if elements else _reduced_rows(ctx, reduction)
    axis: dict[str, Any] = {"axis": ctx.axis()} if elements else {}
    ddata = dupdates = None
    if ctx.needs(0) and reduction == "add":
        ddata = dy
    elif ctx.needs(0):
        zeros = op.zeros(op.shape_of(updates), ctx.dtype(data))
        ddata = op.emit(ctx.node.op_type, [dy, indices, zeros], **axis)[0]
    if ctx.needs(2):
        gather = "GatherElements" if elements else "GatherND"
        dupdates = op.emit(gather, [dy, indices], **axis)[0]
    return [ddata, None, dupdates]


@dataclasses.dataclass(frozen=True)
class _Written:
    """Elements written along one axis: ``indices`` has the shape of ``updates``."""

    op: Ops
    data: ir.Value
    indices: ir.Value
    updates: ir.Value
    y: ir.Value
    dy: ir.Value
    axis: int

    def collect(self, updates: ir.Value, reduction: str) -> ir.Value:
        """What the updates that hit each element of the data make together; 0 or 1 if none."""
        op, neutral = self.op, np.ones if reduction == "mul" else np.zeros
        dtype = (self.data.dtype or ir.DataType.FLOAT).numpy()
        start = op.ConstantOfShape(op.shape_of(self.data), value=ir.tensor(neutral(1, dtype)))
        return op.ScatterElements(start, self.indices, updates, axis=self.axis, reduction=reduction)

    def read(self, value: ir.Value) -> ir.Value:
        """For each update the element of ``value`` that it hits."""
        return self.op.GatherElements(value, self.indices, axis=self.axis)


def _reduced_elements(ctx: Context, reduction: str) -> Cotangents:
    values = (ctx.x(0), ctx.x(1), ctx.x(2), ctx.y(), ctx.dy())
    ddata, dupdates = _reduced(ctx, reduction, _Written(ctx.op, *values, ctx.axis()))
    return [ddata, None, dupdates]


def _reduced_rows(ctx: Context, reduction: str) -> Cotangents:
    """ScatterND writes whole rows: the same with data and updates as tables of rows."""
    op, (numbers, width) = ctx.op, row_numbers(ctx)
    data, updates, y, dy = (
        as_rows(op, value, width) for value in (ctx.x(0), ctx.x(2), ctx.y(), ctx.dy())
    )
    indices = op.Expand(op.reshape(numbers, -1, 1), op.Shape(updates))
    found = _reduced(ctx, reduction, _Written(op, data, indices, updates, y, dy, 0))
    ddata, dupdates = (
        None if value is None else op.reshape_like(value, like)
        for value, like in zip(found, (ctx.x(0), ctx.x(2)), strict=True)
    )
    return [ddata, None, dupdates]


def _reduced(ctx: Context, reduction: str, written: _Written) -> Parts:
    return _product(ctx, written) if reduction == "mul" else _extremum(ctx, written)


def _product(ctx: Context, written: _Written) -> Parts:
    """The slope of a factor is the product of the others.

    Where a factor u is zero, that is not y / u: so zeros are counted, and left out of the
    product. A slope is zero if another factor than its own is.
    """
    op, updates = written.op, written.updates
    ddata = dupdates = None
    if ctx.needs(0):
        ddata = op.Mul(written.dy, written.collect(updates, "mul"))
    if ctx.needs(2):
        zero = op.Equal(updates, 0)
        factors, zeros = op.Where(zero, 1, updates), op.cast(zero, ctx.dtype(updates))
        others = op.Sub(written.read(written.collect(zeros, "add")), zeros)
        weighted = op.Mul(op.Mul(written.dy, written.data), written.collect(factors, "mul"))
        slope = op.Div(written.read(weighted), factors)
        dupdates = op.Where(op.Equal(others, 0), slope, 0)
    return ddata, dupdates


def _extremum(ctx: Context, written: _Written) -> Parts:
    op, dtype = written.op, ctx.dtype(written.data)
    kept = op.cast(op.Equal(written.data, written.y), dtype)
    hits = op.cast(op.Equal(written.updates, written.read(written.y)), dtype)
    share = op.Div(written.dy, op.Add(kept, written.collect(hits, "add")))
    return op.Mul(kept, share), op.Mul(hits, written.read(share))


@vjp("TensorScatter", since=24)
def tensor_scatter(ctx: Context) -> Cotangents:
    """A cache whose steps ``write_indices[b] + 0, 1, ...`` of sample b are overwritten."""
    op, cache, update, dy = ctx.op, ctx.x(0), ctx.x(1), ctx.dy()
    starts, rank = ctx.maybe_x(2), ctx.rank(cache)
    axis = ctx.axis(default=-2)
    dcache = dupdate = None
    if ctx.needs(0):
        zeros = op.zeros(op.shape_of(update), ctx.dtype(cache))
        attributes = {"axis": axis, "mode": ctx.string("mode", "linear")}
        dcache = op.TensorScatter(dy, zeros, starts, **attributes)
    if ctx.needs(1):
        zero, one = op.constant(np.array(0)), op.constant(np.array(1))
        length = op.squeeze(op.slice(op.shape_of(update), [0], [axis], [axis + 1]), 0)
        steps = op.reshape(op.Range(zero, length, one), -1, *[1] * (rank - 1 - axis))
        if starts is not None:
            steps = op.Add(op.reshape(starts, -1, *[1] * (rank - 1)), steps)
        if ctx.string("mode", "linear") == "circular":
            steps = op.Mod(steps, op.slice(op.shape_of(cache), [0], [axis], [axis + 1]))
        dupdate = op.GatherElements(dy, op.Expand(steps, op.shape_of(update)), axis=axis)
    return [dcache, dupdate, None]
