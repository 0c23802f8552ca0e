"""Computes integer arithmetic on known shapes before the model runs.

Exporters and function bodies compute axes and bounds from shapes, node by node:
Shape, Gather, Concat, Range. Gradient rules need to know the results. An If on such a
result is replaced by the branch that is taken. Nodes that compute the same are merged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from odtpack.graph.graphs import (
    PLAIN_ATTRIBUTES,
    RANDOM_OPERATORS,
    Dims,
    Names,
    constant,
    dims_of,
    is_scalar,
    nodes_of,
    producer,
    static_dims,
    subgraphs,
    used_names,
)

_LARGEST = 4096  # elements of a folded value: shapes and axes, not tables

_FOLDED = {
    "Abs", "Add", "And", "Cast", "CastLike", "Concat", "ConstantOfShape", "Div", "Equal",
    "Expand", "Gather", "Greater", "Identity", "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not",
    "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice",
    "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip

# Of these the result may be large however small the inputs are: its shape must be known.
_GROWING = {"ConstantOfShape", "Expand", "Range", "Tile"}

MOVED = "odtpack.moved"
"""Set in the meta data of a value that an If returned, of which one branch is left."""

_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL}


def fold(graph: ir.Graph, keep: Collection[str] = (), root: ir.Graph | None = None) -> bool:
    """Replace integer nodes with known results by constants, drop idle casts; whether any was."""
    # Shapes that depend on the results may then be inferred, and be folded in their turn. Subgraphs
    # are folded, too.
    # graph: In topological order, with types and shapes inferred; changed in place. keep: Names of
    # initializers whose values are not to be relied on. root: The main graph, of a subgraph.
    root, changed = graph if root is None else root, False
    for node in list(graph):
        for subgraph in subgraphs(node):
            subgraph.opset_imports.update(graph.opset_imports)
            changed |= fold(subgraph, keep, root)
        if node.op_type == "If" and node.domain == "":
            condition = _known(node.inputs[0], keep)
            if condition is not None and condition.size == 1:
                taken = "then_branch" if condition.item() else "else_branch"
                _move_branch(graph, node, root, taken)
                changed = True
            continue
        if node.domain != "" or len(node.outputs) != 1:
            continue
        output, read = node.outputs[0], node.inputs[0] if node.inputs else None
        if output.is_graph_output():
            continue
        if node.op_type == "Cast" and read is not None and read.dtype == output.dtype is not None:
            # ONNX Runtime 1.32 may remove it beside a fusion of Div and Mul, and leave its reader.
            ir.convenience.replace_all_uses_with(output, read)
            graph.remove(node, safe=True)
            changed = True
            continue
        if output.dtype not in _INTEGERS:
            continue
        array = None
        dims = _read_dims(node) if node.op_type in ("Shape", "Size") else None
        if dims is not None and all(isinstance(dim, int) for dim in dims):
            array = np.array(dims, np.int64)
            array = np.asarray(array.prod()) if node.op_type == "Size" else array
        sizes = static_dims(output)
        small = sizes is not None and math.prod(sizes) <= _LARGEST
        if node.op_type in _FOLDED and (small or node.op_type not in _GROWING):
            array = _evaluate(node, graph, keep)
        if array is not None and array.size <= _LARGEST:
            _replace(graph, node, array)
            changed = True
    return changed


def share_constants(graph: ir.Graph, keep: Collection[str] = ()) -> bool:
    """Give subgraphs copies of axes and sizes that they read from the main graph; whether any."""
    # Shape inference does not see the values of what lies outside of a subgraph.
    # keep: Names of initializers whose values are not to be relied on.
    names, changed = Names(used_names(graph)), False
    known = {
        value: value.const_value
        for value in graph.initializers.values()
        if value.dtype == ir.DataType.INT64 and _known(value, keep) is not None
    }
    for subgraph in graph.subgraphs():
        copies: dict[ir.Value, ir.Value] = {}
        for node in subgraph:
            for index, value in enumerate(node.inputs):
                if value is None or value not in known:
                    continue
                if value not in copies:
                    name = names.fresh(str(value.name))
                    copies[value] = ir.val(name, const_value=known[value])
                    subgraph.register_initializer(copies[value])
                node.replace_input_with(index, copies[value])
                changed = True
    return changed


def _read_dims(shape: ir.Node) -> Dims | None:
    """Dimensions that a Shape or Size node reads."""
    dims = dims_of(shape.inputs[0])
    if dims is None:
        return None
    start = shape.attributes.get_int("start", 0)
    return dims[start : shape.attributes.get_int("end", len(dims))]


def _known(value: ir.Value | None, keep: Collection[str]) -> np.ndarray | None:
    if value is None or value.name in keep or value.is_graph_input():
        return None
    return constant(value, largest=_LARGEST)


def _evaluate(node: ir.Node, graph: ir.Graph, keep: Collection[str]) -> np.ndarray | None:
    """The result of a node all of whose inputs are known."""
    # Gather and Slice may read a shape of which only what they pick is known.
    feeds, partial = {}, False
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        array = _known(value, keep)
        if array is None and index == 0 and node.op_type in ("Gather", "Slice"):
            # The result of a Shape node with -1, which no shape has, for what is unknown.
            shape = value.producer()
            dims = None if shape is None or shape.op_type != "Shape" else _read_dims(shape)
            if dims is not None:
                array = np.array([d if isinstance(d, int) else -1 for d in dims], np.int64)
            partial = True
        if array is None or value.name is None:
            return None
        feeds[value.name] = array
    proto = ir.serde.serialize_node(node)
    evaluator = ReferenceEvaluator(proto, opsets={"": graph.opset_imports[""]})
    try:
        with np.errstate(divide="raise"):
            (result,) = evaluator.run(None, feeds)
    except (ValueError, IndexError, TypeError, ArithmeticError):
        return None  # the runtime will say what is wrong with it
    return None if partial and np.any(np.asarray(result) < 0) else np.asarray(result)


def _replace(graph: ir.Graph, node: ir.Node, array: np.ndarray) -> None:
    output = node.outputs[0]
    constant = ir.node("Constant", [], {"value": ir.tensor(array)}, name=node.name)
    value = constant.outputs[0]
    value.shape = ir.Shape(array.shape)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [constant], [output], [value])


def _move_branch(graph: ir.Graph, node: ir.Node, root: ir.Graph, name: str) -> None:
    """Move a branch of an If into the graph, in the place of the If."""
    branch = node.attributes[name].as_graph()
    inner, results, names = list(branch), list(branch.outputs), Names(used_names(root))
    branch.outputs.clear()
    branch.remove(inner)
    for value in list(branch.initializers.values()):
        branch.initializers.pop(str(value.name))
        value.name = names.fresh(f"{node.name}/{value.name}")
        graph.register_initializer(value)
    for each in inner:  # of nodes, too: the graph may have others of these names
        each.name = names.fresh(f"{node.name}/{each.name}")
    for value in (value for each in inner for value in each.outputs if value.name):
        value.name = names.fresh(f"{node.name}/{value.name}")
    replacements = []
    for result in results:
        replacement = result
        # A result takes the name of the output that it replaces: it must be free to.
        if result.producer() not in inner or result in replacements:
            inner.append(ir.node("Identity", [result]))
            replacement = inner[-1].outputs[0]
        replacement.meta[MOVED] = True
        replacements.append(replacement)
    ir.convenience.replace_nodes_and_values(graph, node, [node], inner, node.outputs, replacements)


def take_squeeze(root: ir.Graph) -> tuple[str, int] | None:
    """Take the branch that squeezes an axis of unknown size, as torch.jit writes ``squeeze(d)``."""
    # With both branches the rank is unknown. The Squeeze that is left refuses other sizes than 1.
    # root: The main graph, as :func:`fold` left it; the first such If is replaced.
    # Returns the value that is squeezed and the axis.
    for node in nodes_of(root):
        squeezed = _squeezed(node) if node.op_type == "If" else None
        if squeezed is not None and node.graph is not None:
            _move_branch(node.graph, node, root, "then_branch")
            return squeezed
    return None


def _squeezed(node: ir.Node) -> tuple[str, int] | None:
    """What ``If(Shape(x)[d] == 1)`` squeezes that leaves x as it is elsewhere."""
    if len(node.outputs) != 1:
        return None
    then, other = (node.attributes[f"{n}_branch"].as_graph().outputs[0] for n in ("then", "else"))
    squeeze, equal = producer(then, "Squeeze"), producer(node.inputs[0], "Equal")
    if squeeze is None or equal is None or len(squeeze.inputs) != 2:
        return None
    value, axes = squeeze.inputs[0], constant(squeeze.inputs[1], largest=1)
    same = producer(other, "Identity")
    if value is None or axes is None or value is not (other if same is None else same.inputs[0]):
        return None
    sizes = [each for each in equal.inputs if each is not None and not is_scalar(each, 1)]
    size = producer(sizes[0], "Gather") if len(sizes) == 1 else None
    index = None if size is None else constant(size.inputs[1], largest=1)
    shape = None if size is None else producer(size.inputs[0], "Shape")
    if index is None or shape is None or shape.inputs[0] is not value or value.shape is None:
        return None
    axis, read = int(axes.item()), int(index.item())
    return (str(value.name), axis) if (axis - read) % value.shape.rank() == 0 else None


def merge_equal(graph: ir.Graph, nodes: Iterable[ir.Node] | None = None) -> None:
    """Let the first of several equal nodes do for all, as ONNX Runtime's optimizers do."""
    # graph: A sorted graph, whose subgraphs stay as they are. nodes: Those of it to merge, in its
    # order; all if None.
    found: dict[Hashable, ir.Node] = {}
    for node in list(graph if nodes is None else nodes):
        key = _merge_key(node)
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


def _merge_key(node: ir.Node) -> Hashable:
    """A key that equal nodes share; None for a node that must not be merged."""
    attributes = sorted(node.attributes.items())
    if node.domain or node.op_type in RANDOM_OPERATORS:
        return None
    if any(attribute.type not in PLAIN_ATTRIBUTES for _, attribute in attributes):
        return None
    return (
        node.op_type,
        tuple(node.inputs),
        tuple(bool(value.name) for value in node.outputs),
        tuple((name, str(attribute.value)) for name, attribute in attributes),
    )
