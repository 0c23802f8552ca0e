"""ORT format models and the list of operators that they need, through onnxruntime.tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from odtpack.errors import OdtpackError


def convert_models(models: Sequence[Path], custom_op_library: Path | None) -> None:
    """Write ``X.ort`` and ``X.required_operators.config`` beside every ``X.onnx``.

    Raises:
        OdtpackError: ONNX Runtime cannot convert a model.
    """
    from onnxruntime.tools.convert_onnx_models_to_ort import (
        OptimizationStyle,
        convert_onnx_models_to_ort,
    )

    for model in models:
        try:
            convert_onnx_models_to_ort(
                model,
                optimization_styles=[OptimizationStyle.Fixed],
                custom_op_library_path=custom_op_library,
            )
        except Exception as error:
            raise OdtpackError(
                "ort-conversion-failed",
                f"ONNX Runtime cannot convert {str(model)!r} to ORT format: {error}",
                hint="leave ort_format out, or report the model",
            ) from error
