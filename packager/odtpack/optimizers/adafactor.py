"""Adafactor: a second moment of rows and columns in place of one of elements."""

from __future__ import annotations

import dataclasses

import numpy as np

from odtpack.optimizers.common.base import Ops, Optimizer, StateVector, Value, Values, keep_factor
from odtpack.option import option

ROWS, COLUMNS = "row_variances", "column_variances"


@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
    """AdamW's step with little state, in the variant of ``torch.optim.Adafactor``.

    For a matrix, with b = t^beta2_decay and RMS the root of the mean square over the whole
    parameter::

        R <- R + b (mean of g^2 over columns - R);  C <- C + b (mean of g^2 over rows - C)
        V = R C / max(mean of R, epsilon1)
        u = g / sqrt(max(V, epsilon1^2))
        a = max(epsilon2, RMS(p)) min(lr, 1 / sqrt(t))
        p <- p - lr weight_decay p
        p <- p - a u / max(1, RMS(u) / clip_threshold)

    A vector is one row whose V is C. (Its R, a single number, is kept and not used, so that
    every parameter has the same two tensors.) A parameter with more axes is a matrix of its
    first axes by the rest, cut where least is kept. PyTorch takes the last two axes for the
    matrix: of a convolution kernel, 3 x 3 or 1 x 1, it keeps most or more than all.
    epsilon1 is the distance from 1 to the next number of the element type, 2^-23 for float32.

    Source: Shazeer and Stern (2018), https://arxiv.org/abs/1804.04235.

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind = "adafactor"
    summary = "Adafactor, with the learning rate as given."
    source = "`torch.optim.Adafactor`, after Shazeer and Stern (2018)"
    keeps = "a number per row and column: 0.02 bytes for 700 x 700"
    learning_rates = (0.01, 0.03, 0.003)
    beta2_decay: float = option(
        -0.8, "Power of the step by which the second moment decays.", most=0
    )
    epsilon2: float = option(1e-3, "Least root mean square of a parameter.", above=0)
    clip_threshold: float = option(1.0, "Largest root mean square of a step.", above=0)

    # Means of the squares of each row, and of each column.
    state = (StateVector(ROWS, (0,)), StateVector(COLUMNS, (1,)))

    def write(self, op: Ops, values: Values, weight_decay: Value | float) -> dict[str, Value]:
        # ``values`` also holds ``factored`` BOOL[1]: true for matrices, false for vectors.
        params, gradients, rate = values["params"], values["gradients"], values["learning_rate"]
        dtype = op.type_of(gradients)
        epsilon1 = float(np.finfo(dtype.numpy()).eps)
        step = op.cast(values["step"], dtype)
        weight = op.Pow(step, self.beta2_decay)
        squares = op.Mul(gradients, gradients)

        def toward(old: Value, new: Value) -> Value:
            return op.Add(old, op.Mul(op.Sub(new, old), weight))

        rows = toward(values[ROWS], op.reduce_mean(squares, [1]))
        columns = toward(values[COLUMNS], op.reduce_mean(squares, [0]))
        ratio = op.Div(rows, op.Max(op.reduce_mean(rows, [0]), epsilon1))
        ratio = op.Where(values["factored"], ratio, 1.0)
        variance = op.Max(op.Mul(ratio, columns), epsilon1**2)
        update = op.Div(gradients, op.Sqrt(variance))

        early = op.Div(1.0, op.Sqrt(step))
        size = op.Mul(op.Max(_rms(op, params), self.epsilon2), op.Min(rate, early))
        excess = op.Max(op.Div(_rms(op, update), self.clip_threshold), 1.0)
        keep = keep_factor(op, rate, weight_decay)
        if keep is not None:
            params = op.Mul(params, keep)
        new = op.Sub(params, op.Mul(update, op.Div(size, excess)))
        return {"params": new, ROWS: rows, COLUMNS: columns}


def _rms(op: Ops, value: Value) -> Value:
    """Root of the mean square over all elements, [1, 1]."""
    total = op.ReduceSumSquare(value, keepdims=1)
    return op.Sqrt(op.Div(total, op.cast(op.Size(value), op.type_of(value))))
