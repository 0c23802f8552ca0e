"""Replaces the nodes of a model for which there is a decomposition."""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.contrib import attention, elementary, quantized  # noqa: F401 (fills the table)
from odtpack.contrib.table import DOMAIN, TABLE
from odtpack.graph.graphs import Ops, nodes_of, replace
from odtpack.graph.inference import infer_shapes


def covered() -> list[str]:
    """Contributed operators for which there is a decomposition."""
    return sorted(TABLE)


def needs_blocks(graph: ir.Graph) -> bool:
    """Whether a graph has nodes that are written in :data:`.quantized.BLOCKED_OPSET` only."""
    return any(node.domain == DOMAIN and node.op_type == "MatMulNBits" for node in graph)


def decompose(model: ir.Model) -> ir.Model:
    """Write every contributed node that can be in standard operators."""
    # model: In topological order, with types and shapes inferred, as of what is returned; changed
    # in place.
    graph = model.graph
    op: Ops | None = None
    # Some need the ranks of their inputs, which may follow from those before them.
    while found := [node for node in graph if node.domain == DOMAIN and node.op_type in TABLE]:
        op = op or Ops(graph, "contrib/")
        if not sum(_replace(op, node) for node in found):
            break
        model = infer_shapes(model)
    products = [node for node in graph if node.op_type in quantized.PRODUCTS]
    if products and quantized.pass_straight_through(Ops(graph, "straight/"), products):
        model = infer_shapes(model)
    if all(node.domain != DOMAIN for node in nodes_of(graph)):
        graph.opset_imports.pop(DOMAIN, None)
    return model


def _replace(op: Ops, node: ir.Node) -> bool:
    with op.before(node):
        written = TABLE[node.op_type](Context(node, op, (), ()))
        if written is None:
            return False
        results = [written] if isinstance(written, ir.Value) else list(written)
        for old, new in zip(node.outputs, results, strict=False):
            if new is None or not old.name:
                continue
            # An operand may come back as it is: it keeps its own name.
            copy = op.Identity(new) if new.producer() is None or new in node.inputs else new
            old.type = old.type or new.type
            replace(old, copy, [])
    graph, inputs = node.graph, list(node.inputs)
    if graph is not None:
        graph.remove(node, safe=True)
        for value in inputs:  # what only it read, such as scales, is stored otherwise now
            if value is None or value.uses() or value.is_graph_output():
                continue
            if value is graph.initializers.get(str(value.name)):
                graph.initializers.pop(str(value.name))
    return True
