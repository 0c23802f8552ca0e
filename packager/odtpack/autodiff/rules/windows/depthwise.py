"""Depthwise convolutions as products with banded matrices.

A depthwise convolution has too little arithmetic for each element to run fast as a
convolution. Written as matrix products it does more arithmetic, on the zeros of a band,
but in the one kernel that runs at full speed:

- rows: each row is multiplied by a Toeplitz matrix T_i [W, out W] for each kernel row i,
  and the rows of all samples are stacked;
- dots: of a wide row most of the band is computed in vain; the weight gradient of a tap is the
  scalar product of the output gradient and the plane, shifted;
- taps: wider still, where windows are steps apart, each tap is a shifted product and a sum.

(Small planes are the matter of :mod:`odtpack.autodiff.windows.small_conv`.)

T is itself a product of the weight with a constant 0/1 matrix, so that its gradient is
one too. ``docs/adr/0002-conv-gradients.md`` has the measurements behind the thresholds.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.windows.windows import Windows, transposed_convolution
from odtpack.graph.ops import Ops

# Widest row for the form by rows.
_WIDEST_ROW = 64
# Narrowest row for the weight gradient by dots.
_NARROWEST_ROW_OF_DOTS = 48
# Largest plane whose input gradient takes the form by rows.
_MOST_PIXELS_BY_ROWS = 12 * 12


def suits(win: Windows) -> bool:
    """Whether a convolution is depthwise in two dimensions."""
    return win.depthwise and win.rank == 2


def _by_rows(win: Windows) -> bool:
    return max(win.size[1], win.out[1]) <= _WIDEST_ROW


def weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """dW [C, 1, kh, kw]."""
    if _by_dots(win):
        return _dots(op, win, x, dy)
    if not _by_rows(win):
        return _sum_of_taps(op, win, x, dy)
    grads = op.reshape(op.transpose(dy, 1, 0, 2, 3), win.channels, -1, win.out[1])
    pattern = op.constant(_row_pattern(win, x).T.copy())
    weights = []
    for rows in _input_rows(op, win, x):
        band = op.MatMul(op.transpose(rows, 0, 2, 1), grads)  # [C, W, out_w]
        flat = op.reshape(band, win.channels, win.size[1] * win.out[1])
        weights.append(op.unsqueeze(op.MatMul(flat, pattern), 1))  # [C, 1, kw]
    return op.reshape(op.join(weights, 1), win.channels, 1, *win.kernel)


def input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """dX [N, C, H, W]."""
    if not _by_rows(win) or max(win.strides) > 1 or win.pixels > _MOST_PIXELS_BY_ROWS:
        return transposed_convolution(op, win, w, dy)
    return _input_gradient_by_rows(op, win, w, dy)


# By rows


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
    """For each kernel row the input rows that the output rows read: [C, N out_h, W].

    The row that lies on the output row itself, the middle one mostly, is cut out of nothing.
    """
    planes = op.transpose(x, 1, 0, 2, 3)
    padded = op.pad(planes, [0, 0, win.before[0], 0], [0, 0, win.after[0], 0])
    span, stride = win.spans()[0], win.strides[0]
    rows = []
    for i in range(0, win.kernel[0] * win.dilations[0], win.dilations[0]):
        whole = i == win.before[0] and stride == 1 and span == win.size[0]
        cut = planes if whole else op.slice(padded, [2], [i], [i + span], [stride])
        rows.append(op.reshape(cut, win.channels, -1, win.size[1]))
    return rows


def _input_gradient_by_rows(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """Row h of dX sums row h + before - i dilation of dY through T_i transposed; stride 1."""
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


# By dots


def _by_dots(win: Windows) -> bool:
    """Whether rows are wide, and a column of windows reads every column of the kernel in turn.

    A kernel of one row is left out: ONNX Runtime computes a matrix of two rows or more times a
    column as scalar products, a single row times a column one element at a time.
    """
    in_turn = min(win.strides[1], win.dilations[1]) == 1
    # Of columns apart, a quarter of the time is not worth the memory of what is laid together.
    narrowest = _NARROWEST_ROW_OF_DOTS if win.strides[1] == 1 else _WIDEST_ROW + 1
    return in_turn and win.kernel[0] > 1 and win.size[1] >= narrowest


def _dots(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """Tap (i, j) is the scalar product of dY, moved by j, and of the rows that taps i read.

    Rows of dY are as wide as those of the padded input, so that one shift moves all of them.
    Where windows are s columns apart, column s c + b of the input is column c of plane b, and j
    moves dY by j / s.
    """
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


# By taps


def _sum_of_taps(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    padded = op.pad(x, [0, 0, *win.before], [0, 0, *win.after])
    sums = []
    for offset in win.taps():
        product = op.Mul(win.tap(op, padded, win.spatial, offset), dy)
        sums.append(op.unsqueeze(op.reduce_sum(product, [0, 2, 3], keepdims=False), 1))
    return op.reshape(op.join(sums, 1), win.channels, 1, *win.kernel)
