"""What every block is, and building blocks of one operator or a few."""

from __future__ import annotations

import abc
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir

from odtpack import targets
from odtpack.autodiff.stop_gradient import stop
from odtpack.errors import OdtpackError
from odtpack.model import external_data, source
from odtpack.onnxblock.accessor import Equation, ModelAccessor

_CURRENT: ContextVar[ModelAccessor | None] = ContextVar("onnxblock base", default=None)
_LIBRARY: ContextVar[Path | None] = ContextVar("onnxblock custom_op_library", default=None)

_USUAL_OPSET = 17


def current(who: str) -> ModelAccessor:
    """The model that blocks write into."""
    accessor = _CURRENT.get()
    if accessor is None:
        raise OdtpackError("no-base", f"{who} is called without a model to write into")
    return accessor


@contextmanager
def base(model: onnx.ModelProto, model_path: str | None = None) -> Iterator[ModelAccessor]:
    """Let blocks write into a copy of a model.

    Args:
        model: Forward model; it is not changed.
        model_path: Its file, if its data lie beside it.

    Yields:
        The accessor; its attribute ``model`` is the copy.

    Raises:
        OdtpackError: A base is open already, or the model cannot be differentiated in its
            opset.
    """
    if not isinstance(model, onnx.ModelProto):
        raise OdtpackError(
            "bad-model-type",
            f"the base model is a {type(model).__name__}; it must be an onnx.ModelProto",
            hint="load it with onnx.load(path), or start from none: onnxblock.empty_base()",
        )
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if model_path is None:
        external_data.require_none(copy)
    else:
        # None in place: a block may look at the values of any initializer.
        list(external_data.load_beside(copy, Path(model_path), lambda _: False, source.map_file))
    with _opened(copy, model_path) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Let blocks write into a new model.

    Args:
        opset_version: Opset of the standard operators; 17 by default, which ONNX Runtime
            1.12 and newer load.

    Yields:
        The accessor; its attribute ``model`` is the model.

    Raises:
        OdtpackError: A base is open already, or no runtime loads the opset.
    """
    model = onnx.ModelProto(producer_name="odtpack")
    model.graph.name = "graph"
    model.opset_import.append(onnx.helper.make_opsetid("", opset_version or _USUAL_OPSET))
    model.ir_version = targets.lowest_target(opset_version or _USUAL_OPSET).ir_version
    with _opened(model, None) as accessor:
        yield accessor


@contextmanager
def _opened(model: onnx.ModelProto, path: str | None) -> Iterator[ModelAccessor]:
    if _CURRENT.get() is not None:
        raise OdtpackError(
            "base-open", "a base model is open already; blocks write into one model at a time"
        )
    opset = next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), None)
    if opset is None:
        raise OdtpackError("no-opset", "the model imports no standard operators")
    targets.lowest_target(opset)
    accessor = ModelAccessor(model, path)
    token = _CURRENT.set(accessor)
    try:
        yield accessor
    finally:
        _CURRENT.reset(token)


@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[Path]:
    """Check that a library of custom operators is there, while a model that uses it is built.

    The gradient is taken without running the model, so that the library is not loaded; only
    the conversion to the ORT format loads it
    (``generate_artifacts(..., ort_format=True, custom_op_library=...)``).

    Raises:
        OdtpackError: It is not a file, or another one is named already.
    """
    path = Path(custom_op_library_path)
    if _LIBRARY.get() is not None:
        raise OdtpackError("library-open", "a library of custom operators is named already")
    if not path.is_file():
        raise OdtpackError("library-not-found", f"custom_op_library {str(path)!r} is not a file")
    token = _LIBRARY.set(path)
    try:
        yield path
    finally:
        _LIBRARY.reset(token)


class Block(abc.ABC):
    """Base class of all blocks.

    A subclass writes :meth:`build`, which calls other blocks or appends nodes to
    ``self.base.graph``, and returns the names of its results. It need not call
    ``super().__init__()``.

    Args:
        temp_file_name: For compatibility only; no temporary file is written.

    Attributes:
        base: The model that is written into, an ``onnx.ModelProto``; None before the first
            call.

    Raises:
        OdtpackError: ``temp_file_name`` is an absolute path, as in the reference.
    """

    base: onnx.ModelProto | Any = None

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        if Path(temp_file_name).is_absolute():
            raise OdtpackError(
                "absolute-path", f"temp_file_name {temp_file_name!r} must be a relative path"
            )

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write the block; return the names of its results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write the block into the open base model and check what it wrote.

        Returns:
            What :meth:`build` returns.

        Raises:
            OdtpackError: There is no open base, or the model is invalid now.
        """
        who = type(self).__name__
        accessor = current(who)
        self.base = accessor.model
        output = self.build(*args, **kwargs)
        accessor.learn(who)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """A copy of the open base model with all shapes that can be inferred."""
        return onnx.shape_inference.infer_shapes(current(type(self).__name__).model)

    def _write(self, names: Sequence[str], equation: Equation) -> str:
        """Write nodes that read the named values; return the name of the first result."""
        return current(type(self).__name__).write(type(self).__name__, names, equation)[0]


