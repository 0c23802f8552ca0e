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
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.losses.common.base import dims, shaped

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Ops


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
            f"matrix; {logits.name!r} is not, as with an adapter on that product, or the matrix "
            "is nf4",
            hint="leave the loss's option words out, or for a matrix in nf4 use --base int4",
        )
    hidden = node.inputs[0]
    assert hidden is not None  # noqa: S101 - a MatMul has it
    words = weight.shape[0 if words_first else 1]
    assert isinstance(words, int)  # noqa: S101 - that of an initializer
    return Head(hidden, weight, codes, words_first, words)


def token_terms(op: Ops, head: Head, labels: ir.Value, words: int) -> ir.Value:
    """-log softmax(logits)[labels] of each token, [B, T], with its gradient by hidden states."""
    # labels: Number of the word of each token, [B, T]; all of them from 0 to V - 1. words: Words of
    # a part.
    from odtpack.autodiff.stop_gradient import stop

    hidden = head.hidden
    rows = stop(op, hidden)
    zero = op.Mul(op.reduce_sum(rows, [2]), 0.0)
    lowest = float(np.finfo(op.type_of(hidden).numpy()).min)
    nothing = op.Mul(rows, 0.0)
    in_parts = False
    if head.codes is not None and head.blocks:
        # Unless the numbers of a word are a row of whole blocks and of whole bytes, the labels'
        # columns are found part by part.
        columns, block = _size(head.weight)[1], head.codes.attributes.get_int("block_size")
        in_parts = not (head.words_first and columns % 2 == columns % block == 0)
    states = [op.Add(zero, lowest), zero, nothing, *([nothing] if in_parts else [])]
    tables = [_bytes(op, each) for each in head.codes.inputs] if head.codes and head.blocks else []
    most, total, mixed, *found = _over_parts(op, head, tables, rows, labels, words, lowest, states)
    if in_parts:
        (chosen,) = found
    elif head.blocks:
        chosen = _chosen_row(op, head, tables, labels)
    else:
        chosen = _chosen(op, head, labels)
    shape = dims(hidden)
    value = op.Sub(op.Add(most, op.Log(total)), op.reduce_sum(op.Mul(rows, chosen), [2]))
    value = shaped(value, (*shape[:2], 1))
    slope = stop(op, shaped(op.Sub(op.Div(mixed, total), chosen), shape))
    # Its value is that of the terms, its gradient the slope.
    along = op.reduce_sum(shaped(op.Mul(hidden, slope), shape), [2])
    along = shaped(along, (*shape[:2], 1))
    return op.squeeze(op.Add(op.Sub(along, stop(op, along)), stop(op, value)), 2)


