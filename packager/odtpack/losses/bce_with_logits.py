"""Binary cross-entropy of logits."""

from __future__ import annotations

import dataclasses

import numpy as np

from odtpack.losses.common.base import Elementwise, Numbers, Ops, Value, like
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(Elementwise):
    """-w (p t log s(x) + (1 - t) log(1 - s(x))), s the sigmoid, without ever taking a log."""

    # w is ``weight``, and p ``pos_weight``, broadcast to the prediction's shape.

    name = "bce_with_logits"
    summary = "Binary cross-entropy, from logits."
    formula = "-w (p t log s(y) + (1 - t) log(1 - s(y))), s the sigmoid"
    prediction = "logits"
    weight: Numbers | None = option(None, "Factor of the terms.", least=0, axes=0)
    pos_weight: Numbers | None = option(None, "Weight of the positive class.", least=0, axes=0)

    def terms(self, op: Ops, *values: Value) -> Value:
        """Write softplus(x) - x t, or with p: (1 - t) x + (1 + (p - 1) t) softplus(-x)."""
        logits, target = values
        if self.pos_weight is None:
            terms = op.Sub(op.Softplus(logits), op.Mul(logits, target))
        else:
            extra = self._constant(op, "pos_weight", logits, minus=1)
            positive = op.Add(op.Mul(target, extra), 1)
            terms = op.Add(
                op.Mul(op.Sub(1, target), logits), op.Mul(positive, op.Softplus(op.Neg(logits)))
            )
        if self.weight is not None:
            terms = op.Mul(terms, self._constant(op, "weight", logits))
        return like(terms, logits)

    def _constant(self, op: Ops, option: str, logits: Value, minus: float = 0) -> Value:
        from odtpack.graph.graphs import dims_of

        array = np.asarray(getattr(self, option), np.float64) - minus
        shape = dims_of(logits) or ()
        ends = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.ndim > len(shape) or any(
            size not in (1, dim) for size, dim in ends if isinstance(dim, int)
        ):
            shown = ", ".join(map(str, shape))
            raise self._bad(option, f"of a shape that broadcasts to the prediction's, [{shown}]")
        return op.constant(array.astype(op.type_of(logits).numpy()))
