"""Parameters as one vector, without gaps: what devices and a server exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.layout import Array, allocate
from odtpack_runtime.errors import OdtpackError


def gather(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return a copy of parameters as one vector of ``dtype``.

    Raises:
        OdtpackError: ``parameter-type`` if one of them does not fit into that type.
    """
    for array in arrays:
        _require_fits(array, dtype)
    size = sum(array.size for array in arrays)
    vector = allocate(size * dtype.itemsize).view(dtype)
    at = 0
    for array in arrays:
        vector[at : at + array.size] = array.reshape(-1)
        at += array.size
    return vector


def scatter(
    vector: Any, arrays: Sequence[Array], dtype: np.dtype[Any], trainable_only: bool
) -> None:
    """Set parameters from one vector, an array or OrtValue of ``dtype``.

    Args:
        vector: What :func:`gather` returns.
        arrays: The parameters, of narrower floating types than ``dtype`` at most.
        dtype: What the vector must be of.
        trainable_only: Whether they are the trainable parameters only, for the message.

    Raises:
        OdtpackError: ``buffer-type``, ``buffer-size`` or ``parameter-type``. Nothing is
            changed then.
    """
    if not isinstance(vector, np.ndarray) and hasattr(vector, "numpy"):
        vector = vector.numpy()
    if not isinstance(vector, np.ndarray) or vector.dtype != dtype:
        raise OdtpackError(
            "buffer-type", f"Parameters are set from an OrtValue or an array of {dtype}."
        )
    size = sum(array.size for array in arrays)
    if vector.size != size:
        raise OdtpackError(
            "buffer-size",
            f"The buffer holds {vector.size} elements, and the parameters have {size}.",
            hint=f"pass trainable_only={not trainable_only} if it holds "
            + ("all parameters" if trainable_only else "trainable parameters only"),
        )
    for array in arrays:
        _require_fits(array, dtype)
    values = vector.reshape(-1)
    at = 0
    for array in arrays:
        part = values[at : at + array.size].reshape(array.shape)
        np.copyto(array, part, casting="same_kind")
        at += array.size


def _require_fits(array: Array, dtype: np.dtype[Any]) -> None:
    if array.dtype.kind != "f" or array.dtype.itemsize > dtype.itemsize:
        raise OdtpackError(
            "parameter-type",
            f"A parameter has elements of {array.dtype}, and a flat buffer is {dtype} throughout.",
            hint="pass trainable_only=True",
        )
