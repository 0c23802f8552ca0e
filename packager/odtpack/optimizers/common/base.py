"""What every optimizer has in common: where its numbers come from and what it keeps."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from odtpack.errors import OdtpackError
from odtpack.option import is_too_large, option, options_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.ops import Ops

FIRST, SECOND = "first_order_moments", "second_order_moments"

Values: TypeAlias = "Mapping[str, ir.Value]"


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

    Every field is a hyperparameter, declared by :func:`odtpack.option.option`: the fields are
    what the command line takes as ``--optimizer-option`` and what the manifest shows.

    Attributes:
        kind: Its name, as the manifest and the command line have it; that of its file.
        summary: What it is, in a sentence.
        source: Whose formula it is, for the documentation.
        keeps: What it keeps for each parameter, for the documentation.
        learning_rates: What a search tries, the usual one first.
        weight_decay: How strongly parameters are drawn to 0; what it is multiplied with is
            the formula's affair.

    Raises:
        OdtpackError: ``bad-hyperparameter``: a hyperparameter is out of range.
    """

    kind: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    keeps: ClassVar[str]
    learning_rates: ClassVar[tuple[float, ...]] = (0.001, 0.003, 0.0003)
    weight_decay: float = option(
        0.0,
        "How strongly parameters are drawn to 0; `adam` and `sgd`: an L2 penalty.",
        least=0,
    )

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if not each.takes(value):
                shown = f"{value:g}" if type(value) is float else str(value)
                default = each.default if type(each.default) is not float else f"{each.default:g}"
                raise OdtpackError(
                    "bad-hyperparameter",
                    f"{each.name} is {shown[:60]}; it must be {each.range}"
                    + (" that float32 holds" if is_too_large(value) else ""),
                    hint=f"leave it out: the default is {default}",
                )

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
