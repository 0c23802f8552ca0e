"""Mean absolute error."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from odtpack.losses.common.base import Elementwise, like

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Ops


@dataclasses.dataclass(frozen=True)
class MeanAbsoluteError(Elementwise):
    """|prediction - target|; the slope where they are equal is 0."""

    name = "l1"
    summary = "Mean absolute error."
    formula = r"\|y - t\|"

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        prediction, target = values
        return like(op.Abs(op.Sub(prediction, target)), prediction)
