"""Rewrites forward convolutions on small planes as matrix products (autodiff.planes).

Runs after differentiation, whose rule for Conv takes the same form there. Convolutions
whose weight is a constant are left alone: the runtime repacks those for its own kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff import planes
from odtpack.autodiff.context import Context
from odtpack.autodiff.graphs import static_dims
from odtpack.autodiff.ops import Ops
from odtpack.autodiff.windows import conv_windows
from odtpack.passes import match
from odtpack_runtime.signature import OWN_TYPE_SUFFIX


def rewrite(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every convolution that :mod:`odtpack.autodiff.planes` suits."""
    for node in list(graph):
        if node.op_type != "Conv" or node.domain or not _known(node):
            continue
        ctx = Context(node, op, [], [])
        win = conv_windows(ctx)
        if not (planes.suits_pointwise(win) or planes.suits_depthwise(win)):
            continue
        product = planes.pointwise if planes.suits_pointwise(win) else planes.depthwise
        with op.before(node):
            y = product(op, win, ctx.x(), ctx.x(1))
            bias = ctx.maybe_x(2)
            if bias is not None:
                y = op.Add(y, op.reshape(bias, win.features, 1, 1))
            y = planes.samples_first(op, y, win.features, win.out)
        match.replace(node.outputs[0], y, [node])


def _known(node: ir.Node) -> bool:
    """Whether the weight is an input, widened maybe, and everything but the batch is known."""
    x, w = node.inputs[0], node.inputs[1]
    if x is None or w is None:
        return False
    if not (w.is_graph_input() or str(w.name).endswith(OWN_TYPE_SUFFIX)):
        return False
    if x.dtype != ir.DataType.FLOAT or x.shape is None or static_dims(w) is None:
        return False
    return all(isinstance(dim, int) for dim in x.shape[1:])
