"""Grouped-query attention, the one operator that decoders of onnxruntime-genai's builder share.

A model that trains has no cache: a sequence starts empty, and each token sees itself and those
before it. Padding goes to the end, where no token that counts sees it; what the kernel returns for
padding itself is undefined. So the numbers of tokens (``seqlens_k``) do not matter.

Shapes: B samples, S tokens, N heads of queries, G of them for each of M heads of keys and values,
sizes H of a head.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.contrib.attention import heads_first, lowest
from odtpack.contrib.embedding import buffer, turn
from odtpack.contrib.table import (
    Outputs,
    asked_for,
    decomposition,
    known_rank,
    known_size,
    not_covered,
)
from odtpack.graph.ops import Ops

_UNREAD = {  # inputs, and what they make of the operator
    11: "a sink of each head takes part in its softmax (head_sink)",
    12: "its cache is quantized",
    13: "its cache is quantized",
    14: "it normalizes queries and keys itself",
    15: "it normalizes queries and keys itself",
    16: "it takes numbers of queries (query_seqlens)",
}


@decomposition("GroupQueryAttention")
def group_query_attention(ctx: Context) -> Outputs | None:
    """Inputs: query, key, value, past keys and values, lengths, cosines, sines, positions, bias.

    Query, key and value are [B, S, heads H] each, or all in the first.
    """
    op, count, shared = ctx.op, ctx.int("num_heads", 0), ctx.int("kv_num_heads", 0)
    why = _why_not(ctx)
    width = known_size(ctx.x(), 2)
    if why is not None or width is None:
        return not_covered(ctx, why or "the width of its queries is not known")
    packed = ctx.maybe_x(1) is None
    parts = count + 2 * shared if packed else count
    if (
        min(count, shared) < 1
        or count % shared
        or width % parts
        or packed != (ctx.maybe_x(2) is None)
    ):
        return not_covered(ctx, f"{width} numbers do not fit {count} and {shared} heads")
    size = width // parts
    if ctx.int("do_rotary", 0) and 2 * (known_size(ctx.maybe_x(7), 1) or 0) > size:
        return not_covered(ctx, f"it turns more than the {size} numbers of a head")
    if packed:
        q, k, v = op.split(ctx.x(), 2, [count * size, shared * size, shared * size])
    else:
        q, k, v = ctx.x(), ctx.x(1), ctx.x(2)
    q, k, v = heads_first(op, q, count), heads_first(op, k, shared), heads_first(op, v, shared)
    if ctx.int("do_rotary", 0):
        cos, sin = _angles(ctx, q)
        q, k = (_turned(ctx, each, cos, sin, size) for each in (q, k))
    groups = count // shared
    # The queries that share keys as rows of one matrix: [B, M, G S, H].
    rows = op.reshape(q, 0, shared, -1, size) if groups > 1 else q
    scale = ctx.float("scale", 0.0) or 1 / math.sqrt(size)
    scores = op.MatMul(op.Mul(rows, scale), op.transpose(k, 0, 1, 3, 2))
    softcap = ctx.float("softcap", 0.0)
    if softcap:
        scores = op.Mul(op.Tanh(op.Mul(scores, 1 / softcap)), softcap)
    bias = ctx.maybe_x(10)
    if bias is not None:
        scores = op.Add(scores, _by_rows(op, bias, shared, groups))
    seen = _seen(op, q, ctx.int("local_window_size", -1))
    scores = op.Where(_repeated(op, seen, groups, 0), scores, lowest(op, scores))
    mixed = op.MatMul(op.Softmax(scores, axis=3), v)
    if groups > 1:
        mixed = op.reshape(mixed, 0, count, -1, size)
    y = op.reshape(op.transpose(mixed, 0, 2, 1, 3), 0, 0, count * size)
    return [y, k, v]


def _why_not(ctx: Context) -> str | None:
    """What keeps a node from being written in standard operators."""
    if ctx.maybe_x(3) is not None or ctx.maybe_x(4) is not None:
        return "its past keys and values are no inputs of the model that could be left out"
    for index, why in _UNREAD.items():
        if ctx.maybe_x(index) is not None:
            return why
    if ctx.int("smooth_softmax", 0):
        return "its softmax is smooth (smooth_softmax)"
    if not ctx.int("causal", 1):
        return "tokens see those after them (causal)"
    if ctx.int("qk_output", 0) or asked_for(ctx, 3):
        return "it returns its scores (qk_output)"
    if ctx.int("sliding_window_cache", 0):
        return "its cache slides (sliding_window_cache)"
    if ctx.int("do_rotary", 0) and None in (known_size(ctx.maybe_x(i), 1) for i in (7, 8)):
        return "the size of its cosines and sines is not known"
    bias = ctx.maybe_x(10)
    if bias is not None and (known_rank(bias) != 4 or known_size(bias, 1) is None):
        return "the heads of what is added to its scores are not known (attention_bias)"
    return None


def _length(op: Ops, q: ir.Value) -> ir.Value:
    """S, a scalar, of [B, N, S, H]."""
    return op.squeeze(op.slice(op.Shape(q), [0], [2], [3]), 0)


def _places(op: Ops, q: ir.Value) -> ir.Value:
    """0, 1, ... for the tokens."""
    return op.Range(op.constant(np.array(0)), _length(op, q), op.constant(np.array(1)))


def _angles(ctx: Context, q: ir.Value) -> list[ir.Value]:
    """Cosines and sines of the tokens, [S, half of what is turned]."""
    op, places = ctx.op, _places(ctx.op, q)
    positions = ctx.maybe_x(9)
    if positions is not None:  # of a prompt the kernel reads the first one
        places = op.Add(places, op.slice(op.reshape(positions, -1), [0], [0], [1]))
    return [op.Gather(buffer(ctx.x(i)), places, axis=0) for i in (7, 8)]


def _turned(ctx: Context, x: ir.Value, cos: ir.Value, sin: ir.Value, size: int) -> ir.Value:
    """[B, heads, S, H] after the rotation of the first features."""
    op, half = ctx.op, known_size(ctx.x(7), 1) or 0
    turned = turn(op, x, cos, sin, half, interleaved=bool(ctx.int("rotary_interleaved", 0)))
    if 2 * half == size:
        return turned
    return op.Concat(turned, op.slice(x, [3], [2 * half], [size]), axis=3)


def _seen(op: Ops, q: ir.Value, window: int) -> ir.Value:
    """[S, S]: whether a token sees another: no later one, and only so many before."""
    places = _places(op, q)
    rows = op.unsqueeze(places, 1)
    seen = op.LessOrEqual(places, rows)
    if window < 0:
        return seen
    return op.And(seen, op.Greater(op.Add(places, window), rows))


def _repeated(op: Ops, value: ir.Value, times: int, axis: int) -> ir.Value:
    return value if times == 1 else op.Concat(*[value] * times, axis=axis)


def _by_rows(op: Ops, bias: ir.Value, shared: int, groups: int) -> ir.Value:
    """[B or 1, N or 1, S, S] for rows [B, M, G S, S]."""
    if known_size(bias, 1) == 1 or groups == 1:
        return _repeated(op, bias, groups, 2)
    length = op.slice(op.Shape(bias), [0], [3], [4])
    return op.Reshape(bias, op.Concat(op.ints(0, shared, -1), length, axis=0))
