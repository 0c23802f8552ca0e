"""The LSTM cell, differentiated; symbols as in ``recurrent_cells``.

c = forget before + i g and h = o k(c), where the gates i, o and forget may look at the cell
through peepholes: at the state before the step, and o at that after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from odtpack.autodiff.rules.recurrent.cells import Found, Functions, Gates, value_and_slope
from odtpack.autodiff.rules.recurrent.steps import Body, Direction, Step
from odtpack.graph.ops import Ops

_I, _O, _FORGET, _G = range(4)  # order of the gates


def lstm(direction: Direction, functions: Functions) -> Found:
    """Cotangents of one direction of an LSTM.

    With dh for the hidden state after a step, the cotangent of the cell is
    dc = (that from the next step) + dh k_c, k_c = o k'(c) + k_o Po, and the gates have
    dh k_o, k_o = k(c) o'; dc k_i, k_i = g i'; dc k_f, k_f = before forget'; and dc k_g,
    k_g = i g'. The step before receives dc k_b, k_b = forget + k_i Pi + k_f Pf.
    """
    op, layer, weights, (f, _, k) = direction.op, direction.layer, direction.r, functions
    hidden, gates, peepholes = layer.hidden, Gates(direction), _Peepholes.of(direction)
    cell = _cell(direction, gates, functions, peepholes)
    o, do = value_and_slope(op, f, peepholes.add(op, _O, gates.input(_O), cell.after))
    shown, dshown = value_and_slope(op, dataclasses.replace(k, clip=None), cell.after)
    k_o = op.Mul(shown, do)
    k_c = peepholes.add(op, _O, op.Mul(o, dshown), k_o)
    k_b = peepholes.add(op, _I, cell.forget, cell.k_i)
    k_b = peepholes.add(op, _FORGET, k_b, cell.k_f)

    def body(op: Ops, dh: ir.Value, dc: ir.Value, *factors: ir.Value) -> Step:
        k_o, k_c, k_i, k_f, k_g, k_b = factors
        dc = op.Add(dc, op.Mul(dh, k_c))
        pairs = ((dc, k_i), (dh, k_o), (dc, k_f), (dc, k_g))
        da = op.Concat(*(op.Mul(*pair) for pair in pairs), axis=1)
        return [op.MatMul(da, weights), op.Mul(dc, k_b)], [da]

    factors = (k_o, k_c, cell.k_i, cell.k_f, cell.k_g, k_b)
    sequences = [layer.by_step(each, hidden) for each in factors]
    finals = [direction.final(1), direction.final(2)]
    initial_h, initial_c, stacked = direction.backward(finals, sequences, body)
    da = layer.rows(stacked, 4 * hidden)
    dp = None
    if layer.ctx.needs(7):
        parts = op.split(da, 1, [hidden] * 4)
        seen = {_I: cell.before, _O: cell.after, _FORGET: cell.before}
        sums = [op.reduce_sum(op.Mul(parts[g], c), [0], keepdims=False) for g, c in seen.items()]
        dp = op.Concat(*sums, axis=0)
    return Found(da, [(da, direction.h)], initial_h, initial_c, dp)


@dataclasses.dataclass(frozen=True)
class _Peepholes:
    """Weights [H] by which the gates i, o and forget see the cell; none without peepholes."""

    weights: Sequence[ir.Value]

    @classmethod
    def of(cls, direction: Direction) -> _Peepholes:
        weights = direction.layer.ctx.maybe_x(7)
        if weights is None:
            return cls(())
        return cls(direction.op.split(direction.part(weights), 0, [direction.layer.hidden] * 3))

    def add(self, op: Ops, gate: int, a: ir.Value, cell: ir.Value) -> ir.Value:
        """a + P cell for one gate."""
        return op.Add(a, op.Mul(cell, self.weights[gate])) if self.weights else a


@dataclasses.dataclass(frozen=True)
class _Cell:
    """Cell states around each step and the gates that make them; all are rows [T B, H]."""

    before: ir.Value
    after: ir.Value
    forget: ir.Value
    k_i: ir.Value
    k_f: ir.Value
    k_g: ir.Value


def _cell(direction: Direction, gates: Gates, functions: Functions, peepholes: _Peepholes) -> _Cell:
    """Run the cell states through all steps, as no output of the node holds them.

    Without peepholes the gates do not depend on them, and are computed before the loop.
    With input_forget the forget gate is 1 - i.
    """
    op, layer, (f, g, _) = direction.op, direction.layer, functions
    coupled = bool(layer.ctx.int("input_forget", 0))
    blind = [gates.input(gate) for gate in ((_I,) if coupled else (_I, _FORGET))]
    block, dblock = value_and_slope(op, g, gates.input(_G))

    def gates_at(
        op: Ops, cell: ir.Value, blind: Sequence[ir.Value]
    ) -> tuple[list[ir.Value], ir.Value, ir.Value]:
        pairs = zip((_I, _FORGET), blind, strict=False)
        a = [peepholes.add(op, gate, each, cell) for gate, each in pairs]
        i = f.value(op, a[0])
        return a, i, op.Sub(1, i) if coupled else f.value(op, a[1])

    def watching(op: Ops, cell: ir.Value, block: ir.Value, *blind: ir.Value) -> Step:
        _, i, forget = gates_at(op, cell, blind)
        new = op.Add(op.Mul(cell, forget), op.Mul(i, block))
        return [new], [new]

    def plain(op: Ops, cell: ir.Value, forget: ir.Value, written: ir.Value) -> Step:
        new = op.Add(op.Mul(cell, forget), written)
        return [new], [new]

    def run(body: Body, *rows: ir.Value) -> ir.Value:
        sequences = [layer.by_step(each, layer.hidden) for each in rows]
        return direction.forward([start], sequences, body)[1]

    start = direction.initial(6)
    if peepholes.weights:
        stacked = run(watching, block, *blind)
        before = direction.before(stacked, 6)
        a, i, forget = gates_at(op, before, blind)
    else:
        a, i, forget = gates_at(op, start, blind)  # which look at no state
        stacked = run(plain, forget, op.Mul(i, block))
        before = direction.before(stacked, 6)
    after = layer.rows(stacked, layer.hidden)
    k_i = op.Mul(op.Sub(block, before) if coupled else block, f.slope(op, a[0], i))
    if coupled:
        k_f = op.zeros(op.Shape(i), layer.dtype)
    else:
        k_f = op.Mul(before, f.slope(op, a[1], forget))
    return _Cell(before, after, forget, k_i, k_f, op.Mul(i, dblock))
