"""Writes ONNX Runtime's contributed operators (domain com.microsoft) as standard ones.

Models that ONNX Runtime has optimized, and some exporters, contain fused operators:
FusedMatMul, SkipLayerNormalization, MultiHeadAttention. No inference knows their shapes and
no rule their gradients; in standard operators both follow, and what is emitted needs no
contributed kernels. One function for each operator, in the module of its family.

A node that a function does not cover stays as it is: it runs, and is an error only where a
gradient would have to pass it.
"""

from odtpack.contrib.decompose import covered, decompose, needs_blocks
from odtpack.contrib.table import DOMAIN

__all__ = ["DOMAIN", "covered", "decompose", "needs_blocks"]
