"""How numbers become codes of 8 or 4 bits, and how a graph makes numbers of them again.

int8    w = scale[out] code                 one scale for each output, codes from -127 to 127
int4    w = scale[out, block] code          codes from -8 to 7; the largest number is -8 scales
nf4     w = scale[out, block] table[code]   16 quantiles of a normal distribution (Dettmers et al.,
                                            2023, QLoRA, appendix E)

A block is 32 (nf4: 64) weights of one output that follow each other along the inputs, or fewer
where that does not divide their number.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import onnx_ir as ir

from odtpack.choices import BaseKind
from odtpack.graph.ops import Ops
from odtpack.model.loading import mark_constant

NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip

_BLOCKS = {"int4": 32, "nf4": 64}
_SMALLEST_BLOCK = 8
_LEAST = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class Codes:
    """A matrix in few bits.

    Attributes:
        kind: How.
        values: INT8, INT4 or UINT4, of the matrix's shape.
        scales: FLOAT: for int8 one for each output; else of the matrix's rank, with a number for
            each block along the inputs.
        axis: Axis of the inputs.
        block: Weights that share a scale; 0 for all of an output.
    """

    kind: BaseKind
    values: np.ndarray
    scales: np.ndarray
    axis: int
    block: int


def quantize(matrix: np.ndarray, kind: BaseKind, axis: int) -> Codes:
    """Codes of a matrix, rounding to nearest.

    Args:
        matrix: Finite floating-point numbers, of two axes.
        kind: What to make of it. Where blocks would have fewer than 8 weights it is int8.
        axis: Axis of the inputs.
    """
    size = matrix.shape[axis]
    block = math.gcd(size, _BLOCKS.get(kind, 1))
    if kind == "int8" or block < _SMALLEST_BLOCK:
        largest = np.abs(matrix).max(axis=axis, keepdims=True).astype(np.float32)
        scales = np.maximum(largest / np.float32(127), _LEAST)
        values = np.clip(np.rint(matrix / scales), -127, 127).astype(np.int8)
        return Codes("int8", values, scales.reshape(-1), axis, 0)
    rows = np.moveaxis(matrix, axis, 1).astype(np.float32)
    blocks = rows.reshape(rows.shape[0], -1, block)
    places = np.abs(blocks).argmax(axis=2, keepdims=True)
    extremes = np.take_along_axis(blocks, places, 2)
    if kind == "int4":
        scales = extremes / np.float32(-8)
        scales = np.where(np.abs(scales) < _LEAST, _LEAST, scales)
        found = np.clip(np.rint(blocks / scales), -8, 7).astype(ml_dtypes.int4)
    else:
        scales = np.maximum(np.abs(extremes), _LEAST)
        bounds = (NF4[1:] + NF4[:-1]) / 2
        found = np.searchsorted(bounds, blocks / scales).astype(ml_dtypes.uint4)
    values = np.ascontiguousarray(np.moveaxis(found.reshape(rows.shape), 1, axis))
    return Codes(
        kind, values, np.ascontiguousarray(np.moveaxis(scales[..., 0], 1, axis)), axis, block
    )


def write(op: Ops, codes: Codes, values: ir.Value, scales: ir.Value) -> ir.Value:
    """Write what makes float32 numbers of stored codes and scales."""
    if codes.kind == "int8":
        return op.DequantizeLinear(values, scales, axis=1 - codes.axis)
    if codes.kind == "int4":
        return op.DequantizeLinear(values, scales, axis=codes.axis, block_size=codes.block)
    # Numbers of the codes first: there is no look-up by 4 bits. ONNX Runtime computes constants
    # before it runs, but for DequantizeLinear.
    numbers = op.DequantizeLinear(values, op.constant(np.float32(1)))
    numbers.type = scales.type
    table = op.constant(NF4)
    mark_constant(table)
    looked_up = op.Gather(table, op.Cast(numbers, to=int(ir.DataType.INT32)), axis=0)
    looked_up.type = scales.type
    split = [*codes.values.shape]
    split[codes.axis : codes.axis + 1] = [-1, codes.block]
    blocks = op.reshape(looked_up, *split)
    return op.reshape(op.Mul(blocks, op.unsqueeze(scales, codes.axis + 1)), *codes.values.shape)
