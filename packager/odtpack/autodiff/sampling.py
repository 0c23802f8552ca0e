"""Reading a plane at fractional positions, and the weights of Resize."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.backward import add_at
from odtpack.autodiff.context import Context
from odtpack.graph.graphs import Ops, dims_of

# Along each axis a sample is a sum over a few neighbouring elements ("taps") whose weights
# depend on the position: one for nearest, two for linear, four for cubic interpolation. The
# taps of several axes multiply. Everything here runs on all samples at once:
#
# - N planes of C channels and any number of axes, P samples in each plane;
# - positions [N, P, 1] along one axis, in elements of the plane;
# - K taps of each sample, [N, P, K], as row-major indices into the flat plane.

_KEYS = -0.75  # parameter of the cubic kernel: that of ONNX Runtime and PyTorch


@dataclasses.dataclass(frozen=True)
class Taps:
    """The elements that each sample reads."""

    index: ir.Value  # INT64 [N, P, K], within the plane
    weight: ir.Value  # [N, P, K]; zero for what lies outside of the plane where that reads zero
    # Derivative of ``weight`` by the position along each axis, [N, P, K] each; None where it is
    # zero everywhere.
    slope: tuple[ir.Value | None, ...]


def length(op: Ops, value: ir.Value, axis: int) -> ir.Value:
    """INT64 [1]: the length of one axis of ``value``."""
    dims = dims_of(value)
    size = None if dims is None else dims[axis]
    if isinstance(size, int):
        return op.ints(size)
    return op.slice(op.Shape(value), [0], [axis], [axis + 1])


def nearest(op: Ops, at: ir.Value, size: ir.Value, padding: str, corners: bool) -> Taps:
    """The element next to each position; halves go to the even one."""
    place = op.Round(_move_inside(op, at, size, padding, corners)[0])
    index, inside = _index(op, place, size)
    return Taps(index, inside, (None,))


def linear(op: Ops, at: ir.Value, size: ir.Value, padding: str, corners: bool) -> Taps:
    """The two elements around each position."""
    # at: Positions [N, P, 1]. size: INT64 [1]: length of the axis. padding: What lies outside:
    # "zeros", or "border" and "reflection", which move the position inside. corners: Reflect at the
    # centres of the outermost elements, not at their edges.
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
    return op.Min(op.Max(value, _zero(op, value.dtype or ir.DataType.FLOAT)), last)


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


# The weights with which Resize interpolates along one axis.
#
# Formulas of the operator's specification, and ONNX Runtime's where that leaves room: the
# antialiasing filter, and the identity along an axis of scale 1 in a cropped image.

_NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_COORDINATES = (
    "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric", "asymmetric", "align_corners",
    "tf_half_pixel_for_nn", "tf_crop_and_resize",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How a Resize interpolates: its attributes."""

    mode: str
    nearest_mode: str
    coordinates: str
    cubic: float
    exclude_outside: bool
    antialias: bool

    @classmethod
    def of(cls, ctx: Context) -> Kernel:
        """Read a Resize node."""
        kernel = cls(
            ctx.string("mode", "nearest"),
            ctx.string("nearest_mode", "round_prefer_floor"),
            ctx.string("coordinate_transformation_mode", "half_pixel"),
            ctx.float("cubic_coeff_a", -0.75),
            bool(ctx.int("exclude_outside", 0)),
            bool(ctx.int("antialias", 0)),
        )
        if kernel.mode not in ("nearest", "linear", "cubic"):
            raise ctx.unsupported(f"mode {kernel.mode!r}")
        if kernel.mode == "nearest" and kernel.nearest_mode not in _NEAREST_MODES:
            raise ctx.unsupported(f"nearest_mode {kernel.nearest_mode!r}")
        if kernel.coordinates not in _COORDINATES:
            raise ctx.unsupported(f"coordinate_transformation_mode {kernel.coordinates!r}")
        return kernel


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a Resize."""

    old: ir.Value  # INT64 [1]: length of the input
    new: ir.Value  # INT64 [1]: length of the result
    scale: float | ir.Value | None  # its scale, a number or [1]; None for new / old
    # Start and end of the part to resize, numbers or [2]; None for all of it.
    region: tuple[float, float] | ir.Value | None
    # Rows and columns of the weights that are wanted; None for all.
    window: tuple[range, range] | None = None

    def columns(self, op: Ops, dtype: ir.DataType, margin: ir.Value | None = None) -> ir.Value:
        """Numbers of the elements of the input, with so many more on either side."""
        count, first = self.old, 0
        if self.window is not None:
            count, first = op.ints(len(self.window[1])), self.window[1].start
        if margin is None:
            found = numbers(op, count, dtype)
        else:
            wide = numbers(op, op.Add(count, op.Mul(margin, 2)), dtype)
            found = op.Sub(wide, op.cast(margin, dtype))
        return op.Add(found, float(first)) if first else found


def weights(op: Ops, kernel: Kernel, axis: Axis, dtype: ir.DataType) -> ir.Value:
    """Write the nodes that compute the weights [new, old] of one axis."""
    old, new = (op.cast(value, dtype) for value in (axis.old, axis.new))
    scale = op.Div(new, old) if axis.scale is None else _vector(op, axis.scale, dtype)
    at = op.unsqueeze(positions(op, kernel, axis, dtype, scale), 1)  # [new, 1]
    last = op.Sub(old, 1.0)
    columns = axis.columns(op, dtype)  # [old]
    if kernel.antialias:
        result = _filtered(op, kernel, at, axis, scale)
    elif kernel.mode == "linear":
        distance = op.Abs(op.Sub(_clip(op, at, last), columns))
        result = op.Max(op.Sub(1.0, distance), _zero(op, dtype))
    elif kernel.mode == "nearest":
        near = _clip(op, _round(op, at, kernel.nearest_mode), last)
        result = op.cast(op.Equal(near, columns), dtype)
    else:
        result = _cubic(op, kernel, at, columns, last)
    if kernel.coordinates != "tf_crop_and_resize":
        return result
    # What lies outside of the input is a constant.
    outside = op.Or(op.Less(at, 0.0), op.Greater(at, last))
    return op.Where(outside, 0.0, result)


def positions(
    op: Ops, kernel: Kernel, axis: Axis, dtype: ir.DataType, scale: ir.Value | None = None
) -> ir.Value:
    """Where each element of the result lies in the input: [new]."""
    if axis.scale is not None:
        scale = _vector(op, axis.scale, dtype)
    elif scale is None:
        scale = op.Div(op.cast(axis.new, dtype), op.cast(axis.old, dtype))
    rows, mode = numbers(op, axis.new, dtype), kernel.coordinates
    if axis.window is not None:
        rows = op.slice(rows, [0], [axis.window[0].start], [axis.window[0].stop])
    old, new = (op.cast(value, dtype) for value in (axis.old, axis.new))
    last, one = op.Sub(old, 1.0), op.constant(np.ones(1, dtype.numpy()))
    steps = op.Max(op.Sub(new, 1.0), one)
    if mode == "asymmetric":
        return op.Div(rows, scale)
    if mode == "align_corners":
        return op.Mul(rows, op.Div(last, steps))
    if mode == "tf_crop_and_resize":
        if axis.region is None:
            raise ValueError("tf_crop_and_resize needs a region")
        region = _vector(op, axis.region, dtype)
        start, end = op.slice(region, [0], [0], [1]), op.slice(region, [0], [1], [2])
        step = op.Div(op.Mul(op.Sub(end, start), last), steps)
        spread = op.Add(op.Mul(start, last), op.Mul(rows, step))
        middle = op.Mul(op.Mul(op.Add(start, end), 0.5), last)
        cropped = op.Where(op.Equal(axis.new, 1), middle, spread)
        return op.Where(op.Equal(scale, 1.0), rows, cropped)
    centred = op.Div(op.Add(rows, 0.5), scale)
    if mode == "tf_half_pixel_for_nn":
        return centred
    at = op.Sub(centred, 0.5)
    if mode == "pytorch_half_pixel":
        return op.Where(op.Equal(axis.new, 1), 0.0, at)
    if mode == "half_pixel_symmetric":
        cut = op.Sub(1.0, op.Div(new, op.Mul(scale, old)))
        return op.Add(op.Mul(op.Mul(old, 0.5), cut), at)
    return at


def _round(op: Ops, at: ir.Value, mode: str) -> ir.Value:
    if mode == "round_prefer_floor":
        return op.Ceil(op.Sub(at, 0.5))
    if mode == "round_prefer_ceil":
        return op.Floor(op.Add(at, 0.5))
    return op.Floor(at) if mode == "floor" else op.Ceil(at)


def _cubic(op: Ops, kernel: Kernel, at: ir.Value, columns: ir.Value, last: ir.Value) -> ir.Value:
    """Four elements around each position; those outside are the border's, or left out."""
    dtype = at.dtype or ir.DataType.FLOAT
    taps = op.Add(op.Floor(at), op.constant(np.array([-1, 0, 1, 2], dtype.numpy())))
    values = _keys(op, op.Abs(op.Sub(at, taps)), kernel.cubic)
    inside = _clip(op, taps, last)
    if kernel.exclude_outside:
        values = _normalize(op, op.Mul(values, op.cast(op.Equal(taps, inside), dtype)))
    hits = op.cast(op.Equal(op.unsqueeze(inside, 2), columns), dtype)  # [new, 4, old]
    return op.squeeze(op.MatMul(op.unsqueeze(values, 1), hits), 1)


