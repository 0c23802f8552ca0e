"""Resize, GridSample and AffineGrid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from odtpack.autodiff import sampling
from odtpack.autodiff.context import Context, Cotangents, vjp
from odtpack.autodiff.rules.linalg import multiply_axis
from odtpack.autodiff.sampling import Axis, Kernel, length, positions, weights
from odtpack.graph.graphs import Ops

# Resize: along each axis a product with the matrix of interpolation weights, which holds few
# numbers a row: of a long axis only they are stored.


@vjp("Resize", since=11)
def resize(ctx: Context) -> Cotangents:
    """All modes are separable: y = M x along each axis, so dx = M^T dy."""
    # M is a constant where the sizes and the scale of an axis are known; else the graph computes
    # it. Sizes, scales and the region of tf_crop_and_resize receive no gradient.
    op, x, rank, dx = ctx.op, ctx.x(), ctx.rank(ctx.x()), ctx.dy()
    kernel = Kernel.of(ctx)
    resized = []
    for position, axis in enumerate(_listed(ctx)):
        old, new = ctx.dims(x)[axis], ctx.dims(ctx.y())[axis]
        scale, same = _scale(ctx, position), old is not None and old == new
        if scale == 1 or (same and (_stretched(ctx) or ctx.int("antialias", 0))):
            continue
        if axis == 0 and rank > 2 and kernel.mode != "nearest":
            continue  # of which the runtime resizes no samples
        resized.append((position, axis, old, new, scale, same))
    if all(same for *_, same in resized):
        return [dx, None, None, None]  # the runtime copies, whatever the scales
    for position, axis, old, new, scale, _ in resized:
        region = _region(ctx, position)
        if (
            isinstance(old, int)
            and isinstance(new, int)
            and not isinstance(scale, ir.Value)
            and not isinstance(region, ir.Value)
        ):
            known = _KnownAxis(op.opset, kernel, old, new, scale, region)
            dx = _multiply_known(op, dx, rank, axis, known, ctx.dtype(x))
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


_LARGEST = 1 << 16  # elements of a matrix of weights; of a longer axis only those that are not 0
_ROWS = 1024  # that are looked at at once
_EXACT = 1 << 24  # up to here each whole number is one in float32


@dataclasses.dataclass(frozen=True)
class _KnownAxis:
    """An axis of which everything is known."""

    opset: int
    kernel: Kernel
    old: int
    new: int
    scale: float | None
    region: tuple[float, float] | None

    def run(
        self,
        write: Callable[[Ops, Kernel, Axis, ir.DataType], ir.Value],
        window: tuple[range, range] | None = None,
    ) -> np.ndarray:
        """The result of the nodes that would compute something of it."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": self.opset}, name="weights")
        op = Ops(graph)
        axis = Axis(op.ints(self.old), op.ints(self.new), self.scale, self.region, window)
        # The runtime computes positions in float32: of two elements it takes the one next to them.
        nearest = self.kernel.mode == "nearest"
        dtype = ir.DataType.FLOAT if nearest else ir.DataType.DOUBLE
        graph.outputs.append(write(op, self.kernel, axis, dtype))
        model = ir.to_proto(ir.Model(graph, ir_version=8))
        results: Any = ReferenceEvaluator(model).run(None, {})  # its stubs say it may be a dict
        return np.asarray(results[0])

    def read(self) -> np.ndarray | None:
        """Which element each one of the result is, as the runtime rounds; None if not known."""
        if self.kernel.mode != "nearest" or self.region is not None or self.old >= _EXACT:
            return None
        opset = 19 if self.kernel.coordinates == "half_pixel_symmetric" else 11
        graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="read")
        op, sized = Ops(graph), self.scale is None
        # A second axis grows: where no axis changes its length, the runtime only copies.
        result = op.Resize(
            op.constant(np.arange(self.old, dtype=np.float32)[None]),
            op.constant(np.zeros(0, np.float32)),
            op.constant(np.array([] if sized else [2, self.scale], np.float32)),
            *([op.ints(2, self.new)] if sized else []),
            mode="nearest",
            nearest_mode=self.kernel.nearest_mode,
            coordinate_transformation_mode=self.kernel.coordinates,
        )
        graph.outputs.append(op.Cast(result, to=int(ir.DataType.INT64)))
        graph.outputs[0].dtype = ir.DataType.INT64
        model = ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString()
        try:
            session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
            found = np.asarray(session.run(None, {})[0])[0]
        except Exception:  # ONNX Runtime's exceptions have no common base; it may be too old
            return None
        return found if len(found) == self.new else None


