"""Reading a plane at fractional positions, and the derivatives of that.

Along each axis a sample is a sum over a few neighbouring elements ("taps") whose weights
depend on the position: one for nearest, two for linear, four for cubic interpolation. The
taps of several axes multiply. Everything here runs on all samples at once:

- N planes of C channels and any number of axes, P samples in each plane;
- positions [N, P, 1] along one axis, in elements of the plane;
- K taps of each sample, [N, P, K], as row-major indices into the flat plane.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.scatter_add import add_at
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

_KEYS = -0.75  # parameter of the cubic kernel: that of ONNX Runtime and PyTorch


@dataclasses.dataclass(frozen=True)
class Taps:
    """The elements that each sample reads.

    Attributes:
        index: INT64 [N, P, K], within the plane.
        weight: [N, P, K]; zero for what lies outside of the plane where that reads zero.
        slope: Derivative of ``weight`` by the position along each axis, [N, P, K] each;
            None where it is zero everywhere.
    """

    index: ir.Value
    weight: ir.Value
    slope: tuple[ir.Value | None, ...]


def length(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    """INT64 [1]: the length of one axis of ``value``."""
    dims = dims_of(value)
    size = None if dims is None else dims[axis]
    return (
        op.ints(size)
        if isinstance(size, int)
        else op.slice(op.Shape(value), [0], [axis], [axis + 1])
    )


def nearest(op: Ops, at: ir.Value, size: ir.Value, padding: str, corners: bool) -> Taps:
    """The element next to each position; halves go to the even one."""
    place = op.Round(_move_inside(op, at, size, padding, corners)[0])
    index, inside = _index(op, place, size)
    return Taps(index, inside, (None,))


def linear(op: Ops, at: ir.Value, size: ir.Value, padding: str, corners: bool) -> Taps:
    """The two elements around each position.

    Args:
        op: Writes the nodes.
        at: Positions [N, P, 1].
        size: INT64 [1]: length of the axis.
        padding: What lies outside: "zeros", or "border" and "reflection", which move
            the position inside.
        corners: Reflect at the centres of the outermost elements, not at their edges.
    """
    moved, slope = _move_inside(op, at, size, padding, corners)
    dtype = (at.dtype or ir.DataType.FLOAT).numpy()
    taps = op.Add(op.Floor(moved), op.constant(np.array([0, 1], dtype)))
    index, inside = _index(op, taps, size)
    weight = op.Mul(op.Sub(1.0, op.Abs(op.Sub(moved, taps))), inside)
    signs = op.constant(np.array([-1, 1], dtype))
    sloped = op.Mul(inside, signs if slope is None else op.Mul(signs, slope))
    return Taps(index, weight, (sloped,))


def cubic(op: Ops, at: ir.Value, size: ir.Value, padding: str, corners: bool) -> Taps:
    """The four elements around each position; ``padding`` moves each of them by itself."""
    dtype, floor = (at.dtype or ir.DataType.FLOAT).numpy(), op.Floor(at)
    taps = op.Add(floor, op.constant(np.array([-1, 0, 1, 2], dtype)))
    taps = _move_inside(op, taps, size, padding, corners)[0]
    index, inside = _index(op, taps, size)
    powers = op.Pow(op.Sub(at, floor), op.constant(np.array([0, 1, 2, 3], dtype)))
    # Keys' kernel at 1 + t, t, 1 - t, 2 - t; one row for each power of t.
    a = _KEYS
    kernel = np.array([
        [0, 1, 0, 0], [a, 0, -a, 0], [-2 * a, -a - 3, 2 * a + 3, a], [a, a + 2, -a - 2, -a]
    ], dtype)  # fmt: skip
    rate = np.concatenate([kernel[1:] * np.array([[1], [2], [3]], dtype), np.zeros((1, 4), dtype)])
    weight, slope = (op.Mul(op.MatMul(powers, op.constant(m)), inside) for m in (kernel, rate))
    return Taps(index, weight, (slope,))


def _index(op: Ops, taps: ir.Value, size: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Indices within the axis, and 1 for each that lay there before, else 0."""
    dtype = taps.dtype or ir.DataType.FLOAT
    kept = _clip(op, taps, _last(op, taps, size))
    return op.cast(kept, ir.DataType.INT64), op.cast(op.Equal(kept, taps), dtype)


def _last(op: Ops, like: ir.Value, size: ir.Value) -> ir.Value:
    return op.Sub(op.cast(size, like.dtype or ir.DataType.FLOAT), 1.0)


def _clip(op: Ops, value: ir.Value, last: ir.Value) -> ir.Value:
    zero = op.constant(np.zeros(1, (value.dtype or ir.DataType.FLOAT).numpy()))
    return op.Min(op.Max(value, zero), last)


