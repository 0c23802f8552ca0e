"""Differentiates the body of a control-flow operator into a body of its own.

The backward nodes of a body read values of the forward body, which they cannot see from
where they end up. Each such value is either handed over, as one more output of the forward
body, or computed again from others that are:

1. what an element-wise operator or a view computes from available values is computed again;
2. so is what does not change from turn to turn, which would be stored once for each;
3. everything else, matrix products above all, is handed over, if its shape is the same in
   every turn: outputs of turns are stacked;
4. otherwise it is computed again, from whatever that takes.

What is drawn at random is never drawn again: rule 3 holds for it, or there is no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import onnx_ir as ir

from odtpack.autodiff.backward import FLOATS
from odtpack.autodiff.context import Context
from odtpack.graph.graphs import (
    RANDOM_OPERATORS,
    Dims,
    captures,
    defined,
    dims_of,
    reads,
    subgraphs,
)
from odtpack.graph.ops import Ops

# Operators that take no longer than reading what they return.
_CHEAP = {
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Cos",
    "Div", "Elu", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "Greater",
    "GreaterOrEqual", "HardSigmoid", "Identity", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "Reciprocal", "Relu", "Reshape",
    "Selu", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softplus", "Softsign", "Split",
    "Sqrt", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


class BackwardBody:
    """The subgraph that takes a body's cotangents back, while it is written.

    Attributes:
        body: The forward body. It gets more outputs and, for shapes, more nodes.
        graph: The backward body.
        op: Writes into ``graph``.
    """

    def __init__(self, ctx: Context, body: ir.Graph) -> None:
        self.body = body
        name = ctx.op.fresh_name(f"{body.name or ctx.node.op_type}.backward")
        self.graph = ir.Graph([], [], nodes=[], name=name)
        self.op = ctx.op.inside(self.graph)
        self._forward = ctx.op.inside(body)
        self._ctx = ctx
        self._again: list[ir.Node] = []  # nodes to compute again, last first
        self._needed: set[ir.Value] = set()
        self._kept: list[ir.Value] = []
        self._first = 0  # index of the first node that may read the forward body

    def differentiate(
        self, seeds: Iterable[tuple[ir.Value, ir.Value]], wrt: Iterable[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Write the vector-Jacobian product of the body.

        Args:
            seeds: Outputs of the body with their cotangents, values that ``graph`` sees. An
                output may stand there more than once.
            wrt: Inputs of the body, and values that it captures.

        Returns:
            Cotangent of each value in ``wrt`` that has one.
        """
        self._first = len(self.graph)
        summed: dict[ir.Value, ir.Value] = {}
        for value, cotangent in seeds:
            both = value in summed
            summed[value] = self.op.Add(summed[value], cotangent) if both else cotangent
        return self._ctx.differentiate(self.body, summed, wrt, self.op)

    def input(self, stem: str, like: ir.Value) -> ir.Value:
        """Append an input of the type and shape of ``like``."""
        value = ir.Value(name=self.op.fresh_name(stem), type=like.type, shape=like.shape)
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, like: ir.Value) -> None:
        """Append an output of the type and shape of ``like``."""
        node = value.producer()
        if node is None or node.graph is not self.graph or value in self.graph.outputs:
            value = self.op.Identity(value)
        value.type, value.shape = like.type, like.shape
        self.graph.outputs.append(value)

    def zeros_like(self, value: ir.Value) -> ir.Value:
        """Zeros of the shape of a value that the backward body sees."""
        return self.op.zeros(self.op.shape_of(value), self._ctx.dtype(value))

    def append(self, value: ir.Value) -> int:
        """Make a value one more output of the forward body; return which."""
        node, result = value.producer(), value
        if node is None or node.graph is not self.body or value in self.body.outputs:
            result = self._forward.Identity(value)
            result.type, result.shape = value.type, value.shape
        self.body.outputs.append(result)
        return len(self.body.outputs) - 1

    def append_dummy(self, like: ir.Value) -> int:
        """Give the forward body an output that is not read, of the type of ``like``."""
        dtype, dims = self._ctx.dtype(like), dims_of(like)
        known = dims is not None and all(isinstance(dim, int) for dim in dims)
        sizes = [dim if known and isinstance(dim, int) else 0 for dim in dims or ()]
        dummy = self._forward.zeros(self._forward.ints(*sizes), dtype)
        dummy.shape = ir.Shape(sizes)
        self.body.outputs.append(dummy)
        return len(self.body.outputs) - 1

    def plan(self, is_fixed: Callable[[ir.Value], bool]) -> list[ir.Value]:
        """Choose what of the forward body is handed over and what is computed again.

        Args:
            is_fixed: Whether a value has the same shape in every turn.

        Returns:
            Values to hand over: inputs of the forward body, and outputs of its nodes.
        """
        self._keep_shapes_forward()
        own = defined(self.body)
        self._needed = needed = {value for value in captures(self.graph) if value in own}
        light, kept = self._sort_out(own, is_fixed)
        for node in reversed(list(self.body)):
            wanted = [y for y in node.outputs if y in needed and y not in kept]
            if not wanted:
                continue
            fixed = all(is_fixed(value) for value in wanted)
            if node in light or (not fixed and not _is_unrepeatable(node)):
                self._again.append(node)
                needed.update(value for value in reads(node) if value in own)
            elif fixed:
                kept.update(wanted)
            else:
                raise self._ctx.unsupported(
                    f"{node.name!r} ({node.op_type}) inside it must not run twice, and the shape "
                    "of its result may differ from turn to turn"
                )
        self._kept = [value for value in self.body.inputs if value in needed]
        self._kept += [y for node in self.body for y in node.outputs if y in kept]
        return self._kept

    def _keep_shapes_forward(self) -> None:
        """Let the forward body take the shapes of its values: they are all that is read of some."""
        own = defined(self.body)
        for node in list(self.graph):
            value = node.inputs[0] if node.op_type in ("Shape", "Size") else None
            if value is None or node.domain or value not in own:
                continue
            self.graph.remove(node)
            self.body.append(node)
            dims = dims_of(value)
            if dims is not None and not node.attributes:
                node.outputs[0].shape = ir.Shape([len(dims)] if node.op_type == "Shape" else [])

    def _sort_out(
        self, own: set[ir.Value], is_fixed: Callable[[ir.Value], bool]
    ) -> tuple[set[ir.Node], set[ir.Value]]:
        """Nodes that are quickly repeated from what is available, and results to hand over."""
        constant = set(self.body.initializers.values())
        at_hand = constant | {value for value in self.body.inputs if is_fixed(value)}
        light: set[ir.Node] = set()
        kept: set[ir.Value] = set()
        for node in self.body:
            operands = [value for value in reads(node) if value in own]
            repeatable = not _is_unrepeatable(node)
            if repeatable and all(value in constant for value in operands):
                constant.update(node.outputs)
            elif not (
                repeatable
                and node.op_type in _CHEAP
                and all(value in at_hand for value in operands)
            ):
                found = [y for y in node.outputs if y in self._needed and is_fixed(y)]
                kept.update(found)
                at_hand.update(found)
                continue
            light.add(node)
            at_hand.update(node.outputs)
        return light, kept

    def complete(self, standin: Callable[[ir.Value], ir.Value]) -> None:
        """Write what is computed again, and let the backward body read stand-ins.

        Args:
            standin: Gives the value by which ``graph`` sees a value of the plan; may write
                nodes, which go before those of the cotangents.
        """
        first = next(itertools.islice(self.graph, self._first, None), None)
        with nullcontext() if first is None else self.op.before(first):
            mapping = {value: standin(value) for value in self._kept}
        for value in list(self.body.initializers.values()):
            if value in self._needed and value.const_value is not None:
                name = self.op.fresh_name(str(value.name))
                mapping[value] = ir.val(name, const_value=value.const_value)
                self.graph.register_initializer(mapping[value])
        copies = [copy_node(node, self.op) for node in reversed(self._again)]
        for node, copy in zip(reversed(self._again), copies, strict=True):
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                mapping.setdefault(old, new)
        if first is None:
            self.graph.extend(copies)
        else:
            self.graph.insert_before(first, copies)
        _rewire(self.graph, mapping)


