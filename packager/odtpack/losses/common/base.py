"""What losses share: targets, options, labels."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from odtpack.errors import OdtpackError
from odtpack.option import Option, option, options_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph import graphs

# Losses import what writes graphs where they write: recipes read the declarations, and whether a
# package has to be built again is to be known without loading onnx_ir.
Dims: TypeAlias = "graphs.Dims"
Ops: TypeAlias = "graphs.Ops"
Value: TypeAlias = "ir.Value"

Reduction = Literal["mean", "sum", "none"]
TargetRole = Literal["labels", "target"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a loss compares with: a graph input, unless the model has a value for it."""

    name: str
    role: TargetRole  # in the manifest
    dtype: ir.DataType
    dims: Dims

    def value(self, name: str | None = None) -> Value:
        """The graph input, under its own or another name."""
        import onnx_ir as ir

        return ir.val(name or self.name, dtype=self.dtype, shape=ir.Shape(self.dims))


@dataclasses.dataclass(frozen=True)
class Loss(abc.ABC):
    """A loss; its fields are its options, each declared by :func:`odtpack.option.option`."""

    name: ClassVar[str]  # as the manifest and the command line have it; that of its file
    summary: ClassVar[str]  # what it is, in a sentence
    formula: ClassVar[str]  # of a term, for the documentation
    reads: ClassVar[tuple[str, ...]] = ("prediction",)  # what it reads of the model, in this order
    prediction: ClassVar[str] = "prediction"  # the same with its shape, for the documentation
    target: ClassVar[str] = "`target`"  # what it compares with, for the documentation
    classifies: ClassVar[bool] = True  # labels are classes of whole samples: accuracy is defined

    reduction: Reduction = option("mean", "How the terms become one number.")

    def __post_init__(self) -> None:
        for each in options_of(type(self)):
            value = getattr(self, each.name)
            if not each.takes(value):
                raise bad_option(self.name, each.name, value, each.range)
            if each.axes is not None and value is not None:
                object.__setattr__(self, each.name, numbers(self.name, each, value))

    @abc.abstractmethod
    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """What it compares the predictions with, whose ranks are checked."""

    @abc.abstractmethod
    def terms(self, op: Ops, *values: Value) -> Value:
        """Write the loss without its reduction; ``values`` are predictions, then targets."""

    def write(self, op: Ops, *values: Value) -> Value:
        """Write the loss of predictions and targets: a scalar, or with "none" all terms."""
        # Values of 16 bits are read as float32.
        self._check_types(values)
        wide = [op.cast(v, op.FLOAT) if _is_half(v.dtype) else v for v in values]
        for value, cast in zip(values, wide, strict=True):
            cast.shape = value.shape
        return self.reduced(op, *self.arranged(op, wide))

    def arranged(self, op: Ops, values: Sequence[Value]) -> Sequence[Value]:
        """The values with their axes in the order that the terms expect."""
        return values

    def settled(self, values: Sequence[Value]) -> Loss:
        """The loss with the options that follow from what it reads, targets included."""
        return self

    def reduced(self, op: Ops, *values: Value) -> Value:
        """Write the terms and their reduction."""
        return reduce(op, self.terms(op, *values), self.reduction)

    def label_facts(self, predictions: Sequence[Value]) -> dict[str, int]:
        """What a runtime must know to check labels: ``class_count`` and ``ignore_index``."""
        return {}

    def assumption(self, predictions: Sequence[Value]) -> str | None:
        """What it takes for granted about predictions that could be meant otherwise."""
        return None

    def fixed(self, predictions: Sequence[Value]) -> tuple[str, ...]:
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

    def _check_types(self, values: Sequence[Value]) -> None:
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
                    hint="--loss-option labels=probabilities takes probabilities of classes"
                    if "labels" in self.option_names()
                    else None,
                )

    def _bad(self, option: str, must: str) -> OdtpackError:
        return bad_option(self.name, option, getattr(self, option), must)


def dims(value: Value) -> Dims:
    """Dimensions of a value."""
    from odtpack.graph.graphs import dims_of

    found = dims_of(value)
    if found is None:
        raise OdtpackError("unknown-rank", f"the rank of the prediction {value.name!r} is unknown")
    return found


def rank(value: Value) -> int:
    """Number of axes of a value."""
    return len(dims(value))


def require_rank(loss: str, value: Value, shape: str, least: int, most: int | None) -> None:
    """Check the rank of a prediction."""
    found = rank(value)
    if found < least or (most is not None and found > most):
        raise OdtpackError(
            "prediction-rank", f"{loss} needs a prediction {shape}; {value.name!r} has rank {found}"
        )


def target_dtype(prediction: Value) -> ir.DataType:
    """Element type of a target like a prediction: that of the loss, so 32 bits for 16."""
    import onnx_ir as ir

    dtype = prediction.dtype or ir.DataType.FLOAT
    return ir.DataType.FLOAT if _is_half(dtype) else dtype


