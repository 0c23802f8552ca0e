"""Windows on a plane: where each window and each tap lies."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.graph.graphs import Dims, Ops


class _Taps:
    kernel: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    def taps(self) -> list[tuple[int, ...]]:
        """Offset of every kernel element in the padded plane, in row-major order."""
        steps = (range(0, k * d, d) for k, d in zip(self.kernel, self.dilations, strict=True))
        return list(itertools.product(*steps))


@dataclasses.dataclass(frozen=True)
class Windows(_Taps):
    """The spatial side of a convolution; one entry for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]  # steps between windows
    dilations: tuple[int, ...]  # distances between taps
    before: tuple[int, ...]  # zeros in front of each axis
    after: tuple[int, ...]  # zeros after each axis
    size: tuple[int, ...]  # input sizes
    out: tuple[int, ...]  # output sizes
    groups: int  # number of groups
    channels: int
    features: int  # output channels

    @property
    def spatial(self) -> range:
        """Axes of the spatial dimensions in [N, C, ...] layout."""
        return range(2, 2 + self.rank)

    @property
    def pointwise(self) -> bool:
        """A kernel of ones, without padding or steps: a matrix product over channels."""
        ones = (1,) * self.rank
        return self.kernel == self.strides == ones and not any(self.before + self.after)

    @property
    def tiles(self) -> bool:
        """The windows cover the input once: no padding, overlap, gaps or rest."""
        covered = tuple(o * k for o, k in zip(self.out, self.kernel, strict=True))
        dense = all(dilation == 1 for dilation in self.dilations)
        return dense and self.kernel == self.strides and covered == self.size

    @property
    def depthwise(self) -> bool:
        """One input and one output channel in each group."""
        return self.groups == self.channels == self.features and self.groups > 1

    @property
    def pixels(self) -> int:
        """Number of output positions of one sample and channel."""
        return math.prod(self.out)

    def tap(
        self, op: Ops, padded: ir.Value, axes: Sequence[int], offset: Sequence[int]
    ) -> ir.Value:
        """The elements of ``padded`` that one tap reads, one for each window."""
        ends = [start + span for start, span in zip(offset, self.spans(), strict=True)]
        return op.slice(padded, axes, offset, ends, self.strides)

    def spans(self) -> tuple[int, ...]:
        """Elements between the first and last window position along each axis, plus one."""
        return tuple((o - 1) * s + 1 for o, s in zip(self.out, self.strides, strict=True))

    def unread(self) -> tuple[int, ...]:
        """Elements after the last window along each axis, which none reads."""
        rows = zip(
            self.size, self.before, self.after, self.kernel, self.dilations, self.spans(),
            strict=True,
        )  # fmt: skip
        return tuple(n + b + a - ((k - 1) * d + span) for n, b, a, k, d, span in rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """The nodes of one result, marked with it: what a native kernel may compute in their place."""

    kind: str  # "forward", "input gradient" or "weight gradient"
    windows: Windows


def region(op: Ops, kind: str, win: Windows) -> AbstractContextManager[None]:
    """Mark the nodes of a depthwise convolution of planes, or of its gradient."""
    depthwise = win.depthwise and win.rank == 2
    return op.marked(Region(kind, win)) if depthwise else nullcontext()


def conv_windows(ctx: Context) -> Windows:
    """Read a Conv node."""
    if ctx.string("auto_pad", "NOTSET").startswith("SAME") and max(ctx.ints("dilations", (1,))) > 1:
        raise ctx.unsupported("ONNX Runtime does not run it with auto_pad and dilations")
    weight = _known(ctx, ctx.dims(ctx.x(1)))
    return _windows(ctx, tuple(weight[2:]), ctx.int("group", 1), weight[0])


def pool_windows(ctx: Context) -> Windows:
    """Read a pooling node: one group for each channel."""
    channels = _known(ctx, ctx.dims(ctx.x())[1:])[0]
    return _windows(ctx, ctx.ints("kernel_shape", ()), channels, channels)


def _known(ctx: Context, dims: Dims) -> list[int]:
    known = [dim for dim in dims if isinstance(dim, int)]
    if len(known) != len(dims):
        raise ctx.unsupported("the sizes of its weight must be known")
    return known


def check_lengths(ctx: Context, rank: int, spatial: int) -> None:
    """Hold the list attributes to the number of spatial axes."""
    # rank: Length of the kernel. spatial: Number of spatial axes of the input.
    lengths = {"kernel_shape": rank, "strides": rank, "dilations": rank, "pads": 2 * rank}
    for name, wanted in lengths.items():
        if rank != spatial or len(ctx.ints(name, (0,) * wanted)) != wanted:
            raise ctx.unsupported(f"its {name} does not go with {spatial} spatial axes")


def _windows(ctx: Context, kernel: tuple[int, ...], groups: int, features: int) -> Windows:
    """auto_pad and ceil_mode are turned into explicit padding: every window lies inside."""
    channels, *sizes = _known(ctx, ctx.dims(ctx.x())[1:])
    size = tuple(sizes)
    strides, dilations, reach = spacing(ctx, kernel, len(size))
    before, after = padding(ctx, kernel, strides, size)
    out, reached = [], []
    for n, b, a, r, s in zip(size, before, after, reach, strides, strict=True):
        count = (n + b + a - r) // s + 1
        # With ceil_mode the last window may start inside and hang over.
        if ctx.int("ceil_mode", 0) and (n + b + a - r) % s and count * s < n + b:
            count += 1
        out.append(count)
        reached.append(max(a, (count - 1) * s + r - n - b))
    return Windows(
        kernel, strides, dilations, before, tuple(reached), size, tuple(out), groups, channels,
        features,
    )  # fmt: skip


def check_pool(ctx: Context, win: Windows) -> None:
    """Refuse a pool whose windows ONNX Runtime has elsewhere, or not as many of."""
    check_gaps(ctx, win.kernel, win.strides, win.size)
    if any(
        isinstance(n, int) and n != o for n, o in zip(ctx.dims(ctx.y())[2:], win.out, strict=True)
    ):
        raise ctx.unsupported("ONNX Runtime has another number of windows than the standard")


def check_gaps(
    ctx: Context, kernel: Sequence[int], strides: Sequence[int], size: Sequence[int]
) -> None:
    """Refuse a pool that ONNX Runtime gives a negative padding, which moves its windows."""
    same = ctx.string("auto_pad", "NOTSET").startswith("SAME")
    # One element less behind the end moves none, but dilated windows may then be fewer.
    least = -1 if max(ctx.ints("dilations", (1,))) == 1 else 0
    rows = zip(kernel, strides, size, strict=True)
    if same and any((-(-n // s) - 1) * s + k - n < least for k, s, n in rows):
        raise ctx.unsupported(
            "with auto_pad and strides that leave gaps ONNX Runtime does not run it, or moves its "
            "windows"
        )


def padding(
    ctx: Context, kernel: Sequence[int], strides: Sequence[int], size: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Declared elements of padding before and after each spatial axis."""
    rank, mode = len(kernel), ctx.string("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max(0, (-(-n // s) - 1) * s + k - n)
            for n, s, k in zip(size, strides, kernel, strict=True)
        ]
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        return (small, large) if mode == "SAME_UPPER" else (large, small)
    pads = ctx.ints("pads", (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
    return pads[:rank], pads[rank:]


def transposed_convolution(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """Scatter ``dy`` [N, O, out...] through ``w`` [O, C/G, k...] to [N, C, size...]."""
    return op.ConvTranspose(
        dy, w, group=win.groups, strides=win.strides, dilations=win.dilations,
        pads=[*win.before, *win.after], output_padding=win.unread(),
    )  # fmt: skip


# Windows on a plane whose size is known only when the model runs.
#
# The arithmetic on sizes that is done above before the model runs is written into the graph here,
# on INT64 vectors of one number for each spatial axis. It needs neither the number of samples nor
# that of channels.


@dataclasses.dataclass(frozen=True)
class OpenWindows(_Taps):
    """The spatial side of a convolution or pool; one entry for each spatial axis."""

    op: Ops  # writes the nodes
    kernel: tuple[int, ...]
    strides: tuple[int, ...]  # steps between windows
    dilations: tuple[int, ...]  # distances between taps
    before: ir.Value  # INT64 vector [rank]: elements of padding in front of each axis
    # The same after each axis, so that the last window ends with it; negative where elements are
    # left over.
    after: ir.Value
    size: ir.Value  # INT64 vector [rank]: sizes of the plane that the windows read
    out: ir.Value  # INT64 vector [rank]: number of windows along each axis

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
    """Read a Conv or a pool, whose windows lie on its input, or a ConvTranspose: on its output."""
    op, rank, mode = ctx.op, len(kernel), ctx.string("auto_pad", "NOTSET")
    transposed = ctx.node.op_type == "ConvTranspose"
    ends = (ctx.dy(), ctx.x()) if transposed else (ctx.x(), ctx.dy())
    size, out = (spatial_shape(op, value) for value in ends)
    strides, dilations, reach = spacing(ctx, kernel, ctx.rank(ctx.x()) - 2)
    # From the first to the last element that windows read.
    needed = op.Add(op.Mul(op.Sub(out, 1), op.ints(*strides)), op.ints(*reach))
    if ctx.node.op_type not in ("Conv", "ConvTranspose"):
        check_gaps(ctx, kernel, strides, strides)  # where the padding is least
    pads = (0,) * 2 * rank
    if transposed and (mode.startswith("SAME") or "output_shape" in ctx.node.attributes):
        extra = op.ints(*ctx.ints("output_padding", (0,) * rank))
        total = op.Max(op.Sub(op.Add(needed, extra), size), op.ints(0))
        before = _same_before(op, total, mode)
    elif mode.startswith("SAME"):
        before = _same_before(op, _same_total(op, size, kernel, strides), mode)
    else:
        given = transposed or mode == "NOTSET"
        before = op.ints(*(ctx.ints("pads", pads) if given else pads)[:rank])
    after = op.Sub(op.Sub(needed, size), before)
    return OpenWindows(op, tuple(kernel), strides, dilations, before, after, size, out)


def column_windows(ctx: Context, kernel: Sequence[int]) -> OpenWindows:
    """Read a Col2Im: its windows lie on its output, as many as fit into it."""
    op, rank = ctx.op, len(kernel)
    strides, dilations, reach = spacing(ctx, kernel, rank)
    pads = ctx.ints("pads", (0,) * 2 * rank)
    before, after = op.ints(*pads[:rank]), op.ints(*pads[rank:])
    size = spatial_shape(op, ctx.dy())
    room = op.Sub(op.Add(size, op.Add(before, after)), op.ints(*reach))
    out = op.Add(op.Div(room, op.ints(*strides)), 1)
    return OpenWindows(op, tuple(kernel), strides, dilations, before, after, size, out)


_Sizes = tuple[int, ...]


def spacing(ctx: Context, kernel: Sequence[int], spatial: int) -> tuple[_Sizes, _Sizes, _Sizes]:
    """Strides, dilations, and how far the taps of one window reach."""
    check_lengths(ctx, len(kernel), spatial)
    strides, dilations = (ctx.ints(n, (1,) * len(kernel)) for n in ("strides", "dilations"))
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
        ends, dilation = [], win.dilations[axis]
        for bound in (limit, low):  # taps of each window that lie before it
            room = op.Max(op.Sub(bound, starts), op.ints(0))
            taps = op.Div(op.Add(room, dilation - 1), dilation)
            ends.append(op.Min(taps, op.ints(win.kernel[axis])))
        others = [other for other in range(win.rank) if other != axis]
        count = op.Sub(*ends)
        axes.append(op.unsqueeze(count, *others) if others else count)
    return op.cast(functools.reduce(op.Mul, axes), ctx.dtype(ctx.x()))


# Convolutions on small planes as matrix products.
#
# Late layers of a mobile network have planes of 7x7 or less. There the kernels for Conv
# with a weight that is not a constant, and for ConvTranspose, spend their time on overhead.
#
# - A 1x1 convolution is W [O, C] times X [C, N P], one product over all samples.
# - A depthwise convolution is, for each channel, X [N, P] times T [P, out P], a matrix that
#   holds the kernel's taps on its bands. T is the product of the weight with a constant 0/1
#   matrix, and so its gradient is one too.
#
# The gradient rule for Conv and the pass that rewrites the forward node share this module.

# Pixels below which a 1x1 convolution takes one product over all samples.
_FEW_PIXELS = 64
# Largest T of one channel, in pixels times out pixels.
_LARGEST_BAND = 64 * 64


def suits_pointwise(win: Windows) -> bool:
    """Whether one product over all samples beats one for each sample."""
    return win.pointwise and win.groups == 1 and win.pixels < _FEW_PIXELS


def suits_depthwise(win: Windows) -> bool:
    """Whether T is small enough."""
    small = math.prod(win.size) * win.pixels <= _LARGEST_BAND
    return win.depthwise and win.rank == 2 and small


def channels_first(op: Ops, value: ir.Value, channels: int, pixels: int) -> ir.Value:
    """View [N, C, p...] as [C, N, P]."""
    return op.transpose(op.reshape(value, -1, channels, pixels), 1, 0, 2)


def by_channel(op: Ops, value: ir.Value, channels: int, pixels: int) -> ir.Value:
    """View [N, C, p...] as [C, N P]."""
    return op.reshape(channels_first(op, value, channels, pixels), channels, -1)


def samples_first(op: Ops, value: ir.Value, channels: int, size: tuple[int, ...]) -> ir.Value:
    """View [C, N, P] as [N, C, p...]."""
    return op.reshape(op.transpose(value, 1, 0, 2), -1, channels, *size)


def pointwise(op: Ops, win: Windows, x: ir.Value, w: ir.Value) -> ir.Value:
    """Y [O, N, P] of a 1x1 convolution."""
    flat = by_channel(op, x, win.channels, win.pixels)
    y = op.Gemm(op.reshape(w, win.features, win.channels), flat)
    return op.reshape(y, win.features, -1, win.pixels)


def pointwise_input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """DX [N, C, p...] of a 1x1 convolution."""
    flat = by_channel(op, dy, win.features, win.pixels)
    dx = op.Gemm(op.reshape(w, win.features, win.channels), flat, transA=1)
    return samples_first(op, op.reshape(dx, win.channels, -1, win.pixels), win.channels, win.size)


def pointwise_weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """DW [O, C, 1...] of a 1x1 convolution."""
    left = by_channel(op, dy, win.features, win.pixels)
    dw = op.Gemm(left, by_channel(op, x, win.channels, win.pixels), transB=1)
    return op.reshape(dw, win.features, win.channels, *win.kernel)


def depthwise(op: Ops, win: Windows, x: ir.Value, w: ir.Value) -> ir.Value:
    """Y [C, N, out P] of a depthwise convolution."""
    bands = _bands(op, win, w, _pattern(win), (math.prod(win.size), win.pixels))
    return op.MatMul(channels_first(op, x, win.channels, math.prod(win.size)), bands)


def depthwise_input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """DX [N, C, p...] of a depthwise convolution: dY times T transposed."""
    # T transposed is written from the weight anew, with a pattern of its own: sharing T with the
    # forward pass would keep it in memory from there to here.
    pattern = _pattern(win).transpose(0, 2, 1)
    bands = _bands(op, win, w, pattern, (win.pixels, math.prod(win.size)))
    dx = op.MatMul(channels_first(op, dy, win.channels, win.pixels), bands)
    return samples_first(op, dx, win.channels, win.size)


def depthwise_weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """DW [C, 1, kh, kw] of a depthwise convolution: the taps gathered from X^T dY."""
    pixels = math.prod(win.size)
    planes = op.transpose(channels_first(op, x, win.channels, pixels), 0, 2, 1)
    bands = op.MatMul(planes, channels_first(op, dy, win.channels, win.pixels))
    flat = op.reshape(bands, win.channels, pixels * win.pixels)
    pattern = _pattern(win).reshape(math.prod(win.kernel), -1).astype(op.type_of(x).numpy())
    weight = op.Gemm(flat, op.constant(pattern), transB=1)
    return op.reshape(weight, win.channels, 1, *win.kernel)


def _bands(
    op: Ops, win: Windows, w: ir.Value, pattern: np.ndarray, shape: tuple[int, int]
) -> ir.Value:
    taps = op.reshape(w, win.channels, math.prod(win.kernel))
    flat = np.ascontiguousarray(pattern.reshape(pattern.shape[0], -1), op.type_of(w).numpy())
    return op.reshape(op.Gemm(taps, op.constant(flat)), win.channels, *shape)


def _pattern(win: Windows) -> np.ndarray:
    """Constant 0/1 [kh kw, P, out P] that writes the taps onto the bands of T."""
    height, width = win.size
    pattern = np.zeros((math.prod(win.kernel), height, width, *win.out), np.float32)
    for tap, offset in enumerate(win.taps()):
        for row, column in itertools.product(range(win.out[0]), range(win.out[1])):
            y = row * win.strides[0] + offset[0] - win.before[0]
            x = column * win.strides[1] + offset[1] - win.before[1]
            if 0 <= y < height and 0 <= x < width:
                pattern[tap, y, x, row, column] = 1
    return pattern.reshape(math.prod(win.kernel), height * width, win.pixels)
