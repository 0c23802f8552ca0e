"""Convolutions on small planes as matrix products.

Late layers of a mobile network have planes of 7x7 or less. There the kernels for Conv
with a weight that is not a constant, and for ConvTranspose, spend their time on overhead.

- A 1x1 convolution is W [O, C] times X [C, N P], one product over all samples.
- A depthwise convolution is, for each channel, X [N, P] times T [P, out P], a matrix that
  holds the kernel's taps on its bands. T is the product of the weight with a constant 0/1
  matrix, and so its gradient is one too.

The gradient rule for Conv and the pass that rewrites the forward node share this module.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.windows.windows import Windows
from odtpack.graph.ops import Ops

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


def samples_first(op: Ops, value: ir.Value, channels: int, size: tuple[int, ...]) -> ir.Value:
    """View [C, N, P] as [N, C, p...]."""
    return op.reshape(op.transpose(value, 1, 0, 2), -1, channels, *size)


def pointwise(op: Ops, win: Windows, x: ir.Value, w: ir.Value) -> ir.Value:
    """Y [O, N, P] of a 1x1 convolution."""
    flat = op.reshape(channels_first(op, x, win.channels, win.pixels), win.channels, -1)
    y = op.Gemm(op.reshape(w, win.features, win.channels), flat)
    return op.reshape(y, win.features, -1, win.pixels)


def pointwise_input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """DX [N, C, p...] of a 1x1 convolution."""
    flat = op.reshape(channels_first(op, dy, win.features, win.pixels), win.features, -1)
    dx = op.Gemm(op.reshape(w, win.features, win.channels), flat, transA=1)
    return samples_first(op, op.reshape(dx, win.channels, -1, win.pixels), win.channels, win.size)


def pointwise_weight_gradient(op: Ops, win: Windows, x: ir.Value, dy: ir.Value) -> ir.Value:
    """DW [O, C, 1...] of a 1x1 convolution."""
    left = op.reshape(channels_first(op, dy, win.features, win.pixels), win.features, -1)
    right = op.reshape(channels_first(op, x, win.channels, win.pixels), win.channels, -1)
    dw = op.Gemm(left, right, transB=1)
    return op.reshape(dw, win.features, win.channels, *win.kernel)


def depthwise(op: Ops, win: Windows, x: ir.Value, w: ir.Value) -> ir.Value:
    """Y [C, N, out P] of a depthwise convolution."""
    bands = _bands(op, win, w, _pattern(win), (math.prod(win.size), win.pixels))
    return op.MatMul(channels_first(op, x, win.channels, math.prod(win.size)), bands)


def depthwise_input_gradient(op: Ops, win: Windows, w: ir.Value, dy: ir.Value) -> ir.Value:
    """DX [N, C, p...] of a depthwise convolution: dY times T transposed.

    T transposed is written from the weight anew, with a pattern of its own: sharing T with
    the forward pass would keep it in memory from there to here.
    """
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
    pattern = _pattern(win).reshape(math.prod(win.kernel), -1).astype(_numpy(x))
    weight = op.Gemm(flat, op.constant(pattern), transB=1)
    return op.reshape(weight, win.channels, 1, *win.kernel)


def _bands(
    op: Ops, win: Windows, w: ir.Value, pattern: np.ndarray, shape: tuple[int, int]
) -> ir.Value:
    taps = op.reshape(w, win.channels, math.prod(win.kernel))
    flat = np.ascontiguousarray(pattern.reshape(pattern.shape[0], -1), _numpy(w))
    return op.reshape(op.Gemm(taps, op.constant(flat)), win.channels, *shape)


def _numpy(value: ir.Value) -> np.dtype:
    return np.dtype((value.dtype or ir.DataType.FLOAT).numpy())


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