def _is_half(dtype: ir.DataType | None) -> bool:
    return dtype is not None and dtype.name in ("FLOAT16", "BFLOAT16")


def target_like(prediction: Value) -> Target:
    """A target of the prediction's shape."""
    return Target("target", "target", target_dtype(prediction), dims(prediction))


def whole_numbers(name: str, role: TargetRole, shape: Dims) -> Target:
    """A target of whole numbers, INT64."""
    import onnx_ir as ir

    return Target(name, role, ir.DataType.INT64, shape)


def like(value: Value, model: Value) -> Value:
    """Give an elementwise result the shape of its operand."""
    value.shape = model.shape
    return value


def shaped(value: Value, shape: Dims) -> Value:
    """Give a result its shape."""
    import onnx_ir as ir

    value.shape = ir.Shape(shape)
    return value


def reduce(op: Ops, value: Value, reduction: Reduction) -> Value:
    """Mean or sum over all axes, or the value as it is."""
    axes = range(rank(value))
    if reduction == "none" or not axes:
        return value
    write = op.reduce_sum if reduction == "sum" else op.reduce_mean
    return shaped(write(value, axes, keepdims=False), ())


# What losses share that compare prediction and target element by element.


@dataclasses.dataclass(frozen=True)
class Elementwise(Loss):
    """A loss with one term for each element of the prediction."""

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """A target of the prediction's shape."""
        return (target_like(predictions[0]),)


def huber(op: Ops, delta: float, prediction: Value, target: Value) -> Value:
    """With a = |prediction - target| and c = min(a, delta): c (a - c / 2)."""
    # That is a^2 / 2 up to delta and delta (a - delta / 2) beyond; nothing is squared that could
    # overflow.
    distance = like(op.Abs(op.Sub(prediction, target)), prediction)
    near = like(op.Min(distance, delta), prediction)
    return like(op.Mul(near, op.Sub(distance, op.Mul(near, 0.5))), prediction)


# Options of losses, made comparable.

Numbers = float | tuple[Any, ...]
"""A number, or numbers nested as an array is: hashable and comparable, unlike an array."""


def same_type(value: object, usual: object) -> object:
    """A whole number where the default is one with a fraction: ``margin=1`` is 1.0."""
    if isinstance(usual, float) and type(value) is int:
        return float(value)
    return value


def bad_option(loss: str, option: str, value: object, must: str) -> OdtpackError:
    """The error for a value that an option does not take."""
    shown = repr(value)
    return OdtpackError(
        "bad-loss-option",
        f"option {option} of {loss} is {shown[:60]}{'...' * (len(shown) > 60)}; it must be {must}",
        hint="docs/losses.md lists the options of every loss",
    )


