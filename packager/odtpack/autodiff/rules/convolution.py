"""Convolutions: plain, depthwise, transposed and deformable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from odtpack.autodiff import sampling, windows
from odtpack.autodiff.context import Context, Cotangents, vjp
from odtpack.autodiff.rules.norm import sum_per_channel
from odtpack.autodiff.windows import Windows, conv_windows, transposed_convolution
from odtpack.graph.graphs import Ops

# ONNX has no operator for a convolution's weight gradient, and writing it as a convolution
# with swapped axes runs at a third of the speed of a matrix product. So it is written as
# matrix products over shifted slices ("taps") of the padded input; which of the three
# forms is quickest depends on the channels, and ``docs/adr/0002-conv-gradients.md`` has the
# measurements behind the thresholds.

Form = Callable[[Ops, Windows, ir.Value, ir.Value], ir.Value]

# Below this many input channels in a group the taps are joined before one product:
# a product for each tap would have too few columns to keep the registers busy.
_FEW_CHANNELS = 16
# Columns from which on patches are cut out in one Transpose, which copies row by row.
_WIDE_PATCH = 4


@vjp("Conv")
def conv(ctx: Context) -> Cotangents:
    """dX by transposed convolution, dW by matrix products, dB by a sum."""
    op, x, w, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    dx = dw = db = None
    if ctx.needs(2):
        db = sum_per_channel(op, dy, ctx.rank(x))
    if windows.is_open(ctx, x):  # the size of the plane is known only when the model runs
        groups, weight = ctx.int("group", 1), [ctx.size(w, axis) for axis in range(ctx.rank(w))]
        on = windows.open_windows(ctx, weight[2:])
        return [
            on.scatter(w, dy, groups) if ctx.needs(0) else None,
            windows.weight_gradient(on, x, dy, groups, weight) if ctx.needs(1) else None,
            db,
        ]
    win = conv_windows(ctx)
    input_gradient, weight_gradient = forms(win)
    if ctx.needs(0):
        with windows.region(op, "input gradient", win):
            dx = input_gradient(op, win, w, dy)
    if ctx.needs(1):
        with windows.region(op, "weight gradient", win):
            dw = weight_gradient(op, win, x, dy)
    return [dx, dw, db]


def forms(win: Windows) -> tuple[Form, Form]:
    """The quickest ways to write the gradients of the input and of the weight."""
    if windows.suits_pointwise(win):
        return windows.pointwise_input_gradient, windows.pointwise_weight_gradient
    if windows.suits_depthwise(win):
        return windows.depthwise_input_gradient, windows.depthwise_weight_gradient
    if win.depthwise and win.rank == 2:
        return _depthwise_input_gradient, _depthwise_weight_gradient
    if win.pointwise and win.groups == 1:
        return _pointwise_input_gradient, _weight_gradient
    return transposed_convolution, _weight_gradient


def _pointwise_input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """A plain matrix product for 1x1 kernels."""
    weight = op.transpose(op.reshape(w, win.features, win.channels), 1, 0)
    dx = op.MatMul(weight, op.reshape(dy, -1, win.features, win.pixels))
    return op.reshape(dx, -1, win.channels, *win.size)


def _weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """dW[o, c, t] = sum over n, p of dY[n, o, p] X[n, c, stride p + t]."""
    if win.groups > 1:
        form = _grouped
    elif win.pointwise:
        form = _pointwise
    elif win.tiles and win.kernel[-1] >= _WIDE_PATCH:
        form = _patches
    else:
        form = _joined_taps if win.channels < _FEW_CHANNELS else _tap_by_tap
    shape = (win.features, win.channels // win.groups, *win.kernel)
    return op.reshape(form(op, win, x, dy), *shape)


def _pointwise(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    pixels = win.pixels
    if pixels * (win.features + win.channels) < win.features * win.channels:
        # Few pixels: one product over all samples; the transposes cost less than
        # a product for each sample and the sum of them.
        left = windows.by_channel(op, dy, win.features, pixels)
        right = op.transpose(op.reshape(x, -1, win.channels, pixels), 0, 2, 1)
        return op.MatMul(left, op.reshape(right, -1, win.channels))
    left = op.reshape(dy, -1, win.features, pixels)
    right = op.transpose(op.reshape(x, -1, win.channels, pixels), 0, 2, 1)
    return op.reduce_sum(op.MatMul(left, right), [0], keepdims=False)


def _patches(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Windows that tile the plane: dY [O, N P] times the patches [N P, C k...]."""
    tiled = [size for pair in zip(win.out, win.kernel, strict=True) for size in pair]
    blocks = op.reshape(x, -1, win.channels, *tiled)
    places, elements = range(2, 2 + 2 * win.rank, 2), range(3, 3 + 2 * win.rank, 2)
    patches = op.transpose(blocks, 0, *places, 1, *elements)
    patches = op.reshape(patches, -1, win.channels * math.prod(win.kernel))
    return op.MatMul(windows.by_channel(op, dy, win.features, win.pixels), patches)


