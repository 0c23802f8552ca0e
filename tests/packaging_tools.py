"""Builds packages from zoo models and opens them, for tests and benchmarks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime

from odtpack import artifacts
from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Optimizer, Package
from odtpack_runtime.training.loop import loss_of

LOSSES = {
    "mse": artifacts.LossType.MSELoss,
    "cross_entropy": artifacts.LossType.CrossEntropyLoss,
    "bce_with_logits": artifacts.LossType.BCEWithLogitsLoss,
    "l1": artifacts.LossType.L1Loss,
}
OPTIMIZERS = {"sgd": artifacts.OptimType.SGD, "adamw": artifacts.OptimType.AdamW}


def trainable_names(model: onnx.ModelProto) -> list[str]:
    """Initializers of a zoo model that take a gradient: all but running statistics."""
    return [tensor.name for tensor in model.graph.initializer if not _is_statistic(tensor.name)]


def statistic_names(model: onnx.ModelProto) -> list[str]:
    """Running statistics of a zoo model."""
    return [tensor.name for tensor in model.graph.initializer if _is_statistic(tensor.name)]


def _is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def generate(
    model: onnx.ModelProto, folder: Path, optimizer: artifacts.OptimType = artifacts.OptimType.SGD,
    loss: artifacts.LossType = artifacts.LossType.CrossEntropyLoss, **options: Any,
) -> Path:  # fmt: skip
    """Artifacts that train every parameter of a zoo model; return ``folder``."""
    arguments = {"requires_grad": trainable_names(model), **options}
    artifacts.generate_artifacts(
        model, loss=loss, optimizer=optimizer, artifact_directory=folder, **arguments
    )
    return folder


def open_training(
    folder: Path, session_options: onnxruntime.SessionOptions | None = None,
    checkpoint: Path | None = None, form: str = "onnx", **options: Any,
) -> tuple[CheckpointState, Module, Optimizer]:  # fmt: skip
    """Open a generated folder through the training runtime; ``options`` are the module's."""
    state = CheckpointState.load_checkpoint(checkpoint or folder / "checkpoint")
    training, evaluation, update = (
        folder / f"{kind}_model.{form}" for kind in ("training", "eval", "optimizer")
    )
    module = Module(training, state, evaluation, session_options=session_options, **options)
    return state, module, Optimizer(update, module)


Model = onnx.ModelProto | ir.Model | Path


def built_package(
    model: Model, folder: Path, loss: str | None = "cross_entropy", **options: Any
) -> Package:
    """The package of a model, built there and opened."""
    build_package(model, folder, loss=loss, **options)
    return Package.open(folder)


def built_training(
    model: Model, folder: Path, **options: Any
) -> tuple[CheckpointState, Module, Optimizer]:
    """A package of a model, built there and opened for training."""
    return open_training(built_package(model, folder, **options).path)


def open_module(folder: Path, checkpoint: str | Path = "checkpoint") -> Module:
    """The training model of a folder alone, with a checkpoint there."""
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    return Module(folder / "training_model.onnx", state)


def losses_of_steps(
    module: Module, optimizer: Optimizer, batches: Iterable[Iterable[Any]]
) -> list[float]:
    """Make a step on each batch; return the losses."""
    losses = []
    for inputs in batches:
        losses.append(loss_of(module(*inputs)))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def batch(
    model: onnx.ModelProto, size: int, seed: int = 0, classes: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Random input of a zoo model's shape and type, and labels."""
    random = np.random.default_rng(seed)
    tensor = model.graph.input[0].type.tensor_type
    dims = [size, *(dim.dim_value for dim in tensor.shape.dim[1:])]
    if tensor.elem_type == onnx.TensorProto.INT64:
        vocabulary = next(t.dims[0] for t in model.graph.initializer if "embed" in t.name)
        data = random.integers(0, vocabulary, dims)
    else:
        data = random.standard_normal(dims, dtype=np.float32)
    return data, random.integers(0, classes, size)


def distance_limit(name: str, value: np.ndarray, relative: float, walk: float) -> float:
    """Return how far a trained parameter may be from the reference's, as a Euclidean distance.

    The softmax of attention does not see a bias of keys, so its gradient is rounding error around
    zero. SGD hardly moves it, but AdamW makes whole steps of any gradient: two runs may walk apart
    by ``walk`` in every element, the sum of both runs' learning rates.
    """
    if "key.bias" in name:
        return max(1e-6, walk) * float(np.sqrt(value.size))
    return relative * float(np.linalg.norm(value)) + 1e-8
