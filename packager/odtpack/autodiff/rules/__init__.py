"""One module for each family of operators; importing it registers its rules."""

from odtpack.autodiff.rules import (
    control,
    convolution,
    elementwise,
    index,
    linalg,
    norm,
    pooling,
    recurrent,
    reduce,
    resampling,
    shape,
)

__all__ = [
    "control",
    "convolution",
    "elementwise",
    "index",
    "linalg",
    "norm",
    "pooling",
    "recurrent",
    "reduce",
    "resampling",
    "shape",
]
