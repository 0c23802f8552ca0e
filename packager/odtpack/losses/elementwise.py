"""Losses that compare prediction and target element by element."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from odtpack.graph.graphs import dims_of
from odtpack.graph.ops import Ops
from odtpack.losses.base import Loss, Target, like, target_like
from odtpack.losses.options import Numbers, check_number, numbers


@dataclasses.dataclass(frozen=True)
class _Elementwise(Loss):
    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """A target of the prediction's shape."""
        return (target_like(predictions[0]),)


@dataclasses.dataclass(frozen=True)
class MeanSquaredError(_Elementwise):
    """(prediction - target)^2."""

    name: ClassVar[str] = "mse"

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the squares."""
        prediction, target = values
        difference = like(op.Sub(prediction, target), prediction)
        return like(op.Mul(difference, difference), prediction)


@dataclasses.dataclass(frozen=True)
class MeanAbsoluteError(_Elementwise):
    """|prediction - target|; the slope where they are equal is 0."""

    name: ClassVar[str] = "l1"

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the distances."""
        prediction, target = values
        return like(op.Abs(op.Sub(prediction, target)), prediction)


def _huber(op: Ops, delta: float, prediction: ir.Value, target: ir.Value) -> ir.Value:
    """With a = |prediction - target| and c = min(a, delta): c (a - c / 2).

    That is a^2 / 2 up to delta and delta (a - delta / 2) beyond; nothing is squared that
    could overflow.
    """
    distance = like(op.Abs(op.Sub(prediction, target)), prediction)
    near = like(op.Min(distance, delta), prediction)
    return like(op.Mul(near, op.Sub(distance, op.Mul(near, 0.5))), prediction)


@dataclasses.dataclass(frozen=True)
class Huber(_Elementwise):
    """d^2 / 2 for |d| <= delta, delta (|d| - delta / 2) beyond; d = prediction - target."""

    name: ClassVar[str] = "huber"
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "delta", self.delta, above=0)

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the terms."""
        return _huber(op, self.delta, *values)


@dataclasses.dataclass(frozen=True)
class SmoothL1(_Elementwise):
    """d^2 / (2 beta) for |d| <= beta, |d| - beta / 2 beyond; d = prediction - target."""

    name: ClassVar[str] = "smooth_l1"
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "beta", self.beta, above=0)

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the terms."""
        huber = _huber(op, self.beta, *values)
        return huber if self.beta == 1 else like(op.Mul(huber, 1 / self.beta), values[0])


@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(_Elementwise):
    """-w (p t log s(x) + (1 - t) log(1 - s(x))), s the sigmoid, without ever taking a log.

    Attributes:
        weight: w, broadcast to the prediction's shape; 1 if None.
        pos_weight: p, likewise.
    """

    name: ClassVar[str] = "bce_with_logits"
    weight: Numbers | None = None
    pos_weight: Numbers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("weight", "pos_weight"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, numbers(self.name, option, value))

    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write softplus(x) - x t, or with p: (1 - t) x + (1 + (p - 1) t) softplus(-x)."""
        logits, target = values
        if self.pos_weight is None:
            terms = op.Sub(op.Softplus(logits), op.Mul(logits, target))
        else:
            extra = self._constant(op, "pos_weight", logits, minus=1)
            positive = op.Add(op.Mul(target, extra), 1)
            terms = op.Add(
                op.Mul(op.Sub(1, target), logits),
                op.Mul(positive, op.Softplus(op.Neg(logits))),
            )
        if self.weight is not None:
            terms = op.Mul(terms, self._constant(op, "weight", logits))
        return like(terms, logits)

    def _constant(self, op: Ops, option: str, logits: ir.Value, minus: float = 0) -> ir.Value:
        array = np.asarray(getattr(self, option), np.float64) - minus
        shape = dims_of(logits) or ()
        ends = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.ndim > len(shape) or any(
            size not in (1, dim) for size, dim in ends if isinstance(dim, int)
        ):
            shown = ", ".join(map(str, shape))
            raise self._bad(option, f"of a shape that broadcasts to the prediction's, [{shown}]")
        return op.constant(array.astype((logits.dtype or ir.DataType.FLOAT).numpy()))
