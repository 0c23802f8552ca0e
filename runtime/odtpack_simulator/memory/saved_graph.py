"""What a session of ONNX Runtime makes of a model, as a file."""

from __future__ import annotations

from collections.abc import Mapping

from odtpack_runtime.package.manifest_device import OptimizationLevel
from odtpack_runtime.session.options import LEVELS
from odtpack_runtime.session.session import open_session
from odtpack_simulator.memory.process_memory import memory_options


def save_optimized(
    model: str, out: str, threads: int, level: OptimizationLevel, sizes: Mapping[str, int] = {}
) -> None:
    """Write what a session makes of a model; to be called apart, as it computes constants.

    Args:
        model: The model.
        out: Where it goes.
        threads: Intra-operator threads.
        level: How far ONNX Runtime rewrites the model.
        sizes: Sizes of named dimensions.
    """
    options = memory_options(threads)
    options.graph_optimization_level = LEVELS[level]
    options.optimized_model_filepath = out
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    open_session(model, options)
