"""What of a training model is its forward pass."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from odtpack.graph.graphs import dims_of, reads
from odtpack_simulator.memory.runtime_graph import RuntimeGraph


def named_values(graph: ir.Graph) -> dict[str, ir.Value]:
    """What the nodes of a graph compute, by name."""
    return {v.name: v for node in graph for v in node.outputs if v.name}


def nameable(graph: ir.Graph) -> frozenset[str]:
    """Values of a graph that a control edge can be put on: those of a known rank."""
    return frozenset(n for n, v in named_values(graph).items() if dims_of(v) is not None)


def take_ranks(graph: ir.Graph, executed: RuntimeGraph) -> None:
    """Give values of the forward pass whose rank is unknown the one that ONNX Runtime infers.

    With the sizes that are the same for every batch.
    """
    for node in ancestors(graph.outputs[:1]):
        for value in node.outputs:
            known = executed.values.get(value.name or "")
            if value.shape is None and known is not None and known.dims is not None:
                value.shape = ir.Shape(d if isinstance(d, int) else None for d in known.dims)


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
