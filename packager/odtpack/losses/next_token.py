"""Cross-entropy of the next token, for language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from odtpack.losses.common.base import (
    Loss,
    Ops,
    Target,
    Value,
    dims,
    facts_of_labels,
    like,
    reduce,
    require_rank,
    shaped,
    whole_numbers,
)
from odtpack.losses.common.vocabulary import head_of, token_terms
from odtpack.option import option


@dataclasses.dataclass(frozen=True)
class NextToken(Loss):
    """-log softmax(prediction[b, t])[labels[b, t + 1]], logits being [B, T, V].

    ``labels`` are the tokens themselves, as Hugging Face's causal models take them: the shift is
    part of the loss. A label of ``ignore_index`` does not count, be it one of the prompt, so that
    only the completion is learned, or padding. The mean is over the labels that count; where
    none does loss and gradient are 0. Of ``words`` see :mod:`odtpack.losses.common.vocabulary`.
    """

    name = "next_token"
    summary = "Cross-entropy of the next token, from logits."
    formula = "-log softmax(y[:, t])[labels[:, t + 1]]"
    prediction = "logits [B, T, V]"
    target = "`labels` [B, T]"
    classifies = False
    ignore_index: int = option(-100, "Label of tokens that do not count.", whole=True)
    words: int | None = option(
        None,
        "Number of words whose logits exist at once, to save memory: splits the last product, "
        "whose matrix must be frozen.",
        whole=True,
        above=0,
    )

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """Token numbers: the prediction's dimensions without the last."""
        require_rank(self.name, predictions[0], "[B, T, V]", 3, 3)
        return (whole_numbers("labels", "labels", dims(predictions[0])[:2]),)

    def label_facts(self, predictions: Sequence[Value]) -> dict[str, int]:
        """Number of tokens, where it is known, and the label that does not count."""
        return facts_of_labels(predictions[0], 2, self.ignore_index)

    def fixed(self, predictions: Sequence[Value]) -> tuple[str, ...]:
        """The matrix of the last product, where that is taken apart."""
        if self.words is None:
            return ()
        return (str(head_of(predictions[0], self.name).weight.name),)

    def terms(self, op: Ops, *values: Value) -> Value:
        """Write the loss of every token; 0 for the last of a sequence."""
        return self._terms_and_counts(op, *values)[0]

    def reduced(self, op: Ops, *values: Value) -> Value:
        """Write the terms and their reduction; the mean is over labels that count."""
        terms, counts = self._terms_and_counts(op, *values)
        if self.reduction != "mean":
            return reduce(op, terms, self.reduction)
        total = op.reduce_sum(terms, [0, 1], keepdims=False)
        count = op.reduce_sum(op.cast(counts, op.type_of(terms)), [0, 1], keepdims=False)
        return shaped(op.Div(total, op.Max(count, 1)), ())

    def _terms_and_counts(self, op: Ops, *values: Value) -> tuple[Value, Value]:
        """Terms [B, T], and which of them count."""
        logits, labels = values
        shape = dims(logits)[:2]
        # The labels move, not the logits, which are a thousand times larger.
        labels = op.cast(labels, op.INT64)
        after = op.slice(labels, [1], [1], [np.iinfo(np.int64).max])
        first = op.slice(labels, [1], [0], [1])
        nothing = op.Add(op.Sub(first, first), self.ignore_index)
        wanted = shaped(op.Concat(after, nothing, axis=1), shape)
        counts = shaped(op.Not(op.Equal(wanted, self.ignore_index)), shape)
        known = op.Where(counts, wanted, 0)
        if self.words is not None:
            terms = token_terms(op, head_of(logits, self.name), known, self.words)
        else:
            index = op.unsqueeze(known, 2)
            log_p = like(op.LogSoftmax(logits, axis=2), logits)
            terms = op.Neg(op.squeeze(op.GatherElements(log_p, index, axis=2), 2))
        terms = shaped(terms, shape)
        # Not a product with 0: an ignored token may hold anything.
        return shaped(op.Where(counts, terms, 0), shape), counts