def _joined_taps(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Few channels: all taps side by side [N, T C, P], one product with dY^T [N, P, O]."""
    taps, pixels = win.taps(), win.pixels
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
    columns = op.Concat(*(win.tap(op, padded, win.spatial, tap) for tap in taps), axis=1)
    columns = op.reshape(columns, -1, len(taps) * win.channels, pixels)
    rows = op.transpose(op.reshape(dy, -1, win.features, pixels), 0, 2, 1)
    summed = op.reduce_sum(op.MatMul(columns, rows), [0], keepdims=False)
    by_tap = op.reshape(summed, len(taps), win.channels, win.features)
    return op.transpose(by_tap, 2, 1, 0)


def _tap_by_tap(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Many channels: channels last, and for each tap dY [O, N P] times X_tap [N P, C]."""
    last = op.transpose(x, 0, *win.spatial, 1)
    padded = op.pad(last, [0, *win.before, 0], [0, *win.after, 0])
    axes = range(1, 1 + win.rank)
    rows = op.reshape(op.transpose(dy, 1, 0, *win.spatial), win.features, -1)
    products = []
    for tap in win.taps():
        columns = op.reshape(win.tap(op, padded, axes, tap), -1, win.channels)
        products.append(op.MatMul(rows, columns))
    by_tap = op.reshape(op.join(products, 0), len(products), win.features, win.channels)
    return op.transpose(by_tap, 1, 2, 0)


def _grouped(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Taps joined as above, with a batch axis for the groups."""
    taps, pixels, groups = win.taps(), win.pixels, win.groups
    inner, outer = win.channels // groups, win.features // groups
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
    split = [
        op.reshape(win.tap(op, padded, win.spatial, tap), -1, groups, inner, pixels) for tap in taps
    ]
    columns = op.Concat(*split, axis=2) if len(split) > 1 else split[0]
    rows = op.transpose(op.reshape(dy, -1, groups, outer, pixels), 0, 1, 3, 2)
    summed = op.reduce_sum(op.MatMul(columns, rows), [0], keepdims=False)
    by_tap = op.reshape(summed, groups, len(taps), inner, outer)
    return op.transpose(by_tap, 0, 3, 2, 1)


# Depthwise convolutions as products with banded matrices.
#
# A depthwise convolution has too little arithmetic for each element to run fast as a
# convolution. Written as matrix products it does more arithmetic, on the zeros of a band,
# but in the one kernel that runs at full speed:
#
# - rows: each row is multiplied by a Toeplitz matrix T_i [W, out W] for each kernel row i,
#   and the rows of all samples are stacked;
# - dots: of a wide row most of the band is computed in vain; the weight gradient of a tap is the
#   scalar product of the output gradient and the plane, shifted;
# - taps: wider still, where windows are steps apart, each tap is a shifted product and a sum.
#
# (Small planes are the matter of :mod:`odtpack.autodiff.windows`.)
#
# T is itself a product of the weight with a constant 0/1 matrix, so that its gradient is
# one too. ``docs/adr/0002-conv-gradients.md`` has the measurements behind the thresholds.

# Widest row for the form by rows.
_WIDEST_ROW = 64
# Narrowest row for the weight gradient by dots.
_NARROWEST_ROW_OF_DOTS = 48
# Largest plane whose input gradient takes the form by rows.
_MOST_PIXELS_BY_ROWS = 12 * 12


def _depthwise_weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """dW [C, 1, kh, kw]."""
    # Dots want wide rows, and a column of windows that reads every column of the kernel in turn.
    # A kernel of one row is left out: ONNX Runtime computes a matrix of two rows or more times a
    # column as scalar products, a single row times a column one element at a time.
    # Of columns apart, a quarter of the time is not worth the memory of what is laid together.
    narrowest = _NARROWEST_ROW_OF_DOTS if win.strides[1] == 1 else _WIDEST_ROW + 1
    in_turn = min(win.strides[1], win.dilations[1]) == 1
    if in_turn and win.kernel[0] > 1 and win.size[1] >= narrowest:
        return _dots(op, win, x, dy)
    weights = []
    if max(win.size[1], win.out[1]) > _WIDEST_ROW:
        padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
        for offset in win.taps():
            product = op.Mul(win.tap(op, padded, win.spatial, offset), dy)
            weights.append(op.unsqueeze(op.reduce_sum(product, [0, 2, 3], keepdims=False), 1))
        return op.reshape(op.join(weights, 1), win.channels, 1, *win.kernel)
    grads = op.reshape(op.transpose(dy, 1, 0, 2, 3), win.channels, -1, win.out[1])
    pattern = op.constant(_row_pattern(win, x).T.copy())
    for rows in _input_rows(op, win, x):
        band = op.MatMul(op.transpose(rows, 0, 2, 1), grads)  # [C, W, out_w]
        flat = op.reshape(band, win.channels, win.size[1] * win.out[1])
        weights.append(op.unsqueeze(op.MatMul(flat, pattern), 1))  # [C, 1, kw]
    return op.reshape(op.join(weights, 1), win.channels, 1, *win.kernel)


def _row_pattern(win: Windows, like: ir.Value) -> np.ndarray:
    """Constant 0/1 matrix [kw, W * out_w] that writes a row of taps onto its band."""
    dtype = (like.dtype or ir.DataType.FLOAT).numpy()
    pattern = np.zeros((win.kernel[1], win.size[1], win.out[1]), dtype)
    for tap, column in itertools.product(range(win.kernel[1]), range(win.out[1])):
        source = column * win.strides[1] + tap * win.dilations[1] - win.before[1]
        if 0 <= source < win.size[1]:
            pattern[tap, source, column] = 1
    return pattern.reshape(win.kernel[1], -1)


def _input_rows(op: Ops, win: Windows, x: ir.Value) -> list[ir.Value]:
    """For each kernel row the input rows that the output rows read: [C, N out_h, W]."""
    # The row that lies on the output row itself, the middle one mostly, is cut out of nothing.
    planes = op.transpose(x, 1, 0, 2, 3)
    padded = op.pad(planes, [0, 0, win.before[0], 0], [0, 0, win.after[0], 0])
    span, stride = win.spans()[0], win.strides[0]
    rows = []
    for i in range(0, win.kernel[0] * win.dilations[0], win.dilations[0]):
        whole = i == win.before[0] and stride == 1 and span == win.size[0]
        cut = planes if whole else op.slice(padded, [2], [i], [i + span], [stride])
        rows.append(op.reshape(cut, win.channels, -1, win.size[1]))
    return rows


def _depthwise_input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """dX [N, C, H, W]: row h sums row h + before - i dilation of dY through T_i transposed."""
    few = max(win.size[1], win.out[1]) <= _WIDEST_ROW and win.pixels <= _MOST_PIXELS_BY_ROWS
    if not few or max(win.strides) > 1:
        return transposed_convolution(op, win, w, dy)
    (height, width), (kh, kw) = win.size, win.kernel
    rows_now, moved = win.out[0], op.transpose(dy, 1, 0, 2, 3)  # [C, N, out_h, out_w]
    reach = (kh - 1) * win.dilations[0]
    above, below = reach - win.before[0], height + win.before[0] - rows_now
    if above < 0 or below < 0:
        moved = op.slice(moved, [2], [max(0, -above)], [rows_now + min(0, below)])
    padded = op.pad(moved, [0, 0, max(0, above), 0], [0, 0, max(0, below), 0])
    starts = [reach - i * win.dilations[0] for i in range(kh)]
    shifted = [op.slice(padded, [2], [start], [start + height]) for start in starts]
    rows = op.Concat(*shifted, axis=3) if kh > 1 else shifted[0]
    rows = op.reshape(rows, win.channels, -1, kh * win.out[1])
    bands = op.MatMul(op.reshape(w, win.channels * kh, kw), op.constant(_row_pattern(win, w)))
    bands = op.reshape(bands, win.channels, kh, width, win.out[1])
    bands = op.reshape(op.transpose(bands, 0, 1, 3, 2), win.channels, kh * win.out[1], width)
    dx = op.reshape(op.MatMul(rows, bands), win.channels, -1, height, width)
    return op.transpose(dx, 1, 0, 2, 3)


def _dots(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Tap (i, j) is the scalar product of dY, moved by j, and of the rows that taps i read."""
    # Rows of dY are as wide as those of the padded input, so that one shift moves all of them.
    # Where windows are s columns apart, column s c + b of the input is column c of plane b, and j
    # moves dY by j / s.
    (height, columns), (stride, apart) = win.out, win.strides
    moves = range(0, -(-win.kernel[1] // apart) * win.dilations[1], win.dilations[1])
    read = win.before[1] + win.size[1] + win.after[1]
    width = max(-(-read // apart), moves[-1] + columns)
    after = (win.after[0], win.after[1] + width * apart - read)
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *after])
    planes = op.transpose(op.reshape(padded, -1, apart), 1, 0) if apart > 1 else padded
    planes = op.reshape(planes, apart, -1, win.before[0] + win.size[0] + after[0], width)
    starts = range(0, win.kernel[0] * win.dilations[0], win.dilations[0])
    rows = op.ints(*(start + row * stride for start in starts for row in range(height)))
    shifted = op.reshape(op.Gather(planes, rows, axis=2), apart, -1, win.kernel[0], height * width)
    sums = []
    for move in moves:
        moved = op.pad(dy, [0, 0, 0, move], [0, 0, 0, width - columns - move])
        sums.append(op.MatMul(shifted, op.reshape(moved, -1, height * width, 1)))
    taps = op.transpose(op.join(sums, 3), 1, 2, 3, 0)  # [N C, kh, moves, s]
    samples = op.reshape(taps, -1, win.channels, win.kernel[0], len(moves) * apart)
    total = op.reduce_sum(samples, [0], keepdims=False)
    if len(moves) * apart > win.kernel[1]:
        total = op.slice(total, [2], [0], [win.kernel[1]])
    return op.reshape(total, win.channels, 1, *win.kernel)


# Transposed convolution: the gradients of a convolution with input and output swapped.


@vjp("ConvTranspose")
def conv_transpose(ctx: Context) -> Cotangents:
    """X is scattered to Y through the windows of a convolution; dX is that convolution of dY."""
    op, x, w, dy = ctx.op, ctx.x(), ctx.x(1), ctx.dy()
    dx = dw = db = None
    if ctx.needs(2):
        db = sum_per_channel(op, dy, ctx.rank(x))
    if windows.is_open(ctx, x) or windows.is_open(ctx, ctx.y()):
        groups, weight = ctx.int("group", 1), [ctx.size(w, axis) for axis in range(ctx.rank(w))]
        on = windows.open_windows(ctx, weight[2:])
        if ctx.needs(0):
            dx = op.Conv(on.pad(dy), w, group=groups, strides=on.strides, dilations=on.dilations)
        if ctx.needs(1):
            dw = windows.weight_gradient(on, dy, x, groups, weight)
        return [dx, dw, db]
    win = read_windows(ctx)
    if ctx.needs(0):
        dx = op.Conv(
            dy, w, group=win.groups, strides=win.strides, dilations=win.dilations,
            pads=[*win.before, *win.after],
        )  # fmt: skip
    if ctx.needs(1):
        with windows.region(op, "weight gradient", win):
            dw = forms(win)[1](op, win, dy, x)
    return [dx, dw, db]


def read_windows(ctx: Context) -> Windows:
    """The windows of the convolution from Y [N, O, ...] to X [N, C, ...]; weight [C, O/G, ...]."""
    # After the last window there is only as much padding as it reads.
    x, w, y = ctx.x(), ctx.x(1), ctx.y()
    rank = ctx.rank(x) - 2
    axes = range(2, 2 + rank)
    kernel = tuple(ctx.size(w, axis) for axis in axes)
    size, out = (tuple(ctx.size(value, axis) for axis in axes) for value in (y, x))
    strides, dilations = (ctx.ints(name, (1,) * rank) for name in ("strides", "dilations"))
    groups, mode = ctx.int("group", 1), ctx.string("auto_pad", "NOTSET")
    reads = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in
             zip(out, strides, kernel, dilations, strict=True)]  # fmt: skip
    if mode.startswith("SAME") or "output_shape" in ctx.node.attributes:
        extra = ctx.ints("output_padding", (0,) * rank)
        totals = [max(0, r + e - n) for r, e, n in zip(reads, extra, size, strict=True)]
        before = tuple(t // 2 if mode == "SAME_UPPER" else t - t // 2 for t in totals)
    else:
        before = ctx.ints("pads", (0,) * 2 * rank)[:rank]
    after = tuple(max(0, r - b - n) for r, b, n in zip(reads, before, size, strict=True))
    return Windows(
        kernel, strides, dilations, before, after, size, out, groups,
        channels=ctx.size(y, 1), features=ctx.size(w, 0),
    )  # fmt: skip


# Deformable convolution: a convolution whose taps are read at positions that are learnt.


@vjp("DeformConv", since=19)
def deform_conv(ctx: Context) -> Cotangents:
    """y[o, p] = b[o] + sum over c, k of w[o, c, k] m[k, p] x[c] at position (k, p)."""
    # Samples and offset groups together are the planes [N D, C / D, H, W] of
    # :mod:`odtpack.autodiff.sampling`; each has K P samples.
    op, x, w, mask = ctx.op, ctx.x(), ctx.x(1), ctx.maybe_x(4)
    outer, inner, *kernel = (ctx.size(w, axis) for axis in range(ctx.rank(w)))
    if len(kernel) != 2:
        raise ctx.unsupported("only two spatial axes")
    groups, shared = ctx.int("group", 1), ctx.int("offset_group", 1)
    channels, count = inner * groups, int(np.prod(kernel))
    plane = op.slice(op.shape_of(x), [0], [2], [4])
    planes = op.Reshape(x, op.Concat(op.ints(-1, channels // shared), plane, axis=0))
    taps = _taps(ctx, planes, kernel)
    dy = op.reshape(ctx.dy(), 0, groups, outer // groups, -1)  # [N, G, O / G, P]
    pixels = op.slice(op.Shape(dy), [0], [3], [4])

    def samples(value: ir.Value, each: int) -> ir.Value:
        """View anything of ``each`` channels in each plane as [N D, each, K P]."""
        return op.Reshape(value, op.Concat(op.ints(-1, each), op.Mul(pixels, count), axis=0))

    # The cotangent of what the taps read: dread[c, k, p] = sum over o of w[o, c, k] dy[o, p].
    weight = op.transpose(op.reshape(w, groups, outer // groups, inner * count), 0, 2, 1)
    dread = samples(op.MatMul(weight, dy), channels // shared)
    factor = None if mask is None else samples(mask, 1)
    dmasked = dread if factor is None else op.Mul(dread, factor)
    dx = dw = doffset = db = dmask = None
    if ctx.needs(0):
        dx = op.reshape_like(sampling.scatter(op, planes, taps, dmasked), x)
    if ctx.needs(3):
        db = sum_per_channel(op, ctx.dy(), 4)
    if not any(map(ctx.needs, (1, 2, 4))):
        return [dx, None, None, db, None]
    read = sampling.rows(op, planes, taps)
    if ctx.needs(1):
        values = op.reduce_sum(op.Mul(read, op.unsqueeze(taps.weight, 3)), [2], keepdims=False)
        columns = op.transpose(values, 0, 2, 1)  # [N D, C / D, K P]
        columns = columns if factor is None else op.Mul(columns, factor)
        shape = op.Concat(op.ints(-1, groups, inner * count), pixels, axis=0)
        product = op.MatMul(dy, op.transpose(op.Reshape(columns, shape), 0, 1, 3, 2))
        dw = op.reshape_like(op.reduce_sum(product, [0], keepdims=False), w)
    if ctx.needs(2):
        found = sampling.position_gradients(op, taps, sampling.shares(op, read, dmasked))
        pairs = [op.reshape(value, 0, count, 1, -1) for value in found if value is not None]
        doffset = op.reshape_like(op.Concat(*pairs, axis=2), ctx.x(2))
    if mask is not None and ctx.needs(4):
        share = op.Mul(sampling.shares(op, read, dread), taps.weight)
        dmask = op.reshape_like(op.reduce_sum(share, [2], keepdims=False), mask)
    return [dx, dw, doffset, db, dmask]


def _taps(ctx: Context, planes: ir.Value, kernel: list[int]) -> sampling.Taps:
    """What the samples [N D, K P] read: the grid of an ordinary convolution plus the offsets."""
    op, dtype, count = ctx.op, ctx.dtype(ctx.x()), int(np.prod(kernel))
    strides, dilations = ctx.ints("strides", (1, 1)), ctx.ints("dilations", (1, 1))
    pads = ctx.ints("pads", (0,) * 4)
    taps = np.array(list(itertools.product(*map(range, kernel)))) * dilations - pads[:2]
    plane = op.slice(op.shape_of(ctx.dy()), [0], [2], [4])
    pairs = op.Reshape(ctx.x(2), op.Concat(op.ints(-1, count, 2), plane, axis=0))
    offsets = op.split(pairs, 2, [1, 1])  # [N D, K, 1, oh, ow] each
    axes, sizes = [], []
    for axis, moved in enumerate(offsets):
        number = op.squeeze(sampling.length(op, ctx.dy(), 2 + axis), 0)
        steps = op.Range(op.constant(np.int64(0)), number, op.constant(np.int64(1)))
        starts = op.cast(op.Mul(steps, strides[axis]), dtype)
        corner = op.reshape(starts, *((-1, 1) if axis == 0 else (1, -1)))
        tap = op.constant(taps[:, axis].astype(dtype.numpy()).reshape(-1, 1, 1, 1))
        at = op.Add(op.Add(moved, tap), corner)
        size = sampling.length(op, ctx.x(), 2 + axis)
        axes.append(sampling.linear(op, op.reshape(at, 0, -1, 1), size, "zeros", corners=False))
        sizes.append(size)
    return sampling.combine(op, axes, sizes)