def _over_parts(
    op: Ops,
    head: Head,
    tables: Sequence[ir.Value | None],
    rows: ir.Value,
    labels: ir.Value,
    words: int,
    lowest: float,
    states: list[ir.Value],
) -> tuple[ir.Value, ...]:
    """Write the loop over the parts: m, s and a, and with blocks the columns of the labels."""
    # Here, so that recipes can read the declarations of losses without onnx_ir.
    import onnx_ir as ir

    words = min(words, head.words)
    if head.blocks and words % 2 and words < head.words:
        words += 1  # two codes of 4 bits share a byte
    kinds = [("turn", ir.DataType.INT64), ("going", ir.DataType.BOOL)]
    turn, going = (ir.val(op.fresh_name(name), dtype, []) for name, dtype in kinds)
    before = [ir.Value(name=op.fresh_name("before"), type=each.type, shape=each.shape)
              for each in states]  # fmt: skip
    body = ir.Graph([turn, going, *before], [], nodes=[], name=op.fresh_name("words"))
    most, total, mixed, *chosen = before
    inner = op.inside(body)
    first = inner.Mul(turn, words)
    start = inner.Min(first, head.words - words)  # the last part has words of the one before
    part, scales = _part(inner, head, tables, inner.reshape(start, 1), words)
    across = inner.transpose(part, 1, 0)
    logits = inner.MatMul(rows, across if head.words_first else part)
    if scales is not None:
        logits = inner.Mul(logits, scales)
    if head.words % words:
        place = inner.Add(inner.constant(np.arange(words)), start)
        logits = inner.Where(inner.Less(place, first), lowest, logits)
    peak = inner.Max(most, inner.reduce_max(logits, [2]))
    shares = inner.Exp(inner.Sub(logits, peak))
    summed = inner.reduce_sum(shares, [2])
    if scales is not None:
        shares = inner.Mul(shares, scales)
    fade = inner.Exp(inner.Sub(most, peak))
    after = [
        peak,
        inner.Add(inner.Mul(total, fade), summed),
        inner.Add(inner.Mul(mixed, fade),
                  inner.MatMul(shares, part if head.words_first else across)),
    ]  # fmt: skip
    after += [
        inner.Add(known, _chosen_of(inner, head, part, labels, start, first, words))
        for known in chosen
    ]
    for each, like in zip(after, states, strict=True):
        each.type, each.shape = like.type, like.shape
    goes_on = inner.Identity(going)
    goes_on.type, goes_on.shape = going.type, going.shape
    body.outputs.extend([goes_on, *after])
    count = op.constant(np.array(math.ceil(head.words / words)))
    results = op.emit("Loop", [count, None, *states], outputs=len(states),
                      body=ir.AttrGraph("body", body))  # fmt: skip
    for each, like in zip(results, states, strict=True):
        each.type, each.shape = like.type, like.shape
    return results


def _part(
    inner: Ops, head: Head, tables: Sequence[ir.Value | None], start: ir.Value, words: int
) -> tuple[ir.Value, ir.Value | None]:
    """A part of the weight's words as floats or whole numbers, and the scale of each, if any."""
    # Codes become floats by a Cast. After a DequantizeLinear, ONNX Runtime quantizes once more what
    # the Transpose of it gives, which takes ten times as long as the products.
    bounds = start, inner.Add(start, words)
    if not head.blocks:
        part = inner.Slice(head.weight, *bounds, inner.ints(head.axis))
        if head.scales is None:
            return part, None
        scales = inner.Slice(head.scales, *bounds, inner.ints(0))
        return inner.cast(part, inner.type_of(head.scales)), scales
    from odtpack.contrib import quantized

    assert head.codes is not None  # noqa: S101 - which has the blocks
    codes, scales, *points = [
        _cut(inner, table, value, head.axis, bounds, words)
        for table, value in zip(tables, head.codes.inputs, strict=True)
        if table is not None and value is not None
    ]
    offset = quantized.FOUR_BITS.get(head.weight.dtype or inner.FLOAT)
    if not points and offset:
        zero = inner.constant(np.full((), offset, np.uint8))
        points = [inner.Expand(zero, inner.Shape(scales))]
    block = head.codes.attributes.get_int("block_size")
    part = inner.DequantizeLinear(codes, scales, *points, axis=1 - head.axis, block_size=block)
    part.type = scales.type
    return part, None


def _size(matrix: ir.Value) -> tuple[int, int]:
    """Rows and columns of a matrix that is stored."""
    rows, columns = (each if isinstance(each, int) else 0 for each in dims(matrix))
    return rows, columns


