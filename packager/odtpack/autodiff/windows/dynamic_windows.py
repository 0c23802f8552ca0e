"""Windows on a plane whose size is known only when the model runs.

The counterpart of :mod:`odtpack.autodiff.windows.windows`: the arithmetic on sizes that is done
there before the model runs is written into the graph here, on INT64 vectors of one number for
each spatial axis. It needs neither the number of samples nor that of channels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.windows.windows import check_lengths
from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class OpenWindows:
    """The spatial side of a convolution or pool; one entry for each spatial axis.

    Attributes:
        op: Writes the nodes.
        kernel: Kernel sizes.
        strides: Steps between windows.
        dilations: Distances between taps.
        before: INT64 vector [rank]: elements of padding in front of each axis.
        after: The same after each axis, so that the last window ends with it; negative
            where elements are left over.
        size: INT64 vector [rank]: sizes of the plane that the windows read.
        out: INT64 vector [rank]: number of windows along each axis.
    """

    op: Ops
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: ir.Value
    after: ir.Value
    size: ir.Value
    out: ir.Value

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    def taps(self) -> list[tuple[int, ...]]:
        """Offset of every kernel element in the padded plane, in row-major order."""
        steps = (range(0, k * d, d) for k, d in zip(self.kernel, self.dilations, strict=True))
        return list(itertools.product(*steps))

    def spans(self) -> ir.Value:
        """Elements between the first and last window position along each axis, plus one."""
        op = self.op
        return op.Add(op.Mul(op.Sub(self.out, 1), op.ints(*self.strides)), 1)

    def pad(self, x: ir.Value, value: ir.Value | None = None) -> ir.Value:
        """``x`` [N, C, size...] with its padding around it, zeros if no value is given."""
        op, none = self.op, self.op.ints(0, 0)
        pads = op.Concat(none, self.before, none, self.after, axis=0)
        return op.Pad(x, pads, *([] if value is None else [value]))

    def tap(self, padded: ir.Value, offset: Sequence[int]) -> ir.Value:
        """The elements of ``padded`` that one tap reads, one for each window."""
        op, start = self.op, self.op.ints(*offset)
        axes = op.ints(*range(2, 2 + self.rank))
        return op.Slice(padded, start, op.Add(self.spans(), start), axes, op.ints(*self.strides))

    def scatter(self, w: ir.Value, dy: ir.Value, groups: int) -> ir.Value:
        """Scatter ``dy`` [N, O, out...] through ``w`` [O, C/G, k...] to [N, C, size...]."""
        op, none = self.op, self.op.ints(0, 0)
        full = op.ConvTranspose(dy, w, group=groups, strides=self.strides, dilations=self.dilations)
        end = op.Neg(self.after)
        return op.Pad(full, op.Concat(none, op.Neg(self.before), none, end, axis=0))


def is_open(ctx: Context, value: ir.Value) -> bool:
    """Whether the channels or a spatial size of ``value`` [N, C, ...] are unknown."""
    return not all(isinstance(dim, int) for dim in ctx.dims(value)[1:])


def spatial_shape(op: Ops, value: ir.Value) -> ir.Value:
    """INT64 vector of the spatial sizes of ``value`` [N, C, ...]."""
    return op.slice(op.Shape(value), [0], [2], [1 << 31])


def open_windows(ctx: Context, kernel: Sequence[int]) -> OpenWindows:
    """Read a Conv or a pool: its windows lie on its input.

    Raises:
        OdtpackError: The attributes do not go with the input's rank.
    """
    strides, dilations, reach = _steps(ctx, kernel, ctx.rank(ctx.x()) - 2)
    op, rank, mode = ctx.op, len(kernel), ctx.string("auto_pad", "NOTSET")
    size, out = spatial_shape(op, ctx.x()), spatial_shape(op, ctx.dy())
    needed = op.Add(op.Mul(op.Sub(out, 1), op.ints(*strides)), op.ints(*reach))
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        before = _same_before(op, _same_total(op, size, kernel, strides), mode)
    else:
        pads = ctx.ints("pads", (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
        before = op.ints(*pads[:rank])
    after = op.Sub(op.Sub(needed, size), before)
    return OpenWindows(op, tuple(kernel), strides, dilations, before, after, size, out)


def transposed_open_windows(ctx: Context, kernel: Sequence[int]) -> OpenWindows:
    """Read a ConvTranspose: its windows lie on its output.

    Raises:
        OdtpackError: The attributes do not go with the input's rank.
    """
    strides, dilations, reach = _steps(ctx, kernel, ctx.rank(ctx.x()) - 2)
    op, rank, mode = ctx.op, len(kernel), ctx.string("auto_pad", "NOTSET")
    size, out = spatial_shape(op, ctx.dy()), spatial_shape(op, ctx.x())
    needed = op.Add(op.Mul(op.Sub(out, 1), op.ints(*strides)), op.ints(*reach))
    if mode.startswith("SAME") or "output_shape" in ctx.node.attributes:
        extra = op.ints(*ctx.ints("output_padding", (0,) * rank))
        total = op.Max(op.Sub(op.Add(needed, extra), size), op.ints(0))
        before = _same_before(op, total, mode)
    else:
        before = op.ints(*ctx.ints("pads", (0,) * 2 * rank)[:rank])
    after = op.Sub(op.Sub(needed, size), before)
    return OpenWindows(op, tuple(kernel), strides, dilations, before, after, size, out)


def column_windows(ctx: Context, kernel: Sequence[int]) -> OpenWindows:
    """Read a Col2Im: its windows lie on its output, as many as fit into it.

    Raises:
        OdtpackError: The attributes do not go with the kernel's rank.
    """
    strides, dilations, reach = _steps(ctx, kernel, len(kernel))
    op, rank = ctx.op, len(kernel)
    pads = ctx.ints("pads", (0,) * 2 * rank)
    before, after = op.ints(*pads[:rank]), op.ints(*pads[rank:])
    size = spatial_shape(op, ctx.dy())
    room = op.Sub(op.Add(size, op.Add(before, after)), op.ints(*reach))
    out = op.Add(op.Div(room, op.ints(*strides)), 1)
    return OpenWindows(op, tuple(kernel), strides, dilations, before, after, size, out)


def _steps(
    ctx: Context, kernel: Sequence[int], spatial: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Strides, dilations, and how far the taps of one window reach."""
    rank = len(kernel)
    check_lengths(ctx, rank, spatial)
    strides, dilations = (ctx.ints(name, (1,) * rank) for name in ("strides", "dilations"))
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    return strides, dilations, reach


