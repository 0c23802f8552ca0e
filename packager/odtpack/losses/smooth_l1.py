"""Smooth L1 loss."""

from __future__ import annotations

import dataclasses

from odtpack.losses.common.base import Elementwise, Ops, Value, huber, like
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class SmoothL1(Elementwise):
    """d^2 / (2 beta) for |d| <= beta, |d| - beta / 2 beyond; d = prediction - target."""

    name = "smooth_l1"
    summary = "Huber's loss divided by the difference."
    formula = r"d²/(2 beta) up to \|d\| = beta, then \|d\| - beta/2"
    beta: float = option(1.0, "Where it becomes linear.", above=0)

    def terms(self, op: Ops, *values: Value) -> Value:
        terms = huber(op, self.beta, *values)
        return terms if self.beta == 1 else like(op.Mul(terms, 1 / self.beta), values[0])