def _multiply_known(
    op: Ops, value: ir.Value, rank: int, place: int, axis: _KnownAxis, dtype: ir.DataType
) -> ir.Value:
    """Multiply weights [new, old] that are known onto one axis."""
    new, old, which = axis.new, axis.old, axis.read()
    if new * old <= _LARGEST:
        matrix = axis.run(weights) if which is None else np.equal.outer(which, np.arange(old))
        return multiply_axis(op, value, rank, place, matrix.astype(dtype.numpy()))
    found = [] if which is None else [(np.arange(new), which, np.ones(new))]
    at = np.clip(axis.run(positions), 0, old - 1)
    reach = int(2 * max(1, old / new, 1 / (axis.scale or 1))) + 3
    for start in range(0, new if which is None else 0, _ROWS):
        rows = range(start, min(start + _ROWS, new))
        near = at[start : rows.stop]
        columns = range(max(int(near.min()) - reach, 0), min(int(near.max()) + reach + 1, old))
        matrix = axis.run(weights, (rows, columns))
        row, column = matrix.nonzero()
        found.append((row + start, column + columns.start, matrix[row, column]))
    row, column, numbers = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(column, kind="stable")
    row, column, numbers = row[order], column[order], numbers[order]
    counts = np.bincount(column, minlength=old)
    nth = np.arange(len(column)) - np.repeat(np.cumsum(counts) - counts, counts)
    most = max(int(counts.max()), 1)
    sources, factors = np.zeros((old, most), np.int64), np.zeros((old, most), dtype.numpy())
    sources[column, nth], factors[column, nth] = row, numbers
    last = [i for i in range(rank) if i != place] + [place]
    read = op.Gather(op.transpose(value, *last), op.constant(sources.reshape(-1)), axis=rank - 1)
    split = op.reshape(read, *[0] * (rank - 1), old, most)
    summed = op.reduce_sum(op.Mul(split, op.constant(factors)), [rank], keepdims=False)
    return op.transpose(summed, *(last.index(i) for i in range(rank)))


# Sampling at positions that the model computes: GridSample, and AffineGrid, which makes them.

# Names of the modes; opset 20 renamed two of them.
_MODES = {
    "nearest": sampling.nearest,
    "bilinear": sampling.linear,
    "linear": sampling.linear,
    "bicubic": sampling.cubic,
    "cubic": sampling.cubic,
}


@vjp("GridSample", since=16)
def grid_sample(ctx: Context) -> Cotangents:
    """x [N, C, ...] read at grid [N, ..., r], whose last axis counts from the last to the first."""
    # A grid of -1 to 1 spans the plane: from the centre of its first element to that of its last
    # with align_corners, from edge to edge without.
    op, x, grid, rank = ctx.op, ctx.x(), ctx.x(1), ctx.rank(ctx.x()) - 2
    mode, padding = ctx.string("mode", "linear"), ctx.string("padding_mode", "zeros")
    corners = bool(ctx.int("align_corners", 0))
    if mode not in _MODES or padding not in ("zeros", "border", "reflection"):
        raise ctx.unsupported(f"mode {mode!r} with padding_mode {padding!r}")
    sizes = [sampling.length(op, x, 2 + axis) for axis in range(rank)]
    places = op.reshape(op.cast(grid, ctx.dtype(x)), 0, -1, rank)
    scales, axes = [], []
    for axis, size in enumerate(sizes):
        length = op.cast(size, ctx.dtype(x))
        scale = op.Mul(op.Sub(length, 1.0) if corners else length, 0.5)
        column = op.slice(places, [2], [rank - 1 - axis], [rank - axis])
        at = op.Add(op.Mul(column, scale), op.Mul(op.Sub(length, 1.0), 0.5))
        axes.append(_MODES[mode](op, at, size, padding, corners))
        scales.append(scale)
    taps = sampling.combine(op, axes, sizes)
    dy = op.reshape(ctx.dy(), 0, 0, -1)
    dx = sampling.scatter(op, x, taps, dy) if ctx.needs(0) else None
    if not ctx.needs(1):
        return [dx]
    if mode == "nearest":
        return [dx, op.zeros(op.shape_of(grid), ctx.dtype(grid))]
    share = sampling.shares(op, sampling.rows(op, x, taps), dy)
    found = sampling.position_gradients(op, taps, share)
    columns = [
        op.unsqueeze(op.Mul(slope, scale), 2)
        for slope, scale in zip(found, scales, strict=True)
        if slope is not None
    ]
    dgrid = op.reshape_like(op.Concat(*reversed(columns), axis=2), grid)
    return [dx, op.cast(dgrid, ctx.dtype(grid))]


@vjp("AffineGrid", since=20)
def affine_grid(ctx: Context) -> Cotangents:
    """grid [N, P, r] = base [P, r] A^T + b, where theta [N, r, r + 1] is A with b appended."""
    # The operator itself makes ``base``: it is the grid of the identity.
    op, theta, rank = ctx.op, ctx.x(), ctx.size(ctx.x(), 1)
    dtype = ctx.dtype(theta)
    identity = op.constant(np.eye(rank, rank + 1, dtype=dtype.numpy())[None])
    one = op.Concat(op.ints(1), op.slice(ctx.x(1), [0], [1], [rank + 2]), axis=0)
    base = op.AffineGrid(identity, one, align_corners=ctx.int("align_corners", 0))
    columns = op.transpose(op.reshape(ctx.dy(), 0, -1, rank), 0, 2, 1)  # [N, r, P]
    matrix = op.MatMul(columns, op.reshape(base, -1, rank))
    return [op.Concat(matrix, op.reduce_sum(columns, [2]), axis=2), None]