def _keys(op: Ops, distance: ir.Value, a: float) -> ir.Value:
    """Keys' cubic convolution kernel."""

    def polynomial(*coefficients: float) -> ir.Value:
        value: ir.Value = op.Mul(distance, coefficients[0])
        for coefficient in coefficients[1:-1]:
            value = op.Mul(op.Add(value, coefficient), distance)
        return op.Add(value, coefficients[-1])

    near, far = polynomial(a + 2, -(a + 3), 0.0, 1.0), polynomial(a, -5 * a, 8 * a, -4 * a)
    beyond = op.Where(op.Less(distance, 2.0), far, 0.0)
    return op.Where(op.Greater(distance, 1.0), beyond, near)


def _filtered(op: Ops, kernel: Kernel, at: ir.Value, axis: Axis, scale: ir.Value) -> ir.Value:
    """The kernel stretched over all elements that shrink into one."""
    # Weights of elements outside of the input go to its border, or are left out.
    dtype = at.dtype or ir.DataType.FLOAT
    shrink = op.Min(scale, op.constant(np.ones(1, dtype.numpy())))
    support = op.Div(
        op.constant(np.full(1, 1 if kernel.mode == "linear" else 2, dtype.numpy())), shrink
    )
    # Positions lie in the input, or at most one element outside of it.
    margin = op.cast(op.Add(op.Ceil(support), 1.0), ir.DataType.INT64)
    last = op.Sub(op.cast(axis.old, dtype), 1.0)
    elements = axis.columns(op, dtype, margin)  # [wide]
    distance = op.Mul(op.Abs(op.Sub(elements, at)), shrink)
    if kernel.mode == "linear":
        values = op.Max(op.Sub(1.0, distance), _zero(op, dtype))
    else:
        values = _keys(op, distance, kernel.cubic)
    inside = _clip(op, elements, last)
    if kernel.exclude_outside:
        values = op.Mul(values, op.cast(op.Equal(inside, elements), dtype))
    hits = op.Equal(op.unsqueeze(inside, 1), axis.columns(op, dtype))  # [wide, old]
    return op.MatMul(_normalize(op, values), op.cast(hits, dtype))


def _normalize(op: Ops, values: ir.Value) -> ir.Value:
    return op.Div(values, op.reduce_sum(values, [1]))


def numbers(op: Ops, count: ir.Value, dtype: ir.DataType) -> ir.Value:
    """0, 1, ... below ``count`` [1]."""
    zero, one = (op.constant(np.int64(value)) for value in (0, 1))
    return op.cast(op.Range(zero, op.squeeze(count, 0), one), dtype)


def _vector(op: Ops, value: float | tuple[float, ...] | ir.Value, dtype: ir.DataType) -> ir.Value:
    if isinstance(value, ir.Value):
        return value
    return op.constant(np.atleast_1d(np.asarray(value, dtype.numpy())))


def _zero(op: Ops, dtype: ir.DataType) -> ir.Value:
    return op.constant(np.zeros(1, dtype.numpy()))
