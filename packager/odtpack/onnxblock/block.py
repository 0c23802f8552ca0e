"""What every block is: something that is called with names and returns names."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.shape_inference

from odtpack.errors import OdtpackError
from odtpack.onnxblock.accessor import Equation
from odtpack.onnxblock.bases import current


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
