"""What losses share that compare prediction and target element by element."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from odtpack.losses.common.base import Loss, Target, like, target_like

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class Elementwise(Loss):
    """A loss with one term for each element of the prediction."""

    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """A target of the prediction's shape."""
        return (target_like(predictions[0]),)


def huber(op: Ops, delta: float, prediction: ir.Value, target: ir.Value) -> ir.Value:
    """With a = |prediction - target| and c = min(a, delta): c (a - c / 2).

    That is a^2 / 2 up to delta and delta (a - delta / 2) beyond; nothing is squared that
    could overflow.
    """
    distance = like(op.Abs(op.Sub(prediction, target)), prediction)
    near = like(op.Min(distance, delta), prediction)
    return like(op.Mul(near, op.Sub(distance, op.Mul(near, 0.5))), prediction)
