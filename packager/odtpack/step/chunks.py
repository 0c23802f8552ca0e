"""Updates of large parameters, a part of the rows after the other, in one Scan.

The temporaries of an update are as large as what it updates. A Scan cuts its inputs into views and
has its body write into views of its outputs, so that an update that is bound in place takes the
temporaries of one part, and its vectors stay in the processor's caches. Where one product computes
the gradient, the body computes its rows, and the gradient never exists as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final

import onnx_ir as ir

from odtpack.graph import match
from odtpack.graph.graphs import static_dims
from odtpack.graph.ops import Ops
from odtpack.step import axpy
from odtpack.step.keep import hoist

LARGE: Final = 1 << 18
"""Elements from which on a parameter is updated in parts."""

PART: Final = 1 << 17
"""Most elements of a part, see ``CHUNK_ELEMENTS``: half a MiB of each vector."""

LEAST_PART: Final = 1 << 14
"""Fewest elements of a part: running a body costs some ten microseconds."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a tensor is cut: ``parts`` times ``rows`` rows of ``width`` elements."""

    parts: int
    rows: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the tensor whose first axis counts the parts."""
        return self.parts, self.rows, self.width

    @property
    def flat(self) -> Cut:
        """The same parts, each a single row."""
        return Cut(self.parts, 1, self.rows * self.width)


def cut(dims: Sequence[int]) -> Cut | None:
    """How to cut a tensor; None if it is small, or its rows cannot be divided evenly."""
    size = math.prod(dims)
    if size < LARGE or len(dims) < 2:
        return None
    width = size // dims[0]
    fitting = [n for n in range(1, dims[0] + 1) if dims[0] % n == 0 and n * width <= PART]
    rows = max(fitting, default=0)
    if rows * width < LEAST_PART:
        return None
    return Cut(dims[0] // rows, rows, width)


def write(
    op: Ops, parts: Cut, vectors: Mapping[str, ir.Value], gradient: ir.Value, update: axpy.Write
) -> dict[str, ir.Value]:
    """Write an update in parts.

    Args:
        op: Writer for the graph, or for a branch in it.
        parts: How the parameter is cut.
        vectors: The parameter and its state, by name, of the shape of ``parts`` or, each part a
            single row, of that of ``parts.flat``.
        gradient: Its gradient, which nothing but the update reads.
        update: Writes the update of one part; ``gradients`` is among what it gets.

    Returns:
        The new values, by name, of the shape of ``vectors``.
    """
    shape = static_dims(vectors["params"]) or ()
    dtype = op.type_of(vectors["params"])
    body = ir.Graph([], [], nodes=[], name=op.fresh_name("update/part"))
    inner = op.inside(body)
    kept = {name: _input(op, body, name, dtype, shape[1:]) for name in vectors}
    product = _rows_of_product(op, inner, gradient, parts)
    if product is None:
        flat = op.reshape(gradient, *shape)
        rows = _input(op, body, "gradients", dtype, shape[1:])
    else:
        flat, rows = product
        if shape != parts.shape:
            rows = inner.reshape(rows, *shape[1:])
    results = axpy.write(inner, kept, rows, update)
    for value in results.values():
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape[1:])
        body.outputs.append(value)
    hoist(op, body, set(body.inputs))  # what is the same for every part: scalars of the formula
    scanned = [*vectors.values(), flat]
    outputs = op.emit("Scan", scanned, outputs=len(results),
        body=ir.AttrGraph("body", body), num_scan_inputs=len(scanned))  # fmt: skip
    for value in outputs:
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return dict(zip(results, outputs, strict=True))


def _input(
    op: Ops, body: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int | str]
) -> ir.Value:
    value = ir.val(op.fresh_name(f"update/{name}"), dtype=dtype, shape=shape)
    body.inputs.append(value)
    return value


def _rows_of_product(
    op: Ops, inner: Ops, gradient: ir.Value, parts: Cut
) -> tuple[ir.Value, ir.Value] | None:
    """What to cut, and the rows of the gradient in the body; None unless it is one product."""
    node = product_of(gradient)
    if node is None:
        return None
    left, right = node.inputs[:2]
    assert left is not None  # noqa: S101 - a Gemm has two factors
    dtype = op.type_of(gradient)
    left.type = ir.TensorType(dtype)
    depth = op.fresh_name("depth")  # known when the model runs
    attributes = dict(node.attributes)
    if node.attributes.get_int("transA", 0):
        flat = op.transpose(op.reshape(left, -1, parts.parts, parts.rows), 1, 0, 2)
        shape: tuple[int | str, ...] = (depth, parts.rows)
    else:
        flat = op.reshape(left, parts.parts, parts.rows, -1)
        shape = (parts.rows, depth)
    own = _input(op, inner.graph, "factor", dtype, shape)
    product = ir.node("Gemm", [own, right], attributes, name=op.fresh_name("update/product"))
    rows = product.outputs[0]
    rows.name, rows.type = product.name, ir.TensorType(dtype)
    rows.shape = ir.Shape(parts.shape[1:])
    inner.graph.append(product)
    assert node.graph is not None  # noqa: S101 - it was found there
    node.graph.remove(node, safe=True)
    return flat, rows


def product_of(gradient: ir.Value) -> ir.Node | None:
    """The one product that computes a gradient, whose rows can be computed part by part."""
    node = match.producer(gradient, "Gemm")
    if node is None or len(gradient.uses()) or any(v is not None for v in node.inputs[2:]):
        return None
    return node