__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "StopGradient",
    "Sub",
]


class _Operator(Block):
    """Writes the operator that a class of this module is named after."""

    _op_type: ClassVar[str]
    _attributes: Mapping[str, Any] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not hasattr(cls, "_op_type") and not cls.__name__.startswith("_"):
            cls._op_type = cls.__name__

    def _node(self, *names: str) -> str:
        return self._write(
            names, lambda op, values: op.emit(self._op_type, values, **self._attributes)
        )


class _Binary(_Operator):
    def build(self, input_name1: str, input_name2: str) -> str:
        """Write the node; the inputs broadcast."""
        return self._node(input_name1, input_name2)


class Add(_Binary):
    """Sum of two values."""


class Sub(_Binary):
    """Difference of two values."""


class Mul(_Binary):
    """Product of two values."""


class Div(_Binary):
    """Quotient of two values."""


class _Unary(_Operator):
    def __init__(self, **attributes: Any) -> None:
        self._attributes = attributes

    def build(self, input_name: str) -> str:
        """Write the node."""
        return self._node(input_name)


class Sigmoid(_Unary):
    """1 / (1 + exp(-x))."""


class Log(_Unary):
    """Natural logarithm."""


class Neg(_Unary):
    """-x."""


class Abs(_Unary):
    """|x|; its slope at 0 is 0."""


class _Reduction(_Unary):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__(keepdims=int(keepdims))


class ReduceMean(_Reduction):
    """Mean over all axes, which keep length 1 unless ``keepdims`` is false."""


class ReduceSum(_Reduction):
    """Sum over all axes, which keep length 1 unless ``keepdims`` is false."""


class Pow(Block):
    """x^exponent."""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """Write the node."""
        return self._write([pow_input_name], lambda op, x: [op.Pow(x[0], self._exponent)])


class Constant(Block):
    """A float32 scalar."""

    def __init__(self, value_float: float) -> None:
        self._value = value_float

    def build(self) -> str:
        """Store the number; return its name."""
        return self._write([], lambda op, _: [op.constant(np.float32(self._value))])


class SequenceConstruct(_Operator):
    """A sequence of tensors."""

    def build(self, *sequence_input_names: str) -> str:
        """Write the node."""
        return self._node(*sequence_input_names)


class ReduceAllL2(Block):
    """Square root of the sum of the squares of all elements of all inputs; slope 0 at 0."""

    def build(self, *reduce_node_input_names: str) -> str:
        """Write the nodes; the result is a scalar."""
        return self._write(
            reduce_node_input_names,
            lambda op, values: [
                op.ReduceL2(
                    op.Concat(*(op.reshape(value, -1) for value in values), axis=0), keepdims=0
                )
            ],
        )


