"""One module for each family of operators; importing it registers its rules."""

from odtpack.autodiff.rules import (
    activation,
    conv,
    conv_transpose,
    deform_conv,
    elementwise,
    grid_sample,
    index,
    linalg,
    lp_pool,
    norm,
    pool,
    reduce,
    resize,
    roi,
    shape,
    unpool,
)

__all__ = [
    "activation",
    "conv",
    "conv_transpose",
    "deform_conv",
    "elementwise",
    "grid_sample",
    "index",
    "linalg",
    "lp_pool",
    "norm",
    "pool",
    "reduce",
    "resize",
    "roi",
    "shape",
    "unpool",
]