def may_be_float(value: ir.Value) -> bool:
    """Whether a value, or an element of it if it is a sequence, is or may be a float."""
    return value.dtype is None or value.dtype in FLOATS


def add_output(ctx: Context, index: int, stem: str, like: ir.Value, dims: Dims | None) -> ir.Value:
    """Add output ``index`` to the forward node, of the element type of ``like``."""
    ctx.node.resize_outputs(index + 1)
    result = ctx.node.outputs[index]
    result.name, result.type = ctx.op.fresh_name(stem), like.type
    result.shape = None if dims is None else ir.Shape(dims)
    return result


def _is_unrepeatable(node: ir.Node) -> bool:
    """Whether a second run may give another result: random draws, unknown operators."""
    if node.op_type in RANDOM_OPERATORS or node.domain not in ("", "ai.onnx"):
        return True
    return any(_is_unrepeatable(inner) for body in subgraphs(node) for inner in body)


def copy_node(node: ir.Node, op: Ops) -> ir.Node:
    """Copy a node with its subgraphs; what it and they compute gets names of its own."""
    attributes = []
    for name, attribute in node.attributes.items():
        if attribute.type != ir.AttributeType.GRAPH:
            attributes.append(attribute)
            continue
        graph = attribute.as_graph().clone(allow_outer_scope_values=True)
        _rename(graph, op)
        attributes.append(ir.AttrGraph(name, graph))
    copy = ir.Node(
        node.domain,
        node.op_type,
        node.inputs,
        attributes,
        num_outputs=len(node.outputs),
        name=op.fresh_name(node.name or node.op_type),
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name = op.fresh_name(old.name) if old.name else old.name
        new.type, new.shape = old.type, old.shape
    return copy


def _rename(graph: ir.Graph, op: Ops) -> None:
    for value in graph.inputs:
        value.name = op.fresh_name(value.name or "input")
    for value in list(graph.initializers.values()):
        graph.initializers.pop(str(value.name))
        value.name = op.fresh_name(str(value.name))
        graph.register_initializer(value)
    for node in graph:
        node.name = op.fresh_name(node.name or node.op_type)
        for value in node.outputs:
            value.name = op.fresh_name(value.name) if value.name else value.name
        for subgraph in subgraphs(node):
            _rename(subgraph, op)


def _rewire(graph: ir.Graph, mapping: Mapping[ir.Value, ir.Value]) -> None:
    """Replace values wherever a graph or one of its subgraphs reads them."""
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value in mapping:
                node.replace_input_with(index, mapping[value])
        for subgraph in subgraphs(node):
            _rewire(subgraph, mapping)
    for index, value in enumerate(graph.outputs):
        if value in mapping:
            graph.outputs[index] = mapping[value]
