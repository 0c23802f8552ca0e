"""Adam and AdamW."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import onnx_ir as ir

from odtpack.graph.ops import Ops
from odtpack.optimizers.base import (
    FIRST,
    SECOND,
    Optimizer,
    StateVector,
    Values,
    add_decay,
    check_fraction,
    check_not_negative,
    check_positive,
    check_range,
    keep_factor,
    lerp,
)

REFERENCE, PYTORCH = "reference", "pytorch"


@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, by one of two formulas.

    Both begin with::

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2

    ``reference``, that of Hugging Face transformers and adam_mode 1 of onnxruntime-training::

        p <- p - lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + epsilon)
        p <- p - lr weight_decay p

    ``pytorch``, that of ``torch.optim.AdamW`` and adam_mode 0::

        p <- p - lr weight_decay p
        p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + epsilon)

    Without ``bias_correction`` both powers b^t count as 0.

    Source: Loshchilov and Hutter (2019), https://arxiv.org/abs/1711.05101.

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind: ClassVar[str] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    formula: str = REFERENCE
    bias_correction: bool = True

    def __post_init__(self) -> None:
        _check(self)
        known = self.formula in (REFERENCE, PYTORCH)
        check_range(self, "formula", known, f"{REFERENCE} or {PYTORCH}")

    @property
    def state(self) -> tuple[StateVector, ...]:
        """First and second moment."""
        return StateVector(FIRST), StateVector(SECOND)

    def write(self, op: Ops, values: Values, weight_decay: ir.Value | float) -> dict[str, ir.Value]:
        """Write one step; see :meth:`Optimizer.write`."""
        rate, params = values["learning_rate"], values["params"]
        m, v = _moments(op, values, values["gradients"], self.beta1, self.beta2)
        keep = keep_factor(op, rate, weight_decay)
        early = self.formula == PYTORCH
        if keep is not None and early:
            params = op.Mul(params, keep)
        change = _change(self, op, values, m, v, scaled_epsilon=early)
        new = op.Sub(params, change)
        if keep is not None and not early:
            new = op.Mul(new, keep)
        return {"params": new, FIRST: m, SECOND: v}


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, with weight decay as an L2 penalty on the loss: ``torch.optim.Adam``.

    ::

        g <- g + weight_decay p
        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
        p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + epsilon)

    Source: Kingma and Ba (2015), https://arxiv.org/abs/1412.6980.

    Raises:
        OdtpackError: A hyperparameter is out of range.
    """

    kind: ClassVar[str] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    bias_correction: bool = True

    def __post_init__(self) -> None:
        _check(self)

    @property
    def state(self) -> tuple[StateVector, ...]:
        """First and second moment."""
        return StateVector(FIRST), StateVector(SECOND)

    def write(self, op: Ops, values: Values, weight_decay: ir.Value | float) -> dict[str, ir.Value]:
        """Write one step; see :meth:`Optimizer.write`."""
        params = values["params"]
        gradients = add_decay(op, values["gradients"], params, weight_decay)
        m, v = _moments(op, values, gradients, self.beta1, self.beta2)
        change = _change(self, op, values, m, v, scaled_epsilon=True)
        return {"params": op.Sub(params, change), FIRST: m, SECOND: v}


def _check(optimizer: AdamW | Adam) -> None:
    check_fraction(optimizer, "beta1", "beta2")
    check_positive(optimizer, "epsilon")
    check_not_negative(optimizer, "weight_decay")


def _moments(
    op: Ops, values: Values, gradients: ir.Value, beta1: float, beta2: float
) -> tuple[ir.Value, ir.Value]:
    m = lerp(op, values[FIRST], gradients, beta1)
    return m, lerp(op, values[SECOND], op.Mul(gradients, gradients), beta2)


def _change(
    optimizer: AdamW | Adam,
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
        t = op.cast(values["step"], size.dtype or ir.DataType.FLOAT)
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
