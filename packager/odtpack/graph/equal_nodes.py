"""Merges nodes that compute the same, as ONNX Runtime's optimizers do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

import onnx_ir as ir

from odtpack.graph.graphs import RANDOM_OPERATORS

_PLAIN: Final = {
    ir.AttributeType.INT,
    ir.AttributeType.FLOAT,
    ir.AttributeType.STRING,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOATS,
    ir.AttributeType.STRINGS,
}


def merge(graph: ir.Graph, nodes: Iterable[ir.Node] | None = None) -> None:
    """Let the first of several equal nodes do for all.

    Args:
        graph: A sorted graph; changed in place. Its subgraphs stay as they are.
        nodes: Nodes of it to merge, in its order; all if None.
    """
    found: dict[Hashable, ir.Node] = {}
    for node in list(graph if nodes is None else nodes):
        key = _key(node)
        if key is None:
            continue
        first = found.setdefault(key, node)
        if first is node or any(value.is_graph_output() for value in node.outputs):
            continue
        for kept, value in zip(first.outputs, node.outputs, strict=True):
            if kept.shape is None:
                kept.shape = value.shape
        ir.convenience.replace_all_uses_with(node.outputs, first.outputs)
        graph.remove(node, safe=True)


def _key(node: ir.Node) -> Hashable:
    """A key that equal nodes share; None for a node that must not be merged."""
    attributes = sorted(node.attributes.items())
    if node.domain or node.op_type in RANDOM_OPERATORS:
        return None
    if any(attribute.type not in _PLAIN for _, attribute in attributes):
        return None
    return (
        node.op_type,
        tuple(node.inputs),
        tuple(bool(value.name) for value in node.outputs),
        tuple((name, str(attribute.value)) for name, attribute in attributes),
    )
