"""Work of operators, and the time it takes at a device's rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from odtpack_simulator.memory.kernel_memory import ALIASES, Shape

if TYPE_CHECKING:
    from odtpack_simulator.result import OperatorClass


# Arithmetic and least memory traffic of one run of an operator, from the shapes it saw.
#
# A multiplication with its addition counts as two operations, as in the rates of
# device profiles. Only what grows faster than the tensors is counted: the
# products in convolutions, matrix products, recurrent layers and attention.
# Elementwise work and reductions need a few operations per element at most and
# have no flops here: their tensors' bytes bound them.
#
# Attributes are not needed: a product has as many multiplications as each element
# of its result takes, and the shapes say how many those are.


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape of a tensor and bytes per element (0 for text)."""

    shape: Shape
    itemsize: float = 4

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        """Bytes of its elements."""
        return self.size * self.itemsize


Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one run of an operator."""

    # Operations; None where the shapes do not give them, or where it has no products.
    flops: float | None
    moved_bytes: float  # Bytes that it must read and write at least once, whatever the caches hold


def operator_work(op_type: str, inputs: Tensors, outputs: Tensors) -> Work:
    """Arithmetic and least traffic of one run."""
    rule = _FLOPS.get(op_type)
    flops: float | None = None
    if rule is not None and inputs and outputs:
        try:
            flops = rule(inputs, outputs)
        except (IndexError, ValueError, ZeroDivisionError):
            flops = None  # fewer tensors or axes than the operator has by its definition
    return Work(flops, _traffic(op_type, inputs, outputs))


def _traffic(op_type: str, inputs: Tensors, outputs: Tensors) -> float:
    written = sum(tensor.nbytes for tensor in outputs)
    if op_type in ALIASES:
        return 0.0
    if op_type in ("Shape", "Size") or not inputs:
        return written
    rest = sum(tensor.nbytes for tensor in inputs[1:])
    if op_type in _PARTIAL_READS:
        return 2 * written + rest
    if op_type in _PARTIAL_WRITES:
        # In place where possible: what is scattered is read, and written to its places.
        return rest + (inputs[-1].nbytes if len(inputs) > 1 else 0.0)
    return inputs[0].nbytes + rest + written


_PARTIAL_READS: Final = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
"""Operators that read only what they write of their first input."""

_PARTIAL_WRITES: Final = frozenset({"Scatter", "ScatterElements", "ScatterND"})
"""Operators that write only what they read of their last input."""


def _conv(inputs: Tensors, outputs: Tensors, weights: int = 1) -> float:
    """Each output element: one product per weight of its output channel, groups included."""
    return 2.0 * outputs[0].size * math.prod(inputs[weights].shape[1:])


def _gemm(inputs: Tensors, outputs: Tensors) -> float:
    """(M, K) by (K, N), either transposed: K is what M leaves of the first matrix."""
    return 2.0 * outputs[0].size * inputs[0].size / outputs[0].shape[0]


def _matmul(inputs: Tensors, outputs: Tensors) -> float:
    """Numpy's product with broadcasting: K is the last axis of the first factor."""
    return 2.0 * outputs[0].size * inputs[0].shape[-1]


def _fused_matmul(inputs: Tensors, outputs: Tensors) -> float:
    """As MatMul, but either factor may be transposed and attributes are not known."""
    # The axes of the first factor are its batch, M and K in some order (transBatchA moves the batch
    # between them): K is what the result's batch and M leave of its size, if both factors have such
    # an axis. A factor that is broadcast has M and K last.
    left, right, result = inputs[0], inputs[1], outputs[0]
    if len(left.shape) < 2 or len(result.shape) < 2:
        return 2.0 * result.size * left.shape[0]
    rows = result.shape[-2]
    inner, over = divmod(left.size, rows * math.prod(result.shape[:-2]))
    if over or inner not in left.shape or inner not in right.shape:
        *_, first, second = left.shape
        inner = second if rows == first else first
    return 2.0 * result.size * inner


def _recurrent(inputs: Tensors, outputs: Tensors) -> float:
    """X (steps, batch, input), W (directions, gates * hidden, input), R (..., hidden)."""
    steps, batch = inputs[0].shape[:2]
    return 2.0 * steps * batch * (inputs[1].size + inputs[2].size)


def _packed_attention(inputs: Tensors, outputs: Tensors) -> float:
    """X (batch, length, d) by W (d, 3 * d'), then scores and values over all positions."""
    batch, length, _ = inputs[0].shape
    projections = 2.0 * batch * length * inputs[1].size
    per_position = inputs[1].shape[1] / 3
    return projections + 4.0 * batch * length * length * per_position


