"""Embeddings: of words and positions, and by rotation."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.contrib.table import (
    Outputs,
    asked_for,
    decomposition,
    known_rank,
    known_size,
    layer_norm,
)
from odtpack.graph.graphs import mark_constant
from odtpack.graph.ops import Ops

_EPSILON = 1e-12


@decomposition("EmbedLayerNormalization")
def embed_layer_norm(ctx: Context) -> Outputs:
    """Sum of word, position and segment embeddings, normalized; and the lengths of the masks.

    Inputs: words [B, S], segments, tables of words, positions and segments, scale, bias,
    mask, positions.
    """
    op, words, segments, positions = ctx.op, ctx.x(), ctx.maybe_x(1), ctx.maybe_x(8)
    total = op.Gather(ctx.x(2), words, axis=0)
    if positions is not None:
        total = op.Add(total, op.Gather(ctx.x(3), positions, axis=0))
    else:  # row t of the table for token t
        length = op.slice(op.Shape(words), [0], [1], [2])
        total = op.Add(total, op.Slice(ctx.x(3), op.ints(0), length, op.ints(0)))
    if segments is not None and ctx.maybe_x(4) is not None:
        total = op.Add(total, op.Gather(ctx.x(4), segments, axis=0))
    y = layer_norm(op, total, ctx.x(5), ctx.x(6), ctx.float("epsilon", _EPSILON))
    return [y, _mask_index(ctx) if asked_for(ctx, 1) else None, total]


def _mask_index(ctx: Context) -> ir.Value:
    """How many tokens of each sample count [B]."""
    op, mask = ctx.op, ctx.maybe_x(7)
    if mask is not None:
        return op.reduce_sum(mask, [1], keepdims=False)
    return op.zeros(op.slice(op.Shape(ctx.x()), [0], [0], [1]), ir.DataType.INT32)


@decomposition("RotaryEmbedding")
def rotary_embedding(ctx: Context) -> Outputs | None:
    """Turn pairs of features by angles that grow with the position.

    Inputs: x [B, S, heads * size] or [B, heads, S, size], positions [B, S] or the first
    one [1], cosines and sines [longest, half the rotated size].
    """
    op, x, positions = ctx.op, ctx.x(), ctx.x(1)
    rank, half = known_rank(x), known_size(ctx.x(2), 1)
    place_rank = known_rank(positions)
    if half is None or rank not in (3, 4) or place_rank is None or ctx.int("is_packed_batching", 0):
        return None
    heads, hidden = ctx.int("num_heads", 0), known_size(x, -1)
    if rank == 3 and heads and hidden is None:
        return None
    size = hidden // heads if rank == 3 and heads and hidden else 2 * half
    heads_last = rank == 3
    shaped = op.reshape(x, 0, 0, -1, size) if heads_last else x
    if place_rank == 1:  # from there on, for every sample
        axis = 1 if heads_last else 2
        length = op.squeeze(op.slice(op.Shape(shaped), [0], [axis], [axis + 1]), 0)
        zero, one = op.constant(np.array(0)), op.constant(np.array(1))
        places = op.Add(op.Range(zero, length, one), positions)
        cos, sin = (op.Gather(buffer(ctx.x(i)), places, axis=0) for i in (2, 3))
        if heads_last:
            cos, sin = op.unsqueeze(cos, 1), op.unsqueeze(sin, 1)
    else:
        cos, sin = (op.Gather(buffer(ctx.x(i)), positions, axis=0) for i in (2, 3))
        axis = 2 if heads_last else 1
        cos, sin = op.unsqueeze(cos, axis), op.unsqueeze(sin, axis)
    turned = turn(op, shaped, cos, sin, half, interleaved=bool(ctx.int("interleaved", 0)))
    if (size if heads_last else hidden) != 2 * half:
        rest = op.slice(shaped, [3], [2 * half], [2**63 - 1])
        turned = op.Concat(turned, rest, axis=3)
    return op.Reshape(turned, op.Shape(x)) if heads_last else turned


def buffer(table: ir.Value) -> ir.Value:
    """Cosines or sines; where the model stores them, they are not trained."""
    if table.is_initializer():
        mark_constant(table)
    return table


def turn(
    op: Ops, x: ir.Value, cos: ir.Value, sin: ir.Value, half: int, *, interleaved: bool
) -> ir.Value:
    """Pairs are neighbours (interleaved), or stand half the rotated size apart."""
    if interleaved:
        left, right = (op.slice(x, [3], [i], [2 * half], [2]) for i in (0, 1))
    else:
        left, right = op.slice(x, [3], [0], [half]), op.slice(x, [3], [half], [2 * half])
    real = op.Sub(op.Mul(left, cos), op.Mul(right, sin))
    imaginary = op.Add(op.Mul(right, cos), op.Mul(left, sin))
    if not interleaved:
        return op.Concat(real, imaginary, axis=3)
    pairs = op.Concat(op.unsqueeze(real, 4), op.unsqueeze(imaginary, 4), axis=4)
    return op.reshape(pairs, 0, 0, 0, 2 * half)
