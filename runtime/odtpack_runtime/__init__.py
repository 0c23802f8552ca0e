"""odtpack_runtime: train a package on stock ONNX Runtime.

The names and their behaviour are those of ``onnxruntime.training.api``, and there are
:class:`Package`, which finds and checks the files, and :func:`self_check`::

    from odtpack_runtime import CheckpointState, Module, Optimizer, Package

    package = Package.open("package")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    optimizer = Optimizer(package.optimizer_model, module)
    for images, labels in batches:
        loss = module(images, labels)
        optimizer.step()
        module.lazy_reset_grad()
    CheckpointState.save_checkpoint(state, "progress.ckpt", include_optimizer_state=True)

Importing this package imports numpy, onnxruntime and flatbuffers, nothing more, and turns the
telemetry of ONNX Runtime off, unless ``ORT_DISABLE_TELEMETRY`` is set.
"""

from odtpack_runtime import telemetry  # noqa: F401 - before anything imports onnxruntime

# isort: split
from odtpack_runtime.checkpoint.parameters import Parameter, Parameters
from odtpack_runtime.checkpoint.state import CheckpointState, Properties
from odtpack_runtime.errors import OdtpackError, UnknownKeyError, UnknownNameError, WrongTypeError
from odtpack_runtime.package.adapter import load_adapter, save_adapter
from odtpack_runtime.package.generator import Generator
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.self_check import self_check
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.lr_scheduler import LinearLRScheduler, LRScheduler
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

__all__ = [
    "CheckpointState",
    "Generator",
    "LRScheduler",
    "LinearLRScheduler",
    "Module",
    "OdtpackError",
    "Optimizer",
    "Package",
    "Parameter",
    "Parameters",
    "Properties",
    "UnknownKeyError",
    "UnknownNameError",
    "WrongTypeError",
    "default_session_options",
    "load_adapter",
    "save_adapter",
    "self_check",
]
