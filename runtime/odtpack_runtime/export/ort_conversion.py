"""Models in ORT format and back, by ONNX Runtime itself: it writes what it has loaded.

Loading computes constants, and a stranger's may take for ever: a command asks another process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.apart import worker
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_runtime.session.session import first_line

_IDENTIFIER = b"ORTM"


def is_ort_format(data: bytes) -> bool:
    """Whether a file's content is a model in ORT format: a flatbuffer of that identifier."""
    return data[4:8] == _IDENTIFIER


def to_onnx(data: bytes, where: str, *, apart: bool = False) -> bytes:
    """Return a model in ORT format as ONNX.

    The nodes are those of the file: what the conversion to ORT format fused stays fused, and
    names that it dropped are gone.

    Args:
        data: The model.
        where: Its path, for messages.
        apart: Whether another process loads it, with limits of time and memory.

    Raises:
        OdtpackError: ``model-not-loadable`` with ONNX Runtime's reason; of a process of its own
            also ``models-memory``, ``models-stall`` and ``models-crash``.
    """
    return _rewritten(data, "ONNX", where, apart=apart)


def to_ort(data: bytes, where: str, *, apart: bool = False) -> bytes:
    """Return an ONNX model in ORT format, with the fusions that suit every processor.

    Args:
        data: The model.
        where: Path of the result, for messages.
        apart: Whether another process loads it, with limits of time and memory.

    Raises:
        OdtpackError: ``ort-conversion-failed`` with ONNX Runtime's reason; of a process of its
            own also ``models-memory``, ``models-stall`` and ``models-crash``.
    """
    return _rewritten(data, "ORT", where, apart=apart)


def output_specs(data: bytes, where: str, *, apart: bool = False) -> list[TensorSpec]:
    """Return type and shape of a model's outputs as ONNX Runtime infers them.

    None of a model that it does not load.

    Args:
        data: The model.
        where: Its path, for messages.
        apart: Whether another process loads it, with limits of time and memory.

    Raises:
        OdtpackError: Of a process of its own: ``models-memory``, ``models-stall`` and
            ``models-crash``.
    """
    found = _ask("describe", data, apart=apart, where=where)
    return [TensorSpec(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in found]


def describe(model: str, where: str) -> list[tuple[str, str, list[int | str | None]]]:
    """:func:`output_specs` of a file in this process, as JSON has them."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        specs = [TensorSpec.of_node(node, where) for node in session.get_outputs()]
    except Exception:  # ONNX Runtime's exceptions have no common base
        return []
    return [(spec.name, spec.dtype.str, list(spec.shape)) for spec in specs]


def rewrite(model: str, out: str, kind: str, where: str) -> None:
    """Write a model in ``ONNX`` or ``ORT`` format in this process."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = (
        # No optimization: the model was optimized when it was converted.
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if kind == "ONNX"
        else onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    )
    options.optimized_model_filepath = out
    options.add_session_config_entry("session.save_model_format", kind)
    options.log_severity_level = 3  # that the file suits this machine only is not so here
    try:
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise OdtpackError(
            "model-not-loadable" if kind == "ONNX" else "ort-conversion-failed",
            f"ONNX Runtime cannot write {where} in {kind} format: {first_line(error)}",
            where=where,
            hint="work with the .onnx files of the package",
        ) from error


def _rewritten(data: bytes, kind: str, where: str, *, apart: bool) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        _ask("rewrite", data, apart=apart, out=str(out), kind=kind, where=where)
        return out.read_bytes()


def _ask(function: str, data: bytes, *, apart: bool, **arguments: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"model.{'ort' if is_ort_format(data) else 'onnx'}"
        model.write_bytes(data)
        if not apart:
            return globals()[function](str(model), **arguments)
        limits = worker.Limits.of([model])
        return worker.call(f"{__name__}:{function}", limits, model=str(model), **arguments)
