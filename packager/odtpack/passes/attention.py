"""Computes attention by blocks of queries, so that its memory grows linearly with the length.

    p = Softmax(... MatMul(q, k) ...);  y = MatMul(p, v)

becomes a Scan over blocks of at most :data:`BLOCK` rows of q, and of what else has a row for each
query, such as a mask. No shape of its body is known in full, so the gradient of the Scan computes
the scores of a block again instead of keeping those of all blocks (:mod:`odtpack.autodiff.bodies`).
The block is the unit of M. Rabe and C. Staats, arXiv 2112.05682, over queries alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import onnx_ir as ir

from odtpack.autodiff.bodies import copy_node, rewire
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops, dims_of

BLOCK: Final = 128  # queries of a block: fewer make its products slow
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Where", "Identity"}
_SINCE = 13  # until then a Softmax is over all axes from its own on


def by_blocks(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every attention over many or any number of queries."""
    for each in [_attention(node) for node in graph if op.opset >= _SINCE]:
        if each is not None:
            _rewrite(op, *each)


def _attention(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value]] | None:
    """The attention that a Softmax belongs to: from the first product to the second."""
    # And what its nodes read that has a row for each query, queries first.
    if node.op_type != "Softmax" or node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    above, below = _above(node.inputs[0]), _below(node.outputs[0])
    dims = dims_of(node.outputs[0])
    if not above or not below or dims is None or len(dims) < 3:
        return None
    queries, rows = above[0].inputs[0], dims[-2]
    if node.attributes.get_int("axis", -1) not in (-1, len(dims) - 1) or queries is None:
        return None
    whole = (above[0].inputs[1], below[-1].inputs[1])  # every block reads all keys and values
    if queries in whole or any(
        v in whole for each in (*above[1:], *below[:-1]) for v in each.inputs
    ):
        return None
    if isinstance(rows, int) and rows < 2 * BLOCK:
        return None
    nodes = [*above, node, *below]
    made = {node.outputs[0] for node in nodes}
    rowwise = [queries]
    for value in (v for node in nodes for v in node.inputs if v not in made):
        dims = dims_of(value)
        if value is None or dims is None:
            return None
        if value in whole or len(dims) < 2 or dims[-2] == 1:
            continue
        if value not in rowwise:
            rowwise.append(value)
    return nodes, rowwise


def _above(value: ir.Value | None) -> list[ir.Node] | None:
    """From a product to what computes a value of it element by element."""
    node = graphs.producer(value, "MatMul", *_ELEMENTWISE)
    if node is None or value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    if node.op_type == "MatMul":
        return [node]
    found = (above for operand in node.inputs if (above := _above(operand)))
    return next(([*above, node] for above in found), None)


def _below(value: ir.Value) -> list[ir.Node] | None:
    """From what reads a value element by element to the product whose left side it is."""
    if value.is_graph_output() or len(value.uses()) != 1:
        return None
    ((node, index),) = value.uses()
    if node.domain or node.graph is not graphs.maker(value).graph:
        return None
    if node.op_type == "MatMul":
        return [node] if index == 0 else None
    below = _below(node.outputs[0]) if node.op_type in _ELEMENTWISE else None
    return below and [node, *below]


