"""Points at which gradients are compared: reproducible, and away from kinks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def spread(*shape, low=-2.0, high=2.0, seed=0, avoid=(0.0,), gap=0.05):
    """Distinct evenly spaced numbers in random order, none within ``gap`` of ``avoid``."""
    count = int(np.prod(shape))
    line = np.linspace(low, high, 8 * count + 64)
    for kink in avoid:
        line = line[np.abs(line - kink) >= gap]
    chosen = line[np.linspace(0, len(line) - 1, count).round().astype(int)]
    return np.random.default_rng(seed).permutation(chosen).reshape(shape).astype(np.float32)


def spread_apart(*shapes: Sequence[int], seed: int = 0, **options: Any) -> list[Array]:
    """Arrays as :func:`spread` gives, with no number in two of them."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    pool = spread(sum(sizes), seed=seed, **options)
    ends = np.cumsum(sizes)
    return [
        pool[end - size : end].reshape(shape)
        for shape, size, end in zip(shapes, sizes, ends, strict=True)
    ]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Normally distributed numbers, for functions without kinks."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def cast_floats(array: Array, floats: type) -> Array:
    return np.asarray(array, floats if array.dtype == np.float32 else array.dtype)