def _same_total(op: Ops, size: ir.Value, kernel: Sequence[int], strides: Sequence[int]) -> ir.Value:
    """Padding of both ends with auto_pad; ONNX Runtime's does not know of dilations."""
    steps = op.ints(*strides)
    out = op.Div(op.Sub(op.Add(size, steps), 1), steps)
    reach = op.Add(op.Mul(op.Sub(out, 1), steps), op.ints(*kernel))
    return op.Max(op.Sub(reach, size), op.ints(0))


def _same_before(op: Ops, total: ir.Value, mode: str) -> ir.Value:
    half = op.Div(total, 2)
    return half if mode == "SAME_UPPER" else op.Sub(total, half)


# Convolutions


def weight_gradient(
    win: OpenWindows, x: ir.Value, dy: ir.Value, groups: int, weight: Sequence[int]
) -> ir.Value:
    """DW [O, C/G, k...]: the product of all taps side by side with dY, group by group."""
    op, taps, (outer, inner, *kernel) = win.op, win.taps(), weight
    padded = win.pad(x)
    split = [op.reshape(win.tap(padded, tap), 0, groups, inner, -1) for tap in taps]
    columns = op.Concat(*split, axis=2) if len(split) > 1 else split[0]
    rows = op.transpose(op.reshape(dy, 0, groups, outer // groups, -1), 0, 1, 3, 2)
    summed = op.reduce_sum(op.MatMul(columns, rows), [0], keepdims=False)
    by_tap = op.reshape(summed, groups, len(taps), inner, outer // groups)
    return op.reshape(op.transpose(by_tap, 0, 3, 2, 1), outer, inner, *kernel)


# Pools: every channel of every sample is a plane [1, ...] of its own


def planes(op: Ops, value: ir.Value) -> ir.Value:
    """View [N, C, ...] as [N C, 1, ...]."""
    return op.Reshape(value, op.Concat(op.ints(-1, 1), spatial_shape(op, value), axis=0))


def scatter_maxima(ctx: Context, win: OpenWindows) -> ir.Value:
    """DX of MaxPool: split the cotangent among the taps, then one transposed convolution."""
    op, x, dtype = win.op, ctx.x(), ctx.dtype(ctx.x())
    y, left = planes(op, ctx.y()), planes(op, ctx.dy())
    padded = win.pad(planes(op, x), op.constant(np.array(-np.inf, dtype.numpy())))
    parts = []
    for tap in win.taps():
        part = op.Mul(op.cast(op.Equal(win.tap(padded, tap), y), dtype), left)
        left = op.Sub(left, part)
        parts.append(part)
    joined = op.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    select = np.eye(len(parts), dtype=dtype.numpy()).reshape(-1, 1, *win.kernel)
    dx = win.scatter(op.constant(select), joined, 1)
    return op.Reshape(dx, op.Shape(x))


def scatter_sums(ctx: Context, win: OpenWindows, dy: ir.Value) -> ir.Value:
    """Give every element of a window the window's ``dy`` [N, C, out...]; [N, C, size...]."""
    op, dtype = win.op, ctx.dtype(ctx.x())
    ones = op.constant(np.ones((1, 1, *win.kernel), dtype.numpy()))
    return op.Reshape(win.scatter(ones, planes(op, dy), 1), op.Shape(ctx.x()))


def counts(ctx: Context, win: OpenWindows) -> ir.Value:
    """Number of elements that each window's mean runs over, [out...] in the type of x."""
    op, include = win.op, ctx.int("count_include_pad", 0)
    mode, high = ctx.string("auto_pad", "NOTSET"), win.size
    if include and mode == "NOTSET":
        # Padding that ceil_mode adds never counts.
        high = op.Add(high, op.ints(*ctx.ints("pads", (0,) * 2 * win.rank)[win.rank :]))
    elif include and mode.startswith("SAME"):
        total = _same_total(op, win.size, win.kernel, win.strides)
        high = op.Add(high, op.Sub(total, win.before))
    axes = []
    for axis in range(win.rank):
        number = op.squeeze(op.slice(win.out, [0], [axis], [axis + 1]), 0)
        first = op.slice(win.before, [0], [axis], [axis + 1])
        steps = op.Range(op.constant(np.int64(0)), number, op.constant(np.int64(1)))
        starts = op.Sub(op.Mul(steps, win.strides[axis]), first)
        low = op.Neg(first) if include else op.ints(0)
        limit = op.slice(high, [0], [axis], [axis + 1])
        to_limit, to_low = (_taps_until(win, axis, starts, bound) for bound in (limit, low))
        others = [other for other in range(win.rank) if other != axis]
        count = op.Sub(to_limit, to_low)
        axes.append(op.unsqueeze(count, *others) if others else count)
    return op.cast(functools.reduce(op.Mul, axes), ctx.dtype(ctx.x()))


def _taps_until(win: OpenWindows, axis: int, starts: ir.Value, bound: ir.Value) -> ir.Value:
    """Number of taps of each window that lie before ``bound``."""
    op, dilation = win.op, win.dilations[axis]
    room = op.Max(op.Sub(bound, starts), op.ints(0))
    taps = op.Div(op.Add(room, dilation - 1), dilation)
    return op.Min(taps, op.ints(win.kernel[axis]))
