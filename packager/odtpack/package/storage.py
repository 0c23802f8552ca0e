"""Stores frozen weights in fewer bytes: float16, or int8 with a scale for each channel.

The models compute in float32 nonetheless: they begin with nodes that widen the stored form,
so that every runtime in every language does the same. Only weights of products, convolutions,
recurrent layers and look-ups are stored so, and only large ones. Scales and biases of norms,
statistics and other vectors are small, and an error in one of them moves a whole channel.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from odtpack.choices import Storage
from odtpack.errors import OdtpackError

SMALLEST = 1024
"""Elements from which on a weight is stored in fewer bytes."""

_LEAST_PER_SCALE = 8  # elements that share a scale: fewer would not pay for it
_LARGEST_INT8 = 127

# Inputs that are weights: every output sums over many of their elements, or is one of them.
_WEIGHTS = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "GRU": (1, 2),
    "Gather": (0,),
    "Gemm": (0, 1),
    "LSTM": (1, 2),
    "MatMul": (0, 1),
    "RNN": (1, 2),
}
_VIEWS = ("Identity", "Reshape", "Split", "Squeeze", "Transpose", "Unsqueeze")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as the checkpoint holds it.

    Attributes:
        values: FLOAT16 or INT8, of the weight's shape.
        scale: FLOAT, of the weight's rank, one element for each channel and axes of length
            one besides; the weight is values * scale. None for FLOAT16.
    """

    values: ir.TensorProtocol
    scale: ir.TensorProtocol | None = None


def is_weight(value: ir.Value) -> bool:
    """Whether an initializer is a large float32 weight and nothing else."""
    if value.dtype != ir.DataType.FLOAT or value.shape is None or value.shape.rank() < 2:
        return False
    size = value.const_value.size if value.const_value is not None else 0
    return size >= SMALLEST and bool(value.uses()) and _only_weighs(value)


def _only_weighs(value: ir.Value) -> bool:
    if value.is_graph_output():
        return False
    for node, index in value.uses():
        if node.domain:
            return False
        if node.op_type in _VIEWS and index == 0:
            if not all(_only_weighs(output) for output in node.outputs):
                return False
        elif index not in _WEIGHTS.get(node.op_type, ()):
            return False
    return True


def store(name: str, tensor: ir.TensorProtocol, storage: Storage) -> Stored | None:
    """Convert a weight, rounding to nearest, ties to even.

    Args:
        name: Its name, for messages.
        tensor: FLOAT, of rank 2 or more.
        storage: What to convert it to.

    Returns:
        The stored form; None where int8 with its scales would save too little.

    Raises:
        OdtpackError: ``value-out-of-range`` for a value that the stored form cannot hold.
    """
    array = tensor.numpy()
    if storage == "float16":
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.array_equal(np.isfinite(half), np.isfinite(array)):
            largest = float(np.abs(array[np.isfinite(array)]).max())
            raise OdtpackError(
                "value-out-of-range",
                f"frozen parameter {name!r} holds {largest:g}, and float16 ends at 65504",
                hint="store it as int8 (--frozen-dtype int8), or leave --frozen-dtype out",
            )
        return Stored(ir.tensor(half, name=name))
    if not np.isfinite(array).all():
        raise OdtpackError(
            "value-out-of-range",
            f"frozen parameter {name!r} holds infinity or NaN, which int8 cannot store",
            hint="leave --frozen-dtype out",
        )
    axes = [i for i, n in enumerate(array.shape) if n * _LEAST_PER_SCALE <= array.size]
    if not axes:
        return None
    values, scale = min((_quantized(array, axis) for axis in axes), key=lambda q: _error(array, *q))
    return Stored(ir.tensor(values, name=name), ir.tensor(scale))


def _quantized(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric quantization with one scale for each index of an axis, float32 throughout."""
    others = tuple(i for i in range(array.ndim) if i != axis)
    largest = np.abs(array).max(axis=others, keepdims=True)
    # A channel of zeros gets a scale, too; so does one whose scale would be denormal.
    scale = np.maximum(largest / np.float32(_LARGEST_INT8), np.finfo(np.float32).tiny)
    values = np.clip(np.rint(array / scale), -_LARGEST_INT8, _LARGEST_INT8)
    return values.astype(np.int8), scale.astype(np.float32)


def _error(array: np.ndarray, values: np.ndarray, scale: np.ndarray) -> float:
    """Sum of the squared differences that a quantization makes."""
    return float(np.sum(np.square(values * scale - array), dtype=np.float64))
