"""The held-out models: what they are, how they are trained, and where their packages are built.

They are networks of the sizes that phones train, in plain PyTorch. Their blocks are those of the
tests of exported models; here they are widened, deepened and joined to whole networks.

Constants of the predictor were fitted to the zoo's networks (see ``benchmarks.memory_prediction``)
and to models of one operator. None of the models here took part in that; they are exported
from PyTorch, as users' models are.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from odtpack import optimizers
from odtpack.build import build_package
from odtpack.choices import Storage
from odtpack.optimizers import SGD, Adafactor, AdamW, Lion
from odtpack_runtime.package.package import Package
from odtpack_simulator.replay.job import Job, SamplePlan
from scripts.harness import ROOT, scratch
from tests.exported import sequence, vision
from tests.exported.export import export
from tests.exported.vision import conv_norm, feed_forward
from tests.torch_twins import Cnn, Mlp


class Apply(nn.Module):
    """A function between layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


class Skip(nn.Sequential):
    """Layers and a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Dense(nn.Sequential):
    """Layers whose channels are joined to those that they read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)


def unet(width: int = 16, classes: int = 5) -> nn.Module:
    """Images [N, 3, S, S] to a class for each pixel, three levels down and up."""
    inner, below = conv_norm(4 * width, 4 * width, 3, nn.ReLU), 4 * width
    for i, o in ((2 * width, 4 * width), (width, 2 * width), (3, width)):
        up = nn.ConvTranspose2d(below, o, 2, stride=2)
        inner, below = nn.Sequential(
            conv_norm(i, o, 3, nn.ReLU), conv_norm(o, o, 3, nn.ReLU),
            Dense(nn.MaxPool2d(2), inner, up), conv_norm(2 * o, o, 3, nn.ReLU),
        ), o  # fmt: skip
    return nn.Sequential(inner, nn.Conv2d(width, classes, 1))


def _mean(*axes: int) -> Apply:
    return Apply(lambda x: x.mean(axes))


def _patches(d: int, size: int) -> nn.Module:
    """Images to tokens [N, T, d]."""
    convolution = nn.Conv2d(3, d, size, stride=size)
    return nn.Sequential(convolution, Apply(lambda x: x.flatten(2).transpose(1, 2)))


def mobile(activation: type[nn.Module], gate: type[nn.Module], width: int = 16) -> nn.Module:
    """Inverted residuals with squeeze-excite: MobileNetV3 or EfficientNet by its activations."""
    plan = [(1, 3, 1), (2, 3, 2), (2, 3, 1), (4, 5, 2), (4, 5, 1), (6, 5, 2), (6, 3, 1)]
    widths = [width, *(factor * width for factor, _, _ in plan)]
    blocks = [
        vision.InvertedResidual(i, o, size=size, stride=stride, activation=activation, gate=gate)
        for (i, o), (_, size, stride) in zip(itertools.pairwise(widths), plan, strict=True)
    ]
    return nn.Sequential(
        conv_norm(3, width, 3, activation, stride=2), *blocks, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(widths[-1], 256), activation(), nn.Dropout(0.0), nn.Linear(256, 20),
    )  # fmt: skip


def convnext(width: int = 32, depths: tuple[int, ...] = (1, 2, 1)) -> nn.Module:
    """Depthwise 7x7 convolutions, layer normalization over channels, GELU."""
    stages: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), vision.ChannelNorm(width)]
    for level, depth in enumerate(depths):
        if level:
            stages += [vision.ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2)]
            width *= 2
        stages += [vision.ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(*stages, _mean(-2, -1), nn.LayerNorm(width), nn.Linear(width, 20))


def siamese(width: int = 24) -> nn.Module:
    """One tower, two images, and the contrastive loss (Hadsell et al., 2006)."""
    tower = nn.Sequential(
        nn.Conv2d(1, width, 5, stride=2), nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 64),
    )  # fmt: skip
    return vision.Siamese(tower=tower)


