"""The packages that are trained on each release of ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.model_text import drawn, parsed
from tests.packaging_tools import batch, losses_of_steps

STEPS, RATE, BATCH, SEED = 5, 3e-3, 8, 1


def gru() -> onnx.ModelProto:
    """Which word is spoken: a recurrent layer over frames of sound, a linear one at the end."""
    shapes = {"w": (1, 48, 10), "r": (1, 48, 16), "b": (1, 96), "head": (10, 16), "bias": (10,)}
    return parsed("""(float[batch, 12, 10] input) => (float[batch, 10] output) {
      frames = Transpose <perm = [1, 0, 2]> (input)
      states = GRU <hidden_size = 16, linear_before_reset = 1> (frames, w, r, b)
      mean = ReduceMean <axes = [0, 1], keepdims = 0> (states)
      output = Gemm <transB = 1> (mean, head, bias)
    }""", **drawn(np.random.default_rng(0), 0.3, **shapes))  # fmt: skip


def dropout() -> onnx.ModelProto:
    """A frozen layer, and after a dropout in training mode a layer to train."""
    return parsed("""(float[batch, 20] input) => (float[batch, 10] output)
    <float ratio = {0.25}, bool training = {1}> {
      features = MatMul (input, body)
      positive = Relu (features)
      left = Dropout (positive, ratio, training)
      output = MatMul (left, head)
    }""", **drawn(np.random.default_rng(0), 0.3, body=(20, 64), head=(64, 10)))  # fmt: skip


def transformer(opset: int = 17) -> onnx.ModelProto:
    return zoo.transformer_encoder(vocab=40, d=32, layers=2, T=12, ff=64, classes=10, opset=opset)


MODELS: dict[str, tuple[str, Callable[[], onnx.ModelProto], dict[str, Any]]] = {
    "demo": ("the demo's CNN", lambda: zoo.cnn(size=8, width=(16, 32)), {}),
    "mlp": ("MLP", lambda: zoo.mlp((20, 32, 10)), {}),
    "transformer": ("transformer", transformer, {}),
    "gru": ("GRU", gru, {}),
    "dropout": ("dropout between a frozen and a trained layer", dropout, {"train": ["head"]}),
    "float16": ("transformer, frozen weights in float16", transformer,
                {"train": ["classifier.*"], "frozen_storage": "float16"}),
    "int8": ("transformer, frozen weights in int8", transformer,
             {"train": ["classifier.*"], "frozen_storage": "int8"}),
    "opset 19": ("MLP of opset 19", lambda: zoo.mlp((20, 32, 10), opset=19), {}),
    "opset 21": ("transformer of opset 21", lambda: transformer(21), {}),
    "opset 23": ("transformer of opset 23", lambda: transformer(23), {}),
    "demo.ort": ("the demo's CNN, `.ort`", lambda: zoo.cnn(size=8, width=(16, 32)), {}),
    "transformer.ort": ("transformer, `.ort`", transformer, {}),
    "gru.ort": ("GRU, `.ort`", gru, {}),
}  # fmt: skip
"""Title, model and options of build by name; with ``.ort`` its files in ORT format run."""


class Trained:
    """A package, what a worker needs to train it, and the losses on the installed release."""

    def __init__(self, name: str, folder: Path) -> None:
        _, make, options = MODELS[name]
        model = make()
        in_ort = name.endswith(".ort")
        ort_format = OrtFormat() if in_ort else None
        build_package(model, folder, loss="cross_entropy", ort_format=ort_format, **options)
        self.package = Package.open(folder)
        inputs = batch(model, BATCH)
        keys = ("training_model", "eval_model", "optimizer_model")
        state = CheckpointState.load_checkpoint(self.package.checkpoint)
        trainable = state.arrays(trainable=True)
        named = zip((i.name for i in self.package.manifest.inputs), inputs, strict=True)
        feeds = {**dict(named), **trainable, **state.arrays(trainable=False)}
        feeds |= {f"{n}_grad.accumulation.buffer": np.zeros_like(a) for n, a in trainable.items()}
        feeds["lazy_reset_grad"] = np.ones(1, np.bool_)
        np.savez(
            folder.with_suffix(".npz"), **{f"a{i}": a for i, a in enumerate(feeds.values())}
        )  # names of tensors may not be names of files
        sources = {key: getattr(self.package, key) for key in keys}
        self.job = {
            "models": {
                key: str(self.package.ort_model(key) if in_ort else path)
                for key, path in sources.items()
            },
            "levels": {key: _level(path) for key, path in sources.items()},
            "feeds": str(folder.with_suffix(".npz")),
            "names": list(feeds),
            "trainable": list(trainable),
            "steps": STEPS,
            "rate": RATE,
            "seed": SEED,
        }
        self.expected = self._train(inputs)

    def _train(self, inputs: tuple[np.ndarray, ...]) -> list[float]:
        state = CheckpointState.load_checkpoint(self.package.checkpoint)
        module = Module(self.package.training_model, state, self.package.eval_model)
        optimizer = Optimizer(self.package.optimizer_model, module)
        optimizer.set_learning_rate(RATE)
        onnxruntime.set_seed(SEED)
        losses = losses_of_steps(module, optimizer, [inputs] * STEPS)
        return [*losses, float(module.eval()(*inputs)[0])]


def _level(path: Path) -> str | None:
    properties = onnx.load(path, load_external_data=False).metadata_props
    return next((p.value for p in properties if p.key == "odtpack.optimization_level"), None)