def _bytes(op: Ops, value: ir.Value | None) -> ir.Value | None:
    """A matrix; codes of 4 bits are stored as bytes, two in one where a row has an even number."""
    import onnx_ir as ir

    from odtpack.contrib import quantized
    from odtpack.graph.graphs import mark_constant

    tensor = None if value is None else value.const_value
    if value is None or tensor is None or tensor.dtype not in quantized.FOUR_BITS:
        return value
    rows, columns = tensor.shape.numpy()
    paired = columns % 2 == 0

    def read() -> ir.TensorProtocol:
        both = (
            quantized.packed_four_bits(tensor).numpy()
            if paired
            else quantized.four_bit_codes(tensor)
        )
        return ir.tensor(both.reshape(rows, -1), name=name)

    name = op.fresh_name(f"{value.name}_bytes")
    shape = ir.Shape([rows, columns // 2 if paired else columns])
    lazy = ir.LazyTensor(read, dtype=ir.DataType.UINT8, shape=shape, name=name)
    stored = ir.val(name, const_value=lazy, type=ir.TensorType(lazy.dtype), shape=shape)
    op.graph.register_initializer(stored)
    mark_constant(stored)
    return stored


def _cut(
    inner: Ops, table: ir.Value, value: ir.Value, axis: int, bounds: Sequence[ir.Value], words: int
) -> ir.Value:
    """Some rows or columns of a matrix that is stored as a table."""
    from odtpack.contrib import quantized

    rows, columns = _size(value)
    if _size(table) == (rows, columns):
        return inner.Slice(table, *bounds, inner.ints(axis))
    if axis == 1:
        half = inner.Div(bounds[0], 2)
        bounds = half, inner.Add(half, words // 2)
    part = inner.Slice(table, *bounds, inner.ints(axis))
    four = inner.constant(np.full((), 4, np.uint8))
    size = (words, columns) if axis == 0 else (rows, words)
    part = quantized.unpack_four_bits(inner, inner.reshape(part, -1), four, size)
    part.type = table.type
    return part


def _chosen_row(
    op: Ops, head: Head, tables: Sequence[ir.Value | None], labels: ir.Value
) -> ir.Value:
    """The weight's row of each token's word, [B, T, K], of codes in whole blocks."""
    from odtpack.contrib import quantized

    assert head.codes is not None  # noqa: S101 - which has the blocks
    found = []
    for table, value in zip(tables, head.codes.inputs, strict=True):
        if table is not None and value is not None:
            row = op.Gather(table, labels, axis=0)
            if _size(table) != _size(value):  # two codes in a byte
                low = op.BitwiseAnd(row, op.constant(np.full((), 15, np.uint8)))
                four = op.constant(np.full((), 4, np.uint8))
                high = op.BitShift(row, four, direction="RIGHT")
                both = op.Concat(op.unsqueeze(low, 3), op.unsqueeze(high, 3), axis=3)
                row = op.reshape(both, 0, 0, _size(value)[1])
            found.append(row)
    codes, scales, *points = found
    shape = 0, 0, -1, head.codes.attributes.get_int("block_size")
    numbers = op.reshape(op.cast(codes, op.type_of(scales)), *shape)
    zero: ir.Value | float = float(quantized.FOUR_BITS.get(head.weight.dtype or op.FLOAT) or 0)
    if points:
        zero = op.unsqueeze(op.cast(points[0], op.type_of(scales)), 3)
    numbers = op.Mul(op.Sub(numbers, zero), op.unsqueeze(scales, 3))
    return op.reshape(numbers, 0, 0, _size(head.weight)[1])


def _chosen_of(
    op: Ops,
    head: Head,
    part: ir.Value,
    labels: ir.Value,
    start: ir.Value,
    first: ir.Value,
    words: int,
) -> ir.Value:
    """The part's numbers of each token's word, [B, T, K]; zeros for words of other parts."""
    place = op.Max(op.Min(op.Sub(labels, start), words - 1), 0)
    found = op.Gather(part, place, axis=head.axis)
    if not head.words_first:
        found = op.transpose(found, 1, 2, 0)
    inside = op.And(op.GreaterOrEqual(labels, first), op.Less(labels, op.Add(start, words)))
    return op.Mul(found, op.unsqueeze(op.cast(inside, op.type_of(part)), 2))


def _chosen(op: Ops, head: Head, labels: ir.Value) -> ir.Value:
    """The weight's column of each token's word, [B, T, K]."""
    found = op.Gather(head.weight, labels, axis=head.axis)
    if not head.words_first:  # [K, B, T]
        found = op.transpose(found, 1, 2, 0)
    if head.scales is None:
        return found
    factors = op.Gather(head.scales, labels, axis=0)
    wide = op.cast(found, op.type_of(head.scales))
    return op.Mul(wide, op.unsqueeze(factors, 2))
