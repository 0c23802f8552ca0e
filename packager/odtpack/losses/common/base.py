"""What every loss shares: options as fields, targets, reduction.

Losses import what writes graphs where they write: recipes read the declarations, and whether a
package has to be built again is to be known without loading onnx_ir.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from odtpack.errors import OdtpackError
from odtpack.losses.common.options import bad_option, numbers, plain
from odtpack.option import option, options_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Dims
    from odtpack.graph.ops import Ops

Reduction = Literal["mean", "sum", "none"]
TargetRole = Literal["labels", "target"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a loss compares with: a graph input, unless the model has a value for it.

    Attributes:
        name: Name of the graph input.
        role: Its role in the manifest.
        dtype: Element type.
        dims: Dimensions.
    """

    name: str
    role: TargetRole
    dtype: ir.DataType
    dims: Dims

    def value(self, name: str | None = None) -> ir.Value:
        """The graph input, under its own or another name."""
        import onnx_ir as ir

        return ir.val(name or self.name, dtype=self.dtype, shape=ir.Shape(self.dims))


@dataclasses.dataclass(frozen=True)
class Loss(abc.ABC):
    """A loss; its fields are its options, each declared by :func:`odtpack.option.option`.

    Attributes:
        name: As the manifest and the command line have it; that of its file.
        summary: What it is, in a sentence.
        formula: Formula of a term, for the documentation.
        reads: What it reads of the model, in this order.
        prediction: The same with its shape, for the documentation.
        target: The graph inputs that it compares with, for the documentation.
        classifies: Whether labels are classes of whole samples, so that accuracy is defined.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    formula: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ("prediction",)
    prediction: ClassVar[str] = "prediction"
    target: ClassVar[str] = "`target`"
    classifies: ClassVar[bool] = True

    reduction: Reduction = option("mean", "How the terms become one number.")

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if not each.takes(value):
                raise bad_option(self.name, each.name, value, each.range)
            if each.axes is not None and value is not None:
                object.__setattr__(self, each.name, numbers(self.name, each, value))

    @abc.abstractmethod
    def targets(self, predictions: Sequence[ir.Value]) -> tuple[Target, ...]:
        """What it compares the predictions with.

        Raises:
            OdtpackError: The predictions do not have the rank that the loss needs.
        """

    @abc.abstractmethod
    def terms(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss without its reduction; ``values`` are predictions, then targets."""

    def write(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the loss.

        Args:
            op: Where to write.
            values: Predictions, then targets. Those of 16 bits are read as float32.

        Returns:
            A scalar; with reduction "none" one number for each term.

        Raises:
            OdtpackError: A value has another type or rank than the loss needs.
        """
        self._check_types(values)
        wide = [op.cast(v, op.FLOAT) if _is_half(v.dtype) else v for v in values]
        for value, cast in zip(values, wide, strict=True):
            cast.shape = value.shape
        return self.reduced(op, *wide)

    def reduced(self, op: Ops, *values: ir.Value) -> ir.Value:
        """Write the terms and their reduction."""
        return reduce(op, self.terms(op, *values), self.reduction)

    def metadata(self, predictions: Sequence[ir.Value]) -> dict[str, str]:
        """What a runtime must know to check targets, for the model's metadata."""
        return {}

    def assumption(self, predictions: Sequence[ir.Value]) -> str | None:
        """What it takes for granted about predictions that could be meant otherwise."""
        return None

    def fixed(self, predictions: Sequence[ir.Value]) -> tuple[str, ...]:
        """Names of parameters through which it lets no gradient, so that they must be frozen."""
        return ()

    def settings(self) -> dict[str, object]:
        """Options in force, for the manifest; what is None is left out."""
        values = {name: plain(getattr(self, name)) for name in self.option_names()}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Default of every option."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    def _check_types(self, values: Sequence[ir.Value]) -> None:
        import onnx_ir as ir

        predictions = values[: len(self.reads)]
        for what, value in zip(self.reads, predictions, strict=True):
            if value.dtype is not None and not value.dtype.is_floating_point():
                raise OdtpackError(
                    "prediction-type",
                    f"{self.name} needs floating-point numbers as its {what}; {value.name!r} "
                    f"is of type {value.dtype.name}",
                )
        wanted = self.targets(predictions)
        for target, value in zip(wanted, values[len(predictions) :], strict=True):
            labels = target.dtype == ir.DataType.INT64
            if value.dtype is not None and labels == value.dtype.is_floating_point():
                raise OdtpackError(
                    "target-type",
                    f"{self.name} needs {target.dtype.name} as its {target.name}; "
                    f"{value.name!r} is of type {value.dtype.name}",
                )

    def _bad(self, option: str, must: str) -> OdtpackError:
        return bad_option(self.name, option, getattr(self, option), must)


def dims(value: ir.Value) -> Dims:
    """Dimensions of a value.

    Raises:
        OdtpackError: The rank is unknown.
    """
    from odtpack.graph.graphs import dims_of

    found = dims_of(value)
    if found is None:
        raise OdtpackError("unknown-rank", f"the rank of the prediction {value.name!r} is unknown")
    return found


def rank(value: ir.Value) -> int:
    """Number of axes of a value.

    Raises:
        OdtpackError: It is unknown.
    """
    return len(dims(value))


def require_rank(loss: str, value: ir.Value, shape: str, least: int, most: int | None) -> None:
    """Check the rank of a prediction.

    Raises:
        OdtpackError: It is not from ``least`` to ``most``.
    """
    found = rank(value)
    if found < least or (most is not None and found > most):
        raise OdtpackError(
            "prediction-rank", f"{loss} needs a prediction {shape}; {value.name!r} has rank {found}"
        )


def target_dtype(prediction: ir.Value) -> ir.DataType:
    """Element type of a target like a prediction: that of the loss, so 32 bits for 16."""
    import onnx_ir as ir

    dtype = prediction.dtype or ir.DataType.FLOAT
    return ir.DataType.FLOAT if _is_half(dtype) else dtype


def _is_half(dtype: ir.DataType | None) -> bool:
    return dtype is not None and dtype.name in ("FLOAT16", "BFLOAT16")


def target_like(prediction: ir.Value, name: str = "target") -> Target:
    """A target of the prediction's shape."""
    return Target(name, "target", target_dtype(prediction), dims(prediction))


def whole_numbers(name: str, role: TargetRole, shape: Dims) -> Target:
    """A target of whole numbers, INT64."""
    import onnx_ir as ir

    return Target(name, role, ir.DataType.INT64, shape)


def like(value: ir.Value, model: ir.Value) -> ir.Value:
    """Give an elementwise result the shape of its operand."""
    value.shape = model.shape
    return value


def shaped(value: ir.Value, shape: Dims) -> ir.Value:
    """Give a result its shape."""
    import onnx_ir as ir

    value.shape = ir.Shape(shape)
    return value


def reduce(op: Ops, value: ir.Value, reduction: Reduction) -> ir.Value:
    """Mean or sum over all axes, or the value as it is."""
    axes = range(rank(value))
    if reduction == "none" or not axes:
        return value
    if reduction == "sum":
        return shaped(op.reduce_sum(value, axes, keepdims=False), ())
    return shaped(op.reduce_mean(value, axes, keepdims=False), ())
