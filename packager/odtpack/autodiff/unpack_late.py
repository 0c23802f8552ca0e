"""Unpacks a weight of few bits for each node that reads it, when that node is at work.

A weight W = DequantizeLinear(codes, scales) is read by the forward pass and by the gradient of its
input. As one value it would lie in float32 from the one to the other, and with it all other
weights. Each reader gets a chain of nodes of its own:

    y  = MatMul(x, W)               y  = MatMul(x, DequantizeLinear(codes, scales * one(x)))
    dx = MatMul(dy, W^T)       ->   dx = MatMul(dy, Transpose(DequantizeLinear(codes,
                                                                       scales * one(dy))))

one(v) is 1, computed from the number of v's elements. So ONNX Runtime neither merges the chains,
which read different scales, nor runs one before v is there, nor takes MatMulNBits in its place,
which would round x to 8 bits.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.graph.ops import Ops

SMALLEST = 256
"""Elements from which on it pays to store a weight in few bits, and to unpack it late."""


def rewrite(op: Ops, graph: ir.Graph) -> bool:
    """Give each reader of an unpacked weight its own chain; return whether there were any."""
    chains = find_chains(graph)
    readers = [
        (node, index, value)
        for node in graph
        if not any(output in chains for output in node.outputs)
        for index, value in enumerate(node.inputs)
        if value is not None and value in chains
    ]
    ones: dict[ir.Value, ir.Value] = {}
    for node, index, value in readers:
        late = next((v for v in node.inputs if v is not None and _is_computed(v, chains)), None)
        if late is None or _is_dequantized(late):
            continue
        with op.before(node):
            if late not in ones:
                # Size is an integer; the least of it and 1 is 1.
                count = op.Min(op.Size(late), 1)
                ones[late] = op.cast(count, ir.DataType.FLOAT)
            copy = _copy(op, value, chains, ones[late], {})
        node.replace_input_with(index, copy)
    return bool(readers)


def _is_dequantized(value: ir.Value) -> bool:
    """Whether a product of integers may take the place of its reader."""
    node = value.producer()
    return node is not None and node.op_type == "DequantizeLinear"


def _is_computed(value: ir.Value, chains: set[ir.Value]) -> bool:
    return value not in chains and not value.is_initializer()


def find_chains(graph: ir.Graph) -> set[ir.Value]:
    """Values that follow from stored codes and other constants alone."""
    found: set[ir.Value] = set()
    constants = {v for v in graph.initializers.values() if not v.is_graph_input()}
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        if not inputs or node.domain not in ("", "ai.onnx") or not constants.issuperset(inputs):
            continue
        constants.update(node.outputs)
        starts = node.op_type == "DequantizeLinear" and _size(inputs[0]) >= SMALLEST
        if starts or not found.isdisjoint(inputs):
            found.update(node.outputs)
    return found


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size


def _copy(
    op: Ops,
    value: ir.Value,
    chains: set[ir.Value],
    one: ir.Value,
    made: dict[ir.Value, ir.Value],
) -> ir.Value:
    """The chain that ends in a value, once more, with its scales times one."""
    if value not in chains:
        return value
    if value not in made:
        node = value.producer()
        assert node is not None  # noqa: S101 - chains are of nodes
        inputs = [
            None if each is None else _copy(op, each, chains, one, made) for each in node.inputs
        ]
        if node.op_type == "DequantizeLinear" and inputs[1] is not None:
            inputs[1] = op.Mul(inputs[1], op.cast(one, op.type_of(inputs[1])))
        attributes = {key: each.value for key, each in node.attributes.items()}
        outputs = op.emit(node.op_type, inputs, **attributes)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.type, new.shape = old.type, old.shape
            made[old] = new
    return made[value]
