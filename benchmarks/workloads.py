"""The models, batches and packages that the benchmarks share."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch

from benchmarks.fidelity.architectures import VisionTransformer
from tests import zoo
from tests.exported.export import export
from tests.packaging_tools import batch


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the batch it is trained on.

    Attributes:
        name: As the command line has it.
        title: What a reader of the table must know.
        build: Returns the forward model.
        batch: Samples of a batch.
        target: Highest ratio of our step time to the peer's that the project allows itself;
            None where it sets none.
        peer_evaluates: Whether the peer can load the evaluation model that it writes.
    """

    name: str
    title: str
    build: Callable[[], onnx.ModelProto]
    batch: int
    target: float | None = None
    peer_evaluates: bool = True

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write model and batch; return the two files."""
        model = self.build()
        onnx.save(model, folder / "model.onnx")
        data, labels = batch(model, self.batch)
        np.savez(folder / "batch.npz", input=data, labels=labels)
        return folder / "model.onnx", folder / "batch.npz"


def vit_tiny() -> onnx.ModelProto:
    """ViT-Ti/16 (Dosovitskiy et al. 2020, Touvron et al. 2021) for images of 96x96, exported.

    The opset is 14: the peer cannot differentiate the LayerNormalization operator of opset 17.
    """
    with torch.random.fork_rng(devices=()), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(7)
        module = VisionTransformer(96, 192, 12, patch=16, heads=3, ratio=4).train()
        path = export(
            module, {"input": torch.rand(2, 3, 96, 96)}, Path(folder) / "model.onnx", "torchscript",
            opset=14, dynamic={"input": {0: "batch"}, "output": {0: "batch"}},
        )  # fmt: skip
        return onnx.load(path)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", "MLP 784-500-10, batch 64", zoo.mlp, 64),
        Workload("cnn", "CNN 1x28x28, batch 32", lambda: zoo.cnn(hidden=128), 32, target=0.5),
        Workload(
            "mobilenet",
            "MobileNetV2 96x96, batch 8, BN folded",
            lambda: zoo.mobilenet_v2(batch_norm="fold"),
            8,
            target=1.0,
        ),
        Workload(
            "mobilenet-bn",
            "MobileNetV2 96x96, batch 8, training-mode BN",
            lambda: zoo.mobilenet_v2(batch_norm="train"),
            8,
            peer_evaluates=False,
        ),
        Workload(
            "transformer",
            "transformer d256 L4 T128, batch 8",
            # The peer cannot differentiate the LayerNormalization operator of opset 17.
            lambda: zoo.transformer_encoder(opset=14),
            8,
            target=1.0,
        ),
        Workload("vit", "ViT-tiny 96x96, batch 8", vit_tiny, 8),
        Workload(
            "big-mlp", "MLP 4096-4096-1000, batch 1", lambda: zoo.mlp((4096, 4096, 1000)), 1
        ),
    )
}
OPTIMIZERS = ("sgd", "adamw")
