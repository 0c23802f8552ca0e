"""Resize: along each axis a product with the matrix of interpolation weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.linalg import multiply_axis


@vjp("Resize", since=11)
def resize(ctx: Context) -> Cotangents:
    """All modes are separable: y = M x along each axis, so dx = M^T dy."""
    op, rank, dx = ctx.op, ctx.rank(ctx.x()), ctx.dy()
    if ctx.int("antialias", 0) or ctx.string("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise ctx.unsupported("antialias and keep_aspect_ratio_policy have no gradient")
    listed = [axis % rank for axis in ctx.ints("axes", range(rank))]
    given = ctx.maybe_x(2) is not None and ctx.dims(ctx.x(2)) != (0,)
    scales = ctx.constant(2) if given else None
    if given and scales is None:
        raise ctx.unsupported("its scales are known only when the model runs")
    for position, axis in enumerate(listed):
        old, new = ctx.dims(ctx.x())[axis], ctx.dims(ctx.y())[axis]
        scale = None if scales is None else float(scales[position])
        if scale == 1 or (scale is None and old == new):
            continue
        if not isinstance(old, int) or not isinstance(new, int):
            raise ctx.unsupported(f"axis {axis} has a size known only when the model runs")
        weights = _weights(ctx, old, new, new / old if scale is None else scale)
        matrix = weights.astype(ctx.dtype(ctx.x()).numpy())
        dx = multiply_axis(op, dx, rank, axis, matrix)
    return [dx, None, None, None]


def _weights(ctx: Context, old: int, new: int, scale: float) -> np.ndarray:
    """Interpolation weights [new, old]; formulas of the operator's specification."""
    at, mode = _positions(ctx, old, new, scale), ctx.string("mode", "nearest")
    weights = np.zeros((new, old))
    rows = np.arange(new)
    if mode == "nearest":
        nearest = _NEAREST[ctx.string("nearest_mode", "round_prefer_floor")](at)
        weights[rows, np.clip(nearest, 0, old - 1).astype(int)] = 1
    elif mode == "linear":
        inside = np.clip(at, 0, old - 1)
        low = np.floor(inside).astype(int)
        np.add.at(weights, (rows, low), 1 - (inside - low))
        np.add.at(weights, (rows, np.minimum(low + 1, old - 1)), inside - low)
    elif mode == "cubic":
        low = np.floor(at).astype(int)
        taps = low[:, None] + np.arange(-1, 3)
        values = _cubic(np.abs(at[:, None] - taps), ctx.float("cubic_coeff_a", -0.75))
        if ctx.int("exclude_outside", 0):
            values = np.where((taps >= 0) & (taps < old), values, 0)
            values /= values.sum(1, keepdims=True)
        np.add.at(weights, (rows[:, None], np.clip(taps, 0, old - 1)), values)
    else:
        raise ctx.unsupported(f"mode {mode!r}")
    return weights


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _positions(ctx: Context, old: int, new: int, scale: float) -> np.ndarray:
    """Where each element of the result lies in the input."""
    rows, mode = np.arange(new), ctx.string("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        return rows / scale
    if mode == "align_corners":
        return rows * ((old - 1) / max(1, new - 1))
    if mode == "pytorch_half_pixel" and new == 1:
        return np.zeros(1)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (rows + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        offset = old / 2 * (1 - new / (scale * old))
        return offset + (rows + 0.5) / scale - 0.5
    raise ctx.unsupported(f"coordinate_transformation_mode {mode!r}")


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))