class Clip(Block):
    """Limit elements to ``clip_min`` and ``clip_max``, each of which may be None."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        self._bounds = [clip_min, clip_max]

    def build(self, clip_input_name: str) -> str:
        """Write the node."""
        bounds = self._bounds if self._bounds[1] is not None else self._bounds[:1]
        bounds = bounds if any(bound is not None for bound in bounds) else []
        return self._write([clip_input_name], lambda op, x: [op.Clip(x[0], *bounds)])


class PassThrough(Block):
    """Nothing: the results are the inputs."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Return the names."""
        return input_names


class StopGradient(Block):
    """The same value, which no gradient passes: ``detach`` in PyTorch."""

    def build(self, input_name: str) -> str:
        """Write the node."""
        return self._write([input_name], lambda op, x: [stop(op, x[0])])


class InputLike(Block):
    """A graph input with type and shape of another value."""

    def __init__(self, like: str) -> None:
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Add the input.

        Args:
            input_name: Its name; one is made up if None.

        Raises:
            OdtpackError: ``like`` names nothing (also a ``LookupError``), or the name is
                taken.
        """
        accessor = current("InputLike")
        model = accessor.value(self._like, "InputLike")
        name = input_name or accessor.fresh_name("input")
        return accessor.add_input(ir.Value(name=name, type=model.type, shape=model.shape))


class LabelEncoder(_Operator):
    """Replaces keys by values: ``ai.onnx.ml`` LabelEncoder, through which no gradient flows.

    Args:
        default_float: Value of unknown keys where values are floats.
        default_int64: The same where they are integers.
        default_string: The same where they are text.
        keys_floats: Keys, or
        keys_int64s: keys, or
        keys_strings: keys.
        values_floats: As many values, or
        values_int64s: values, or
        values_strings: values.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        self._attributes = {
            "domain": "ai.onnx.ml", "default_float": default_float, "default_int64": default_int64,
            "default_string": default_string, "keys_floats": keys_floats,
            "keys_int64s": keys_int64s, "keys_strings": keys_strings,
            "values_floats": values_floats, "values_int64s": values_int64s,
            "values_strings": values_strings,
        }  # fmt: skip

    def build(self, label_encoder_input_name: str) -> str:
        """Write the node."""
        current("LabelEncoder").import_domain("ai.onnx.ml", 2)
        return self._node(label_encoder_input_name)


class Cast(_Operator):
    """Another element type: a member of ``onnx.TensorProto.DataType``."""

    def __init__(self, to: int) -> None:
        self._attributes = {"to": int(to)}

    def build(self, cast_input_name: str) -> str:
        """Write the node."""
        return self._node(cast_input_name)


class Linear(Block):
    """alpha x W + beta b, with new initializers ``linear.weight`` [in, out] and ``linear.bias``.

    They are drawn evenly from +-1 / sqrt(in), as in PyTorch, by a generator that is seeded
    with their names: the same model starts from the same values. A second layer of a model
    is ``linear_2``, and so on.

    Args:
        in_features: Length of the last axis of x [N, in].
        out_features: Length of the last axis of the result [N, out].
        bias: Whether there is a b.
        alpha: Factor of the product.
        beta: Factor of the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise OdtpackError("bad-size", f"{name} is {size}; it must be 1 or more")
        self._shapes: dict[str, tuple[int, ...]] = {"weight": (in_features, out_features)}
        if bias:
            self._shapes |= {"bias": (out_features,)}
        self._factors: dict[str, Any] = {"alpha": float(alpha), "beta": float(beta)}
        self._bound = 1 / math.sqrt(in_features)

    def build(self, linear_input_name: str) -> str:
        """Add the initializers and write the node."""
        accessor = current("Linear")
        layer = accessor.fresh_name("linear")
        names = []
        for part, shape in self._shapes.items():
            name = accessor.fresh_name(f"{layer}.{part}")
            random = np.random.default_rng(zlib.crc32(name.encode()))
            values = random.uniform(-self._bound, self._bound, shape).astype(np.float32)
            accessor.model.graph.initializer.append(
                ir.serde.serialize_tensor(ir.tensor(values, name=name))
            )
            names.append(name)
        accessor.created += names
        return accessor.write(
            layer,
            [linear_input_name, *names],
            lambda op, values: op.emit("Gemm", values, **self._factors),
        )[0]
