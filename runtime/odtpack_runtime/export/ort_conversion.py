"""Models in ORT format and back, by ONNX Runtime itself: it writes what it has loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.session import first_line

_IDENTIFIER = b"ORTM"


def is_ort_format(data: bytes) -> bool:
    """Whether a file's content is a model in ORT format: a flatbuffer of that identifier."""
    return data[4:8] == _IDENTIFIER


def to_onnx(data: bytes, where: str) -> bytes:
    """Return a model in ORT format as ONNX.

    The nodes are those of the file: what the conversion to ORT format fused stays fused, and
    names that it dropped are gone.

    Raises:
        OdtpackError: ``model-not-loadable`` with ONNX Runtime's reason.
    """
    # No optimization: the model was optimized when it was converted.
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _rewrite(data, "ONNX", level, "model-not-loadable", where)


def to_ort(data: bytes, where: str) -> bytes:
    """Return an ONNX model in ORT format, with the fusions that suit every processor.

    Raises:
        OdtpackError: ``model-not-loadable`` with ONNX Runtime's reason.
    """
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return _rewrite(data, "ORT", level, "ort-conversion-failed", where)


def _rewrite(
    data: bytes,
    kind: str,
    level: onnxruntime.GraphOptimizationLevel,
    code: str,
    where: str,
) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "model"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(result)
        options.add_session_config_entry("session.save_model_format", kind)
        options.log_severity_level = 3  # that the file suits this machine only is not so here
        try:
            onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            return result.read_bytes()
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise OdtpackError(
                code,
                f"ONNX Runtime cannot write {where} in {kind} format: {first_line(error)}",
                where=where,
                hint="work with the .onnx files of the package",
            ) from error
