"""One module for each family of operators; importing it registers its rules."""

from odtpack.autodiff.rules import (
    activation,
    control,
    conv,
    conv_transpose,
    elementwise,
    index,
    linalg,
    norm,
    pool,
    recurrent,
    reduce,
    resize,
    shape,
)

__all__ = [
    "activation",
    "control",
    "conv",
    "conv_transpose",
    "elementwise",
    "index",
    "linalg",
    "norm",
    "pool",
    "recurrent",
    "reduce",
    "resize",
    "shape",
]
