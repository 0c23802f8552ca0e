"""Gradient accumulation: out = gradient if lazy_reset_grad else buffer + gradient.

1. A small gradient: Add(Where(reset, 0, buffer), gradient). Two nodes of about a
   microsecond; Where also clears a buffer that holds NaN after a diverged step.
2. A large gradient: If(reset) then Identity(gradient) else Add(buffer, gradient). An If
   costs ten microseconds to enter, and saves a pass over buffer and gradient.
3. A large gradient that one Gemm computes: the Gemm moves into both branches, so that a
   fresh gradient is written straight into its buffer, without a copy and without memory
   of its own. (Adding through Gemm's C would save a pass more, but a kernel may write its
   output before it reads C, and here they share memory.)
4. A large gradient that adds rows at indices, as an embedding's does: If(reset) then the
   rows are added to zeros, else straight into the buffer. Then a step that accumulates
   touches nothing but those rows.

In each case the output may be bound to the memory of the buffer (:mod:`.aliases`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import static_dims
from odtpack.graph.ops import Ops
from odtpack.passes import sparse_gradients

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
    scatter = sparse_gradients.read(sparse_gradients.unrounded(gradient))
    if scatter is not None and not gradient.uses():
        out = _scattered(op, scatter, buffer, dims, reset)
        out.type = buffer.type
        return out
    product = gradient.producer()
    # Branches may not share value names with each other or with the main graph.
    if product is not None and _is_private_gemm(product):
        fresh = _branch(op, f"{buffer.name}.fresh", gradient, [_like(product)])
        copy = _like(product)
        added = _branch(
            op, f"{buffer.name}.added", gradient, [copy, ir.node("Add", [buffer, copy.outputs[0]])]
        )
        op.graph.remove(product)
    else:
        keep = ir.node("Identity", [gradient])
        fresh = _branch(op, f"{buffer.name}.fresh", gradient, [keep])
        added = _branch(op, f"{buffer.name}.added", gradient, [ir.node("Add", [buffer, gradient])])
    out = _choose(op, reset, fresh, added)
    out.type = buffer.type
    return out


def _scattered(
    op: Ops,
    scatter: sparse_gradients.Scatter,
    buffer: ir.Value,
    dims: tuple[int, ...],
    reset: ir.Value,
) -> ir.Value:
    """The updates of a scatter added to zeros or to the buffer."""
    fresh = ir.Graph([], [], nodes=[], name=f"{buffer.name}.fresh")
    added = ir.Graph([], [], nodes=[], name=f"{buffer.name}.added")
    outputs = scatter.fresh(op.inside(fresh), dims, reset), scatter.onto(op.inside(added), buffer)
    for graph, output in zip((fresh, added), outputs, strict=True):
        output.type, output.shape = buffer.type, buffer.shape
        graph.outputs.append(output)
    scatter.remove()
    return _choose(op, reset, fresh, added)


def _choose(op: Ops, reset: ir.Value, fresh: ir.Graph, added: ir.Graph) -> ir.Value:
    out: ir.Value = op.If(
        reset,
        then_branch=ir.AttrGraph("then_branch", fresh),
        else_branch=ir.AttrGraph("else_branch", added),
    )
    return out


def _is_private_gemm(node: ir.Node) -> bool:
    """A product without an addend that nothing else reads."""
    value = node.outputs[0]
    return (
        node.op_type == "Gemm"
        and not node.domain
        and all(v is None for v in node.inputs[2:])
        and not value.uses()
        and not value.is_graph_output()
    )


def _like(node: ir.Node) -> ir.Node:
    return ir.node(node.op_type, node.inputs[:2], dict(node.attributes))


def _branch(op: Ops, name: str, gradient: ir.Value, nodes: list[ir.Node]) -> ir.Graph:
    """A subgraph without inputs, which reads outer values, and returns the last node's output."""
    for node in nodes:
        node.name = op.fresh_name(name)
        value = node.outputs[0]
        value.name, value.type, value.shape = node.name, gradient.type, gradient.shape
    return ir.Graph([], nodes[-1].outputs, nodes=nodes, name=name)
