"""Rewrites forward convolutions on small planes as matrix products (autodiff.planes).

Runs after differentiation, whose rule for Conv takes the same form there. Convolutions
whose weight is a constant are left alone: the runtime repacks those for its own kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.windows import small_conv
from odtpack.autodiff.windows.windows import conv_windows
from odtpack.graph import match
from odtpack.graph.graphs import static_dims
from odtpack.graph.ops import Ops
from odtpack_runtime.session.graph_signature import OWN_TYPE_SUFFIX


def rewrite(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every convolution that :mod:`odtpack.autodiff.windows.small_conv` suits."""
    for node in list(graph):
        if node.op_type != "Conv" or node.domain or not _known(node):
            continue
        ctx = Context(node, op, [], [])
        win = conv_windows(ctx)
        if not (small_conv.suits_pointwise(win) or small_conv.suits_depthwise(win)):
            continue
        product = small_conv.pointwise if small_conv.suits_pointwise(win) else small_conv.depthwise
        with op.before(node):
            y = product(op, win, ctx.x(), ctx.x(1))
            bias = ctx.maybe_x(2)
            if bias is not None:
                y = op.Add(y, op.reshape(bias, win.features, 1, 1))
            y = small_conv.samples_first(op, y, win.features, win.out)
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
