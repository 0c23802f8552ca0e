"""Frozen weights in 8 or 4 bits: constants of the models, unpacked where they are read."""

from odtpack.quantized.base import quantize_base

__all__ = ["quantize_base"]