class Residual(nn.Module):
    """Convolutions and a shortcut (He et al., 2015)."""

    def __init__(self, body: nn.Module, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and fan_in == fan_out
        other = partial(conv_norm, fan_in, fan_out, 1, nn.Identity, stride=stride)
        self.shortcut = nn.Identity() if same else other()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(width: int = 32) -> nn.Module:
    """ResNet-18, with a width of its own."""
    blocks, widths = [], [width, *(width << level for level in range(4) for _ in range(2))]
    for index, (i, o) in enumerate(itertools.pairwise(widths)):
        stride = 1 if index % 2 or not index else 2
        body = (conv_norm(i, o, 3, nn.ReLU, stride=stride), conv_norm(o, o, 3, nn.Identity))
        blocks.append(Residual(nn.Sequential(*body), i, o, stride))
    stem = (conv_norm(3, width, 7, nn.ReLU, stride=2), nn.MaxPool2d(3, 2, 1))
    parts = {"backbone": nn.Sequential(*stem, *blocks), "pool": _mean(2, 3)}
    return nn.Sequential(OrderedDict(**parts, head=nn.Linear(widths[-1], 20)))


def signal_net(width: int = 32) -> nn.Module:
    """A signal of twelve channels, [N, 12, T], to a class: 1-D convolutions with group norm."""
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise([12, width, 2 * width, 4 * width, 8 * width]):
        layers += [nn.Conv1d(i, o, 7, stride=2, padding=3), nn.GroupNorm(4, o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8 * width, 6))


def mixer(size: int = 64, d: int = 128, depth: int = 4) -> nn.Module:
    """MLP-Mixer (Tolstikhin et al., 2021) on patches of 8x8 pixels."""
    blocks, turned = list[nn.Module](), Apply(lambda x: x.transpose(1, 2))
    for _ in range(depth):
        across = (turned, feed_forward((size // 8) ** 2, 2), turned)
        blocks += [Skip(nn.LayerNorm(d), *across), Skip(nn.LayerNorm(d), feed_forward(d, 2))]
    return nn.Sequential(_patches(d, 8), *blocks, nn.LayerNorm(d), _mean(1), nn.Linear(d, 20))


def tabular() -> nn.Module:
    """Thirty measurements to a class: as small as packages get."""
    hidden = (nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(32, 4))


def inverted(
    plan: Sequence[tuple[int, ...]],
    fan_in: int,
    activation: type[nn.Module] = nn.ReLU6,
    gate: type[nn.Module] = nn.Identity,
    squeeze: int = 0,
) -> list[nn.Module]:
    """Inverted residuals (Sandler et al., 2018), gated if something is squeezed.

    Each row of the plan: factor, width, number of blocks, stride of the first, kernels' size or 3.
    """
    blocks: list[nn.Module] = []
    for factor, width, count, stride, *size in plan:
        for index in range(count):
            block = vision.InvertedResidual(
                fan_in, width, size=size[0] if size else 3, stride=1 if index else stride,
                activation=activation, gate=gate, hidden=factor * fan_in,
                squeezed=fan_in // squeeze if squeeze else 0,
            )  # fmt: skip
            blocks.append(block)
            fan_in = width
    return blocks


def mobilenet_v2(width: int = 16) -> nn.Module:
    """Inverted residuals of the published factors and repeats."""
    plan = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 2, 2), (6, 96, 1, 1)]
    return nn.Sequential(
        conv_norm(3, width, 3, nn.ReLU6, stride=2), *inverted(plan, width),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(96, 20),
    )  # fmt: skip


class Experts(nn.Module):
    """A mixture of experts over tokens [N, T, d]: all are computed, and weighted by a gate."""

    def __init__(self, d: int = 96, experts: int = 6, hidden: int = 192) -> None:
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.experts = nn.ModuleList(feed_forward(d, hidden // d) for _ in range(experts))
        self.head = nn.Linear(d, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), dim=-1)
        found = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.head((x + (found * weights.unsqueeze(-2)).sum(-1)).mean(dim=1))


def densenet(growth: int = 12) -> nn.Module:
    """Layers that read all before them (Huang et al., 2016): two blocks of five."""
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=2, padding=1)]
    for _ in range(2):
        for _ in range(5):
            convolution = nn.Conv2d(channels, growth, 3, padding=1, bias=False)
            layers.append(Dense(nn.BatchNorm2d(channels), nn.ReLU(), convolution))
            channels += growth
        narrow = nn.Conv2d(channels, channels // 2, 1, bias=False)
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), narrow, nn.AvgPool2d(2)]
        channels //= 2
    return nn.Sequential(*layers, _mean(2, 3), nn.Linear(channels, 20))


