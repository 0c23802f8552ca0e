"""What Adam and AdamW share: two moments, and the change that follows from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from odtpack.optimizers.common.base import FIRST, SECOND, Values, lerp

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops


class AdamLike(Protocol):
    """Hyperparameters that the change reads."""

    @property
    def beta1(self) -> float:
        """Decay of the first moment."""

    @property
    def beta2(self) -> float:
        """Decay of the second moment."""

    @property
    def epsilon(self) -> float:
        """Added to the denominator."""

    @property
    def bias_correction(self) -> bool:
        """Whether the moments are corrected for their start at 0."""


def moments(
    op: Ops, values: Values, gradients: ir.Value, beta1: float, beta2: float
) -> tuple[ir.Value, ir.Value]:
    """Return both moments after a step."""
    m = lerp(op, values[FIRST], gradients, beta1)
    return m, lerp(op, values[SECOND], op.Mul(gradients, gradients), beta2)


def change(
    optimizer: AdamLike,
    op: Ops,
    values: Values,
    m: ir.Value,
    v: ir.Value,
    *,
    scaled_epsilon: bool,
) -> ir.Value:
    """Return lr sqrt(u2) / u1 m / (sqrt(v) + epsilon'), where u = 1 - b^t.

    epsilon' is epsilon, or with ``scaled_epsilon`` sqrt(u2) epsilon: the same as dividing
    sqrt(v) by sqrt(u2) first, with a pass over the vector less.
    """
    size = values["learning_rate"]
    epsilon: ir.Value | float = optimizer.epsilon
    if optimizer.bias_correction:
        t = op.cast(values["step"], op.type_of(size))
        root2 = op.Sqrt(_unbias(op, t, optimizer.beta2))
        if scaled_epsilon:
            epsilon = op.Mul(root2, optimizer.epsilon)
        size = op.Mul(size, op.Div(root2, _unbias(op, t, optimizer.beta1)))
    direction = op.Div(m, op.Add(op.Sqrt(v), epsilon))
    return op.Mul(direction, size)


def _unbias(op: Ops, t: ir.Value, beta: float) -> ir.Value:
    """Return 1 - beta^t, of the type of t, [1].

    It is 1 - exp(-2 x) with x = -t ln(beta) / 2, written 2 tanh(x) / (1 + tanh(x)): with
    b2 = 0.999 a difference of 1 would lose four digits of the first steps in float32, and
    float64 is what not every runtime has.
    """
    half = op.Tanh(op.Mul(t, -math.log(beta) / 2))
    return op.Div(op.Mul(half, 2.0), op.Add(half, 1.0))
