"""One module for each family of operators; importing it registers its rules."""

from odtpack.autodiff.rules import (
    activation,
    conv,
    conv_transpose,
    elementwise,
    grid_sample,
    index,
    linalg,
    norm,
    pool,
    reduce,
    resize,
    shape,
)

__all__ = [
    "activation",
    "conv",
    "conv_transpose",
    "elementwise",
    "grid_sample",
    "index",
    "linalg",
    "norm",
    "pool",
    "reduce",
    "resize",
    "shape",
]
