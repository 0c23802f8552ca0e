"""What every block is: something that is called with names and returns names."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import onnx
import onnx.shape_inference

from odtpack import targets
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

    def _write(self, names: Sequence[str], equation: Equation) -> tuple[str, ...]:
        """Write nodes that read the named values; return the names of the results."""
        return current(type(self).__name__).write(type(self).__name__, names, equation)
