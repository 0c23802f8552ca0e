"""Operators that put elements or patches onto a plane: MaxUnpool and Col2Im."""

from __future__ import annotations

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.windows import dynamic_windows


@vjp("MaxUnpool", since=9)
def max_unpool(ctx: Context) -> Cotangents:
    """Each element reads the cotangent of where it was put, as in PyTorch.

    Overlapping windows put the same maximum to the same place more than once; each of them
    then receives the whole cotangent.
    """
    op = ctx.op
    return [op.Gather(op.reshape(ctx.dy(), -1), ctx.x(1), axis=0), None, None]


@vjp("Col2Im", since=18)
def col_to_im(ctx: Context) -> Cotangents:
    """x [N, C taps, L] is summed onto planes: dx is what every tap reads of dy."""
    op, dy, block = ctx.op, ctx.dy(), ctx.constant(2)
    if block is None:
        raise ctx.unsupported("its block shape is known only when the model runs")
    win = dynamic_windows.column_windows(ctx, [int(size) for size in block])
    padded = win.pad(dy)
    taps = [op.unsqueeze(op.reshape(win.tap(padded, tap), 0, 0, -1), 2) for tap in win.taps()]
    joined = op.Concat(*taps, axis=2) if len(taps) > 1 else taps[0]
    return [op.reshape_like(joined, ctx.x()), None, None]
