"""Cross-entropy of class numbers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from odtpack.losses.common.base import log_softmax, rank
from odtpack.losses.nll import NegativeLogLikelihood
from odtpack.option import option

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class CrossEntropy(NegativeLogLikelihood):
    """-w[label] log softmax(prediction)[label], the prediction being logits [N, C, ...].

    With label smoothing e, (1 - e) of that plus e times the mean over classes c of
    -w[c] log softmax(prediction)[c]. Source: PyTorch's CrossEntropyLoss, after Szegedy et
    al. (2016).

    Attributes:
        label_smoothing: e, from 0 to 1.
    """

    name = "cross_entropy"
    summary = "Cross-entropy of labels, from logits."
    formula = "-w[t] log softmax(y)[t], smoothed by `label_smoothing`"
    prediction = "logits [N, C, ...]"
    label_smoothing: float = option(
        0.0, "How much of a label is spread over all classes.", least=0, most=1
    )

    def _log_probabilities(self, op: Ops, prediction: ir.Value) -> tuple[ir.Value, int]:
        return log_softmax(op, prediction)

    def _smooth(
        self, op: Ops, terms: ir.Value, log_p: ir.Value, axis: int, classes: ir.Value | None
    ) -> ir.Value:
        if not self.label_smoothing:
            return terms
        if classes is not None:
            beside = [1] * rank(log_p)
            beside[axis] = -1
            log_p = op.Mul(log_p, op.reshape(classes, *beside))
        spread = op.reduce_mean(log_p, [axis], keepdims=False)
        smooth = self.label_smoothing
        return op.Sub(op.Mul(terms, 1 - smooth), op.Mul(spread, smooth))
