"""The order in which ONNX Runtime executes the nodes of a graph.

ONNX Runtime numbers nodes as they stand in the file and walks depth first from
the nodes whose outputs are not read, the last of them first, to what they need,
the producer with the highest number first; a node comes after everything that
it needs (``GraphViewer``, its default order). The order in the file matters only
through the numbers.

An optimized model that ONNX Runtime saves has its nodes in this order, if the
optimizers changed anything. If not, it is saved as it was. Names of values may
appear in it twice, outside and inside a body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx


def execution_order(graph: onnx.GraphProto) -> list[int]:
    """Return the indices of a graph's nodes in the order of execution."""
    producers = {
        name: index for index, node in enumerate(graph.node) for name in node.output if name
    }
    needs = [
        sorted({producers[name] for name in reads(node) if name in producers})
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


def rename_in_bodies(saved: onnx.GraphProto) -> None:
    """Rename the values of bodies whose names a graph around them has, too.

    ONNX Runtime gives the casts that it inserts around float16 the same names outside and
    inside a body, and does not load such a model again.

    Args:
        saved: The graph as saved; changed in place.
    """
    _rename(saved, {}, frozenset())


def _rename(graph: onnx.GraphProto, names: Mapping[str, str], outer: frozenset[str]) -> None:
    """Use new names for values of the graphs around, and for those of its own that clash."""
    own = {
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
        *(name for node in graph.node for name in node.output if name),
    }
    taken = own | outer
    names = dict(names)
    for name in sorted(own & outer):
        new = f"{name}/inner"
        while new in taken:
            new += "/inner"
        names[name] = new
        taken |= {new}
    if names:
        for each in (*graph.input, *graph.initializer, *graph.value_info, *graph.output):
            each.name = names.get(each.name, each.name)
    around = frozenset(taken)
    for node in graph.node:
        if names:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) for name in field]
        for _, body in _graphs(node):
            _rename(body, names, around)


def _graphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, in its subgraphs too; values inside those may be among them."""
    yield from node.input
    for _, graph in _graphs(node):
        for inner in graph.node:
            yield from reads(inner)
        for value in graph.output:
            yield value.name
