"""One module for each family of operators; importing it registers its rules."""

from odtpack.autodiff.rules import (  # noqa: F401  (fills the registry)
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
