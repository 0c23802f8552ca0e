"""Moves a Relu after the MaxPool that alone reads it.

max(relu(a), relu(b)) = relu(max(a, b)), and so are the gradients: the maximum passes its
cotangent on exactly if it is positive. On the pooled plane the Relu and its mask touch a
quarter of the elements, and the large plane is read once less.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph import match
from odtpack.graph.ops import Ops


def rewrite(op: Ops, graph: ir.Graph) -> bool:
    """Swap every such pair; return whether there was one."""
    changed = False
    for pool in list(graph):
        if pool.op_type != "MaxPool" or pool.domain or len(pool.outputs) > 1:
            continue
        relu = match.producer(pool.inputs[0], "Relu")
        if relu is None or not match.private([relu], pool):
            continue
        x, pooled = relu.inputs[0], pool.outputs[0]
        with op.before(pool):
            y = op.emit("MaxPool", [x], **{k: a.value for k, a in pool.attributes.items()})[0]
            y.shape = pooled.shape
            new = op.Relu(y)
        match.replace(pooled, new, [pool, relu])
        changed = True
    return changed