def gru_tagger(vocabulary: int = 4000, d: int = 64, hidden: int = 64) -> nn.Module:
    """Tokens [N, T] to a tag for each, [N, tags, T]: a GRU in both directions."""
    gru = nn.GRU(d, hidden, batch_first=True, bidirectional=True)
    return nn.Sequential(
        nn.Embedding(vocabulary, d), gru, Apply(lambda found: found[0]), nn.Linear(2 * hidden, 9),
        Apply(lambda x: x.transpose(1, 2)),
    )  # fmt: skip


def speech_conv(width: int = 64, depth: int = 4) -> nn.Module:
    """Frames [N, 40, T] to a keyword: 1-D convolutions by channel and across (depthwise)."""
    layers: list[nn.Module] = [nn.Conv1d(40, width, 9, stride=2, padding=4)]
    layers += [nn.BatchNorm1d(width), nn.ReLU()]
    for _ in range(depth):
        by_channel = nn.Conv1d(width, width, 9, padding=4, groups=width, bias=False)
        across = nn.Conv1d(width, width, 1, bias=False)
        layers.append(Skip(by_channel, across, nn.BatchNorm1d(width), nn.ReLU()))
    return nn.Sequential(*layers, _mean(2), nn.Linear(width, 12))


class Causal(nn.Conv1d):
    """A convolution that looks back alone, and its activation."""

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (2 * self.dilation[0], 0))
        return functional.leaky_relu(super().forward(padded))


def temporal_conv(inputs: int = 8, width: int = 48, depth: int = 5) -> nn.Module:
    """A sequence [N, C, T]: causal convolutions that look back twice as far in every layer."""
    blocks = (Skip(Causal(width, width, 3, dilation=2**level)) for level in range(1, depth))
    ends = (nn.Conv1d(width, 1, 1), Apply(lambda x: x.squeeze(1)))
    return nn.Sequential(Causal(inputs, width, 3), *blocks, *ends)


