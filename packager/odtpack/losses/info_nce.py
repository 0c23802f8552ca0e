"""InfoNCE: each query finds its key among those of the batch."""

from __future__ import annotations

import dataclasses

from odtpack.losses.common.base import LEAST_SQUARE, Embeddings, Ops, Value, dims, shaped
from odtpack.losses.cross_entropy import CrossEntropy
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class InfoNCE(Embeddings):
    """-log softmax_j(<q_i, k_j> / T)[i]: query i belongs to key i, to none of the others.

    Source: van den Oord, Li and Vinyals (2018); in both directions, Radford et al. (2021).
    """

    name = "info_nce"
    summary = "Classifies, for each query, which key of the batch belongs to it."
    formula = "-log softmax over j of ⟨q[i], k[j]⟩/T, at j = i"
    prediction = "queries, keys [N, D]"
    target = ""
    reads = ("queries", "keys")
    temperature: float = option(0.07, "Divides the products.", above=0)
    normalize: bool = option(True, "Whether embeddings are brought to length 1.")
    symmetric: bool = option(
        False, "Whether the loss is the mean of both directions, from queries to keys and back."
    )

    def terms(self, op: Ops, *values: Value) -> Value:
        queries, keys = (self._direction(op, value) for value in values)
        size = dims(values[0])[0]
        similarity = op.MatMul(queries, op.transpose(keys, 1, 0))
        logits = shaped(op.Mul(similarity, 1 / self.temperature), (size, size))
        own = shaped(op.places(queries, 0), (size,))
        forth = CrossEntropy().terms(op, logits, own)
        if not self.symmetric:
            return forth
        back = CrossEntropy().terms(op, shaped(op.transpose(logits, 1, 0), (size, size)), own)
        return shaped(op.Mul(op.Add(forth, back), 0.5), (size,))

    def _direction(self, op: Ops, value: Value) -> Value:
        if not self.normalize:
            return value
        squares = op.reduce_sum(op.Mul(value, value), [1])
        return op.Div(value, op.Sqrt(op.Max(squares, LEAST_SQUARE)))
