"""ORT format models and the list of operators that they need, through onnxruntime.tools."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from odtpack.errors import OdtpackError

ORT_SUFFIX = ".ort"
CONFIG_SUFFIX = ".required_operators.config"


def convert_models(models: Sequence[Path], custom_op_library: Path | None) -> None:
    """Write ``X.ort`` and ``X.required_operators.config`` beside every ``X.onnx``.

    Raises:
        OdtpackError: ONNX Runtime cannot convert a model.
    """
    from onnxruntime.tools.convert_onnx_models_to_ort import (
        OptimizationStyle,
        convert_onnx_models_to_ort,
    )

    # The converter tells what it does on stdout, which belongs to the caller.
    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
    for model in models:
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # it forgets to close files
                convert_onnx_models_to_ort(
                    model,
                    optimization_styles=[OptimizationStyle.Fixed],
                    custom_op_library_path=custom_op_library,
                )
        except Exception as error:
            raise OdtpackError(
                "ort-conversion-failed",
                f"ONNX Runtime cannot convert {model.name!r} to ORT format: {error}",
                hint="leave ORT format out, or report the model",
            ) from error
