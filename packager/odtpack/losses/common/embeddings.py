"""What losses over embeddings share: what belongs together shall lie together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from odtpack.errors import OdtpackError
from odtpack.losses.common.base import Loss, dims, require_rank

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops

_EPSILON = 1e-6
"""Added to every difference, as in PyTorch's pairwise_distance."""
LEAST_SQUARE = 1e-30
"""Squared length below which a vector has no direction."""


@dataclasses.dataclass(frozen=True)
class Embeddings(Loss):
    """A loss that compares embeddings of one length."""

    def check_embeddings(self, predictions: Sequence[ir.Value]) -> None:
        """Check rank and length of the embeddings.

        Raises:
            OdtpackError: One has another rank than 2, or their lengths differ.
        """
        for value in predictions:
            require_rank(self.name, value, "[N, D]", 2, 2)
        widths = {dims(value)[1] for value in predictions}
        if len({width for width in widths if isinstance(width, int)}) > 1:
            shown = ", ".join(repr(value.name) for value in predictions)
            raise OdtpackError(
                "prediction-shape",
                f"{self.name} compares embeddings of one length; those of {shown} differ",
                hint="name other outputs as the loss's inputs",
            )


def distance(op: Ops, first: ir.Value, second: ir.Value, p: int) -> ir.Value:
    """||first - second + 1e-6||_p over the last axis of [N, D]; slope 0 where it is 0."""
    difference = op.Add(op.Sub(first, second), _EPSILON)
    if p == 1:
        return op.reduce_sum(op.Abs(difference), [1], keepdims=False)
    squares = op.reduce_sum(op.Mul(difference, difference), [1], keepdims=False)
    return op.Sqrt(op.Max(squares, LEAST_SQUARE))
