"""Leaves out the key-value cache of a decoder: in training every sequence starts empty.

Exporters give a decoder the keys and values of earlier tokens as inputs, one pair for each block,
and the longer ones as outputs. Attention reads them, or a Concat puts them before the new ones:

    present = Concat(past, new)     ->  new
    GroupQueryAttention(q, k, v, past_key, past_value, ...)  ->  without the two

What else reads the past, be it the number of its tokens, reads an empty one.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.contrib import DOMAIN
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

_PAST = {  # inputs with past keys and values, and outputs with them and the new ones
    (DOMAIN, "GroupQueryAttention"): ((3, 4), (1, 2)),
    (DOMAIN, "MultiHeadAttention"): ((6, 7), (1, 2)),
    ("", "Attention"): ((4, 5), (1, 2)),
}
_TOKENS = 2  # axis of [batch, heads, tokens, size]


def drop(graph: ir.Graph) -> tuple[str, ...]:
    """Leave out the inputs and outputs of a graph that are a cache.

    An input is one if a node reads it as past keys or values, or a Concat, whose result is an
    output, puts it in front along the tokens, whose number is open.

    Returns:
        Names of the inputs that are left out.
    """
    found = [value for value in graph.inputs if _is_past(value)]
    kept = [value for value in graph.inputs if value not in found]
    if not found or not kept:
        return ()
    op = Ops(graph, "cache/")
    for past in found:
        presents = _take_out(past)
        outputs = [value for value in graph.outputs if value not in presents]
        graph.outputs[:] = outputs or [*graph.outputs]
        if past.uses():
            _make_empty(op, graph, past, kept[0])
    graph.inputs[:] = kept
    return tuple(str(value.name) for value in found)


def _is_past(value: ir.Value) -> bool:
    dims = dims_of(value)
    if dims is None or len(dims) != 4 or isinstance(dims[_TOKENS], int):
        return False
    if value.is_initializer() or value.is_graph_output():
        return False
    return any(_present(node, index) is not None for node, index in value.uses())


def _present(node: ir.Node, index: int) -> tuple[ir.Value, ...] | None:
    """The values that hold the past and new tokens, if a node reads its input as the past."""
    if node.op_type == "Concat" and node.domain in ("", "ai.onnx"):
        ahead = index == 0 and len(node.inputs) == 2
        along = node.attributes.get_int("axis", 0) % 4 == _TOKENS
        return (node.outputs[0],) if ahead and along and node.outputs[0].is_graph_output() else None
    domain = "" if node.domain == "ai.onnx" else node.domain
    inputs, outputs = _PAST.get((domain, node.op_type), ((), ()))
    if index not in inputs:
        return None
    return tuple(node.outputs[i] for i in outputs if i < len(node.outputs))


def _take_out(past: ir.Value) -> set[ir.Value]:
    """Let the nodes that read a past go without it; return what held it with the new tokens."""
    presents: set[ir.Value] = set()
    for node, index in [*past.uses()]:
        held = _present(node, index)
        if held is None:
            continue
        presents.update(held)
        if node.op_type == "Concat":
            new = node.inputs[1]
            assert new is not None  # noqa: S101 - a Concat has no absent inputs
            new_readers = [*node.outputs[0].uses()]
            for reader, place in new_readers:
                reader.replace_input_with(place, new)
            node.replace_input_with(0, new)
        else:
            node.replace_input_with(index, None)
    return presents


def _make_empty(op: Ops, graph: ir.Graph, past: ir.Value, first: ir.Value) -> None:
    """Put keys or values of no tokens in the place of an input: [batch, heads, 0, size]."""
    dims = dims_of(past) or ()
    readers = [*past.uses()]
    shape = [dim if isinstance(dim, int) else 1 for dim in dims]
    shape[_TOKENS] = 0
    dtype = past.dtype or ir.DataType.FLOAT
    with op.before(graph[0]):
        empty = op.constant(np.zeros(shape, dtype.numpy()))
        if not isinstance(dims[0], int):  # as many samples as the first input has
            batch = op.slice(op.Shape(first), [0], [0], [1])
            empty = op.Expand(empty, op.Concat(batch, op.ints(*shape[1:]), axis=0))
    empty.type = past.type
    for node, index in readers:
        node.replace_input_with(index, empty)
