"""Reverse-mode differentiation of ONNX graphs into plain ONNX operators.

``vjp`` and ``non_differentiable`` register rules, for one's own operators too: see
docs/guides/own-operators.md.
"""

import odtpack.autodiff.rules  # noqa: F401  (fills the registry)
from odtpack.autodiff.backward import differentiate
from odtpack.autodiff.context import REGISTRY, Context, Registry, non_differentiable, vjp

__all__ = ["REGISTRY", "Context", "Registry", "differentiate", "non_differentiable", "vjp"]
