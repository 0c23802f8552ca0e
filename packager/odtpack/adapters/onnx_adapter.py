"""ONNX Runtime's own adapters: a base model with inputs for them, and ``.onnx_adapter`` files.

An app loads the base once, and names an adapter for each run: ``RunOptions.add_active_adapter``
(``OrtRunOptions`` in other languages). The inputs have the values of an adapter that changes
nothing where none is named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.checker

from odtpack.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write


def write_onnx_adapter(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as ``.onnx_adapter``, by the names of the base's inputs.

    Raises:
        OdtpackError: This ONNX Runtime is older than 1.20, which has adapters
            (``onnxruntime-too-old``); or the file cannot be written.
    """
    import onnxruntime

    if not hasattr(onnxruntime, "AdapterFormat"):
        raise OdtpackError(
            "onnxruntime-too-old",
            f"ONNX Runtime {onnxruntime.__version__} writes no adapters; 1.20 does",
            hint="pip install --upgrade onnxruntime",
        )
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(
        {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in tensors.items()
        }
    )
    # It writes by path: what is half written never has the name.
    with tempfile.TemporaryDirectory(prefix=".odtpack-", dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        adapter.export_adapter(str(made))
        with atomic_write(path) as stream:
            stream.write(made.read_bytes())


def with_adapter_inputs(model: Path, defaults: Mapping[str, np.ndarray]) -> None:
    """Let initializers of a model be inputs that may be left out.

    Args:
        model: An ONNX file, which is replaced.
        defaults: Their values where a run names no adapter.

    Raises:
        OdtpackError: The file cannot be written, or would exceed 2 GB.
    """
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
