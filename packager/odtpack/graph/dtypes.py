"""Element types in which a parameter may be stored and trained."""

from __future__ import annotations

import onnx_ir as ir

TRAINABLE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
"""Kept in float32, or in float64 as soon as one parameter is of that type."""
