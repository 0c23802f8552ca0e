"""What every optimizer has in common: where its numbers come from and what it keeps."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.ops import Ops

FIRST, SECOND = "first_order_moments", "second_order_moments"

Values = Mapping[str, ir.Value]


@dataclasses.dataclass(frozen=True)
class StateVector:
    """What an optimizer keeps from step to step for every parameter.

    Attributes:
        name: Input of the optimizer model; its new value is the output ``<name>.out``.
        axes: None if it has the parameter's shape. Otherwise the optimizer is run parameter
            by parameter, each seen as a matrix [rows, columns], and these of the two axes
            are kept; the other has length 1.
    """

    name: str
    axes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
    """A formula and its hyperparameters.

    Every field is a hyperparameter with a default: the fields are what the command line
    takes as ``--optimizer-option`` and what the manifest shows.

    Attributes:
        weight_decay: How strongly parameters are drawn to 0; what it is multiplied with is
            the formula's affair.
    """

    kind: ClassVar[str]
    weight_decay: float = 0.0

    @property
    @abc.abstractmethod
    def state(self) -> tuple[StateVector, ...]:
        """What is kept, in the order of the checkpoint's ``momentum0``, ``momentum1``."""

    @abc.abstractmethod
    def write(self, op: Ops, values: Values, weight_decay: ir.Value | float) -> dict[str, ir.Value]:
        """Write one step.

        Args:
            op: Writer for the optimizer graph.
            values: ``params``, ``gradients`` (clipped) and the state by name, of one
                element type; ``learning_rate`` of that type, [1]; ``step`` INT64[1], the
                number of the step from 1.
            weight_decay: The decay: a number, or [1] where it differs between groups.

        Returns:
            The new value of ``params`` and of each state vector.
        """

    def settings(self) -> dict[str, Any]:
        """Hyperparameters, for the manifest."""
        return dataclasses.asdict(self)


def keep_factor(op: Ops, rate: ir.Value, weight_decay: ir.Value | float) -> ir.Value | None:
    """Return 1 - rate decay, the factor of decoupled weight decay; None without decay."""
    if isinstance(weight_decay, float | int) and weight_decay == 0:
        return None
    return op.Sub(1.0, op.Mul(rate, weight_decay))


def add_decay(
    op: Ops, gradients: ir.Value, params: ir.Value, weight_decay: ir.Value | float
) -> ir.Value:
    """Return g + decay p, the gradient with an L2 penalty; g without decay."""
    if isinstance(weight_decay, float | int) and weight_decay == 0:
        return gradients
    return op.Add(gradients, op.Mul(params, weight_decay))


def lerp(op: Ops, old: ir.Value, new: ir.Value, keep: float) -> ir.Value:
    """Return keep old + (1 - keep) new."""
    return op.Add(op.Mul(old, keep), op.Mul(new, 1 - keep))


def check_range(optimizer: Optimizer, name: str, good: bool, bounds: str) -> None:
    """Refuse a hyperparameter that is out of range.

    Raises:
        OdtpackError: ``bad-hyperparameter``, with the default as a hint.
    """
    if not good:
        default = getattr(type(optimizer), name)
        shown = default if isinstance(default, str | bool) else f"{default:g}"
        value = getattr(optimizer, name)
        raise OdtpackError(
            "bad-hyperparameter",
            f"{name} is {value if isinstance(value, str | bool) else f'{value:g}'}; "
            f"it must be {bounds}",
            hint=f"leave it out: the default is {shown}",
        )


def check_fraction(optimizer: Optimizer, *names: str, zero: bool = False) -> None:
    """Refuse hyperparameters that are not between 0 and 1; 0 itself is good with ``zero``."""
    for name in names:
        value = getattr(optimizer, name)
        good = 0 <= value < 1 if zero else 0 < value < 1
        check_range(optimizer, name, good, "0 or more and below 1" if zero else "between 0 and 1")


def check_positive(optimizer: Optimizer, *names: str) -> None:
    """Refuse hyperparameters that are not above 0 and finite."""
    for name in names:
        check_range(optimizer, name, 0 < getattr(optimizer, name) < math.inf, "above 0")


def check_not_negative(optimizer: Optimizer, *names: str) -> None:
    """Refuse hyperparameters that are not 0 or more and finite."""
    for name in names:
        check_range(optimizer, name, 0 <= getattr(optimizer, name) < math.inf, "0 or more")
