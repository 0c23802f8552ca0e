"""The held-out models: what they are, how they are trained, and where their packages are built.

Constants of the predictor were fitted to the zoo's networks (see ``benchmarks.memory_prediction``)
and to models of one operator. None of the models here took part in that; they are exported
from PyTorch, as users' models are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from benchmarks.fidelity import architectures
from odtpack import optimizers
from odtpack.build import build_package
from odtpack.choices import Storage
from odtpack.optimizers import SGD, Adafactor, AdamW, Lion
from odtpack_runtime.package.package import Package
from odtpack_simulator.replay.job import Job
from scripts.harness import scratch
from tests.exported.export import export
from tests.exported.sequence import KeywordSpotter, LstmClassifier, Recommender
from tests.exported.vision import Autoencoder
from tests.torch_twins import Mlp

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
"""Optimizer steps of a training: then a fifth of the samples is one batch for the evaluation."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    name: str  # as the command line has it
    title: str  # what a reader of the table must know
    module: Callable[[], nn.Module]
    inputs: Mapping[str, tuple[int, ...]]  # one sample's shape of each input, in order
    batches: tuple[int, ...]  # sizes
    # for an input or target of whole numbers, how many there are
    ranges: Mapping[str, int] = dataclasses.field(default_factory=dict)
    loss: str | None = "cross_entropy"  # None where the model returns its loss
    optimizer: optimizers.Optimizer = dataclasses.field(default_factory=AdamW)
    update: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # clipping and the like
    accumulation_steps: int = 1
    target: tuple[int, ...] = ()  # one sample's shape of it, where the model leaves that open
    norms: bool = False  # whether batch normalizations are in training mode, or folded
    freeze: tuple[str, ...] = ()  # patterns of the parameters that stay as they are
    storage: Storage | None = None  # of frozen weights

    def model(self) -> onnx.ModelProto:
        """Export the network, with random weights of a fixed seed; the batch size stays open."""
        with torch.random.fork_rng(devices=()), scratch() as folder:
            torch.manual_seed(7)
            module = self.module().train(self.norms)
            samples = {name: self._sample(name, shape) for name, shape in self.inputs.items()}
            dynamic = {name: {0: "batch"} for name in (*self.inputs, "output")}
            path = folder / "model.onnx"
            return onnx.load(
                export(module, samples, path, "torchscript", opset=17, dynamic=dynamic)
            )

    def samples(self, batch_size: int) -> int:
        """How many make :data:`STEPS` steps and a batch for the evaluation."""
        return math.ceil(STEPS * batch_size * self.accumulation_steps * 5 / 4)

    def _sample(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name in self.ranges and name != "same":
            return torch.randint(self.ranges[name], (2, *shape))
        return torch.rand(2, *shape)


@dataclasses.dataclass(frozen=True)
class Built:
    """A case with its package and data on disk; the data serve every batch size."""

    case: Case
    folder: Path

    @property
    def package(self) -> Package:
        """The package."""
        return Package.open(self.folder / "package")

    @property
    def data(self) -> dict[str, str]:
        """For each user input, in order, the file of its data."""
        names = (spec.name for spec in self.package.manifest.input_specs())
        return {name: str(self.folder / f"{name}.npy") for name in names}

    def with_session(self, folder: Path, **changes: Any) -> Built:
        """The same with other session options, in another folder.

        Its manifest says so, and all that open it follow: the plan, the app, the replay.
        """
        session = self.package.manifest.session
        assert session is not None
        own = dataclasses.replace(session, **changes)
        shutil.copytree(self.folder, folder)
        changed = dataclasses.replace(self.package.manifest, session=own).to_json()
        (folder / "package" / "manifest.json").write_text(changed)
        return dataclasses.replace(self, folder=folder)

    def shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """Shape of one batch of each user input."""
        return {
            name: (batch_size, *np.load(file, "r").shape[1:]) for name, file in self.data.items()
        }

    def batch(self, batch_size: int) -> dict[str, np.ndarray]:
        """The first rows of each user input."""
        return {
            name: np.ascontiguousarray(np.load(file, "r")[:batch_size])
            for name, file in self.data.items()
        }

    def job(self, folder: Path, batch_size: int, threads: int = 1, **changes: Any) -> Job:
        """A training of :data:`STEPS` full batches, in a child that may write to ``folder``."""
        package = self.package
        files = (package.training_model, package.eval_model, package.optimizer_model)
        job = Job(
            "train", *map(str, files), str(package.checkpoint), str(folder), self.data,
            self.case.samples(batch_size), batch_size, epochs=1, seed=3, full_batches=True,
            learning_rate=1e-4, threads=threads, accumulation_steps=self.case.accumulation_steps,
        )  # fmt: skip
        return dataclasses.replace(job, **changes)


def build(case: Case, root: Path | None = None, *, native: bool = False) -> Built:
    """Build the package of a case and random data for it, unless that was done before.

    They are kept in ``root``, or in ``build/fidelity`` of the repository.
    """
    name = f"{case.name}-native" if native else case.name
    folder = (root or ROOT / "build" / "fidelity") / f"{name}-{_version()}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
        try:
            _fill(case, begun, native)
            with contextlib.suppress(OSError):  # another process was first
                begun.rename(folder)
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return Built(case, folder)


def _fill(case: Case, folder: Path, native: bool) -> None:
    manifest = build_package(
        case.model(), folder / "package", loss=case.loss, optimizer=case.optimizer,
        accumulation_steps=case.accumulation_steps, freeze=case.freeze,
        frozen_storage=case.storage, native=native, **case.update,
    )  # fmt: skip
    random = np.random.default_rng(5)
    count = case.samples(max(case.batches))
    for item in manifest.inputs:
        spec = item.spec()
        sizes = case.target if case.target and item.role != "data" else spec.shape[1:]
        shape = (count, *(int(size or 0) for size in sizes))
        high = case.ranges.get(item.name) or item.class_count
        array = random.integers(0, high, shape) if high else random.standard_normal(shape)
        np.save(folder / f"{item.name}.npy", array.astype(spec.dtype))


def _version() -> str:
    """A digest of everything that a package and its data are made by."""
    digest = hashlib.sha256(f"{onnx.__version__} {torch.__version__}".encode())
    sources = [*(ROOT / "tests/exported").glob("*.py"), *(ROOT / "packager").rglob("*.py")]
    sources.append(ROOT / "tests/torch_twins.py")
    for source in (Path(architectures.__file__), Path(__file__), *sorted(sources)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


_WORDS = {"segments": 2, "mask": 2}


def _bert(words: int, length: int, d: int, depth: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The network, and its inputs."""
    module = partial(architectures.bert, words, length, d, depth)
    return module, dict.fromkeys(("tokens", "segments", "mask"), (length,))


_CASES = (
    Case(
        "keyword-gru", "GRU over 60 frames of sound, AdamW",
        partial(KeywordSpotter, 12, 40, 64, 5, 2, 96), {"x": (60, 40)}, (8, 32),
    ),
    Case(
        "lstm", "bidirectional LSTM over 32 tokens, SGD with momentum",
        partial(LstmClassifier, 6000, 4, 64, 64), {"tokens": (32,)}, (8, 32),
        ranges={"tokens": 6000}, optimizer=SGD(momentum=0.9),
    ),
    Case(
        "unet", "U-Net 64x64, batch norm trained, AdamW",
        architectures.UNet, {"x": (3, 64, 64)}, (2, 4, 8), norms=True,
    ),
    Case(
        "mobilenet-v3", "MobileNetV3 96x96, batch norm trained, SGD with momentum",
        partial(architectures.mobile, nn.Hardswish, nn.Hardsigmoid), {"x": (3, 96, 96)}, (4, 16),
        norms=True, optimizer=SGD(momentum=0.9),
    ),
    Case(
        "efficientnet", "EfficientNet 96x96, batch norm folded, Lion",
        partial(architectures.mobile, nn.SiLU, nn.Sigmoid), {"x": (3, 96, 96)}, (4, 12),
        optimizer=Lion(),
    ),
    Case(
        "convnext", "ConvNeXt 64x64, AdamW, gradients clipped",
        architectures.convnext, {"x": (3, 64, 64)}, (4, 16), update={"clip_norm": 1.0},
    ),
    Case(
        "vit", "ViT 64x64, d128 L4, AdamW",
        architectures.VisionTransformer, {"x": (3, 64, 64)}, (4, 16),
    ),
    Case(
        "bert", "BERT d128 L3 T64 with mask, AdamW",
        *_bert(8000, 64, 128, 3), (4, 16), ranges=_WORDS | {"tokens": 8000},
    ),
    Case(
        "causal-lm", "causal LM d128 L3 T48, tied embeddings, Adafactor",
        partial(architectures.causal_lm, 4000, 48, 128, 3), {"tokens": (48,)}, (2, 8),
        ranges={"tokens": 4000}, target=(48,), optimizer=Adafactor(),
    ),
    Case(
        "recommender", "wide and deep, 60000 users and 30000 items, SGD",
        partial(Recommender, 60_000, 30_000, 500), {"user": (), "item": (), "tags": (8,)},
        (64, 2048), ranges={"user": 60_000, "item": 30_000, "tags": 500, "targets": 2},
        loss="bce_with_logits", optimizer=SGD(),
    ),
    Case(
        "autoencoder", "convolutional autoencoder 64x64, AdamW",
        partial(Autoencoder, (24, 48), 16, 128), {"x": (1, 64, 64)}, (8, 32), loss="mse",
    ),
    Case(
        "siamese", "Siamese towers 48x48, loss in the model, SGD",
        architectures.siamese, {"left": (1, 48, 48), "right": (1, 48, 48), "same": ()}, (8, 24),
        ranges={"same": 2}, loss=None, optimizer=SGD(),
    ),
    Case(
        "resnet18", "ResNet-18 of width 24, 64x64, batch norm trained, SGD with momentum",
        partial(architectures.resnet, 24), {"x": (3, 64, 64)}, (4, 16), norms=True,
        optimizer=SGD(momentum=0.9),
    ),
    Case(
        "signal", "1-D convolutions over 1024 samples of 12 channels, Lion",
        architectures.signal_net, {"x": (12, 1024)}, (8, 32), optimizer=Lion(),
    ),
    Case(
        "mixer", "MLP-Mixer 64x64, d128 L4, AdamW, two batches a step",
        architectures.mixer, {"x": (3, 64, 64)}, (4, 16), accumulation_steps=2,
    ),
    Case(
        "transfer-int8", "ResNet-18 of width 64, all but the head frozen in int8, AdamW",
        partial(architectures.resnet, 64), {"x": (3, 64, 64)}, (8, 24),
        freeze=("backbone*",), storage="int8",
    ),
    Case(
        "transfer-half", "BERT d256 L4 T32, all but the head frozen in float16, SGD",
        *_bert(8000, 32, 256, 4), (4, 16), ranges=_WORDS | {"tokens": 8000}, optimizer=SGD(),
        freeze=("words*", "positions*", "segments*", "norm*", "layers*"), storage="float16",
    ),
    Case(
        "tabular", "MLP 30-64-32-4, as small as packages get, AdamW",
        architectures.tabular, {"x": (30,)}, (16, 256),
    ),
    Case(
        "mobilenet-v2", "MobileNetV2 64x64, batch norm trained, SGD with momentum",
        architectures.mobilenet_v2, {"x": (3, 64, 64)}, (4, 16), norms=True,
        optimizer=SGD(momentum=0.9),
    ),
    Case("cnn", "two convolutions 28x28, SGD", architectures.cnn, {"x": (1, 28, 28)}, (32, 128),
         optimizer=SGD()),
    Case("mlp", "MLP 256-512-512-10, AdamW", partial(Mlp, [256, 512, 512, 10]), {"x": (256,)},
         (16, 128)),
    Case(
        "experts", "mixture of six experts over 24 tokens, SGD", architectures.Experts,
        {"x": (24, 96)}, (8, 32), optimizer=SGD(),
    ),
    Case(
        "densenet", "DenseNet 48x48, batch norm trained, SGD with momentum",
        architectures.densenet, {"x": (3, 48, 48)}, (4, 16), norms=True,
        optimizer=SGD(momentum=0.9),
    ),
    Case(
        "gru-tagger", "bidirectional GRU, a tag for each of 32 tokens, AdamW",
        architectures.GruTagger, {"tokens": (32,)}, (8, 32), ranges={"tokens": 4000},
        target=(32,),
    ),
    Case(
        "speech-conv", "1-D convolutions by channel over 98 frames, batch norm trained, Lion",
        architectures.speech_conv, {"x": (40, 98)}, (8, 32), norms=True, optimizer=Lion(),
    ),
    Case(
        "temporal-conv", "causal convolutions over 256 samples, AdamW, gradients clipped",
        architectures.temporal_conv, {"x": (8, 256)}, (8, 32), loss="mse", target=(256,),
        update={"clip_norm": 1.0},
    ),
    Case(
        "crossing", "DLRM with four tables of 25350 rows, SGD with momentum",
        architectures.Crossing,
        {"numbers": (13,), "a": (), "b": (), "c": (), "e": ()}, (64, 512),
        ranges={"a": 20_000, "b": 5_000, "c": 300, "e": 50, "targets": 2},
        loss="bce_with_logits", optimizer=SGD(momentum=0.9),
    ),
    Case(
        "graph-conv", "three graph convolutions over 48 nodes, AdamW", architectures.GraphConv,
        {"nodes": (48, 16), "adjacency": (48, 48)}, (8, 64),
    ),
    Case(
        "bert-tiny", "BERT d64 L2 T32 with mask, SGD",
        *_bert(4000, 32, 64, 2), (4, 32), ranges=_WORDS | {"tokens": 4000}, optimizer=SGD(),
    ),
    Case(
        "points", "PointNet over 256 points, batch norm trained, AdamW, two batches a step",
        architectures.point_net, {"x": (3, 256)}, (4, 16), norms=True, accumulation_steps=2,
    ),
)  # fmt: skip

CASES = {case.name: case for case in _CASES}
"""The held-out cases by name."""
