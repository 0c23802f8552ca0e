"""Mean squared error."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from odtpack.losses.common.base import Elementwise, like

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Ops


@dataclasses.dataclass(frozen=True)
class MeanSquaredError(Elementwise):
    """(prediction - target)^2."""

    name = "mse"
    summary = "Mean squared error."
    formula = "(y - t)²"

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        prediction, target = values
        difference = like(op.Sub(prediction, target), prediction)
        return like(op.Mul(difference, difference), prediction)
