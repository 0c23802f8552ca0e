"""A training model whose gradients start afresh in every run: without what accumulates them."""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph import match
from odtpack.graph.ops import Ops
from odtpack.passes.accumulate import BUFFER_SUFFIX, OUTPUT_SUFFIX


def fresh_gradients(op: Ops, graph: ir.Graph, reset: ir.Value) -> dict[str, ir.Value]:
    """Take accumulation out of a training graph.

    Args:
        op: Writer for the graph.
        graph: The graph; changed in place. Gradient buffers and accumulated gradients are no
            longer among its inputs and outputs.
        reset: The input ``lazy_reset_grad``, which nothing is left to choose by.

    Returns:
        The gradient of each trainable parameter, by its name, in the order of the outputs.
    """
    flags = _views(reset)
    for node in list(graph):
        if node.op_type == "If" and node.inputs[0] in flags:
            _inline(op, node)
    gradients: dict[str, ir.Value] = {}
    for index, value in reversed(list(enumerate(graph.outputs))):
        name = str(value.name)
        if name.endswith(OUTPUT_SUFFIX):
            del graph.outputs[index]
            gradients[name.removesuffix(OUTPUT_SUFFIX)] = _gradient(value, flags)
    for index, value in reversed(list(enumerate(graph.inputs))):
        if str(value.name).endswith(BUFFER_SUFFIX):
            for node in {node for node, _ in value.uses()}:
                _remove_unread(node)
            del graph.inputs[index]
    return dict(reversed(gradients.items()))


def _views(reset: ir.Value) -> set[ir.Value]:
    """The flag, and the scalars that are made of it."""
    found, stack = {reset}, [reset]
    while stack:
        for node in stack.pop().consumers():
            if node.op_type in ("Squeeze", "Reshape") and node.outputs[0] not in found:
                found.add(node.outputs[0])
                stack.append(node.outputs[0])
    return found


def _inline(op: Ops, node: ir.Node) -> None:
    """Put the nodes of the branch for fresh gradients in the place of an If."""
    branch = node.attributes["then_branch"].as_graph()
    result = branch.outputs[0]
    branch.outputs.clear()
    for name, value in list(branch.initializers.items()):
        branch.initializers.pop(name)
        value.name = op.fresh_name(f"update/{name}")
        op.graph.register_initializer(value)
    nodes = list(branch)
    branch.remove(nodes)
    for each in nodes:
        for value in each.outputs:
            if value.name:
                value.name = op.fresh_name(f"update/{value.name}")
        each.name = each.outputs[0].name
    graph = node.graph
    assert graph is not None  # noqa: S101 - it was found there
    graph.insert_before(node, nodes)
    match.replace(node.outputs[0], result, [node])
    other = node.attributes["else_branch"].as_graph()
    other.outputs.clear()
    for each in reversed(list(other)):
        other.remove(each, safe=True)  # what it read from around it is no longer read


def _gradient(accumulated: ir.Value, flags: set[ir.Value]) -> ir.Value:
    """What Add(Where(reset, 0, buffer), gradient) adds; a value that nothing adds to, itself."""
    add = match.producer(accumulated, "Add")
    kept = None if add is None else match.producer(add.inputs[0], "Where")
    if add is None or kept is None or kept.inputs[0] not in flags:
        return accumulated
    gradient = add.inputs[1]
    assert gradient is not None  # noqa: S101 - an Add has two inputs
    return gradient


def _remove_unread(node: ir.Node) -> None:
    """Remove a node that nothing needs, and the nodes that read it, which nothing needs either."""
    for value in node.outputs:
        for reader in {reader for reader, _ in value.uses()}:
            _remove_unread(reader)
    if node.graph is not None:
        node.graph.remove(node, safe=True)
