"""The weights with which Resize interpolates along one axis.

Formulas of the operator's specification, and ONNX Runtime's where that leaves room: the
antialiasing filter, and the identity along an axis of scale 1 in a cropped image.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.graph.ops import Ops

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
        """Read a Resize node.

        Raises:
            OdtpackError: An attribute has a value that the specification does not name.
        """
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
    """One axis of a Resize.

    Attributes:
        old: INT64 [1]: length of the input.
        new: INT64 [1]: length of the result.
        scale: Its scale, a number or [1]; None for new / old.
        region: Start and end of the part to resize, numbers or [2]; None for all of it.
    """

    old: ir.Value
    new: ir.Value
    scale: float | ir.Value | None
    region: tuple[float, float] | ir.Value | None


def weights(op: Ops, kernel: Kernel, axis: Axis, dtype: ir.DataType) -> ir.Value:
    """Write the nodes that compute the weights [new, old] of one axis.

    Args:
        op: Writes the nodes.
        kernel: How to interpolate.
        axis: Along what.
        dtype: Type to compute in.
    """
    old, new = (op.cast(value, dtype) for value in (axis.old, axis.new))
    scale = op.Div(new, old) if axis.scale is None else _vector(op, axis.scale, dtype)
    at = op.unsqueeze(_positions(op, kernel, axis, scale, dtype), 1)  # [new, 1]
    last = op.Sub(old, 1.0)
    columns = _numbers(op, axis.old, dtype)  # [old]
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


def _positions(
    op: Ops, kernel: Kernel, axis: Axis, scale: ir.Value, dtype: ir.DataType
) -> ir.Value:
    """Where each element of the result lies in the input: [new]."""
    rows, mode = _numbers(op, axis.new, dtype), kernel.coordinates
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
    values, inside = _keys(op, op.Abs(op.Sub(at, taps)), kernel.cubic), _clip(op, taps, last)
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
    """The kernel stretched over all elements that shrink into one.

    Weights of elements outside of the input go to its border, or are left out.
    """
    dtype = at.dtype or ir.DataType.FLOAT
    shrink = op.Min(scale, op.constant(np.ones(1, dtype.numpy())))
    support = op.Div(
        op.constant(np.full(1, 1 if kernel.mode == "linear" else 2, dtype.numpy())), shrink
    )
    # Positions lie in the input, or at most one element outside of it.
    margin = op.cast(op.Add(op.Ceil(support), 1.0), ir.DataType.INT64)
    wide = op.Add(axis.old, op.Mul(margin, 2))
    last = op.Sub(op.cast(axis.old, dtype), 1.0)
    elements = op.Sub(_numbers(op, wide, dtype), op.cast(margin, dtype))  # [wide]
    distance = op.Mul(op.Abs(op.Sub(elements, at)), shrink)
    if kernel.mode == "linear":
        values = op.Max(op.Sub(1.0, distance), _zero(op, dtype))
    else:
        values = _keys(op, distance, kernel.cubic)
    inside = _clip(op, elements, last)
    if kernel.exclude_outside:
        values = op.Mul(values, op.cast(op.Equal(inside, elements), dtype))
    hits = op.Equal(op.unsqueeze(inside, 1), _numbers(op, axis.old, dtype))  # [wide, old]
    return op.MatMul(_normalize(op, values), op.cast(hits, dtype))


def _normalize(op: Ops, values: ir.Value) -> ir.Value:
    return op.Div(values, op.reduce_sum(values, [1]))


def _numbers(op: Ops, count: ir.Value, dtype: ir.DataType) -> ir.Value:
    """0, 1, ... below ``count`` [1]."""
    zero, one = (op.constant(np.int64(value)) for value in (0, 1))
    return op.cast(op.Range(zero, op.squeeze(count, 0), one), dtype)


def _vector(op: Ops, value: float | tuple[float, ...] | ir.Value, dtype: ir.DataType) -> ir.Value:
    if isinstance(value, ir.Value):
        return value
    return op.constant(np.atleast_1d(np.asarray(value, dtype.numpy())))


def _zero(op: Ops, dtype: ir.DataType) -> ir.Value:
    return op.constant(np.zeros(1, dtype.numpy()))


def _clip(op: Ops, value: ir.Value, last: ir.Value) -> ir.Value:
    return op.Min(op.Max(value, _zero(op, value.dtype or ir.DataType.FLOAT)), last)
