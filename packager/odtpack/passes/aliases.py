"""Proves that an output may be written into the memory of an input.

ONNX Runtime lets a caller bind one buffer as input and output and does not check that
this is safe. It is, in whatever order the runtime executes, if

1. every node that reads the input, except the one that writes the output, is an ancestor
   of the writer, and so has finished before the writer starts; and
2. the writer either does not read the input, or reads and writes it element by element
   at the same place.
"""

from __future__ import annotations

import collections

import onnx_ir as ir

from odtpack.autodiff.ops import dims_of, subgraphs

# Operators that compute element i of the output from element i of equally shaped inputs.
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Identity", "Where"}


class UnsafeAliasError(Exception):
    """An alias that odtpack promised cannot be proven safe: a bug, not bad input."""


def _readers(value: ir.Value) -> set[ir.Node]:
    """Nodes of the main graph that read a value, also from inside their subgraphs."""
    readers = set()
    for node in value.consumers():
        owner = node
        while owner.graph is not None and owner.graph is not value.graph:
            parent = owner.graph.meta.get("owner")
            if not isinstance(parent, ir.Node):
                raise UnsafeAliasError(f"{value.name!r} is read in a subgraph of unknown owner")
            owner = parent
        readers.add(owner)
    return readers


def verify(graph: ir.Graph, source: ir.Value, output: ir.Value) -> None:
    """Check that ``output`` may overwrite ``source``, a graph input.

    Raises:
        UnsafeAliasError: It may not, or it cannot be shown.
    """
    writer = output.producer()
    if writer is None:
        raise UnsafeAliasError(f"{output.name!r} is not computed")
    if dims_of(source) != dims_of(output):
        raise UnsafeAliasError(f"{output.name!r} and {source.name!r} differ in shape")
    late = _not_upstream(_readers(source) - {writer}, writer)
    if late:
        first = min(str(node.name) for node in late)
        raise UnsafeAliasError(
            f"{first!r} may read {source.name!r} after {output.name!r} overwrites it"
        )
    for node in _innermost_readers(source, writer):
        if node.op_type not in _ELEMENTWISE:
            raise UnsafeAliasError(f"{node.op_type} does not write {output.name!r} in place")
        if any(dims_of(y) not in (None, dims_of(source)) for y in node.outputs):
            raise UnsafeAliasError(f"{node.name!r} broadcasts {source.name!r}")


def _not_upstream(wanted: set[ir.Node], writer: ir.Node) -> set[ir.Node]:
    """Those of the wanted nodes that are no ancestors of ``writer``, nearest looked at first."""
    missing, seen = set(wanted), {writer}
    queue = collections.deque([writer])
    while queue and missing:
        for value in _reads(queue.popleft()):
            node = value.producer()
            if node is not None and node not in seen:
                seen.add(node)
                missing.discard(node)
                queue.append(node)
    return missing


def _reads(node: ir.Node) -> list[ir.Value]:
    """Inputs of a node, and outer values that its subgraphs read."""
    values = [value for value in node.inputs if value is not None]
    for subgraph in subgraphs(node):
        for inner in subgraph:
            values.extend(v for v in _reads(inner) if v.graph is not subgraph)
    return values


def _innermost_readers(source: ir.Value, writer: ir.Node) -> list[ir.Node]:
    inner = {writer} | {node for graph in subgraphs(writer) for node in graph}
    return [node for node in source.consumers() if node in inner]
