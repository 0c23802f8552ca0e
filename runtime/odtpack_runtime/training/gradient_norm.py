"""The norm of all gradients together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_NORM_ELEMENTS = 8 * 1024
"""Elements whose squares are summed at once: few enough for a cache, and for one thread (OpenBLAS
takes several from 10,000 on, which wait for each other): the sum is the same in every run."""


def gradient_norm(gradients: npt.NDArray[Any]) -> float:
    """Return the L2 norm of a flat vector, which an optimizer model that clips by it takes.

    Squares and sum are float64, so that every language has the same float32, whatever the
    order in which it adds.

    Args:
        gradients: All gradients, float32 or float64; the gaps between them are zero.
    """
    wide = np.empty(min(gradients.size, _NORM_ELEMENTS))
    total = 0.0
    for start in range(0, gradients.size, _NORM_ELEMENTS):
        part = gradients[start : start + _NORM_ELEMENTS]
        values = wide[: part.size]
        np.copyto(values, part)
        total += float(np.dot(values, values))
    return math.sqrt(total)
