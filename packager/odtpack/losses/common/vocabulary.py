"""The loss of a language model by parts of its vocabulary, so that no logits of all of it exist.

Logits of T tokens and V words are T V numbers, and their softmax and gradient as many again: for
256 tokens and 152,000 words half a gigabyte. The last product of the model, logits = h W, is taken
apart instead. Over parts W_c of the columns, as in an online softmax (Milakov and Gimelshein,
2018),

    l = h W_c          m' = max(m, max l)            p = exp(l - m')
    s' = s exp(m - m') + sum p                       a' = a exp(m - m') + p W_c^T

and in the end log(sum exp) = m + log s, whose gradient by h is a / s. So one pass computes the loss
and its gradient by h, in two products a part. The weight takes no gradient: it must be frozen.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.losses.common.base import dims, shaped

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops


@dataclasses.dataclass(frozen=True)
class Head:
    """The last product of a language model."""

    hidden: ir.Value  # what it reads, [B, T, K]
    weight: ir.Value  # float matrix, or codes
    codes: ir.Node | None  # where they are codes, the node that makes numbers of them
    words_first: bool  # whether the weight is [V, K] and not [K, V]
    words: int  # V

    @property
    def axis(self) -> int:
        """Axis of the words."""
        return 0 if self.words_first else 1

    @property
    def scales(self) -> ir.Value | None:
        """Scale of each word's codes, or of each block of them; None without codes."""
        return None if self.codes is None else self.codes.inputs[1]

    @property
    def blocks(self) -> bool:
        """Whether a word has several scales."""
        return self.codes is not None and "block_size" in self.codes.attributes


def head_of(logits: ir.Value, loss: str) -> Head:
    """The product that gives the logits."""
    node, words_first = logits.producer(), False
    while node is not None and node.op_type == "Identity" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    weight = node.inputs[1] if node is not None and node.op_type == "MatMul" else None
    maker = None if weight is None else weight.producer()
    if maker is not None and maker.op_type == "Transpose":
        weight, words_first = maker.inputs[0], True
        maker = None if weight is None else weight.producer()
    codes = None
    if maker is not None and maker.op_type == "DequantizeLinear":
        axis = maker.attributes.get_int("axis", 1)
        words_axis, blocks = 0 if words_first else 1, "block_size" in maker.attributes
        stored = all(each is not None and each.is_initializer() for each in maker.inputs)
        if stored and (axis != words_axis if blocks else axis == words_axis):
            codes, weight = maker, maker.inputs[0]
    if node is None or weight is None or not weight.is_initializer() or weight.shape is None:
        raise OdtpackError(
            "head-not-found",
            f"{loss} by parts of the vocabulary needs logits that are a product with a stored "
            f"matrix; {logits.name!r} is not, or the matrix is nf4",
            hint="leave the loss's option words out",
        )
    hidden = node.inputs[0]
    assert hidden is not None  # noqa: S101 - a MatMul has it
    words = weight.shape[0 if words_first else 1]
    assert isinstance(words, int)  # noqa: S101 - that of an initializer
    return Head(hidden, weight, codes, words_first, words)


def token_terms(op: Ops, head: Head, labels: ir.Value, words: int) -> ir.Value:
    """-log softmax(logits)[labels] of every token, [B, T], with its gradient by the hidden states.

    Args:
        op: Where to write.
        head: The last product.
        labels: Number of the word of each token, [B, T]; all of them from 0 to V - 1.
        words: Words of a part.
    """
    from odtpack.autodiff.backward import stop

    hidden = head.hidden
    rows = stop(op, hidden)
    most, total, mixed = op.Mul(op.reduce_sum(rows, [2]), 0.0), None, None
    chosen = None if head.blocks else _chosen(op, head, labels)
    for start in range(0, head.words, words):
        end = min(start + words, head.words)
        # A part is read once both sums over the one before are done: no logits wait for the end.
        done = [hidden] if total is None or mixed is None else [total, mixed]
        one = op.Min(*(op.Size(value) for value in done), 1)
        if head.blocks:
            part, scales = _blocks(op, head, start, end, one), None
            found = _chosen_of(op, head, part, labels, start, end)
            chosen = found if chosen is None else op.Add(chosen, found)
        else:
            part, scales = _part(op, head, op.Mul(one, start), op.Mul(one, end))
        across = op.transpose(part, 1, 0)
        logits = op.MatMul(rows, across if head.words_first else part)
        if scales is not None:
            logits = op.Mul(logits, scales)
        highest = op.reduce_max(logits, [2])
        peak = highest if total is None else op.Max(most, highest)
        shares = op.Exp(op.Sub(logits, peak))
        summed = op.reduce_sum(shares, [2])
        if scales is not None:
            shares = op.Mul(shares, scales)
        added = op.MatMul(shares, part if head.words_first else across)
        if total is not None and mixed is not None:
            fade = op.Exp(op.Sub(most, peak))
            summed = op.Add(op.Mul(total, fade), summed)
            added = op.Add(op.Mul(mixed, fade), added)
        most, total, mixed = peak, summed, added
    assert total is not None  # noqa: S101 - there is a word
    assert mixed is not None  # noqa: S101
    assert chosen is not None  # noqa: S101
    shape = dims(hidden)
    value = op.Sub(op.Add(most, op.Log(total)), op.reduce_sum(op.Mul(rows, chosen), [2]))
    value = shaped(value, (*shape[:2], 1))
    slope = stop(op, shaped(op.Sub(op.Div(mixed, total), chosen), shape))
    # Its value is that of the terms, its gradient the slope.
    along = op.reduce_sum(shaped(op.Mul(hidden, slope), shape), [2])
    along = shaped(along, (*shape[:2], 1))
    terms: ir.Value = op.squeeze(op.Add(op.Sub(along, stop(op, along)), stop(op, value)), 2)
    return terms


