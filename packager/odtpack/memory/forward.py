"""What of a training model is its forward pass."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from odtpack.graph.graphs import dims_of, reads


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """What the nodes of a graph compute, by name."""
    return {v.name: v for node in graph for v in node.outputs if v.name}


def nameable(graph: ir.Graph) -> frozenset[str]:
    """Values of a graph that a control edge can be put on: those of a known rank."""
    return frozenset(n for n, v in named_values(graph).items() if dims_of(v) is not None)


def ancestors(outputs: Collection[ir.Value]) -> set[ir.Node]:
    """Nodes that some values need; for the loss those are the forward pass."""
    found: set[ir.Node] = set()
    stack = [value.producer() for value in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        found.add(node)
        stack += [value.producer() for value in reads(node)]
    return found
