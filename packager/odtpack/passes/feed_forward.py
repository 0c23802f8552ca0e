"""Computes feed-forward layers by blocks of tokens, so that their wide values exist for one block.

    g = MatMul(x, W);  u = MatMul(x, V);  h = Mul(act(g), u);  y = MatMul(h, D)

becomes a Scan over blocks of rows of x, a row being a token. As of attention
(:mod:`odtpack.passes.attention`), its gradient computes the wide values of a block again. Adapters
beside the products, and products that were taken apart, belong to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import onnx_ir as ir

from odtpack.autodiff.bodies import copy_node, rewire
from odtpack.graph import graphs
from odtpack.graph.graphs import SHAPE, Ops, dims_of, reads, static_dims
from odtpack.passes.attention import even_blocks
from odtpack.passes.finishing import SMALLEST

BLOCK: Final = 5 << 18
"""Numbers in a wide value of a block: 269 tokens of a width of 4,864. In the backward model about
ten such values live at once, and each block unpacks the weights of the layer once more."""

# What keeps rows of zeros finite, and their gradients too: the last block may be filled with them.
_ELEMENTWISE = {
    "Add", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
    "Max", "Min", "Mish", "Mul", "Neg", "Relu", "Sigmoid", "Softplus", "Sub", "Tanh",
}  # fmt: skip


class _Layer(NamedTuple):
    tokens: int  # of a block, at most
    nodes: Sequence[ir.Node]  # in order
    entries: Sequence[ir.Value]  # rows that it reads
    result: ir.Value


def by_blocks(op: Ops, graph: ir.Graph) -> None:
    """Rewrite every feed-forward layer of many or any number of tokens."""
    seen: set[ir.Node] = set()
    found = []
    for node in graph:
        if node not in seen and (dims := _widens(node)):
            region = _Region(*dims)
            layer = region.layer(graph, node)
            seen |= region.nodes
            found += [layer] if layer else []
    for layer in found:
        _rewrite(op, *layer)


def _widens(node: ir.Node) -> tuple[tuple[int | str | None, ...], int] | None:
    """The sizes and the width that a product with a wide matrix gives; None of anything else."""
    if node.op_type != "MatMul" or node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    dims = dims_of(node.outputs[0])
    readers = [*node.outputs[0].consumers()]
    if len(readers) == 1 and readers[0].op_type == "Concat":  # a part of a product
        dims = dims_of(readers[0].outputs[0])
    shape = static_dims(node.inputs[1])
    if shape is None or dims is None or len(shape) != 2 or len(dims) < 2 or None in dims:
        return None
    rows, width = [size for size in dims[:-1] if isinstance(size, int)], dims[-1]
    if not isinstance(width, int) or width <= shape[0] or shape[0] * width < SMALLEST:
        return None
    if len(rows) == len(dims) - 1 and math.prod(rows) <= _tokens(width):
        return None
    return tuple(dims[:-1]), width


def _tokens(width: int) -> int:
    """How many tokens a block has at most."""
    return max(BLOCK // width, 1)


class _Region:
    """The nodes around values of one width."""

    def __init__(self, lead: tuple[int | str | None, ...], width: int) -> None:
        self.lead, self.width = lead, width
        self.nodes: set[ir.Node] = set()

    def layer(self, graph: ir.Graph, first: ir.Node) -> _Layer | None:
        """The layer that a product widens; None if anything in it mixes or keeps tokens."""
        if not self._flood(first):
            return None
        self._absorb(graph)
        nodes = [node for node in graph if node in self.nodes]
        made = {value for node in nodes for value in node.outputs}
        entries = dict.fromkeys(v for n in nodes for v in self._rows(n) if v not in made)
        if any(n.op_type == "MatMul" and n.inputs[1] in made | {*entries} for n in nodes):
            return None
        results = [
            v for v in made if v.is_graph_output() or not self.nodes.issuperset(v.consumers())
        ]
        if (
            len(results) != 1
            or not self._is_row(results[0])
            or dims_of(results[0]) == (*self.lead, self.width)
        ):
            return None
        after = set(results)  # nothing of the layer may follow from its result
        for node in graph:
            if node in self.nodes:
                if any(v in after and v not in results for v in reads(node)):
                    return None
            elif not after.isdisjoint(reads(node)):
                after.update(node.outputs)
        return _Layer(_tokens(self.width), nodes, [*entries], results[0])

    def _flood(self, first: ir.Node) -> bool:
        """Take every node that gives or reads a wide value, or a part of one."""
        wide, queue = set(first.outputs), [*first.outputs]
        while queue:
            value = queue.pop()
            maker = value.producer()
            around = [*value.consumers(), *([] if maker is None else [maker])]
            if maker is None or value.is_graph_output():
                return False
            for node in around:
                if not self._by_row(node) or (node.op_type == "MatMul" and value is node.inputs[1]):
                    return False
                self.nodes.add(node)
                near = [*node.outputs] if value in node.inputs else []
                if node.op_type != "MatMul":
                    near += [*self._rows(node), *node.outputs]
                new = [v for v in near if v not in wide and self._is_wide(v, node)]
                wide.update(new)
                queue += new
        return True

    def _absorb(self, graph: ir.Graph) -> None:
        """Take thin products and cuts that it alone reads, and what follows from it alone."""
        for node in reversed([*graph]):
            alone = not any(
                v.is_graph_output() or not self.nodes.issuperset(v.consumers())
                for v in node.outputs
            )
            if alone and node.op_type in ("MatMul", "Split") and self._by_row(node):
                self.nodes.add(node)
        for node in graph:
            rows = self._rows(node) if self._by_row(node) else []
            if rows and all(v.producer() in self.nodes for v in rows):
                self.nodes.add(node)

    def _is_wide(self, value: ir.Value, node: ir.Node) -> bool:
        """Whether a value is of the width, or a part of one that is."""
        return self._is_row(value) and (
            (dims_of(value) or ())[-1] == self.width or node.op_type in ("Split", "Concat")
        )

    def _is_row(self, value: ir.Value) -> bool:
        dims = dims_of(value)
        return dims is not None and tuple(dims[:-1]) == self.lead and isinstance(dims[-1], int)

    def _rows(self, node: ir.Node) -> list[ir.Value]:
        """What a node reads that has a row for each token."""
        given = node.inputs[:1] if node.op_type == "MatMul" else node.inputs
        return [v for v in given if v is not None and self._is_row(v)]

    def _by_row(self, node: ir.Node) -> bool:
        """Whether a row of what a node gives follows from the same row of what it reads."""
        if node.domain or not all(map(self._is_row, node.outputs)) or not self._rows(node):
            return False
        others = [v for v in node.inputs if v is not None and v not in self._rows(node)]
        ranks = [None if (dims := dims_of(v)) is None else len(dims) for v in others]
        if node.op_type == "MatMul":
            return ranks == [2]
        if node.op_type in ("Split", "Concat"):
            axis = node.attributes.get_int("axis", 0)
            return axis in (-1, len(self.lead)) and all(rank == 1 for rank in ranks)
        return node.op_type in _ELEMENTWISE and all(rank in (0, 1) for rank in ranks)


def _rewrite(
    op: Ops, tokens: int, nodes: Sequence[ir.Node], entries: Sequence[ir.Value], result: ir.Value
) -> None:
    # The name of a size, so that equal ones are known to be equal.
    block = op.fresh_name("feed_forward.tokens")
    with op.before(nodes[-1]):
        flat = [_typed(op.reshape(v, -1, _width(v)), v, None, _width(v)) for v in entries]
        rows = op.slice(op.Shape(flat[0]), [0], [0], [1])
        count, length = even_blocks(op, rows, tokens)
        pads = op.Concat(op.ints(0, 0), op.Sub(op.Mul(count, length), rows), op.ints(0), axis=0)
        wholes = []
        for value in flat:
            full = _typed(op.Pad(value, pads), value, None, _width(value))
            sizes = op.Concat(count, length, op.ints(_width(value)), axis=0)
            wholes.append(_typed(op.Reshape(full, sizes), value, None, None, _width(value)))
        parts = [_typed(ir.Value(name=op.fresh_name(f"{v.name}.block")), v, block, _width(v))
                 for v in entries]  # fmt: skip
        body = ir.Graph(parts, [], nodes=[], name=op.fresh_name("feed_forward.block"))
        inside = dict(zip(entries, parts, strict=True))
        for node in nodes:
            copy = copy_node(node, op)
            if "axis" in copy.attributes:
                copy.attributes["axis"] = ir.AttrInt64("axis", 1)
            body.append(copy)
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                inside[old] = _typed(new, old, block, _width(old))
        rewire(body, inside)
        body.outputs.append(inside[result])
        width = _width(result)
        y = op.Scan(*wholes, body=ir.AttrGraph("body", body), num_scan_inputs=len(wholes))
        y = _typed(y, result, None, None, width)
        # So that the gradient alone does not compute the result for its shape.
        y.meta[SHAPE] = op.Concat(count, length, op.ints(width), axis=0)
        y = _typed(op.reshape(y, -1, width), result, None, width)
        y = _typed(op.Pad(y, op.Neg(pads)), result, None, width)
        lead = op.slice(op.Shape(entries[0]), [0], [0], [-1])
        y = op.Reshape(y, op.Concat(lead, op.ints(width), axis=0))
    graphs.replace(result, y, reversed(nodes))


def _width(value: ir.Value) -> int:
    return int((dims_of(value) or ())[-1] or 0)


def _typed(value: ir.Value, like: ir.Value, *dims: int | str | None) -> ir.Value:
    value.type, value.shape = like.type, ir.Shape(dims)
    return value