def numbers(loss: str, option: Option, value: Any) -> Numbers:
    """Return an array, list or number as nested tuples."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array([])
    if (option.axes and array.ndim != option.axes) or array.size == 0:
        raise bad_option(loss, option.name, value, option.range)
    if not all(option.bounds.hold(number) for number in array.ravel().tolist()):
        raise bad_option(loss, option.name, value, option.range)
    nested: Numbers = _nest(array.tolist())
    return nested


def _nest(value: Any) -> Any:
    return tuple(_nest(part) for part in value) if isinstance(value, list) else value


def plain(value: object) -> object:
    """The value as JSON has it: lists for tuples."""
    return [plain(part) for part in value] if isinstance(value, tuple) else value


# What losses over scores of classes [N, C, ...] share.


def log_softmax(op: Ops, logits: Value) -> tuple[Value, int]:
    """Log-probabilities of logits [N, C, ...], and the axis on which the classes are."""
    axes = rank(logits)
    if op.opset < 13 and axes > 2:
        # Before opset 13 LogSoftmax takes every axis from `axis` on as one.
        shape = dims(logits)
        moved = op.transpose(logits, 0, *range(2, axes), 1)
        log_p = op.LogSoftmax(moved, axis=axes - 1)
        return shaped(log_p, (shape[0], *shape[2:], shape[1])), axes - 1
    return like(op.LogSoftmax(logits, axis=1), logits), 1


Layout = Literal["NC", "NLC"]


@dataclasses.dataclass(frozen=True)
class Classes(Loss):
    """A loss over scores of classes, on axis 1 ("NC") or the last one ("NLC")."""

    layout: Layout | None = option(
        None,
        "Axis of the classes: NC for axis 1, NLC for the last one. Without it, axis 1, unless the "
        "labels or the known sizes leave only the last one.",
    )

    def class_axis(self, prediction: Value) -> int:
        """The axis of the classes."""
        require_rank(self.name, prediction, "[N, C, ...]", 2, None)
        shape = dims(prediction)
        known = [isinstance(size, int) for size in shape[1:]]
        only_last = self.layout is None and known[-1] and not any(known[:-1])
        return len(shape) - 1 if self.layout == "NLC" or only_last else 1

    def not_as_the_reference(self, predictions: Sequence[Value]) -> str | None:
        """What to know where the classes are inferred to be on another axis than 1."""
        assumed = self.assumption(predictions)
        if assumed is None or self.class_axis(predictions[0]) == 1:
            return None
        return f"{assumed}; onnxruntime-training takes axis 1, as layout='NC' of a block does"

    def arranged(self, op: Ops, values: Sequence[Value]) -> Sequence[Value]:
        """Scores with the classes on axis 1."""
        axes, axis = rank(values[0]), self.class_axis(values[0])

        def moved(value: Value) -> Value:
            shape = () if value.shape is None else dims(value)
            if len(shape) != axes or axis == 1:
                return value
            result = op.transpose(value, 0, axis, *range(1, axis))
            return shaped(result, (shape[0], shape[axis], *shape[1:axis]))

        return [moved(value) for value in values]

    def label_target(self, prediction: Value) -> Target:
        """The graph input for class numbers: they drop the class axis of the prediction."""
        shape, axis = dims(prediction), self.class_axis(prediction)
        unknown = not isinstance(shape[axis], int) and self.layout is None
        if unknown and any(isinstance(dim, int) for dim in shape[2:]):
            raise OdtpackError(
                "classes-unknown",
                f"{self.name} takes axis {axis} of its prediction for the classes, and of "
                f"{prediction.name!r} {shape_text(shape)} that axis has any length: the labels "
                "cannot be known from it",
                hint="--loss-option layout=NC takes axis 1, and layout=NLC the last axis; "
                "otherwise transpose the output in the model so that the classes are on axis 1, "
                "or name another value as the loss's input",
            )
        return whole_numbers("labels", "labels", without_classes(shape, axis))

    def settled(self, values: Sequence[Value]) -> Loss:
        """With the layout that labels leave, which are values of the model."""
        shape, last = dims(values[0]), rank(values[0]) - 1
        labels = [v for v in values[1:] if v.shape is not None and rank(v) == last]
        if self.layout is not None or last < 2 or not labels:
            return self

        def fits(axis: int) -> bool:
            pairs = zip(dims(labels[0]), without_classes(shape, axis), strict=True)
            return not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)

        return dataclasses.replace(self, layout="NLC") if fits(last) and not fits(1) else self


def settled_on(graph: ir.Graph, loss: Loss, read: Sequence[str]) -> tuple[Loss, list[Value]] | None:
    """The loss as it is with the values that it reads, and its predictions; None if unknown."""
    all_values = (*graph.outputs, *graph.inputs, *(y for node in graph for y in node.outputs))
    known = {value.name: value for value in all_values}
    values = [known[name] for name in read if name in known]
    predictions = values[: len(loss.reads)]
    if len(predictions) < len(loss.reads) or any(v.shape is None for v in predictions):
        return None  # attaching the loss says what is wrong
    return loss.settled(values), predictions


def facts_of_labels(prediction: Value, axis: int, ignore_index: int | None) -> dict[str, int]:
    """What a runtime needs to check labels."""
    found = {"class_count": dims(prediction)[axis], "ignore_index": ignore_index}
    return {key: number for key, number in found.items() if isinstance(number, int)}


def shape_text(shape: Dims) -> str:
    """A shape for people."""
    return f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def without_classes(shape: Dims, axis: int = 1) -> Dims:
    """The shape of labels: that of scores without the axis of the classes."""
    return (*shape[:axis], *shape[axis + 1 :])


# What losses over embeddings share: what belongs together shall lie together.

_EPSILON = 1e-6  # added to every difference, as in PyTorch's pairwise_distance
LEAST_SQUARE = 1e-30  # squared length below which a vector has no direction


@dataclasses.dataclass(frozen=True)
class Embeddings(Loss):
    """A loss that compares embeddings of one length."""

    def targets(self, predictions: Sequence[Value]) -> tuple[Target, ...]:
        """None: the embeddings, whose ranks and lengths are checked, are all that it needs."""
        for value in predictions:
            require_rank(self.name, value, "[N, D]", 2, 2)
        widths = {dims(value)[1] for value in predictions}
        if len({width for width in widths if isinstance(width, int)}) > 1:
            shown = ", ".join(repr(value.name) for value in predictions)
            raise OdtpackError(
                "prediction-shape",
                f"{self.name} compares embeddings of one length; those of {shown} differ",
                hint="name other outputs as the loss's inputs",
            )
        return ()


def distance(op: Ops, first: Value, second: Value, p: int) -> Value:
    """||first - second + 1e-6||_p over the last axis of [N, D]; slope 0 where it is 0."""
    difference = op.Add(op.Sub(first, second), _EPSILON)
    if p == 1:
        return op.reduce_sum(op.Abs(difference), [1], keepdims=False)
    squares = op.reduce_sum(op.Mul(difference, difference), [1], keepdims=False)
    return op.Sqrt(op.Max(squares, LEAST_SQUARE))
