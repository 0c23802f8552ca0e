"""Mean squared error."""

from __future__ import annotations

import dataclasses

from odtpack.losses.common.base import Elementwise, Ops, Value, like


@dataclasses.dataclass(frozen=True)
class MeanSquaredError(Elementwise):
    """(prediction - target)^2."""

    name = "mse"
    summary = "Mean squared error."
    formula = "(y - t)²"

    def terms(self, op: Ops, *values: Value) -> Value:
        prediction, target = values
        difference = like(op.Sub(prediction, target), prediction)
        return like(op.Mul(difference, difference), prediction)
