"""Inputs to run each model of a package with once: the user's data, or made-up ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from odtpack.errors import OdtpackError
from odtpack_runtime.checkpoint.parameters import nominal_error
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import BUFFER_SUFFIX, RESET_NAME

Array = np.ndarray[Any, np.dtype[Any]]

_SIZE = 2
"""Size of every axis that a model leaves open."""


class SampleFeeds:
    """Inputs of the models of a package.

    Args:
        package: The package; its parameters come from its checkpoint.
        data: An ``.npz`` file with samples; made-up values if None: numbers from a fixed
            seed, zeros where whole numbers are asked for, every open axis of size 2.

    Raises:
        OdtpackError: The data do not fit the package.
    """

    def __init__(self, package: Package, data: Path | None = None) -> None:
        self._user = _user_inputs(package, data)
        state = CheckpointState.load_checkpoint(package.checkpoint)
        if state.is_nominal:
            raise nominal_error("a model cannot be run without its parameters' values")
        self.trainable = state.arrays(trainable=True)
        self._parameters = {**self.trainable, **state.arrays(trainable=False)}

    def __call__(self, model: str, source: Path) -> dict[str, Array]:
        """Return the inputs of a model by name.

        Args:
            model: ``training_model``, ``eval_model``, ``optimizer_model`` or
                ``inference_model``.
            source: The model in ONNX format.
        """
        if model == "optimizer_model":
            graph = onnx.load(str(source), load_external_data=False).graph
            return {value.name: _ones(value.type.tensor_type) for value in graph.input}
        feeds = self._user | self._parameters
        if model == "training_model":
            feeds |= {n + BUFFER_SUFFIX: np.zeros_like(a) for n, a in self.trainable.items()}
            feeds[RESET_NAME] = np.ones(1, np.bool_)
        return feeds


def _user_inputs(package: Package, data: Path | None) -> dict[str, Array]:
    specs = package.manifest.input_specs()
    sizes = [spec.shape[0] for spec in specs if spec.shape]
    batch = next((size for size in sizes if isinstance(size, int)), _SIZE)
    if data is not None:
        arrays = package.load_data(data)
        held = min(len(array) for array in arrays.values())
        if held < batch and batch != _SIZE:
            raise OdtpackError(
                "data-length",
                f"the models take {batch} samples at once, and the data hold {held}",
                where=str(data),
                hint=f"pass at least {batch} samples",
            )
        return {name: array[:batch] for name, array in arrays.items()}
    random = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for spec in specs:
        shape = tuple(size if isinstance(size, int) else _SIZE for size in spec.shape)
        if spec.dtype == object:
            made[spec.name] = np.full(shape, "text", object)
        elif spec.dtype.kind == "f":
            made[spec.name] = random.random(shape).astype(spec.dtype)
        else:
            made[spec.name] = np.zeros(shape, spec.dtype)
    return made


def _ones(described: onnx.TypeProto.Tensor) -> Array:
    shape = [dim.dim_value if dim.HasField("dim_value") else _SIZE for dim in described.shape.dim]
    return np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(described.elem_type))
