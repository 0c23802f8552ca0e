"""Attention with its projections, masks and caches, as ONNX Runtime's CPU kernels read them.

Shapes: B samples, N heads, S queries, T keys (past ones included), sizes H of a head.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.contrib.table import Outputs, asked_for, decomposition, known_rank, known_size
from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops

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
    """Inputs: query, key, value, bias, mask, bias of scores, past keys and values.

    Query, key and value are [B, S, N H] each, or key and value [B, N, T, H] as they are. The
    packed forms have no kernel for CPUs.
    """
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
        allowed = op.Less(_range(op, heads.k), op.unsqueeze(counts, 1))
    else:
        allowed = op.Greater(counts, 0)
    axes = (1, 2) if rank in (1, 2) else (1,)
    dtype = heads.q.dtype or ir.DataType.FLOAT
    blocked = op.cast(op.Not(op.unsqueeze(allowed, *axes)), dtype)
    return op.Mul(blocked, ctx.float("mask_filter_value", _FILTER))


def _range(op: Ops, rows: ir.Value) -> ir.Value:
    """0, 1, ... for each of the rows [B, N, T, H]."""
    length = op.squeeze(op.slice(op.Shape(rows), [0], [2], [3]), 0)
    return op.Range(op.constant(np.array(0)), length, op.constant(np.array(1)))


def _causal(op: Ops, heads: _Heads) -> ir.Value:
    """[S, T]: query s, the last of which stands at the last key, sees the keys up to it."""
    lengths = [op.slice(op.Shape(part), [0], [2], [3]) for part in (heads.k, heads.q)]
    places = op.Add(_range(op, heads.q), op.Sub(*lengths))
    return op.LessOrEqual(_range(op, heads.k), op.unsqueeze(places, 1))