def _attention(inputs: Tensors, outputs: Tensors) -> float:
    """Scores of every query with every key, then as many products with the values."""
    # Query and result are (batch, length, heads * d) or (batch, heads, length, d); the length of
    # the keys is their last axis but one in both.
    return 2.0 * inputs[1].shape[-2] * (inputs[0].size + outputs[0].size)


def _depthwise(inputs: Tensors, outputs: Tensors) -> float:
    """Each element of the smaller planes meets every tap; the weight is less than either."""
    shaped = (tensor for tensor in (*inputs, *outputs) if len(tensor.shape) > 2)
    weight, planes, _ = sorted(shaped, key=lambda tensor: tensor.size)
    return 2.0 * planes.size * math.prod(weight.shape[1:])


_FLOPS: Final[dict[str, Callable[[Tensors, Tensors], float]]] = {
    "Attention": lambda i, o: _packed_attention(i, o) if len(i[1].shape) == 2 else _attention(i, o),
    "Conv": _conv,
    "ConvInteger": _conv,
    # Each input element meets every weight of its channel: the weights are (C, M / group, k).
    "ConvTranspose": lambda i, _: 2.0 * i[0].size * math.prod(i[1].shape[1:]),
    "FusedConv": _conv,
    "FusedGemm": _gemm,
    "FusedMatMul": _fused_matmul,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MultiHeadAttention": _attention,
    "QLinearConv": lambda i, o: _conv(i, o, weights=3),
    "QLinearMatMul": _matmul,
    "RNN": _recurrent,
    "native depthwise": _depthwise,
    # Codes, scales, and x, each row of which meets a matrix.
    "native product": lambda i, o: 2.0 * o[0].size * i[2].shape[-1],
    "native transposed": lambda i, o: 2.0 * o[0].size * i[0].shape[0],  # (M, K)ᵀ by (M, N)
    "TransposeMatMul": _fused_matmul,
}


# The roofline: how long work takes at least on a machine, and what bounds it.
#
# A machine computes at most so many operations and moves at most so many bytes
# per second. Work takes at least as long as the slower of the two needs, and the
# ridge point, their ratio, parts what arithmetic bounds from what memory bounds:
# S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual
# Performance Model for Multicore Architectures", CACM 52 (4), 2009. The roofs
# here are calibrated: not a data sheet's peaks, but what a large matrix product
# and a large copy reach.

COMPUTE_BOUND: Final = frozenset(
    {
        *("Conv", "ConvInteger", "ConvTranspose", "FusedConv", "Gemm", "FusedGemm", "MatMul"),
        *("FusedMatMul", "TransposeMatMul", "MatMulInteger", "Einsum", "Attention"),
        *("MultiHeadAttention", "GRU", "LSTM", "RNN", "QLinearConv", "QLinearMatMul"),
        *("GroupQueryAttention", "DeformConv", "native product", "native transposed"),
    }
)
"""Operators that are matrix products in one form or another, whatever their shapes."""

INT8_PRODUCTS: Final = frozenset(
    {
        *("ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"),
        *("QAttention", "QGemm", "QLinearConv", "QLinearMatMul"),
    }
)
"""Products of bytes, for which processors have instructions of their own."""

SMALL: Final = ALIASES | {"Constant", "ConstantOfShape", "Range", "Shape", "Size"}
"""Operators that read nothing to speak of: their time is the runtime's own."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What a machine reaches."""

    flops: float  # FLOP/s of a large matrix product
    bandwidth: float  # Bytes per second of memory traffic, read and written together

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on work is compute-bound."""
        return self.flops / self.bandwidth

    def seconds(self, work: Work) -> float:
        """The least time of some work: the slower of its arithmetic and its traffic."""
        return max((work.flops or 0.0) / self.flops, work.moved_bytes / self.bandwidth)

    def bound(self, op_type: str, work: Work, overhead: float = 0.0) -> OperatorClass:
        """What bounds an operator on this machine."""
        # `overhead`: Seconds that the runtime takes for any operator: work that needs less than
        # that is bound by neither roof.
        if op_type in SMALL:
            return "other"
        unknown = work.flops is None and op_type in COMPUTE_BOUND
        if not unknown and self.seconds(work) < overhead:
            return "other"
        if unknown:
            return "compute"
        intense = work.flops is not None and work.flops >= self.ridge * work.moved_bytes
        return "compute" if intense else "memory"
