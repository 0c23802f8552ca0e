"""Reverse-mode differentiation of ONNX graphs into plain ONNX operators."""

import odtpack.autodiff.rules  # noqa: F401  (fills the registry)
from odtpack.autodiff.backward import differentiate
from odtpack.autodiff.registry import REGISTRY, Registry

__all__ = ["REGISTRY", "Registry", "differentiate"]
