"""Gradient accumulation: out = gradient if lazy_reset_grad else buffer + gradient.

1. A small gradient: Add(Where(reset, 0, buffer), gradient). Two nodes of about a
   microsecond; Where also clears a buffer that holds NaN after a diverged step.
2. A large gradient: If(reset) then Identity(gradient) else Add(buffer, gradient). An If
   costs ten microseconds to enter, and saves a pass over buffer and gradient.
3. A large gradient that one MatMul or Gemm computes: the product moves into both
   branches, as Gemm with the buffer as its C. Not one pass over the gradient is left.

In each case the output may be bound to the memory of the buffer (:mod:`.aliases`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.ops import Ops, static_dims

# Elements from which on entering an If is cheaper than Where. For a matrix that is soon:
# the Where kernel handles a scalar against axes of length one element by element.
_LARGE_VECTOR, _LARGE_MATRIX = 1 << 15, 1 << 9

BUFFER_SUFFIX = "_grad.accumulation.buffer"
OUTPUT_SUFFIX = "_grad.accumulation.out"


def accumulate(op: Ops, gradient: ir.Value, buffer: ir.Value, reset: ir.Value) -> ir.Value:
    """Write the accumulation of one gradient.

    Args:
        op: Writer for the training graph.
        gradient: Gradient of this step, of the parameter's shape.
        buffer: Graph input with the gradient accumulated so far, of the same shape.
        reset: BOOL scalar; true to start afresh.

    Returns:
        The accumulated gradient.
    """
    dims = static_dims(buffer) or ()
    if int(np.prod(dims)) < (_LARGE_VECTOR if len(dims) <= 1 else _LARGE_MATRIX):
        return op.Add(op.Where(reset, 0, buffer), gradient)
    # Branches may not share value names with each other or with the main graph.
    fresh = _branch(op, "Identity", [gradient], f"{buffer.name}.fresh")
    added = _branch(op, "Add", [buffer, gradient], f"{buffer.name}.added")
    out: ir.Value = op.emit(
        "If",
        [reset],
        then_branch=ir.AttrGraph("then_branch", fresh),
        else_branch=ir.AttrGraph("else_branch", added),
    )[0]
    node = out.producer()
    for graph in (fresh, added):
        graph.meta["owner"] = node
    out.type = gradient.type
    return out


def _branch(op: Ops, op_type: str, inputs: list[ir.Value], name: str) -> ir.Graph:
    node = ir.node(op_type, inputs, name=op.fresh_name(name))
    node.outputs[0].name = node.name
    node.outputs[0].type, node.outputs[0].shape = inputs[0].type, inputs[0].shape
    return ir.Graph([], node.outputs, nodes=[node], name=node.name)
