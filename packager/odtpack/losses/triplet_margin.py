"""Triplet margin loss over embeddings."""

from __future__ import annotations

import dataclasses
from typing import Literal

from odtpack.losses.common.base import Embeddings, Ops, Value, dims, distance, shaped
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class TripletMargin(Embeddings):
    """max(d(anchor, positive) - d(anchor, negative) + margin, 0), embeddings [N, D] each.

    d(a, b) = ||a - b + 1e-6||_p. Source: PyTorch's TripletMarginLoss, after Balntas et al.
    (2016).
    """

    name = "triplet_margin"
    summary = "Pulls the anchor closer to the positive than to the negative."
    formula = "max(d(a, p) - d(a, n) + margin, 0), d(a, b) = ‖a - b + 1e-6‖"
    prediction = "anchor, positive, negative [N, D]"
    target = ""
    reads = ("anchor", "positive", "negative")
    margin: float = option(1.0, "Margin between the two distances.", above=0)
    p: Literal[1, 2] = option(2, "Norm of the distance.")
    swap: bool = option(
        False, "Whether the distance of positive and negative counts where it is less."
    )

    def terms(self, op: Ops, *values: Value) -> Value:
        anchor, positive, negative = values
        near = distance(op, anchor, positive, self.p)
        far = distance(op, anchor, negative, self.p)
        if self.swap:
            far = op.Min(far, distance(op, positive, negative, self.p))
        return shaped(op.Relu(op.Add(op.Sub(near, far), self.margin)), dims(anchor)[:1])
