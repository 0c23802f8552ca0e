"""Inference models that take an adapter as inputs, as ONNX Runtime's own adapters need it.

An app loads the base once, and names an adapter for each run: ``RunOptions.add_active_adapter``
(``OrtRunOptions`` in other languages). The inputs have the values of an adapter that changes
nothing where none is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.checker

from odtpack.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write


def with_adapter_inputs(model: Path, defaults: Mapping[str, np.ndarray]) -> None:
    """Let initializers of a model be inputs that may be left out."""
    # model: An ONNX file, which is replaced. defaults: Their values where a run names no adapter.
    proto = onnx.load(model)
    for tensor in proto.graph.initializer:
        if tensor.name not in defaults:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        array = np.asarray(defaults[tensor.name], dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        proto.graph.input.append(value)
    if proto.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF:
        raise OdtpackError("model-too-large", "the base model would exceed 2 GB", where=str(model))
    with atomic_write(model) as stream:
        stream.write(proto.SerializeToString(deterministic=True))
