"""Operators that move, cut, join or repeat elements."""

from __future__ import annotations

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp

non_differentiable(
    "Shape", "Size", "ConstantOfShape", "Constant", "Range", "EyeLike", "OneHot",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
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
    return ctx.op.sum_to(ctx.dy(), ctx.dims(ctx.y()), ctx.x())


@vjp("Concat")
def concat(ctx: Context) -> Cotangents:
    op, axis = ctx.op, ctx.axis()
    sizes = [ctx.dims(value)[axis] for value in ctx.node.inputs if value is not None]
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return op.split(ctx.dy(), axis, known)
    if op.opset < 13:
        raise ctx.unsupported(f"sizes along axis {axis} are known only when the model runs")
    lengths = [
        op.Gather(op.Shape(value), op.ints(axis), axis=0)
        for value in ctx.node.inputs
        if value is not None
    ]
    joined = op.Concat(*lengths, axis=0)
    return op.emit("Split", [ctx.dy(), joined], outputs=len(sizes), axis=axis)


@vjp("Split")
def split(ctx: Context) -> Cotangents:
    """An output that nobody uses contributes zeros."""
    op, axis = ctx.op, ctx.axis()
    parts = []
    for index, output in enumerate(ctx.node.outputs):
        cotangent = ctx.maybe_dy(index)
        if cotangent is None:
            dtype = ctx.x().dtype
            assert dtype is not None
            cotangent = op.zeros(op.shape_of(output), dtype)
        parts.append(cotangent)
    return op.Concat(*parts, axis=axis)


@vjp("Slice")
def slice_(ctx: Context) -> Cotangents:
    """Zeros around the cotangent; with steps, zeros between its elements too."""
    op, x, rank = ctx.op, ctx.x(), ctx.rank(ctx.x())
    starts, ends = ctx.constant(1), ctx.constant(2)
    axes = ctx.constant(3) if ctx.maybe_x(3) is not None else None
    steps = ctx.constant(4) if ctx.maybe_x(4) is not None else None
    unknown = (ctx.maybe_x(3) is not None and axes is None) or (
        ctx.maybe_x(4) is not None and steps is None
    )
    if starts is None or ends is None or unknown:
        raise ctx.unsupported("its bounds are known only when the model runs")
    dims = ctx.dims(x)
    dx = ctx.dy()
    listed = [int(a) % rank for a in axes] if axes is not None else list(range(len(starts)))
    before, after = [0] * rank, [0] * rank
    for position, axis in enumerate(listed):
        step = int(steps[position]) if steps is not None else 1
        size = dims[axis]
        bounds = (int(starts[position]), int(ends[position]))
        if not isinstance(size, int):
            if step == 1 and bounds[0] == 0 and bounds[1] >= 2**31 - 1:
                continue  # the whole axis
            raise ctx.unsupported(f"axis {axis} has a size known only when the model runs")
        start, stop, step = slice(*bounds, step).indices(size)
        if bounds[1] < -size and step < 0:
            stop = -1
        count = len(range(start, stop, step))
        if step < 0:
            start, step = start + (count - 1) * step, -step
            dx = op.slice(dx, [axis], [-1], [-(2**31)], [-1])
        if step > 1:
            dx = _dilate(ctx, dx, axis, step, count)
        before[axis], after[axis] = start, size - start - ((count - 1) * step + 1)
    return op.pad(dx, before, after)


def _dilate(ctx: Context, value, axis: int, step: int, count: int):  # type: ignore[no-untyped-def]
    """Put ``step - 1`` zeros between the elements along ``axis``."""
    op = ctx.op
    rank = ctx.rank(ctx.x())
    wide = op.unsqueeze(value, axis + 1)
    after = [0] * (rank + 1)
    after[axis + 1] = step - 1
    wide = op.pad(wide, [0] * (rank + 1), after)
    dims = [d if isinstance(d, int) else 0 for d in ctx.dims(ctx.y())]
    dims[axis] = -1
    for i, size in enumerate(ctx.dims(ctx.y())):
        if not isinstance(size, int) and i != axis:
            dims[i] = 0
    flat = op.reshape(wide, *_merged(dims, axis))
    return op.slice(flat, [axis], [0], [(count - 1) * step + 1])


def _merged(dims: list[int], axis: int) -> list[int]:
    return dims


@vjp("Pad")
def pad(ctx: Context) -> Cotangents:
    """Constant mode: cut the border off again."""
    op, rank = ctx.op, ctx.rank(ctx.x())
    mode = ctx.string("mode", "constant")
    if mode != "constant":
        raise ctx.unsupported(f"mode {mode!r}")
    pads = ctx.constant(1)
    if pads is None:
        raise ctx.unsupported("its pads are known only when the model runs")
    axes = ctx.constant(3) if ctx.maybe_x(3) is not None else None
    listed = [int(a) % rank for a in axes] if axes is not None else list(range(rank))
    half = len(listed)
    cuts = {axis: (int(pads[i]), int(pads[half + i])) for i, axis in enumerate(listed)}
    dx = ctx.dy()
    if any(b < 0 or a < 0 for b, a in cuts.values()):
        dx = op.pad(
            dx,
            [max(0, -cuts.get(axis, (0, 0))[0]) for axis in range(rank)],
            [max(0, -cuts.get(axis, (0, 0))[1]) for axis in range(rank)],
        )
    cut = [axis for axis, (b, a) in cuts.items() if b > 0 or a > 0]
    if cut:
        far = 2**31 - 1
        starts = [max(0, cuts[axis][0]) for axis in cut]
        ends = [-cuts[axis][1] if cuts[axis][1] > 0 else far for axis in cut]
        dx = op.slice(dx, cut, starts, ends)
    value = None
    if ctx.needs(2):
        total = op.reduce_sum(op.reshape(ctx.dy(), -1), [0])
        inner = op.reduce_sum(op.reshape(dx, -1), [0])
        value = op.reshape_like(op.Sub(total, inner), ctx.x(2))
    return [dx, None, value]


@vjp("Tile")
def tile(ctx: Context) -> Cotangents:
    """Fold each axis into (repeat, size) and sum over the repeats."""
    op, dims = ctx.op, ctx.dims(ctx.x())
    repeats = ctx.constant(1)
    if repeats is None or sum(not isinstance(dim, int) for dim in dims) > 1:
        raise ctx.unsupported("its repeats or sizes are known only when the model runs")
    folded, axes = [], []
    for dim, repeat in zip(dims, repeats, strict=True):
        if repeat != 1:
            axes.append(len(folded))
            folded.append(int(repeat))
        folded.append(dim if isinstance(dim, int) else -1)
    if not axes:
        return ctx.dy()
    return op.reduce_sum(op.reshape(ctx.dy(), *folded), axes, keepdims=False)


@vjp("DepthToSpace")
def depth_to_space(ctx: Context) -> Cotangents:
    """SpaceToDepth undoes it; mode CRD orders the channels the other way round."""
    op, size = ctx.op, ctx.int("blocksize", 1)
    dx = op.SpaceToDepth(ctx.dy(), blocksize=size)
    if ctx.string("mode", "DCR") == "DCR":
        return dx
    _, channels, height, width = ctx.dims(ctx.x())
    if not isinstance(channels, int):
        raise ctx.unsupported("its channels are known only when the model runs")
    if not isinstance(height, int) or not isinstance(width, int):
        raise ctx.unsupported("its height and width are known only when the model runs")
    blocks = op.reshape(dx, -1, size * size, channels // size**2, height, width)
    return op.reshape(op.transpose(blocks, 0, 2, 1, 3, 4), -1, channels, height, width)


@vjp("SpaceToDepth")
def space_to_depth(ctx: Context) -> Cotangents:
    return ctx.op.DepthToSpace(ctx.dy(), blocksize=ctx.int("blocksize", 1))


@vjp("Trilu")
def trilu(ctx: Context) -> Cotangents:
    return [ctx.op.Trilu(ctx.dy(), ctx.maybe_x(1), upper=ctx.int("upper", 1)), None]
