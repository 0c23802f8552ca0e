"""The models, batches and packages that the benchmarks share."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch

from odtpack.build import build_package
from scripts.harness import scratch
from tests import zoo
from tests.exported.export import export
from tests.exported.vision import VisionTransformer
from tests.packaging_tools import batch, trainable_names

PEER, PYTORCH = "onnxruntime-training 1.19.2", "PyTorch"
GEOMETRIC_MEAN_GOAL = 0.72
"""Of the workloads that ONNX Runtime training is the rival of, for every number of threads."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the batch it is trained on."""

    name: str  # as the command line has it
    title: str  # what a reader of the table must know
    build: Callable[[], onnx.ModelProto]
    batch: int  # samples
    goal: float  # highest ratio of our step time to the rival's, AdamW on one thread
    rival: str = PEER  # ONNX Runtime training, or PyTorch on the same weights

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write model and batch; return the two files."""
        model = self.build()
        onnx.save(model, folder / "model.onnx")
        data, labels = batch(model, self.batch)
        np.savez(folder / "batch.npz", input=data, labels=labels)
        return folder / "model.onnx", folder / "batch.npz"


def build_native(model: Path, package: Path, optimizer: str) -> None:
    """Build a package with native kernels that trains all parameters."""
    build_package(
        model, package, loss="cross_entropy", optimizer=optimizer, native=True,
        train=tuple(trainable_names(onnx.load(model))),
    )  # fmt: skip


def vit_tiny(
    size: int = 96, d: int = 192, depth: int = 12, patch: int = 16, opset: int = 14
) -> onnx.ModelProto:
    """ViT-Ti/16 (Dosovitskiy et al. 2020, Touvron et al. 2021) for images of 96x96, exported.

    The opset is 14: the peer cannot differentiate the LayerNormalization operator of opset 17.
    """
    with torch.random.fork_rng(devices=()), scratch() as folder:
        torch.manual_seed(7)
        module = VisionTransformer(20, d, depth, size=size, patch=patch, heads=3, ratio=4)
        images = {"input": torch.rand(2, 3, size, size)}
        dynamic = {name: {0: "batch"} for name in ("input", "output")}
        path = folder / "model.onnx"
        return onnx.load(export(module, images, path, "torchscript", opset=opset, dynamic=dynamic))


_WORKLOADS = (
    Workload("mlp", "MLP 784-500-10, batch 64", zoo.mlp, 64, goal=1.0),
    Workload("cnn", "CNN 1x28x28, batch 32", partial(zoo.cnn, hidden=128), 32, goal=0.45),
    Workload("mobilenet", "MobileNetV2 96x96, batch 8, BN folded",
             partial(zoo.mobilenet_v2, batch_norm="fold"), 8, goal=0.5),
    Workload("mobilenet-bn", "MobileNetV2 96x96, batch 8, training-mode BN",
             partial(zoo.mobilenet_v2, batch_norm="train"), 8, goal=0.6, rival=PYTORCH),
    # The peer cannot differentiate the LayerNormalization operator of opset 17.
    Workload("transformer", "transformer d256 L4 T128, batch 8",
             partial(zoo.transformer_encoder, opset=14), 8, goal=0.95),
    Workload("vit", "ViT-tiny 96x96, batch 8", vit_tiny, 8, goal=0.85),
    Workload("big-mlp", "MLP 4096-4096-1000, batch 1", partial(zoo.mlp, (4096, 4096, 1000)), 1,
             goal=0.8),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}
OPTIMIZERS = ("sgd", "adamw")
