"""Find parameters that would train in silence: marked as trainable, with a gradient of zero."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from odtpack_runtime.apart.child import alive
from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.module import Module

MOST_STEPS = 8


def zero_gradients(
    package: Package, arrays: Mapping[str, Array], batch_size: int
) -> tuple[str, ...]:
    """Run training steps on sample data, without an optimizer, and look at the gradients.

    A gradient that is exactly zero for every element and every sample says that the
    parameter has no effect where the data lie: a unit that is never active, an embedding
    that no index names, a branch that is not taken, a value that is rounded away.

    Args:
        package: The package; it is not changed.
        arrays: Data by input, as :func:`odtpack_runtime.training.data.load_dataset` returns them.
        batch_size: Samples in a step. What does not fill a batch is left out, and steps
            end after :data:`MOST_STEPS`.

    Returns:
        Names of the trainable parameters whose accumulated gradient was zero in every step,
        in the order of the checkpoint.

    Raises:
        OdtpackError: A step failed, for example because the data do not fit.
    """
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state)
    names = module.input_names()
    silent = list(state.arrays(trainable=True))
    samples = len(next(iter(arrays.values())))
    for start in range(0, min(samples, MOST_STEPS * batch_size) - batch_size + 1, batch_size):
        module.lazy_reset_grad()
        module(*(np.ascontiguousarray(arrays[n][start : start + batch_size]) for n in names))
        silent = [name for name in silent if not _gradient(state, name).any()]
        alive()
        if not silent:
            break
    return tuple(silent)


def _gradient(state: CheckpointState, name: str) -> Array:
    gradient = state.parameters[name].grad
    assert gradient is not None  # noqa: S101 - it is trainable, and a Module holds the state
    return gradient
