"""Blocks that write losses, models and optimizers: ``onnxruntime.training.onnxblock``.

Same names and calls as there; what they write are plain ONNX operators with names that
depend on nothing but the model. docs/onnxblock.md is a guide.
"""

from odtpack.onnxblock import blocks, loss, optim
from odtpack.onnxblock.accessor import ModelAccessor
from odtpack.onnxblock.blocks import Block, base, custom_op_library, empty_base
from odtpack.onnxblock.models import (
    ForwardBlock,
    TrainingBlock,
    load_checkpoint_to_model,
    save_checkpoint,
)

__all__ = [
    "Block",
    "ForwardBlock",
    "ModelAccessor",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
