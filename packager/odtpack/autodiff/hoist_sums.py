"""Takes sums of matrix products over turns out of a backward loop.

A weight that every turn multiplies by gets in each turn the cotangent p' q, of rows p of
the forward body and rows q of the backward body, and

    sum over turns of p' q  =  P' Q,  the rows of all turns one below the other.

One product of many rows is several times faster than many of few rows, each followed by an
addition of the size of the weight; and P often is stacked anyway.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import onnx_ir as ir

from odtpack.autodiff.bodies import BackwardBody


@dataclasses.dataclass(frozen=True)
class Product:
    """A product p' q, of which one operand is the forward body's.

    Attributes:
        left: Rows p, by turn.
        right: Rows q, by turn.
        forward: Which of the two is the forward body's.
    """

    left: ir.Value
    right: ir.Value
    forward: ir.Value

    @property
    def ours(self) -> ir.Value:
        """The operand that is the backward body's."""
        return self.right if self.left is self.forward else self.left


def take_products(
    back: BackwardBody, total: ir.Value, rows: Collection[ir.Value]
) -> tuple[ir.Value | None, list[Product]]:
    """Take the products out of a sum in a backward body.

    Args:
        back: The body; the nodes of the products are removed from it.
        total: A sum that nothing reads.
        rows: Matrices of the forward body that can be stacked.

    Returns:
        What is left of the sum (None: nothing), and the products.
    """
    additions, products, rest, queue = [], [], [], [total]
    while queue:
        value = queue.pop()
        node = value.producer()
        private = len(value.uses()) == (0 if value is total else 1)
        if node is None or node.graph is not back.graph or not private:
            rest.append(value)
        elif node.op_type == "Add" and not node.domain:
            additions.append(node)
            queue.extend(v for v in node.inputs if v is not None)
        elif _is_product(node, back, rows):
            products.append(node)
        else:
            rest.append(value)
    if not products:
        return total, []
    taken = []
    for node in additions:
        back.graph.remove(node, safe=True)
    for node in products:
        left, right = node.inputs
        if left is not None and right is not None:
            taken.append(Product(left, right, left if left in rows else right))
        back.graph.remove(node, safe=True)
    return functools.reduce(back.op.Add, rest) if rest else None, taken


def _is_product(node: ir.Node, back: BackwardBody, rows: Collection[ir.Value]) -> bool:
    """Whether a node is p' q of a known matrix of the forward body and one of this body."""
    if node.op_type != "Gemm" or node.domain or len(node.inputs) != 2:
        return False
    if (node.attributes.get_int("transA", 0), node.attributes.get_int("transB", 0)) != (1, 0):
        return False
    if node.attributes.get_float("alpha", 1.0) != 1.0:
        return False
    forward = [value for value in node.inputs if value in rows]
    ours = [v for v in node.inputs if v is not None and _is_of(v, back.graph)]
    return len(forward) == 1 and len(ours) == 1


def _is_of(value: ir.Value, graph: ir.Graph) -> bool:
    node = value.producer()
    return value in graph.inputs if node is None else node.graph is graph
