"""Convolutions on small planes, rewritten as matrix products before differentiation.

Late layers of a mobile network have planes of 7x7 or less. There the kernel for Conv
with a weight that is not a constant spends its time on overhead, forward and backward.

1. A 1x1 convolution: W [O, C] times X [C, N P], one product over all samples.
2. A depthwise convolution: for each channel X [N, P] times T [P, out P], a matrix that
   holds the kernel's taps on its bands. T is the product of the weight with a constant
   0/1 matrix, so that its gradient is a product too.

Convolutions whose weight is a constant are left alone: the runtime repacks those.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.ops import Ops, static_dims
from odtpack.autodiff.windows import Windows, conv_windows

# Pixels below which a 1x1 convolution takes one product over all samples.
_FEW_PIXELS = 64
# Largest T of one channel, in pixels times out pixels.
_LARGEST_BAND = 64 * 64


def rewrite(op: Ops, graph: ir.Graph) -> bool:
    """Rewrite what the module's docstring lists; return whether anything changed.

    Shapes of the new values are not set: infer shapes again.
    """
    changed = False
    for node in list(graph):
        if node.op_type != "Conv" or node.domain or not _known(node):
            continue
        weight = node.inputs[1]
        if weight is None or not weight.is_graph_input():
            continue
        ctx = Context(node, op, [], [])
        win = conv_windows(ctx)
        with op.before(node):
            if win.pointwise and win.groups == 1 and win.pixels < _FEW_PIXELS:
                y = _pointwise(op, win, ctx.x(), weight)
            elif (
                win.depthwise
                and win.rank == 2
                and math.prod(win.size) * win.pixels <= _LARGEST_BAND
            ):
                y = _depthwise(op, win, ctx.x(), weight)
            else:
                continue
            bias = ctx.maybe_x(2)
            if bias is not None:
                y = op.Add(y, op.reshape(bias, win.features, 1, 1))
            y = op.transpose(y, 1, 0, 2)  # [N, O, out P]
            y = op.reshape(y, -1, win.features, *win.out)
        _replace(node, y)
        changed = True
    return changed


def _known(node: ir.Node) -> bool:
    """Whether everything but the batch is known."""
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None or x.shape is None or static_dims(w) is None:
        return False
    return all(isinstance(dim, int) for dim in x.shape[1:])


def _replace(node: ir.Node, new: ir.Value) -> None:
    old = node.outputs[0]
    new.type, new.shape = old.type, old.shape
    name, old.name = old.name, None
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def _channels_first(op: Ops, win: Windows, x: ir.Value) -> ir.Value:
    """View [N, C, h, w] as [C, N, P]."""
    pixels = math.prod(win.size)
    return op.transpose(op.reshape(x, -1, win.channels, pixels), 1, 0, 2)


def _pointwise(op: Ops, win: Windows, x: ir.Value, w: ir.Value) -> ir.Value:
    """[O, N, P]."""
    flat = op.reshape(_channels_first(op, win, x), win.channels, -1)
    y = op.MatMul(op.reshape(w, win.features, win.channels), flat)
    return op.reshape(y, win.features, -1, win.pixels)


def _depthwise(op: Ops, win: Windows, x: ir.Value, w: ir.Value) -> ir.Value:
    """[C, N, out P]."""
    taps = op.reshape(w, win.channels, math.prod(win.kernel))
    bands = op.MatMul(taps, op.constant(_pattern(win)))
    bands = op.reshape(bands, win.channels, math.prod(win.size), win.pixels)
    return op.MatMul(_channels_first(op, win, x), bands)


def _pattern(win: Windows) -> np.ndarray:
    """Constant 0/1 matrix [kh kw, P * out P] that writes the taps onto the bands."""
    height, width = win.size
    pattern = np.zeros((math.prod(win.kernel), height, width, *win.out), np.float32)
    for tap, offset in enumerate(win.taps()):
        for row, column in itertools.product(range(win.out[0]), range(win.out[1])):
            y = row * win.strides[0] + offset[0] - win.before[0]
            x = column * win.strides[1] + offset[1] - win.before[1]
            if 0 <= y < height and 0 <= x < width:
                pattern[tap, y, x, row, column] = 1
    return pattern.reshape(math.prod(win.kernel), -1)