def _move_inside(
    op: Ops, at: ir.Value, size: ir.Value, padding: str, corners: bool
) -> tuple[ir.Value, ir.Value | None]:
    """Positions with ``padding`` applied, and by how much they move with ``at``; None for 1."""
    if padding == "zeros":
        return at, None
    dtype, last = at.dtype or ir.DataType.FLOAT, _last(op, at, size)
    slope: ir.Value | None = None
    if padding == "reflection":
        low = 0.0 if corners else -0.5
        span = op.Max(last, 1.0) if corners else op.Add(last, 1.0)
        offset = op.Sub(at, low)
        distance = op.Abs(offset)
        flips = op.Floor(op.Div(distance, span))
        rest = op.Sub(distance, op.Mul(flips, span))
        odd = op.Sub(flips, op.Mul(op.Floor(op.Mul(flips, 0.5)), 2.0))
        back = op.Sub(1.0, op.Mul(odd, 2.0))
        slope = op.Mul(op.Sign(offset), back)
        at = op.Add(op.Add(op.Mul(rest, back), op.Mul(odd, span)), low)
    moved = _clip(op, at, last)
    inside = op.cast(op.And(op.Greater(at, 0.0), op.Less(at, last)), dtype)
    return moved, inside if slope is None else op.Mul(slope, inside)


def combine(op: Ops, axes: Sequence[Taps], sizes: Sequence[ir.Value]) -> Taps:
    """The taps of several axes, in the order of the plane's axes: every pair, triple, ..."""

    def join(kind: str, parts: Sequence[ir.Value]) -> ir.Value:
        def pair(left: ir.Value, right: ir.Value) -> ir.Value:
            both = op.emit(kind, [op.unsqueeze(left, 3), op.unsqueeze(right, 2)])[0]
            return op.reshape(both, 0, 0, -1)

        return functools.reduce(pair, parts)

    index = axes[0].index
    for taps, size in zip(axes[1:], sizes[1:], strict=True):
        index = join("Add", [op.Mul(index, size), taps.index])
    weights = [taps.weight for taps in axes]
    slopes: list[ir.Value | None] = []
    for number, taps in enumerate(axes):
        (slope,) = taps.slope
        rest = [*weights[:number], slope, *weights[number + 1 :]]
        slopes.append(None if slope is None else join("Mul", [v for v in rest if v is not None]))
    return Taps(index, join("Mul", weights), tuple(slopes))


def scatter(op: Ops, x: ir.Value, taps: Taps, dy: ir.Value) -> ir.Value:
    """Gradient of the planes ``x`` [N, C, ...] from that of the samples [N, C, P]."""
    # Samples last: with the few taps last the product would run at a third of the speed.
    index, weight = (op.transpose(value, 0, 2, 1) for value in (taps.index, taps.weight))
    updates = op.reshape(op.Mul(op.unsqueeze(dy, 2), op.unsqueeze(weight, 1)), 0, 0, -1)
    index = op.Expand(op.reshape(index, 0, 1, -1), op.Shape(updates))
    flat = op.Shape(op.reshape(x, 0, 0, -1))
    return op.reshape_like(add_at(op, flat, index, updates, axis=2), x)


def rows(op: Ops, x: ir.Value, taps: Taps) -> ir.Value:
    """The elements of ``x`` [N, C, ...] that the samples read: [N, P, K, C]."""
    flat = op.reshape(x, 0, 0, -1)
    shape = op.Shape(flat)
    channels = op.slice(shape, [0], [1], [2])
    table = op.Reshape(op.transpose(flat, 0, 2, 1), op.Concat(op.ints(-1), channels, axis=0))
    planes = op.squeeze(op.slice(shape, [0], [0], [1]), 0)
    numbers = op.Range(op.constant(np.int64(0)), planes, op.constant(np.int64(1)))
    start = op.reshape(op.Mul(numbers, op.slice(shape, [0], [2], [3])), -1, 1, 1)
    return op.Gather(table, op.Add(taps.index, start), axis=0)


def shares(op: Ops, read: ir.Value, dy: ir.Value) -> ir.Value:
    """Derivative [N, P, K] by the weight of each tap: ``read`` [N, P, K, C] times ``dy``."""
    by_sample = op.unsqueeze(op.transpose(dy, 0, 2, 1), 3)  # [N, P, C, 1]
    return op.squeeze(op.MatMul(read, by_sample), 3)


def position_gradients(op: Ops, taps: Taps, share: ir.Value) -> tuple[ir.Value | None, ...]:
    """Gradient [N, P] of the positions along each axis from :func:`shares`; None for zero."""
    return tuple(
        None if slope is None else op.reduce_sum(op.Mul(share, slope), [2], keepdims=False)
        for slope in taps.slope
    )
