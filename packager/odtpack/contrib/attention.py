"""Attention, embeddings and normalizations of ONNX Runtime's contributed operators."""

from __future__ import annotations

import dataclasses
import math

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
    not_covered,
    rms_norm,
)
from odtpack.graph.graphs import Ops, dims_of, mark_constant, wider

# Attention with its projections, masks and caches, as ONNX Runtime's CPU kernels read them.
#
# Shapes: B samples, N heads, S queries, T keys (past ones included), sizes H of a head.

_FILTER = -10000.0


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Queries [B, N, S, H], keys [B, N, T, H] and values [B, N, T, Hv], and the heads' size."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    size: int


@decomposition("Attention")
def attention(ctx: Context) -> Outputs | None:
    """Inputs: x [B, S, D], weight [D, 3 N H], bias, mask, past [2, B, N, P, H], bias of scores."""
    op, count = ctx.op, ctx.int("num_heads", 1)
    width = known_size(ctx.x(1), 1)
    if width is None or ctx.int("do_rotary", 0) or ctx.maybe_x(6) is not None:
        return None
    if not _covers_mask(ctx.maybe_x(3), ctx.x()) or ctx.int("past_present_share_buffer", 0):
        return None
    sizes = list(ctx.ints("qkv_hidden_sizes", [width // 3] * 3))
    projected = op.MatMul(ctx.x(), ctx.x(1))
    if ctx.maybe_x(2) is not None:
        projected = op.Add(projected, ctx.x(2))
    q, k, v = (heads_first(op, part, count) for part in op.split(projected, 2, sizes))
    past = ctx.maybe_x(4)
    if past is not None:
        old = [op.squeeze(part, 0) for part in op.split(past, 0, [1, 1])]
        k, v = (op.Concat(before, now, axis=2) for before, now in zip(old, (k, v), strict=True))
    y = _attend(ctx, _Heads(q, k, v, sizes[0] // count), ctx.maybe_x(3), ctx.maybe_x(5))
    present = None
    if asked_for(ctx, 1):
        present = op.Concat(op.unsqueeze(k, 0), op.unsqueeze(v, 0), axis=0)
    return [y, present]


@decomposition("MultiHeadAttention")
def multi_head_attention(ctx: Context) -> Outputs | None:
    """Inputs: query, key, value, bias, mask, bias of scores, past keys and values."""
    # Query, key and value are [B, S, N H] each, or key and value [B, N, T, H] as they are. The
    # packed forms have no kernel for CPUs.
    if asked_for(ctx, 3) or ctx.maybe_x(8) is not None or ctx.maybe_x(9) is not None:
        return None
    heads = _projections(ctx) if _covers_mask(ctx.maybe_x(4), ctx.x()) else None
    if heads is None:
        return None
    op, pasts = ctx.op, (ctx.maybe_x(6), ctx.maybe_x(7))
    k, v = (
        now if before is None else op.Concat(before, now, axis=2)
        for before, now in zip(pasts, (heads.k, heads.v), strict=True)
    )
    heads = dataclasses.replace(heads, k=k, v=v)
    return [_attend(ctx, heads, ctx.maybe_x(4), ctx.maybe_x(5)), k, v]


def _projections(ctx: Context) -> _Heads | None:
    """Queries, keys and values of a MultiHeadAttention by heads; None if not covered."""
    op, count = ctx.op, ctx.int("num_heads", 1)
    query, key, value, bias = ctx.x(), ctx.maybe_x(1), ctx.maybe_x(2), ctx.maybe_x(3)
    hidden = known_size(query, 2) if known_rank(query) == 3 else None
    if hidden is None or key is None or value is None:
        return None
    if known_rank(key) == 4 and bias is None:
        return _Heads(heads_first(op, query, count), key, value, hidden // count)
    total = hidden * 3 if bias is None else known_size(bias, 0)
    if known_rank(key) != 3 or total is None:
        return None
    parts = [query, key, value]
    if bias is not None:
        shifts = op.split(bias, 0, [hidden, hidden, total - 2 * hidden])
        parts = [op.Add(part, shift) for part, shift in zip(parts, shifts, strict=True)]
    q, k, v = (heads_first(op, part, count) for part in parts)
    return _Heads(q, k, v, hidden // count)


def lowest(op: Ops, scores: ir.Value) -> float:
    """A score that no softmax sees, as low as its type has one."""
    return -65504.0 if op.type_of(scores) == ir.DataType.FLOAT16 else -3e38


def heads_first(op: Ops, value: ir.Value, count: int) -> ir.Value:
    """[B, S, N H] as [B, N, S, H]."""
    return op.transpose(op.reshape(value, 0, 0, count, -1), 0, 2, 1, 3)


def _attend(ctx: Context, heads: _Heads, mask: ir.Value | None, bias: ir.Value | None) -> ir.Value:
    """softmax(scale Q K^T + masks) V as [B, S, N H]."""
    op = ctx.op
    scale = ctx.float("scale", 0.0) or 1 / math.sqrt(heads.size)
    scores = op.MatMul(op.Mul(heads.q, scale), op.transpose(heads.k, 0, 1, 3, 2))
    if bias is not None:
        scores = op.Add(scores, bias)
    if mask is not None:
        scores = op.Add(scores, _masked(ctx, mask, heads))
    if ctx.int("unidirectional", 0):
        scores = op.Where(_causal(op, heads), scores, lowest(op, scores))
    mixed = op.MatMul(op.Softmax(scores, axis=3), heads.v)
    return op.reshape(op.transpose(mixed, 0, 2, 1, 3), 0, 0, -1)


def _covers_mask(mask: ir.Value | None, x: ir.Value) -> bool:
    """Masks of keys [B, T], of queries and keys [B, S, T], or the number of keys [B]."""
    if mask is None:
        return True
    dims, samples = dims_of(mask), dims_of(x)
    if dims is None or len(dims) != 1:
        return dims is not None and len(dims) in (2, 3)
    # There are longer ones, which hold first and last keys.
    return bool(samples) and dims[0] is not None and dims[:1] == (samples or ())[:1]


def _masked(ctx: Context, mask: ir.Value, heads: _Heads) -> ir.Value:
    """What is added to the scores: the filter value where a key does not count."""
    op, rank = ctx.op, known_rank(mask)
    counts = op.cast(mask, ir.DataType.INT64)
    if rank == 1:
        allowed = op.Less(op.places(heads.k, 2), op.unsqueeze(counts, 1))
    else:
        allowed = op.Greater(counts, 0)
    axes = (1, 2) if rank in (1, 2) else (1,)
    dtype = heads.q.dtype or ir.DataType.FLOAT
    blocked = op.cast(op.Not(op.unsqueeze(allowed, *axes)), dtype)
    return op.Mul(blocked, ctx.float("mask_filter_value", _FILTER))


def _causal(op: Ops, heads: _Heads) -> ir.Value:
    """[S, T]: query s, the last of which stands at the last key, sees the keys up to it."""
    lengths = [op.slice(op.Shape(part), [0], [2], [3]) for part in (heads.k, heads.q)]
    places = op.Add(op.places(heads.q, 2), op.Sub(*lengths))
    return op.LessOrEqual(op.places(heads.k, 2), op.unsqueeze(places, 1))


# Grouped-query attention, the one operator that decoders of onnxruntime-genai's builder share.
#
# A model that trains has no cache: a sequence starts empty, and each token sees itself and those
# before it. Padding goes to the end, where no token that counts sees it; what the kernel returns
# for padding itself is undefined. So the numbers of tokens (``seqlens_k``) do not matter.
#
# Shapes: B samples, S tokens, N heads of queries, G of them for each of M heads of keys and values,
# sizes H of a head.

_UNREAD = {  # inputs, and what they make of the operator
    11: "a sink of each head takes part in its softmax (head_sink)",
    12: "its cache is quantized",
    13: "its cache is quantized",
    16: "it takes numbers of queries (query_seqlens)",
}


@decomposition("GroupQueryAttention")
def group_query_attention(ctx: Context) -> Outputs | None:
    """Inputs: query, key, value, past keys and values, lengths, cosines, sines, positions, bias."""
    # Query, key and value are [B, S, heads H] each, or all in the first. Inputs 14 and 15 are
    # weights [H], with which queries and keys of each head are normalized before they are turned.
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
    q, k = _normal(ctx, q, 14, "q"), _normal(ctx, k, 15, "k")
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
        return "its past keys and values are not inputs that can be left out"
    for index, why in _UNREAD.items():
        if ctx.maybe_x(index) is not None:
            return why
    if (ctx.maybe_x(14) is None) != (ctx.maybe_x(15) is None):
        return "it normalizes queries or keys, and not both (q_norm_weight, k_norm_weight)"
    if ctx.int("smooth_softmax", 0):
        return "its softmax is smooth (smooth_softmax)"
    if not ctx.int("causal", 1):
        return "tokens see those after them (causal)"
    if ctx.int("qk_output", 0) or asked_for(ctx, 3):
        return "it returns its scores (qk_output)"
    if ctx.int("do_rotary", 0) and None in (known_size(ctx.maybe_x(i), 1) for i in (7, 8)):
        return "the size of its cosines and sines is not known"
    bias = ctx.maybe_x(10)
    if bias is not None and (known_rank(bias) != 4 or known_size(bias, 1) is None):
        return "the heads of what is added to its scores are not known (attention_bias)"
    return None


def _normal(ctx: Context, x: ir.Value, place: int, of: str) -> ir.Value:
    """[B, heads, S, H], each row by its root mean square, where there is a weight for it."""
    op, weight = ctx.op, ctx.maybe_x(place)
    if weight is None:
        return x
    epsilon = ctx.float(f"{of}_norm_epsilon", 0.0) or ctx.float("qk_norm_epsilon", 1e-6)
    dtype = op.type_of(x)
    wide = wider(dtype)
    return op.cast(rms_norm(op, op.cast(x, wide), op.cast(weight, wide), [-1], epsilon), dtype)


def _places(op: Ops, q: ir.Value) -> ir.Value:
    """0, 1, ... for the tokens."""
    zero = op.constant(np.array(0))
    return op.Range(zero, op.squeeze(op.slice(op.Shape(q), [0], [2], [3]), 0), 1)


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


# Embeddings: of words and positions, and by rotation.

_EPSILON = 1e-12


@decomposition("EmbedLayerNormalization")
def embed_layer_norm(ctx: Context) -> Outputs:
    """Sum of word, position and segment embeddings, normalized; and the lengths of the masks."""
    # Inputs: words [B, S], segments, tables of words, positions and segments, scale, bias, mask,
    # positions.
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
    """Turn pairs of features by angles that grow with the position."""
    # Inputs: x [B, S, heads * size] or [B, heads, S, size], positions [B, S] or the first one [1],
    # cosines and sines [longest, half the rotated size].
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
    axis = 2 if heads_last else 1  # of the heads
    if place_rank == 1:  # from there on, for every sample: without its axis
        positions = op.Add(op.places(shaped, 3 - axis), positions)
        axis -= 1
    cos, sin = (op.Gather(buffer(ctx.x(i)), positions, axis=0) for i in (2, 3))
    if axis:  # broadcasting adds a first axis by itself
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
