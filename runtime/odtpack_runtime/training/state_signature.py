"""What models take and give, read against the parameters of a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.session.graph_signature import GraphSignature, model_mismatch


def read_signature(
    state: CheckpointState,
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
) -> GraphSignature:
    """Read what a model takes and gives.

    Args:
        state: The parameters.
        shapes: Shapes of the parameters of a nominal state, see :func:`nominal_shapes`.
        where: The model's path, for messages.
        inputs: Its inputs, as ONNX Runtime describes them.
        outputs: Its outputs.

    Raises:
        OdtpackError: ``model-mismatch``.
    """
    return GraphSignature.read(where, inputs, outputs, *roles(state, shapes))


def roles(
    state: CheckpointState, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Trainable parameters and the others; those of a nominal state without values."""
    both = (state.arrays(trainable=True), state.arrays(trainable=False))
    for arrays in both:
        for name in arrays.keys() & shapes.keys():
            # An array of that shape without memory of its own: only shape and dtype count.
            arrays[name] = np.broadcast_to(arrays[name].dtype.type(), shapes[name])
    return both


def nominal_shapes(
    state: CheckpointState, models: Sequence[tuple[str, Sequence[Any], Sequence[Any]]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a nominal state, which only the models know.

    Args:
        state: The state.
        models: Path, inputs and outputs of each.

    Raises:
        OdtpackError: ``model-mismatch`` if a model leaves one open.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for where, inputs, _ in models:
        for node in inputs:
            if node.name in state.parameters:
                if not all(isinstance(size, int) for size in node.shape):
                    raise model_mismatch(where, f"the shape of '{node.name}' is not known")
                shapes.setdefault(node.name, tuple(node.shape))
    return shapes
