"""Weights of 4 bits as bytes that a model takes apart: not every binding of ONNX Runtime has them.

    W = DequantizeLinear(codes, s)   ->   low  = BitwiseAnd(bytes, 15)
                                          high = BitShift(bytes, 4)
                                          W    = DequantizeLinear(Reshape(Concat(low, high)), s, z)

The lower halves of the bytes are the first half of the codes, in rows, and the upper ones the
second: both are written in one piece. Codes from -8 on are stored from 0 on, with z = 8.
Each reader takes them apart when its scales are there (:mod:`odtpack.autodiff.unpack_late`), so
that two of them are not merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from odtpack.graph.ops import Ops

_FOUR_BITS = {ir.DataType.INT4: 8, ir.DataType.UINT4: 0}
"""Types, and what is added to their numbers."""


def can_be_lifted(value: ir.Value) -> bool:
    """Whether an initializer can be an input: of 4 bits those that are unpacked alone can."""
    readers = (node.op_type == "DequantizeLinear" for node, _ in value.uses())
    return value.dtype not in _FOUR_BITS or all(readers)


def packed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor as a model takes it that :func:`unpack` changed: of 4 bits as UINT8 [n / 2]."""
    if tensor.dtype not in _FOUR_BITS:
        return tensor

    def read() -> ir.TensorProtocol:
        codes = _codes(tensor).reshape(-1)
        low, high = codes[: -(-codes.size // 2)], codes[-(-codes.size // 2) :]
        low[: high.size] |= high << 4
        return ir.tensor(low, name=tensor.name)

    shape = ir.Shape([-(-math.prod(tensor.shape.numpy()) // 2)])
    return ir.LazyTensor(read, dtype=ir.DataType.UINT8, shape=shape, name=tensor.name)


def unpack(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Let a graph take initializers of 4 bits apart, which become bytes as of :func:`packed`.

    Args:
        graph: Changed in place.
        values: The initializers; those of 4 bits are read by DequantizeLinear alone, others stay
            as they are.
    """
    op = Ops(graph, "packed/")
    stored = {value: _tensor(value) for value in values if value.dtype in _FOUR_BITS}
    for value, tensor in stored.items():
        stored_as = packed(tensor)
        value.const_value, value.type = stored_as, ir.TensorType(ir.DataType.UINT8)
        value.shape = ir.Shape(stored_as.shape.numpy())
    for node in dict.fromkeys(node for value in stored for node, _ in value.uses()):
        codes, scale, *rest = [value for value in node.inputs if value is not None]
        offset = _FOUR_BITS[(stored.get(codes) or _tensor(codes)).dtype]
        with op.before(node):
            shift = _shift(op, scale)
            found = [_unpacked(op, value, shift, stored) for value in (codes, *rest)]
            if not rest and offset:
                zero = op.constant(np.full((), offset, np.uint8))
                found.append(op.Expand(zero, op.Shape(scale)))
            attributes = {key: each.value for key, each in node.attributes.items()}
            (result,) = op.emit("DequantizeLinear", [found[0], scale, *found[1:]], **attributes)
        old = node.outputs[0]
        result.type, result.shape = old.type, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None  # noqa: S101 - codes are constants
    return value.const_value


def _codes(tensor: ir.TensorProtocol) -> np.ndarray:
    """The numbers, from 0 on, as UINT8."""
    return (tensor.numpy().astype(np.int8) + _FOUR_BITS[tensor.dtype]).astype(np.uint8)


def _shift(op: Ops, scale: ir.Value) -> ir.Value:
    """4, which is there when the scales are."""
    if scale.producer() is None:
        return op.constant(np.full((), 4, np.uint8))
    return op.cast(op.Mul(op.Min(op.Size(scale), 1), 4), ir.DataType.UINT8)


def _unpacked(
    op: Ops, value: ir.Value, shift: ir.Value, stored: Mapping[ir.Value, ir.TensorProtocol]
) -> ir.Value:
    """Codes of 4 bits as UINT8, from 0 on."""
    if value not in stored:
        return op.constant(_codes(_tensor(value)))
    all_bits = op.constant(np.full((), 255, np.uint8))
    low = op.BitwiseAnd(value, op.BitShift(all_bits, shift, direction="RIGHT"))
    both = op.Concat(low, op.BitShift(value, shift, direction="RIGHT"), axis=0)
    shape = stored[value].shape.numpy()
    if math.prod(shape) % 2:
        both = op.slice(both, [0], [0], [math.prod(shape)])
    return op.reshape(both, *shape)
