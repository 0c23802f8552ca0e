"""The cells: what an RNN, a GRU and an LSTM do in one step, differentiated.

Symbols: a is the input of a gate's activation function, a prime its slope there, ``before``
and ``after`` say on which side of a step a state is, and k_.. are factors that do not depend
on the cotangents, and are computed for all steps before the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from odtpack.autodiff.rules.recurrent.gate_functions import GateFunction
from odtpack.autodiff.rules.recurrent.steps import Direction, Step
from odtpack.graph.ops import Ops

Functions = tuple[GateFunction, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """Cotangents that the loop over the steps of one direction has found.

    Attributes:
        inputs: Of X W^T + Wb, for all gates [T B, G H].
        states: Of H R^T + Rb, gates and the states H that they were computed from
            [T B, H]: one pair for each block of rows of R.
        initial_h: Of the initial hidden state [B, H].
        initial_c: Of the initial cell state [B, H].
        peepholes: Of P [3 H].
    """

    inputs: ir.Value
    states: Sequence[tuple[ir.Value, ir.Value]]
    initial_h: ir.Value
    initial_c: ir.Value | None = None
    peepholes: ir.Value | None = None


class Gates:
    """Weights of one direction cut by gate, for the inputs of single gates."""

    def __init__(self, direction: Direction) -> None:
        self.op, self._direction = direction.op, direction
        layer = direction.layer
        sizes = [layer.hidden] * layer.gates

        def cut(value: ir.Value) -> Sequence[ir.Value]:
            return self.op.split(value, 0, sizes) if layer.gates > 1 else [value]

        self.w, self.r = cut(direction.w), cut(direction.r)
        biases = direction.biases or ()
        self.biases = [cut(bias) for bias in biases] or [(), ()]
        self.sums = cut(self.op.Add(*biases)) if biases else ()

    def input(self, gate: int, states: ir.Value | None = None) -> ir.Value:
        """a = x W^T + h R^T + Wb + Rb of a gate [T B, H]; h is the state before a step."""
        linear = self._product(self._direction.x, self.w[gate], self.sums, gate)
        states = self._direction.h if states is None else states
        return self.op.Gemm(states, self.r[gate], linear, transB=1)

    def of_inputs(self, gate: int) -> ir.Value:
        """x W^T + Wb of a gate."""
        return self._product(self._direction.x, self.w[gate], self.biases[0], gate)

    def of_states(self, gate: int) -> ir.Value:
        """h R^T + Rb of a gate."""
        return self._product(self._direction.h, self.r[gate], self.biases[1], gate)

    def _product(
        self, rows: ir.Value, weight: ir.Value, biases: Sequence[ir.Value], gate: int
    ) -> ir.Value:
        return self.op.Gemm(rows, weight, *biases[gate : gate + 1], transB=1)


def rnn(direction: Direction, functions: Functions) -> Found:
    """h = f(a)."""
    op, layer, r, (f,) = direction.op, direction.layer, direction.r, functions
    a = Gates(direction).input(0) if f.slope_needs_input else None
    slopes = layer.by_step(f.slope(op, a, direction.y), layer.hidden)

    def body(op: Ops, dh: ir.Value, slope: ir.Value) -> Step:
        da = op.Mul(dh, slope)
        return [op.MatMul(da, r)], [da]

    initial_h, stacked = direction.backward([direction.final(1)], [slopes], body)
    da = layer.rows(stacked, layer.hidden)
    return Found(da, [(da, direction.h)], initial_h)


def gru(direction: Direction, functions: Functions) -> Found:
    """h = (1 - z) n + z before, where n = g(x Wh^T + (r before) Rh^T + b) and z, r = f(a).

    ONNX names n "h". k_z = (before - n) z', k_n = (1 - z) n', k_r = before r'.
    """
    op, layer, before, (f, g) = direction.op, direction.layer, direction.h, functions
    hidden, gates = layer.hidden, Gates(direction)
    (z, dz), (r, dr) = (value_and_slope(op, f, gates.input(gate)) for gate in (0, 1))
    reset = op.Mul(r, before)
    n, dn = value_and_slope(op, g, gates.input(2, reset))
    factors = [
        op.Mul(op.Sub(before, n), dz),
        op.Mul(op.Sub(1, z), dn),
        op.Mul(before, dr),
    ]
    zr_weights = op.slice(direction.r, [0], [0], [2 * hidden])

    def body(op: Ops, dh: ir.Value, *factors: ir.Value) -> Step:
        k_z, k_n, k_r, z, r = factors
        n_gate = op.Mul(dh, k_n)
        dreset = op.MatMul(n_gate, gates.r[2])
        zr_gates = op.Concat(op.Mul(dh, k_z), op.Mul(dreset, k_r), axis=1)
        straight = op.Add(op.Mul(dh, z), op.Mul(dreset, r))
        return [op.Add(op.MatMul(zr_gates, zr_weights), straight)], [zr_gates, n_gate]

    sequences = [layer.by_step(each, hidden) for each in (*factors, z, r)]
    initial_h, *stacked = direction.backward([direction.final(1)], sequences, body)
    zr_gates, n_gate = layer.rows(stacked[0], 2 * hidden), layer.rows(stacked[1], hidden)
    inputs = op.Concat(zr_gates, n_gate, axis=1)
    return Found(inputs, [(zr_gates, before), (n_gate, reset)], initial_h)


def gru_linear_first(direction: Direction, functions: Functions) -> Found:
    """The same with n = g(x Wh^T + Wbh + r q), q = before Rh^T + Rbh.

    k_z = (before - n) z', k_n = (1 - z) n', k_r = k_n q r', and k_q = k_n r for q.
    """
    op, layer, before, (f, g) = direction.op, direction.layer, direction.h, functions
    hidden, gates, weights = layer.hidden, Gates(direction), direction.r
    (z, dz), (r, dr) = (value_and_slope(op, f, gates.input(gate)) for gate in (0, 1))
    q = gates.of_states(2)
    n, dn = value_and_slope(op, g, op.Add(gates.of_inputs(2), op.Mul(r, q)))
    k_n = op.Mul(op.Sub(1, z), dn)
    factors = [
        op.Mul(op.Sub(before, n), dz),
        k_n,
        op.Mul(k_n, op.Mul(q, dr)),
        op.Mul(k_n, r),
    ]

    def body(op: Ops, dh: ir.Value, *factors: ir.Value) -> Step:
        k_z, k_n, k_r, k_q, z = factors
        z_gate, r_gate = op.Mul(dh, k_z), op.Mul(dh, k_r)
        of_inputs = op.Concat(z_gate, r_gate, op.Mul(dh, k_n), axis=1)
        of_states = op.Concat(z_gate, r_gate, op.Mul(dh, k_q), axis=1)
        return [op.Add(op.MatMul(of_states, weights), op.Mul(dh, z))], [of_inputs, of_states]

    sequences = [layer.by_step(each, hidden) for each in (*factors, z)]
    initial_h, *stacked = direction.backward([direction.final(1)], sequences, body)
    of_inputs, of_states = (layer.rows(each, 3 * hidden) for each in stacked)
    return Found(of_inputs, [(of_states, before)], initial_h)


def value_and_slope(op: Ops, f: GateFunction, a: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Output of a gate's function, and its derivative there."""
    y = f.value(op, a)
    return y, f.slope(op, a, y)
