"""Mean absolute error."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from odtpack.losses.common.base import Elementwise, like

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class MeanAbsoluteError(Elementwise):
    """|prediction - target|; the slope where they are equal is 0."""

    name: ClassVar[str] = "l1"
    summary: ClassVar[str] = "Mean absolute error."
    formula: ClassVar[str] = r"\|y - t\|"

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the distances."""
        prediction, target = values
        return like(op.Abs(op.Sub(prediction, target)), prediction)
