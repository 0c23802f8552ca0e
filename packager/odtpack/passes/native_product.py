"""Wraps products with matrices of few bits, and their gradients; see :mod:`odtpack.passes.native`.

A group is a product and the nodes that unpack its second operand, back to the codes and the scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from odtpack.graph.graphs import constant, static_dims
from odtpack_runtime.package.native_product import END, UNPACKING

_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_MOST_FIXED = 8
"""Elements of a constant that a body has."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes, in order, of which the last is the product."""

    nodes: list[ir.Node]  # others may read the first ones, too
    read: list[ir.Value]  # codes, scales and x
    fixed: list[ir.Value]  # constants that nodes read besides
    programs: list[list[int]]  # of the kernel, of which one may be right


def groups(graph: ir.Graph) -> Iterator[Group]:
    """Each product of a graph with a matrix of few bits."""
    order = {node: place for place, node in enumerate(graph)}
    for node in order:
        if node.op_type in END and not node.domain and len(node.inputs) == 2:
            found = _group(node, order)
            if found:
                yield found


def _group(end: ir.Node, order: dict[ir.Node, int]) -> Group | None:
    x, operand = end.inputs
    nodes, fixed, sized = {end}, dict[ir.Value, None](), dict[ir.Value, None]()
    codes, scales = dict[ir.Value, None](), dict[ir.Value, None]()
    waiting = [operand]
    while waiting:
        value = waiting.pop()
        if value is None or value is x:
            return None
        writer = value.producer()
        if constant(value, _MOST_FIXED) is not None:
            fixed[value] = None
        elif writer is not None and writer in order and writer.op_type in UNPACKING:
            nodes.add(writer)
            (measured,) = writer.inputs if writer.op_type == "Size" else (None,)
            if measured is None:
                waiting += writer.inputs
            elif measured is not x:
                sized[measured] = None
        else:
            (codes if value.dtype in _BYTES else scales)[value] = None
    matrices = [node for node in nodes if node.op_type == "DequantizeLinear"]
    sized = {v: None for v in sized if v.producer() not in nodes}
    if x is None or (len(codes), len(scales), len(matrices)) != (1, 1, 1) or len(sized) > 1:
        return None
    dims = static_dims(matrices[0].outputs[0])
    if dims is None or len(dims) != 2:
        return None
    if {v.dtype for v in (x, *scales, end.outputs[0])} != {ir.DataType.FLOAT}:
        return None
    (stored,), (scale,), reader = codes, scales, matrices[0]
    axis = reader.attributes.get_int("axis", 1) % 2
    signed = stored.dtype == ir.DataType.INT8
    bits = 4 if any(node.op_type == "BitwiseAnd" for node in nodes) else 8
    block = reader.attributes.get_int("block_size", 0)
    if block:
        blocks = (block, 1) if axis == 0 else (1, block)
    else:  # a scale for each place of the axis
        blocks = (1, dims[1]) if axis == 0 else (dims[0], 1)
    programs = [
        [transposed, *dims, *blocks, bits, int(signed), zero]
        for transposed in (1, 0)
        for zero in (1 << bits - 1, 0)
    ]
    read = [stored, scale, x, *sized]
    return Group(sorted(nodes, key=order.__getitem__), read, [*fixed], programs)
