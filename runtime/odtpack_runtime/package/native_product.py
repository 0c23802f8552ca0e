"""What the kernel ``product`` computes, and whether a body computes the same.

A product with a frozen matrix of few bits: y = x W^T, or its gradient dx = dy W. The body unpacks W
and multiplies; the kernel unpacks a panel of W at a time.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from odtpack_runtime.package import native_trial
from odtpack_runtime.package.native_trial import ONES, RefusedError

if TYPE_CHECKING:
    import onnx

PRODUCT: Final = "product"
LENGTH: Final = 8
"""Numbers of a program: whether x meets the transpose of W [N, K]; N; K; the rows and the columns
that share a scale, one of them 1; bits of a code; whether codes have a sign; the code of 0, counted
from the lowest."""
END: Final = {"Gemm", "MatMul"}
"""Operators that multiply: a body ends with one."""
UNPACKING: Final = {
    "BitShift", "BitwiseAnd", "Cast", "Concat", "DequantizeLinear", "Expand", "Min", "Mul",
    "Reshape", "Shape", "Size", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators that unpack W."""
_MOST_ELEMENTS = 1 << 24
"""Of a W whose body is run: as many as 8,192 columns of 2,048 rows have."""


def computes(function: onnx.FunctionProto, program: Sequence[int]) -> bool:
    """Whether a body computes what a program of the kernel says; its inputs are the kernel's."""
    nodes = function.node
    if not nodes or nodes[-1].op_type not in END or len(function.input) not in (3, 4):
        return False
    *before, end = nodes
    x, sized = function.input[2], {*function.input[2:]}
    constants = {each.output[0]: each for each in before if each.op_type == "Constant"}
    sizes, ones = set[str](), set[str]()  # and what follows from 1 and constants
    for node in before:
        kind, read = node.op_type, [*node.input]
        used = {*read}
        if kind in END or (sized & used and kind != "Size") or (sizes & used and kind != "Min"):
            return False
        if kind == "Size":
            sizes.update(node.output)
        elif kind == "Min":  # of a size no more is read than that it is not 0
            if len(read) != 2 or read[0] not in sizes or not _is_one(constants.get(read[1])):
                return False
            ones.update(node.output)
        elif kind == "Cast" and not used <= ones:  # which would round
            return False
        elif kind in ("Cast", "Mul") and used <= ones | constants.keys():
            ones.update(node.output)
    if len(end.input) != 2 or end.input[0] != x:
        return False
    operators = UNPACKING | END | {"Constant"}
    matrix = functools.partial(Product, program, inputs=len(function.input))
    vector = functools.partial(matrix, vector=True)
    return any(native_trial.computes(function, each, operators) for each in (matrix, vector))


def _is_one(node: onnx.NodeProto | None) -> bool:
    from onnx import numpy_helper

    if node is None or len(node.attribute) != 1 or not node.attribute[0].HasField("t"):
        return False
    value = numpy_helper.to_array(node.attribute[0].t)
    return value.size == 1 and bool((value == 1).all())


class Product:
    """Inputs of the kernel, of small whole numbers, and its result.

    Attributes:
        inputs: Codes, [N K / 2] as uint8 or [N, K], scales by rows and columns of blocks or as a
            vector, x [samples, K], or [samples, N]; what the body reads the size of, if it does.
        result: [samples, N], or [samples, K].
    """

    def __init__(
        self, program: Sequence[int], samples: int, inputs: int = 3, *, vector: bool = False
    ) -> None:
        if len(program) != LENGTH or min(program) < 0 or max(program) > 1 << 24:
            raise RefusedError
        transposed, rows, columns, high, wide, bits, signed, zero = program
        if transposed > 1 or 0 in (rows, columns, high, wide) or 1 not in (high, wide):
            raise RefusedError
        if bits not in (4, 8) or signed > (bits == 8) or zero >= 1 << bits:
            raise RefusedError
        if rows * columns > _MOST_ELEMENTS or columns * bits % 8:
            raise RefusedError
        random = np.random.default_rng(secrets.randbits(64))
        codes = random.integers(0, 1 << bits, (rows, columns), np.uint8)
        blocks = math.ceil(rows / high), math.ceil(columns / wide)
        scales = random.choice((0.5, 1, 2), blocks).astype(np.float32)
        x = random.choice(ONES, (samples, columns if transposed else rows)).astype(np.float32)
        wider = scales.repeat(high, 0)[:rows].repeat(wide, 1)[:, :columns]
        w = (codes.astype(np.float32) - zero) * wider
        packed = codes.reshape(-1)
        if bits == 4:
            packed = packed[::2] | packed[1::2] << 4
        elif signed:
            packed = (codes ^ 0x80).view(np.int8)
        else:
            packed = codes
        if vector:
            scales = scales.reshape(-1)
        self.inputs: list[np.ndarray] = [packed, scales, x, x][:inputs]
        self.result: np.ndarray = x @ (w.T if transposed else w)