def _part(op: Ops, head: Head, start: ir.Value, end: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """A part of the weight's words, as it is stored, and the scale of each."""
    # Codes become floats by a Cast. After a DequantizeLinear, ONNX Runtime quantizes once more what
    # the Transpose of it gives, which takes ten times as long as the products.
    bounds = [op.reshape(start, 1), op.reshape(end, 1)]
    part = op.Slice(head.weight, *bounds, op.ints(head.axis))
    if head.scales is None:
        return part, None
    return op.cast(part, op.type_of(head.scales)), op.Slice(head.scales, *bounds, op.ints(0))


def _blocks(op: Ops, head: Head, start: int, end: int, one: ir.Value) -> ir.Value:
    """The same of codes with blocks, which are cut when the model is built."""
    # No kernel cuts values of 4 bits. The scales are computed, so that numbers are made of a part
    # once, for all that read it, and when it is their turn.
    # Here, so that recipes can read the declarations of losses without onnx_ir.
    import onnx_ir as ir

    from odtpack.graph.graphs import mark_constant

    assert head.codes is not None  # noqa: S101 - which has the blocks
    values = []
    for each in head.codes.inputs:
        assert each is not None  # noqa: S101 - head_of looks
        assert each.const_value is not None  # noqa: S101
        array = each.const_value.numpy()
        array = array[start:end] if head.words_first else array[:, start:end]
        tensor = ir.tensor(np.ascontiguousarray(array), each.dtype)
        tensor.name = op.fresh_name(f"{each.name}_{start}")
        values.append(ir.val(tensor.name, const_value=tensor))
        op.graph.register_initializer(values[-1])
        mark_constant(values[-1])
    values[1] = op.Mul(values[1], op.cast(one, op.type_of(values[1])))
    block = head.codes.attributes.get_int("block_size")
    part = op.DequantizeLinear(*values, axis=1 - head.axis, block_size=block)
    part.type = values[1].type
    return part


def _chosen_of(
    op: Ops, head: Head, part: ir.Value, labels: ir.Value, start: int, end: int
) -> ir.Value:
    """The part's numbers of each token's word, [B, T, K]; zeros for words of other parts."""
    place = op.Max(op.Min(op.Sub(labels, start), end - start - 1), 0)
    found = op.emit("Gather", [part, place], axis=head.axis)[0]
    if not head.words_first:
        found = op.transpose(found, 1, 2, 0)
    inside = op.And(op.GreaterOrEqual(labels, start), op.Less(labels, end))
    return op.Mul(found, op.unsqueeze(op.cast(inside, op.type_of(part)), 2))


def _chosen(op: Ops, head: Head, labels: ir.Value) -> ir.Value:
    """The weight's column of each token's word, [B, T, K]."""
    found = op.emit("Gather", [head.weight, labels], axis=0 if head.words_first else 1)[0]
    if not head.words_first:  # [K, B, T]
        found = op.transpose(found, 1, 2, 0)
    if head.scales is None:
        return found
    factors = op.emit("Gather", [head.scales, labels], axis=0)[0]
    wide = op.cast(found, op.type_of(head.scales))
    return op.Mul(wide, op.unsqueeze(factors, 2))
