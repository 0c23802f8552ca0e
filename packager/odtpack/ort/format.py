"""Models in ORT format: ONNX Runtime's own files, optimized once and for all by a session.

What ``onnxruntime.tools.convert_onnx_models_to_ort`` writes; that converter takes the
optimization level from an environment variable, and here it is the model's own. ONNX Runtime
writes the initializers of a model in an order that changes from run to run, so these are the
only files of a package whose bytes are not the same twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import onnxruntime

from odtpack.choices import OrtFormat, Platform, Style
from odtpack.errors import OdtpackError
from odtpack_runtime.apart import worker as apart
from odtpack_runtime.session.options import read_metadata

LEVELS: Final[Mapping[str, onnxruntime.GraphOptimizationLevel]] = {
    "disable": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""Optimization levels as ``odtpack.optimization_level`` and the command line name them."""


RuntimeOptimizations = Literal["save", "apply"]


def convert_model(
    model: Path,
    out: Path,
    *,
    level: str | None = None,
    platform: str | None = None,
    runtime: RuntimeOptimizations | None = None,
    custom_op_library: Path | None = None,
) -> None:
    """Write what a session makes of a model, by default on its recorded level, in ORT format."""
    # Only for amd64 are convolutions laid out in blocks of channels (NCHWc): other processors have
    # no kernels for that.
    library = None if custom_op_library is None else str(custom_op_library.resolve())
    # Apart, as it computes constants.
    apart.call(
        "odtpack.ort.format:save_optimized", apart.Limits.of([model]), model=str(model),
        out=str(out), level=level or recorded_level(model), platform=platform, runtime=runtime,
        library=library,
    )  # fmt: skip


def save_optimized(
    model: str,
    out: str,
    level: str,
    platform: str | None,
    runtime: RuntimeOptimizations | None,
    library: str | None,
) -> None:
    """:func:`convert_model` in this process."""
    options = session_options(level, platform)
    options.optimized_model_filepath = out
    options.add_session_config_entry("session.save_model_format", "ORT")
    if runtime is not None:
        options.add_session_config_entry("optimization.minimal_build_optimizations", runtime)
    try:
        if library is not None:
            options.register_custom_ops_library(library)
        open_optimized(Path(model), options, platform)
        if platform is None:  # that for one kind of processor may have no kernels on this one
            again = session_options(level, platform)
            if library is not None:
                again.register_custom_ops_library(library)
            onnxruntime.InferenceSession(out, again, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise OdtpackError(
            "ort-conversion-failed",
            f"ONNX Runtime cannot convert {Path(model).name!r} to ORT format: {error}",
        ) from error


def session_options(level: str, platform: str | None) -> onnxruntime.SessionOptions:
    """Return the options of a session that optimizes for a platform."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that what it saves fits this processor
    options.graph_optimization_level = LEVELS[level]
    int8 = "1" if platform == Platform.ARM else "0"
    options.add_session_config_entry("session.qdqisint8allowed", int8)
    return options


def open_optimized(
    model: Path, options: onnxruntime.SessionOptions, platform: str | None
) -> onnxruntime.InferenceSession:
    """Open a session that optimizes for a platform and not for this processor."""
    return onnxruntime.InferenceSession(
        str(model),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=None if platform == Platform.AMD64 else ["NchwcTransformer"],
    )


def recorded_level(model: Path) -> str:
    """Return the optimization level that a model's metadata name, ``all`` if they name none."""
    level = read_metadata(model).get("odtpack.optimization_level", "all")
    return level if level in LEVELS else "all"


def convert_variants(
    model: Path, formats: OrtFormat, folder: Path, custom_op_library: Path | None = None
) -> dict[Path, tuple[Style, Platform | None]]:
    """Write every variant of a model."""
    written = {}
    for style, platform in formats.variants():
        out = folder / formats.name(model.stem, style, platform)
        runtime: RuntimeOptimizations | None = "save" if style is Style.RUNTIME else None
        convert_model(
            model, out, platform=platform, runtime=runtime, custom_op_library=custom_op_library
        )
        written[out] = style, platform
    return written
