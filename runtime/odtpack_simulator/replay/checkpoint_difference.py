"""Compare two checkpoints bit by bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.layout import Array


def first_difference(one: CheckpointData, other: CheckpointData) -> str | None:
    """What two checkpoints disagree on, bit by bit; None if on nothing.

    Parameters, running statistics and other frozen values, and of the optimizer its step
    count, learning rate and moments are compared.
    """
    left, right = _arrays(one), _arrays(other)
    if left.keys() != right.keys():
        return f"{min(left.keys() ^ right.keys())}, which one of them lacks"
    for name, array in left.items():
        if array.shape != right[name].shape or not np.array_equal(_bits(array), _bits(right[name])):
            return name
    for name in ("step", "learning_rate"):
        if getattr(one.optimizer, name, None) != getattr(other.optimizer, name, None):
            return f"the optimizer's {name.replace('_', ' ')}"
    return None


def _arrays(data: CheckpointData) -> dict[str, Array]:
    moments = data.optimizer.moments if data.optimizer else {}
    return {
        **{f"parameter '{name}'": array for name, array in data.trainable.items()},
        **{f"'{name}', which is not trained": array for name, array in data.frozen.items()},
        **{
            f"moment {index} of '{name}'": moment
            for name, own in moments.items()
            for index, moment in enumerate(own)
        },
    }


def _bits(array: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
