"""One module for each family of operators; importing it registers its rules."""

from odtpack.autodiff.rules import (
    activation,
    conv,
    elementwise,
    index,
    linalg,
    norm,
    pool,
    reduce,
    shape,
)

__all__ = [
    "activation",
    "conv",
    "elementwise",
    "index",
    "linalg",
    "norm",
    "pool",
    "reduce",
    "shape",
]