def _rewrite(op: Ops, nodes: Sequence[ir.Node], rowwise: Sequence[ir.Value]) -> None:
    result = nodes[-1].outputs[0]
    rank = len(dims_of(result) or ())
    keys = _same_keys(nodes)
    # The name of a size, so that equal ones are known to be equal.
    block = op.fresh_name("attention.queries")
    with op.before(nodes[-1]):
        rows = op.slice(op.Shape(rowwise[0]), [0], [-2], [-1])
        count, length = even_blocks(op, rows, BLOCK)
        wholes = [_blocks(op, v, rows, count, length, _filling(nodes, v)) for v in rowwise]
        parts = [_like(ir.Value(name=op.fresh_name(f"{value.name}.block")), value, rows=block)
                 for value in rowwise]  # fmt: skip
        body = ir.Graph(parts, [], nodes=[], name=op.fresh_name("attention.block"))
        inside = dict(zip(rowwise, parts, strict=True))
        for node in nodes:
            copy = copy_node(node, op)
            body.append(copy)
            inside[node.outputs[0]] = each = _like(copy.outputs[0], node.outputs[0], rows=block)
            if node is not nodes[-1]:
                each.shape = ir.Shape([*(each.shape or ())[:-1], keys])
        rewire(body, inside)
        body.outputs.append(inside[result])
        stacked = op.Scan(*wholes, body=ir.AttrGraph("body", body), num_scan_inputs=len(wholes))
        stacked = _like(stacked, result, 0)
        y = _like(op.transpose(stacked, *range(1, rank - 1), 0, rank - 1, rank), result, rank - 2)
        y = _like(op.Reshape(y, _sizes(op, y, rank - 2, op.Mul(count, length))), result)
        y = op.Slice(y, op.ints(0), rows, op.ints(rank - 2))
    graphs.replace(result, y, reversed(nodes))


def even_blocks(op: Ops, rows: ir.Value, most: int) -> tuple[ir.Value, ir.Value]:
    """How many blocks of at most so many rows there are, and how long each is."""
    count = op.Max(op.Div(op.Add(rows, most - 1), most), 1)
    return count, op.Div(op.Add(rows, op.Sub(count, 1)), count)


def _filling(nodes: Sequence[ir.Node], value: ir.Value) -> str | None:
    """How ``Pad`` fills the last block: by zeros, or by the last row where zeros may give NaN."""
    readers = (node.op_type for node in nodes if value in node.inputs)
    return None if {*readers} <= {"MatMul", "Add", "Sub", "Mul"} else "edge"


def _blocks(
    op: Ops, value: ir.Value, rows: ir.Value, count: ir.Value, length: ir.Value, filling: str | None
) -> ir.Value:
    """A value's blocks of one length along a new first axis."""
    rank = len(dims_of(value) or ())
    # An axis of any length may be one of length 1, which every query reads.
    full = _like(op.Expand(value, op.Concat(op.ints(*[1] * (rank - 2)), rows, op.ints(1), axis=0)),
                 value)  # fmt: skip
    missing = op.Sub(op.Mul(count, length), rows)
    pads = op.Concat(op.ints(*[0] * (2 * rank - 2)), missing, op.ints(0), axis=0)
    full = _like(op.Pad(full, pads, mode=filling), value)
    cut = _like(op.Reshape(full, _sizes(op, value, rank - 2, count, length)), value, rank - 2)
    return _like(op.transpose(cut, rank - 2, *range(rank - 2), rank - 1, rank), value, 0)


def _sizes(op: Ops, value: ir.Value, lead: int, *rows: ir.Value) -> ir.Value:
    """The shape of a value with other sizes between the first axes and the last one."""
    sizes, rank = op.Shape(value), len(dims_of(value) or ())
    first, last = op.slice(sizes, [0], [0], [lead]), op.slice(sizes, [0], [rank - 1], [rank])
    return op.Concat(first, *rows, last, axis=0)


def _same_keys(nodes: Sequence[ir.Node]) -> int | str | None:
    """Let keys and values have one size, as the second product needs; return it."""
    keys, values = nodes[0].inputs[1], nodes[-1].inputs[1]
    of_keys, of_values = dims_of(keys), dims_of(values)
    if of_keys is None or of_values is None or values is None:
        return None
    if isinstance(of_values[-2], int):
        return of_values[-2]
    values.shape = ir.Shape([*of_values[:-2], of_keys[-1], of_values[-1]])
    return of_keys[-1]


def _like(
    value: ir.Value, like: ir.Value, axis: int | None = None, rows: str | None = None
) -> ir.Value:
    """Note the type and shape of a value with other queries: how many there are is not said."""
    # axis: One more, that of blocks.
    dims = dims_of(like) or ()
    shape: list[int | str | None] = [*dims[:-2], rows, dims[-1]]
    if axis is not None:
        shape.insert(axis, None)
    value.type, value.shape = like.type, ir.Shape(shape)
    return value
