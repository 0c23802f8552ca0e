"""odtpack_runtime: train a package on stock ONNX Runtime.

The names and their behaviour are those of ``onnxruntime.training.api``::

    from odtpack_runtime import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint("package/checkpoint")
    module = Module("package/training_model.onnx", state, "package/eval_model.onnx")
    optimizer = Optimizer("package/optimizer_model.onnx", module)
    for images, labels in batches:
        loss = module(images, labels)
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, "progress.ckpt", include_optimizer_state=True)

Importing this package imports numpy, onnxruntime and flatbuffers, nothing more.
"""

from odtpack_runtime.checkpoint.parameters import Parameter, Parameters
from odtpack_runtime.checkpoint.state import CheckpointState, Properties
from odtpack_runtime.errors import OdtpackError, UnknownKeyError, UnknownNameError, WrongTypeError
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.lr_scheduler import LinearLRScheduler, LRScheduler
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

__all__ = [
    "CheckpointState",
    "LRScheduler",
    "LinearLRScheduler",
    "Module",
    "OdtpackError",
    "Optimizer",
    "Parameter",
    "Parameters",
    "Properties",
    "UnknownKeyError",
    "UnknownNameError",
    "WrongTypeError",
    "default_session_options",
]
