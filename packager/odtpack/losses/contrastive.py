"""Contrastive loss over pairs of embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from odtpack.losses.common.base import (
    Embeddings,
    Ops,
    Target,
    Value,
    dims,
    distance,
    shaped,
    target_dtype,
)
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class Contrastive(Embeddings):
    """t d^2 + (1 - t) max(margin - d, 0)^2, d = ||first - second + 1e-6||, [N, D] each.

    The target t [N] is 1 for a pair that belongs together and 0 for one that does not.
    Source: Hadsell, Chopra and LeCun (2006), without the halves.
    """

    name = "contrastive"
    summary = "Pulls pairs together, or pushes them apart."
    formula = "t d² + (1 - t) max(margin - d, 0)², d = ‖a - b + 1e-6‖"
    prediction = "two embeddings [N, D]"
    target = "`target` [N]"
    reads = ("first", "second")
    margin: float = option(1.0, "Minimum distance between negative pairs.", above=0)

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """1 for a pair that belongs together, else 0: [N]."""
        super().targets(predictions)
        first = predictions[0]
        return (Target("target", "target", target_dtype(first), dims(first)[:1]),)

    def terms(self, op: Ops, *values: Value) -> Value:
        first, second, together = values
        apart = distance(op, first, second, 2)
        short = op.Relu(op.Sub(self.margin, apart))
        attract = op.Mul(together, op.Mul(apart, apart))
        repel = op.Mul(op.Sub(1, together), op.Mul(short, short))
        return shaped(op.Add(attract, repel), dims(first)[:1])
