"""RNN, LSTM and GRU.

The forward node stays as it is, with its fused kernel. The rules compute the gates of all
steps again, from the states in Y, as matrix products over all steps; carry the cotangents
from step to step in a Scan whose body is one matrix product (two where a GRU resets before
it) and a few elementwise operators; and end with one product over all steps for each
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from odtpack.autodiff.context import Context
from odtpack.autodiff.registry import Cotangents, vjp
from odtpack.autodiff.rules.recurrent import cells, lstm_cell
from odtpack.autodiff.rules.recurrent.cells import Found, Functions
from odtpack.autodiff.rules.recurrent.gate_functions import gate_functions, rnn_functions
from odtpack.autodiff.rules.recurrent.steps import Direction, Layer
from odtpack.graph.ops import Ops


@vjp("RNN", since=7)
def rnn(ctx: Context) -> Cotangents:
    return _recurrent(ctx, 1, rnn_functions(ctx), cells.rnn)


@vjp("GRU", since=7)
def gru(ctx: Context) -> Cotangents:
    cell = cells.gru_linear_first if ctx.int("linear_before_reset", 0) else cells.gru
    return _recurrent(ctx, 3, gate_functions(ctx, ("sigmoid", "tanh")), cell)


@vjp("LSTM", since=7)
def lstm(ctx: Context) -> Cotangents:
    return _recurrent(ctx, 4, gate_functions(ctx, ("sigmoid", "tanh", "tanh")), lstm_cell.lstm)


def _recurrent(
    ctx: Context,
    gates: int,
    functions: Sequence[Functions],
    cell: Callable[[Direction, Functions], Found],
) -> Cotangents:
    """Cotangents of X, W, R, B, sequence_lens, initial_h, initial_c and P."""
    op, layer = ctx.op, Layer(ctx, gates)
    parts = [Direction(layer, index) for index in range(layer.directions)]
    found = [cell(part, own) for part, own in zip(parts, functions, strict=True)]
    result: list[ir.Value | None] = [None] * 8
    if ctx.needs(0):
        rows = op.MatMul(found[0].inputs, parts[0].w)
        for part, each in zip(parts[1:], found[1:], strict=True):
            rows = op.Gemm(each.inputs, part.w, rows)
        result[0] = layer.by_step(rows, layer.inputs)
    if ctx.needs(1):
        result[1] = layer.join([op.Gemm(each.inputs, layer.x, transA=1) for each in found])
    if ctx.needs(2):
        result[2] = layer.join([_recurrent_weight(op, each) for each in found])
    if ctx.needs(3):
        result[3] = layer.join([_biases(op, each) for each in found])
    if ctx.needs(5):
        result[5] = layer.join([each.initial_h for each in found])
    if ctx.needs(6):
        result[6] = layer.join([each.initial_c for each in found if each.initial_c])
    if ctx.needs(7):
        result[7] = layer.join([each.peepholes for each in found if each.peepholes])
    return result


def _recurrent_weight(op: Ops, found: Found) -> ir.Value:
    blocks = [op.Gemm(gates, states, transA=1) for gates, states in found.states]
    return op.Concat(*blocks, axis=0) if len(blocks) > 1 else blocks[0]


def _biases(op: Ops, found: Found) -> ir.Value:
    of_inputs = op.reduce_sum(found.inputs, [0], keepdims=False)
    (gates, _), *more = found.states
    # Where R is applied in blocks, to different states, both biases are added at one place.
    same = bool(more) or gates is found.inputs
    of_states = of_inputs if same else op.reduce_sum(gates, [0], keepdims=False)
    return op.Concat(of_inputs, of_states, axis=0)
