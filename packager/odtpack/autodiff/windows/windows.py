"""The spatial side of convolutions and pools: where each window and each tap lies."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.graph.graphs import Dims
from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class Windows:
    """The spatial side of a convolution; one entry for each spatial axis.

    Attributes:
        kernel: Kernel sizes.
        strides: Steps between windows.
        dilations: Distances between taps.
        before: Zeros in front of each axis.
        after: Zeros after each axis.
        size: Input sizes.
        out: Output sizes.
        groups: Number of groups.
        channels: Input channels.
        features: Output channels.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    size: tuple[int, ...]
    out: tuple[int, ...]
    groups: int
    channels: int
    features: int

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

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

    def taps(self) -> list[tuple[int, ...]]:
        """Offset of every kernel element in the padded input, in row-major order."""
        steps = (range(0, k * d, d) for k, d in zip(self.kernel, self.dilations, strict=True))
        return list(itertools.product(*steps))

    def tap(
        self, op: Ops, padded: ir.Value, axes: Sequence[int], offset: Sequence[int]
    ) -> ir.Value:
        """The elements of ``padded`` that one tap reads, one for each window."""
        ends = [start + span for start, span in zip(offset, self.spans(), strict=True)]
        return op.slice(padded, axes, offset, ends, self.strides)

    def spans(self) -> tuple[int, ...]:
        """Elements between the first and last window position along each axis, plus one."""
        return tuple((o - 1) * s + 1 for o, s in zip(self.out, self.strides, strict=True))


def _same_pads(total: Sequence[int], upper: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return (small, large) if upper else (large, small)


def conv_windows(ctx: Context) -> Windows:
    """Read a Conv node.

    Raises:
        OdtpackError: Channels or spatial sizes are unknown.
    """
    weight = _known(ctx, ctx.dims(ctx.x(1)))
    return _windows(ctx, tuple(weight[2:]), ctx.int("group", 1), weight[0])


def pool_windows(ctx: Context) -> Windows:
    """Read a pooling node: one group for each channel.

    Raises:
        OdtpackError: Channels or spatial sizes are unknown.
    """
    channels = _known(ctx, ctx.dims(ctx.x())[1:])[0]
    return _windows(ctx, ctx.ints("kernel_shape", ()), channels, channels)


def _known(ctx: Context, dims: Dims) -> list[int]:
    known = [dim for dim in dims if isinstance(dim, int)]
    if len(known) != len(dims):
        raise ctx.unsupported("the sizes of its weight must be known")
    return known


def check_lengths(ctx: Context, rank: int, spatial: int) -> None:
    """Hold the list attributes to the number of spatial axes.

    Args:
        ctx: A convolution or pool.
        rank: Length of its kernel.
        spatial: Number of spatial axes of its input.

    Raises:
        OdtpackError: One is too long or too short.
    """
    lengths = {"kernel_shape": rank, "strides": rank, "dilations": rank, "pads": 2 * rank}
    for name, wanted in lengths.items():
        if rank != spatial or len(ctx.ints(name, (0,) * wanted)) != wanted:
            raise ctx.unsupported(f"its {name} does not go with {spatial} spatial axes")


def _windows(ctx: Context, kernel: tuple[int, ...], groups: int, features: int) -> Windows:
    """auto_pad and ceil_mode are turned into explicit padding: every window lies inside."""
    channels, *sizes = _known(ctx, ctx.dims(ctx.x())[1:])
    rank, size = len(kernel), tuple(sizes)
    check_lengths(ctx, rank, len(size))
    strides = ctx.ints("strides", (1,) * rank)
    dilations = ctx.ints("dilations", (1,) * rank)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    if ctx.string("auto_pad", "NOTSET").startswith("SAME") and reach != kernel:
        raise ctx.unsupported(
            "with auto_pad and dilations ONNX Runtime has other windows than the standard"
        )
    before, after = padding(ctx, kernel, strides, size)
    out = tuple(
        _positions(n, b, a, r, s, ctx.int("ceil_mode", 0))
        for n, b, a, r, s in zip(size, before, after, reach, strides, strict=True)
    )
    after = tuple(
        max(a, (o - 1) * s + r - n - b)
        for n, b, a, r, s, o in zip(size, before, after, reach, strides, out, strict=True)
    )
    return Windows(kernel, strides, dilations, before, after, size, out, groups, channels, features)


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
        return _same_pads(total, mode == "SAME_UPPER")
    pads = ctx.ints("pads", (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
    return pads[:rank], pads[rank:]


def _positions(size: int, before: int, after: int, reach: int, stride: int, ceil: int) -> int:
    """Number of windows along one axis; with ``ceil`` the last may start inside and hang over."""
    count = (size + before + after - reach) // stride + 1
    if ceil and (size + before + after - reach) % stride and count * stride < size + before:
        count += 1
    return count


def transposed_convolution(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """Scatter ``dy`` [N, O, out...] through ``w`` [O, C/G, k...] to [N, C, size...]."""
    # Elements after the last window are read by none; output_padding gives them back.
    unread = [
        n + b + a - ((k - 1) * d + span)
        for n, b, a, k, d, span in zip(
            win.size, win.before, win.after, win.kernel, win.dilations, win.spans(), strict=True
        )
    ]
    return op.ConvTranspose(
        dy, w, group=win.groups, strides=win.strides, dilations=win.dilations,
        pads=[*win.before, *win.after], output_padding=unread,
    )  # fmt: skip
