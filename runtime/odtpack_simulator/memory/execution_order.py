"""The order in which ONNX Runtime executes the nodes of a graph.

ONNX Runtime numbers nodes as they stand in the file and walks depth first from
the nodes whose outputs are not read, the last of them first, to what they need,
the producer with the highest number first; a node comes after everything that
it needs (``GraphViewer``, its default order). The order in the file matters only
through the numbers.

An optimized model that ONNX Runtime saves has its nodes in this order, if the
optimizers changed anything. If not, it is saved as it was.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def execution_order(graph: onnx.GraphProto) -> list[int]:
    """Return the indices of a graph's nodes in the order of execution."""
    producers = {
        name: index for index, node in enumerate(graph.node) for name in node.output if name
    }
    needs = [
        sorted({producers[name] for name in _reads(node) if name in producers})
        for node in graph.node
    ]
    read = {index for indices in needs for index in indices}
    stack = [(index, False) for index in range(len(needs)) if index not in read]
    seen: set[int] = set()
    order = []
    while stack:
        index, is_done = stack.pop()
        if is_done:
            order.append(index)
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack += [(needed, False) for needed in needs[index] if needed not in seen]
    return order


def sort_saved_model(saved: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Bring the nodes of a graph that ONNX Runtime saved into the order of execution.

    Args:
        saved: The graph as saved; changed in place.
        original: The graph that was loaded.
    """
    originals = {name: node for node in original.node for name in node.output if name}
    for node in saved.node:
        twin = next((originals[name] for name in node.output if name in originals), None)
        graphs = {} if twin is None else dict(_graphs(twin))
        for name, graph in _graphs(node):
            if name in graphs:
                sort_saved_model(graph, graphs[name])
    if [list(node.output) for node in saved.node] == [list(node.output) for node in original.node]:
        nodes = [onnx.NodeProto() for _ in saved.node]
        for node, index in zip(nodes, execution_order(saved), strict=True):
            node.CopyFrom(saved.node[index])
        del saved.node[:]
        saved.node.extend(nodes)


def _graphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, in its subgraphs too; values inside those may be among them."""
    yield from node.input
    for _, graph in _graphs(node):
        for inner in graph.node:
            yield from _reads(inner)
        for value in graph.output:
            yield value.name
