"""Codes of 4 bits, two in a byte: no kernel but DequantizeLinear takes them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from odtpack.graph.ops import Ops

TYPES = {ir.DataType.INT4: 8, ir.DataType.UINT4: 0}
"""Types, and what is added to their numbers."""


def codes(tensor: ir.TensorProtocol) -> np.ndarray:
    """The numbers, from 0 on, as UINT8."""
    return (tensor.numpy().astype(np.int8) + TYPES[tensor.dtype]).astype(np.uint8)


def packed(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor as a model takes it that :func:`unpack` changed: of 4 bits as UINT8 [n / 2]."""
    # In the order of MatMulNBits, which reads the same bytes of the file in an inference model.
    if tensor.dtype not in TYPES:
        return tensor

    def read() -> ir.TensorProtocol:
        flat = codes(tensor).reshape(-1)
        both = flat[::2].copy()
        both[: flat.size // 2] |= flat[1::2] << 4
        return ir.tensor(both, name=tensor.name)

    shape = ir.Shape([-(-math.prod(tensor.shape.numpy()) // 2)])
    return ir.LazyTensor(read, dtype=ir.DataType.UINT8, shape=shape, name=tensor.name)


def unpack(op: Ops, value: ir.Value, shift: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Write what makes numbers from 0 on of packed ones; ``shift`` is 4, or 1/16 as FLOAT."""
    if shift.dtype == ir.DataType.FLOAT:  # where there are no kernels for bits
        both = op.cast(value, ir.DataType.FLOAT)
        high = op.Floor(op.Mul(both, shift))
        low = op.Sub(both, op.Mul(high, 16.0))
    else:
        all_bits = op.constant(np.full((), 255, np.uint8))
        low = op.BitwiseAnd(value, op.BitShift(all_bits, shift, direction="RIGHT"))
        high = op.BitShift(value, shift, direction="RIGHT")
    # A Transpose puts them in turn faster than a Concat of columns does.
    rows = op.Concat(op.unsqueeze(low, 0), op.unsqueeze(high, 0), axis=0)
    both = op.reshape(op.transpose(rows, 1, 0), -1)
    if math.prod(shape) % 2:
        both = op.slice(both, [0], [0], [math.prod(shape)])
    found = op.reshape(both, *shape)
    return op.cast(found, ir.DataType.UINT8) if shift.dtype == ir.DataType.FLOAT else found
