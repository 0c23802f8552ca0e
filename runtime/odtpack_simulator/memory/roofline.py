"""The roofline: how long work takes at least on a machine, and what bounds it.

A machine computes at most so many operations and moves at most so many bytes
per second. Work takes at least as long as the slower of the two needs, and the
ridge point, their ratio, parts what arithmetic bounds from what memory bounds:
S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual
Performance Model for Multicore Architectures", CACM 52 (4), 2009. The roofs
here are calibrated: not a data sheet's peaks, but what a large matrix product
and a large copy reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from odtpack_simulator.memory.kernel_memory import ALIASES
from odtpack_simulator.memory.operator_work import Work

if TYPE_CHECKING:
    from odtpack_simulator.result.result import OperatorClass

COMPUTE_BOUND: Final = frozenset(
    {
        *("Conv", "ConvInteger", "ConvTranspose", "FusedConv", "Gemm", "FusedGemm", "MatMul"),
        *("FusedMatMul", "TransposeMatMul", "MatMulInteger", "Einsum", "Attention"),
        *("MultiHeadAttention", "GRU", "LSTM", "RNN", "QLinearConv", "QLinearMatMul"),
        *("GroupQueryAttention", "DeformConv"),
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
    """What a machine reaches.

    Attributes:
        flops: FLOP/s of a large matrix product.
        bandwidth: Bytes per second of memory traffic, read and written together.
    """

    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on work is compute-bound."""
        return self.flops / self.bandwidth

    def seconds(self, work: Work) -> float:
        """The least time of some work: the slower of its arithmetic and its traffic."""
        return max((work.flops or 0.0) / self.flops, work.moved_bytes / self.bandwidth)

    def bound(self, op_type: str, work: Work, overhead: float = 0.0) -> OperatorClass:
        """What bounds an operator on this machine.

        Args:
            op_type: Operator; it decides where the work has no known arithmetic.
            work: Of one run.
            overhead: Seconds that the runtime takes for any operator: work that needs
                less than that is bound by neither roof.
        """
        if op_type in SMALL:
            return "other"
        unknown = work.flops is None and op_type in COMPUTE_BOUND
        if not unknown and self.seconds(work) < overhead:
            return "other"
        if unknown:
            return "compute"
        intense = work.flops is not None and work.flops >= self.ridge * work.moved_bytes
        return "compute" if intense else "memory"
