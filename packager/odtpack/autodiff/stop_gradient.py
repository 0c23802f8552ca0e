"""A value that gradients do not flow through, for losses that bring their own gradient.

Before differentiation: odtpack.StopGradient(x), which has x's value and no gradient. After
it, and in evaluation models, its readers read x.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.registry import INTERNAL_DOMAIN
from odtpack.graph.ops import Ops

_OP_TYPE = "StopGradient"


def stop(op: Ops, value: ir.Value) -> ir.Value:
    """The same value, a constant to differentiation."""
    (held,) = op.emit(_OP_TYPE, [value], domain=INTERNAL_DOMAIN)
    held.type, held.shape = value.type, value.shape
    return held


def lower(graph: ir.Graph) -> None:
    """Write the operator out."""
    for node in [*graph]:
        if node.domain == INTERNAL_DOMAIN and node.op_type == _OP_TYPE:
            value = node.inputs[0]
            if value is None:
                continue
            ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    graph.opset_imports.pop(INTERNAL_DOMAIN, None)
