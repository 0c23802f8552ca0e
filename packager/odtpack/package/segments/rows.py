"""Takes products with large stored codes apart, so that a part of a matrix is unpacked at a time.

Rows of codes follow each other in a file, so that a part of a matrix is a tensor of its own there:

    y = x W                       ->  y = x0 W0 + x1 W1 + ...     x0, x1, ... = Split(x)
    y = x W^T                     ->  y = Concat(x W0^T, x W1^T, ...)

with W0, W1, ... the rows of W = DequantizeLinear(codes, scales). Gradients follow from what is
written here: that of Split is Concat, and the other way round.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import dims_of, mark_constant, static_dims
from odtpack.graph.ops import Ops

LARGEST_PART = 1 << 20
"""Elements of a matrix that are unpacked at a time: 4 MiB in float32."""


def split_rows(graph: ir.Graph) -> None:
    """Take the products of a graph apart whose matrices have more elements than that.

    A matrix that is read by anything else, as DoRA's norms read it, stays whole.

    Args:
        graph: A forward graph whose stored codes are initializers.
    """
    op = Ops(graph, "rows/")
    for node in [*graph]:
        if node.op_type == "DequantizeLinear" and node.domain == "":
            _split(op, node)


def _split(op: Ops, unpack: ir.Node) -> None:
    weight = unpack.outputs[0]
    shape = static_dims(weight)
    if shape is None or len(shape) != 2 or math.prod(shape) <= LARGEST_PART:
        return
    stored = [value for value in unpack.inputs if value is not None]
    if any(value.const_value is None for value in stored) or len(stored[0].uses()) > 1:
        return
    found = _product(weight)
    if found is None:
        return
    product, between = found
    source, old = product.inputs[0], product.outputs[0]
    assert source is not None  # noqa: S101 - a product has two
    sizes = _sizes(unpack, *shape)
    if len(sizes) == 1:
        return
    with op.before(product):
        parts, start = [], 0
        for size in sizes:
            parts.append(_rows(op, unpack, start, size))
            start += size
        if between is not None:
            turned = [op.Transpose(part, perm=[1, 0]) for part in parts]
            result = op.Concat(*(op.MatMul(source, part) for part in turned), axis=-1)
        else:
            cuts = op.split(source, -1, sizes)
            products = [op.MatMul(x, part) for x, part in zip(cuts, parts, strict=True)]
            result = functools.reduce(op.Add, products)
    result.type, result.shape = old.type, old.shape
    old.replace_all_uses_with(result)
    for node in (product, between, unpack):
        if node is not None:
            op.graph.remove(node, safe=True)


def _product(weight: ir.Value) -> tuple[ir.Node, ir.Node | None] | None:
    """The one product that reads a matrix, and the Transpose between them, if there is one."""
    between = None
    while len(weight.uses()) == 1 and not weight.is_graph_output():
        (reader, index), *_ = weight.uses()
        if reader.op_type == "MatMul":
            is_last = index == 1 and not reader.outputs[0].is_graph_output()
            return (reader, between) if is_last else None
        if reader.op_type != "Transpose" or between is not None:
            return None
        between, weight = reader, reader.outputs[0]
    return None


def _sizes(unpack: ir.Node, rows: int, columns: int) -> list[int]:
    """Rows of each part: whole blocks, and whole bytes of codes."""
    unit = math.lcm(_rows_of_scale(unpack), 2)
    most = max(LARGEST_PART // columns // unit, 1) * unit
    count = math.ceil(rows / most)
    size = math.ceil(rows / count / unit) * unit
    return [min(size, rows - start) for start in range(0, rows, size)]


def _rows_of_scale(unpack: ir.Node) -> int:
    """Rows that share a row of scales."""
    blocked = unpack.attributes.get_int("axis", 1) == 0
    return max(unpack.attributes.get_int("block_size", 0), 1) if blocked else 1


def _rows(op: Ops, unpack: ir.Node, start: int, size: int) -> ir.Value:
    """What unpacks some rows of a matrix."""
    stored = [value for value in unpack.inputs if value is not None]
    by_column = unpack.attributes.get_int("axis", 1) == 1
    step = _rows_of_scale(unpack)
    inputs = [_part(op, stored[0], start, size)]
    for value in stored[1:]:  # scales and zero points: of rows of blocks, of rows, or of columns
        rank = len(dims_of(value) or ())
        shared = rank == 0 or (rank == 1 and by_column)
        inputs.append(value if shared else _part(op, value, start // step, -(-size // step)))
    attributes = {key: each.value for key, each in unpack.attributes.items()}
    result = op.emit("DequantizeLinear", inputs, **attributes)[0]
    columns = (static_dims(unpack.outputs[0]) or ())[1:]
    result.type, result.shape = unpack.outputs[0].type, ir.Shape([size, *columns])
    return result


def _part(op: Ops, value: ir.Value, start: int, size: int) -> ir.Value:
    """An initializer with some rows of another one."""
    tensor = value.const_value
    assert tensor is not None  # noqa: S101 - of an initializer
    name = op.fresh_name(f"{value.name}.rows_{start}")
    shape = ir.Shape([size, *tensor.shape.numpy()[1:]])

    def read() -> ir.TensorProtocol:
        rows = np.ascontiguousarray(tensor.numpy()[start : start + size])
        return ir.Tensor(rows, dtype=tensor.dtype, name=name)

    lazy = ir.LazyTensor(read, dtype=tensor.dtype, shape=shape, name=name)
    part = ir.val(name, const_value=lazy, type=ir.TensorType(tensor.dtype), shape=shape)
    op.graph.register_initializer(part)
    mark_constant(part)
    return part
