"""Writes k x + y, with a scalar k, in one node: ``Gemm([[k]], x, y)``, one pass over memory.

Add and Mul, or Sub and Mul, are two, and ONNX Runtime's kernels for them are not as wide as those
for products. A Gemm may be written over its third factor, not over the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from odtpack.graph import match
from odtpack.graph.ops import Ops

Values: TypeAlias = "Mapping[str, ir.Value]"

Write: TypeAlias = "Callable[[Ops, Values], dict[str, ir.Value]]"
"""Writes an update: new values, by name, of some of the values that it gets by name."""


def suits(dtype: ir.DataType) -> bool:
    """Whether products of a type have a kernel for a row that is faster than two passes."""
    return dtype == ir.DataType.FLOAT


def write(
    op: Ops, kept: Mapping[str, ir.Value], gradient: ir.Value, update: Write
) -> dict[str, ir.Value]:
    """Write an update, with sums like these in one node.

    Args:
        op: Writer for the graph.
        kept: The parameter and its state, by name, which results may be written over; [1, N] if
            their type :func:`suits`.
        gradient: The gradient, of the same shape.
        update: Writes the update; ``gradients`` is among what it gets.

    Returns:
        The new values, by name.
    """
    last = next(reversed(op.graph), None)
    results = update(op, {**kept, "gradients": gradient})
    if not suits(op.type_of(gradient)):
        return results
    nodes = list(itertools.takewhile(lambda node: node is not last, reversed(op.graph)))
    return _fuse_sums(op, nodes[::-1], {*kept.values(), gradient}, {*kept.values()}, results)


def _fuse_sums(
    op: Ops,
    nodes: Sequence[ir.Node],
    rows: Collection[ir.Value],
    kept: Collection[ir.Value],
    results: Mapping[str, ir.Value],
) -> dict[str, ir.Value]:
    """Rewrite the sums of an update.

    Args:
        op: Writer for the graph of ``nodes``.
        nodes: The elementwise nodes of an update, in topological order; changed in place.
        rows: What they compute from that is no scalar, each [1, N].
        kept: Those of them that results may be written over.
        results: What the update gives, by name.

    Returns:
        The results after the rewrite.
    """
    found, instead = set(rows), {value: value for value in results.values()}
    for node in nodes:
        if found.isdisjoint(node.inputs):
            continue
        found.update(node.outputs)
        if node.op_type in ("Add", "Sub") and found.issuperset(node.inputs):
            total = _fuse_sum(op, node, found, kept, instead)
            if total is not None:
                found.add(total)
                if node.outputs[0] in instead:
                    instead[node.outputs[0]] = total
    return {name: instead[value] for name, value in results.items()}


def _fuse_sum(
    op: Ops,
    node: ir.Node,
    rows: Collection[ir.Value],
    kept: Collection[ir.Value],
    results: Collection[ir.Value],
) -> ir.Value | None:
    """Write y + k x or y - k x as one node, if ``node`` is one of them."""
    for place in (1, 0) if node.op_type == "Add" else (1,):
        product = match.producer(node.inputs[place], "Mul")
        if product is None or not match.private([product], node):
            continue
        if product.outputs[0] in results:
            continue
        scalars = [value for value in product.inputs if value not in rows]
        factors = [value for value in product.inputs if value in rows and value not in kept]
        if len(scalars) != 1 or len(factors) != 1 or scalars[0] is None:
            continue
        with op.before(node):
            size = _as_matrix(op, scalars[0], negative=node.op_type == "Sub")
            total: ir.Value = op.Gemm(size, factors[0], node.inputs[1 - place])
        match.replace(node.outputs[0], total, [node, product])
        return total
    return None


def _as_matrix(op: Ops, scalar: ir.Value, *, negative: bool) -> ir.Value:
    """A scalar, or less it, as [1, 1]."""
    known = ir.convenience.get_const_tensor(scalar)
    if known is not None:
        array = known.numpy().reshape(1, 1)
        return op.constant(np.negative(array) if negative else array)
    return op.reshape(op.Neg(scalar) if negative else scalar, 1, 1)
