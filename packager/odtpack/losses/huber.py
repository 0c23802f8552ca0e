"""Huber's loss."""

from __future__ import annotations

import dataclasses

from odtpack.losses.common.base import Elementwise, Ops, Value, huber
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class Huber(Elementwise):
    """d^2 / 2 for |d| <= delta, delta (|d| - delta / 2) beyond; d = prediction - target."""

    name = "huber"
    summary = "Squares up to a difference, and a straight line beyond."
    formula = r"d²/2 up to \|d\| = delta, then delta (\|d\| - delta/2); d = y - t"
    delta: float = option(1.0, "Where it becomes linear.", above=0)

    def terms(self, op: Ops, *values: Value) -> Value:
        return huber(op, self.delta, *values)