class Crossing(nn.Module):
    """Numbers and categories whose embeddings multiply, as DLRM (Naumov et al., 2019)."""

    def __init__(self, sizes: tuple[int, ...] = (20_000, 5_000, 300, 50), d: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, d) for size in sizes)
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, d), nn.ReLU())
        count = len(sizes) + 1
        self.top = nn.Sequential(nn.Linear(d + count**2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, a: Tensor, b: Tensor, c: Tensor, e: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = [table(x) for table, x in zip(self.tables, (a, b, c, e), strict=True)]
        vectors = torch.stack([dense, *rows], dim=1)
        crossed = torch.flatten(vectors @ vectors.transpose(1, 2), 1)
        return self.top(torch.cat([dense, crossed], dim=1)).squeeze(1)


class GraphConv(nn.Module):
    """Nodes [N, V, F] and their adjacency [N, V, V] to a class (Kipf and Welling, 2016)."""

    def __init__(self, features: int = 16, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        widths = [features, *depth * [width]]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        self.head = nn.Linear(width, 6)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        scaled = adjacency / (1 + adjacency.abs().sum(dim=-1, keepdim=True))
        for layer in self.layers:
            nodes = functional.relu(layer(scaled @ nodes))
        return self.head(nodes.mean(dim=1))


def point_net(width: int = 64) -> nn.Module:
    """Points [N, 3, P] to a class: each by itself, then the most of all (Qi et al., 2016)."""
    return nn.Sequential(
        nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU(),
        nn.Conv1d(width, 2 * width, 1), nn.BatchNorm1d(2 * width), nn.ReLU(),
        Apply(lambda x: x.amax(dim=2)),
        nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip


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
        return Package.open(self.folder / "package")

    @property
    def data(self) -> dict[str, str]:
        """For each user input, in order, the file of its data."""
        names = (spec.name for spec in self.package.manifest.input_specs())
        return {name: str(self.folder / f"{name}.npy") for name in names}

    def with_session(self, folder: Path, **changes: Any) -> Self:
        """The same with other session options, in another folder.

        Its manifest says so, and all that open it follow: the plan, the app, the replay.
        """
        session = self.package.manifest.session
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
            SamplePlan(
                self.case.samples(batch_size), batch_size, 1, 3, True, self.case.accumulation_steps
            ),
            learning_rate=1e-4, threads=threads,
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
    for source in (Path(__file__), *sorted(sources)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


_WORDS = {"segments": 2, "mask": 2}


def _bert(words: int, length: int, d: int, depth: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The network, and its inputs."""
    module = partial(sequence.Bert, words, d, depth, length)
    return module, dict.fromkeys(("tokens", "segments", "mask"), (length,))


_CASES = (
    Case(
        "keyword-gru", "GRU over 60 frames of sound, AdamW",
        partial(sequence.KeywordSpotter, 12, 40, 64, 5, 2, 96), {"x": (60, 40)}, (8, 32),
    ),
    Case(
        "lstm", "bidirectional LSTM over 32 tokens, SGD with momentum",
        partial(sequence.LstmClassifier, 6000, 4, 64, 64), {"tokens": (32,)}, (8, 32),
        ranges={"tokens": 6000}, optimizer=SGD(momentum=0.9),
    ),
    Case(
        "unet", "U-Net 64x64, batch norm trained, AdamW",
        unet, {"x": (3, 64, 64)}, (2, 4, 8), norms=True,
    ),
    Case(
        "mobilenet-v3", "MobileNetV3 96x96, batch norm trained, SGD with momentum",
        partial(mobile, nn.Hardswish, nn.Hardsigmoid), {"x": (3, 96, 96)}, (4, 16),
        norms=True, optimizer=SGD(momentum=0.9),
    ),
    Case(
        "efficientnet", "EfficientNet 96x96, batch norm folded, Lion",
        partial(mobile, nn.SiLU, nn.Sigmoid), {"x": (3, 96, 96)}, (4, 12),
        optimizer=Lion(),
    ),
    Case(
        "convnext", "ConvNeXt 64x64, AdamW, gradients clipped",
        convnext, {"x": (3, 64, 64)}, (4, 16), update={"clip_norm": 1.0},
    ),
    Case(
        "vit", "ViT 64x64, d128 L4, AdamW",
        partial(vision.VisionTransformer, 20, 128, 4, size=64, patch=8, ratio=3),
        {"x": (3, 64, 64)}, (4, 16),
    ),
    Case(
        "bert", "BERT d128 L3 T64 with mask, AdamW",
        *_bert(8000, 64, 128, 3), (4, 16), ranges=_WORDS | {"tokens": 8000},
    ),
    Case(
        "causal-lm", "causal LM d128 L3 T48, tied embeddings, Adafactor",
        partial(sequence.CausalLanguageModel, 4000, 128, 3, 48, "masked"), {"tokens": (48,)},
        (2, 8), ranges={"tokens": 4000}, target=(48,), optimizer=Adafactor(),
    ),
    Case(
        "recommender", "wide and deep, 60000 users and 30000 items, SGD",
        partial(sequence.Recommender, 60_000, 30_000, 500), {"user": (), "item": (), "tags": (8,)},
        (64, 2048), ranges={"user": 60_000, "item": 30_000, "tags": 500, "targets": 2},
        loss="bce_with_logits", optimizer=SGD(),
    ),
    Case(
        "autoencoder", "convolutional autoencoder 64x64, AdamW",
        partial(vision.Autoencoder, (24, 48), 16, 128), {"x": (1, 64, 64)}, (8, 32), loss="mse",
    ),
    Case(
        "siamese", "Siamese towers 48x48, loss in the model, SGD",
        siamese, {"left": (1, 48, 48), "right": (1, 48, 48), "same": ()}, (8, 24),
        ranges={"same": 2}, loss=None, optimizer=SGD(),
    ),
    Case(
        "resnet18", "ResNet-18 of width 24, 64x64, batch norm trained, SGD with momentum",
        partial(resnet, 24), {"x": (3, 64, 64)}, (4, 16), norms=True,
        optimizer=SGD(momentum=0.9),
    ),
    Case(
        "signal", "1-D convolutions over 1024 samples of 12 channels, Lion",
        signal_net, {"x": (12, 1024)}, (8, 32), optimizer=Lion(),
    ),
    Case(
        "mixer", "MLP-Mixer 64x64, d128 L4, AdamW, two batches a step",
        mixer, {"x": (3, 64, 64)}, (4, 16), accumulation_steps=2,
    ),
    Case(
        "transfer-int8", "ResNet-18 of width 64, all but the head frozen in int8, AdamW",
        partial(resnet, 64), {"x": (3, 64, 64)}, (8, 24),
        freeze=("backbone*",), storage="int8",
    ),
    Case(
        "transfer-half", "BERT d256 L4 T32, all but the head frozen in float16, SGD",
        *_bert(8000, 32, 256, 4), (4, 16), ranges=_WORDS | {"tokens": 8000}, optimizer=SGD(),
        freeze=("words*", "positions*", "segments*", "norm*", "layers*"), storage="float16",
    ),
    Case(
        "tabular", "MLP 30-64-32-4, as small as packages get, AdamW",
        tabular, {"x": (30,)}, (16, 256),
    ),
    Case(
        "mobilenet-v2", "MobileNetV2 64x64, batch norm trained, SGD with momentum",
        mobilenet_v2, {"x": (3, 64, 64)}, (4, 16), norms=True,
        optimizer=SGD(momentum=0.9),
    ),
    Case(
        "cnn", "two convolutions 28x28, SGD",
        partial(Cnn, channels=1, size=28, classes=10, width=[16, 32], hidden=64),
        {"x": (1, 28, 28)}, (32, 128), optimizer=SGD(),
    ),
    Case("mlp", "MLP 256-512-512-10, AdamW", partial(Mlp, [256, 512, 512, 10]), {"x": (256,)},
         (16, 128)),
    Case(
        "experts", "mixture of six experts over 24 tokens, SGD", Experts,
        {"x": (24, 96)}, (8, 32), optimizer=SGD(),
    ),
    Case(
        "densenet", "DenseNet 48x48, batch norm trained, SGD with momentum",
        densenet, {"x": (3, 48, 48)}, (4, 16), norms=True,
        optimizer=SGD(momentum=0.9),
    ),
    Case(
        "gru-tagger", "bidirectional GRU, a tag for each of 32 tokens, AdamW",
        gru_tagger, {"tokens": (32,)}, (8, 32), ranges={"tokens": 4000},
        target=(32,),
    ),
    Case(
        "speech-conv", "1-D convolutions by channel over 98 frames, batch norm trained, Lion",
        speech_conv, {"x": (40, 98)}, (8, 32), norms=True, optimizer=Lion(),
    ),
    Case(
        "temporal-conv", "causal convolutions over 256 samples, AdamW, gradients clipped",
        temporal_conv, {"x": (8, 256)}, (8, 32), loss="mse", target=(256,),
        update={"clip_norm": 1.0},
    ),
    Case(
        "crossing", "DLRM with four tables of 25350 rows, SGD with momentum",
        Crossing,
        {"numbers": (13,), "a": (), "b": (), "c": (), "e": ()}, (64, 512),
        ranges={"a": 20_000, "b": 5_000, "c": 300, "e": 50, "targets": 2},
        loss="bce_with_logits", optimizer=SGD(momentum=0.9),
    ),
    Case(
        "graph-conv", "three graph convolutions over 48 nodes, AdamW", GraphConv,
        {"nodes": (48, 16), "adjacency": (48, 48)}, (8, 64),
    ),
    Case(
        "bert-tiny", "BERT d64 L2 T32 with mask, SGD",
        *_bert(4000, 32, 64, 2), (4, 32), ranges=_WORDS | {"tokens": 4000}, optimizer=SGD(),
    ),
    Case(
        "points", "PointNet over 256 points, batch norm trained, AdamW, two batches a step",
        point_net, {"x": (3, 256)}, (4, 16), norms=True, accumulation_steps=2,
    ),
)  # fmt: skip

CASES = {case.name: case for case in _CASES}
"""The held-out cases by name."""
