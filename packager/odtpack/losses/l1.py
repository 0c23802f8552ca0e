"""Mean absolute error."""

from __future__ import annotations

import dataclasses

from odtpack.losses.common.base import Elementwise, Ops, Value, like


@dataclasses.dataclass(frozen=True)
class MeanAbsoluteError(Elementwise):
    """|prediction - target|; the slope where they are equal is 0."""

    name = "l1"
    summary = "Mean absolute error."
    formula = r"\|y - t\|"

    def terms(self, op: Ops, *values: Value) -> Value:
        prediction, target = values
        return like(op.Abs(op.Sub(prediction, target)), prediction)
