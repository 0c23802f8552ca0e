"""Fourier transforms: linear, so that the gradient is the adjoint transform.

With complex numbers as pairs, the adjoint of y_k = sum_n x_n exp(-2 pi i k n / N) is
sum_k y_k exp(+2 pi i k n / N), which is N times the inverse transform.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, non_differentiable, vjp
from odtpack.autodiff.scatter_add import add_at
from odtpack.graph.ops import Ops

non_differentiable("MelWeightMatrix")

_AXIS_INPUT_SINCE = 20


@vjp("DFT", since=17)
def dft(ctx: Context) -> Cotangents:
    op, x, rank = ctx.op, ctx.x(), ctx.rank(ctx.x())
    axis, inverse = _axis(ctx, rank), bool(ctx.int("inverse", 0))
    onesided = bool(ctx.int("onesided", 0))
    if onesided and inverse:
        raise ctx.unsupported("it is one-sided and inverse at once")
    size = ctx.size(x, axis)
    length = size if ctx.maybe_x(1) is None else _known(ctx, 1, "transform")
    dx = _adjoint(op, ctx.dy(), rank, axis, length, inverse=inverse, onesided=onesided)
    parts = ctx.size(x, rank - 1)
    kept = min(size, length)
    dx = op.slice(dx, [axis, rank - 1], [0, 0], [kept, parts])
    return [_pad_end(op, dx, rank, axis, size - kept), None, None]


def _axis(ctx: Context, rank: int) -> int:
    if ctx.op.opset < _AXIS_INPUT_SINCE:
        return ctx.axis(default=1)
    return (-2 if ctx.maybe_x(2) is None else _known(ctx, 2, "axis")) % rank


def _known(ctx: Context, index: int, what: str) -> int:
    constant = ctx.constant(index)
    if constant is None:
        raise ctx.unsupported(f"the {what} length or axis is known only when the model runs")
    return int(constant.item())


def _pad_end(op: Ops, value: ir.Value, rank: int, axis: int, count: int) -> ir.Value:
    return op.pad(value, [0] * rank, [count * (i == axis) for i in range(rank)])


def _adjoint(
    op: Ops, dy: ir.Value, rank: int, axis: int, length: int, *, inverse: bool, onesided: bool
) -> ir.Value:
    """The adjoint of a transform of ``length`` elements along ``axis``, as complex pairs."""
    if onesided:  # what was left out has no cotangent
        dy = _pad_end(op, dy, rank, axis, length - (length // 2 + 1))
    if op.opset >= _AXIS_INPUT_SINCE:
        result = op.DFT(dy, None, op.constant(np.array(axis)), inverse=int(not inverse))
    else:
        result = op.DFT(dy, axis=axis, inverse=int(not inverse))
    return op.Mul(result, 1 / length if inverse else float(length))


@vjp("STFT", since=17)
def stft(ctx: Context) -> Cotangents:
    """Each frame is a window times a piece of the signal; pieces may overlap."""
    op, signal, window, dy = ctx.op, ctx.x(), ctx.maybe_x(2), ctx.dy()
    step = _known(ctx, 1, "step")
    length = _known(ctx, 3, "frame") if ctx.maybe_x(3) is not None else ctx.size(ctx.x(2), 0)
    samples, parts = ctx.size(signal, 1), ctx.size(signal, 2)
    frames = (samples - length) // step + 1
    onesided = bool(ctx.int("onesided", 1))
    pieces = _adjoint(op, dy, 4, 2, length, inverse=False, onesided=onesided)
    pieces = op.slice(pieces, [3], [0], [parts])  # [B, frames, length, parts]
    places = op.constant(np.arange(frames)[:, None] * step + np.arange(length))
    dsignal = dwindow = None
    if ctx.needs(0):
        shaped = pieces if window is None else op.Mul(pieces, op.unsqueeze(window, 1))
        rows = op.reshape(shaped, -1, frames * length, parts)
        column = op.Expand(op.reshape(places, 1, -1, 1), op.Shape(rows))
        dsignal = add_at(op, op.shape_of(signal), column, rows, axis=1)
    if ctx.needs(2):
        heard = op.Gather(signal, places, axis=1)  # [B, frames, length, parts]
        dwindow = op.reduce_sum(op.Mul(pieces, heard), [0, 1, 3], keepdims=False)
    return [dsignal, None, dwindow, None]
