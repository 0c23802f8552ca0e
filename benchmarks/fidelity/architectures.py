"""Networks of the sizes that phones train, in plain PyTorch.

Their blocks are those of the tests of exported models; here they are widened, deepened and
joined to whole networks.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.exported.sequence import Bert, BertLayer, CausalLanguageModel
from tests.exported.vision import ChannelNorm, ConvNeXtBlock, InvertedResidual, Siamese, conv_norm


class UNet(nn.Module):
    """Images [N, 3, S, S] to a class for each pixel, three levels down and up."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(conv_norm(i, o, 3, nn.ReLU), conv_norm(o, o, 3, nn.ReLU))
            for i, o in zip([3, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = conv_norm(widths[-1], widths[-1], 3, nn.ReLU)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(i, o, 2, stride=2)
            for i, o in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.join = nn.ModuleList(conv_norm(2 * o, o, 3, nn.ReLU) for o in widths[::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = self.pool(kept[-1])
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], dim=1))
        return self.head(x)


class Apply(nn.Module):
    """A function between layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


class Skip(nn.Sequential):
    """Layers and a shortcut."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Across(nn.Sequential):
    """Layers over the axis before the last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Dense(nn.Sequential):
    """Layers whose channels are joined to those that they read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)


def _mean(*axes: int) -> Apply:
    return Apply(lambda x: x.mean(axes))


def _patches(d: int, size: int) -> nn.Module:
    """Images to tokens [N, T, d]."""
    convolution = nn.Conv2d(3, d, size, stride=size)
    return nn.Sequential(convolution, Apply(lambda x: x.flatten(2).transpose(1, 2)))


def _mlp(d: int, ratio: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d, ratio * d), nn.GELU(), nn.Linear(ratio * d, d))


def mobile(activation: type[nn.Module], gate: type[nn.Module], width: int = 16) -> nn.Module:
    """Inverted residuals with squeeze-excite: MobileNetV3 or EfficientNet by its activations."""
    plan = [(1, 3, 1), (2, 3, 2), (2, 3, 1), (4, 5, 2), (4, 5, 1), (6, 5, 2), (6, 3, 1)]
    widths = [width, *(factor * width for factor, _, _ in plan)]
    blocks = [
        InvertedResidual(i, o, size=size, stride=stride, activation=activation, gate=gate)
        for (i, o), (_, size, stride) in zip(itertools.pairwise(widths), plan, strict=True)
    ]
    return nn.Sequential(
        conv_norm(3, width, 3, activation, stride=2), *blocks, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(widths[-1], 256), activation(), nn.Dropout(0.0), nn.Linear(256, 20),
    )  # fmt: skip


def convnext(width: int = 32, depths: tuple[int, ...] = (1, 2, 1)) -> nn.Module:
    """Depthwise 7x7 convolutions, layer normalization over channels, GELU."""
    stages: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), ChannelNorm(width)]
    for level, depth in enumerate(depths):
        if level:
            stages += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2)]
            width *= 2
        stages += [ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(*stages, _mean(-2, -1), nn.LayerNorm(width), nn.Linear(width, 20))


class Attention(nn.MultiheadAttention):
    """Tokens attend to one another."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class VisionTransformer(nn.Module):
    """Patches, a class token, blocks of nn.MultiheadAttention."""

    def __init__(
        self, size: int = 64, d: int = 128, depth: int = 4, *, patch: int = 8, heads: int = 4,
        ratio: int = 3,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = _patches(d, patch)
        self.class_token = nn.Parameter(0.1 * torch.randn(1, 1, d))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, d))
        blocks: list[nn.Module] = []
        for _ in range(depth):
            attention = Attention(d, heads, batch_first=True)
            blocks += [Skip(nn.LayerNorm(d), attention), Skip(nn.LayerNorm(d), _mlp(d, ratio))]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(d))
        self.head = nn.Linear(d, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), self.patches(x)], dim=1)
        return self.head(self.blocks(x + self.positions)[:, 0])


def bert(vocabulary: int, length: int, d: int, depth: int) -> Bert:
    """Tokens, segments and a mask [N, length] to a class of three."""
    model = Bert(vocabulary, d, depth)
    model.positions = nn.Embedding(length, d)
    model.layers = nn.ModuleList(BertLayer(d, 4) for _ in range(depth))
    return model


def causal_lm(vocabulary: int, length: int, d: int, depth: int) -> CausalLanguageModel:
    """Tokens [N, length] to logits [N, V, length]; tied embeddings, attention written out."""
    model = CausalLanguageModel(vocabulary, d, depth, attention="masked")
    model.positions = nn.Parameter(0.1 * torch.randn(length, d))
    return model


def siamese(width: int = 24) -> nn.Module:
    """One tower, two images, and the contrastive loss (Hadsell et al., 2006)."""
    tower = nn.Sequential(
        nn.Conv2d(1, width, 5, stride=2), nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3), nn.SiLU(), nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 64),
    )  # fmt: skip
    return Siamese(tower=tower)


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
    blocks: list[nn.Module] = []
    for _ in range(depth):
        across = Across(_mlp((size // 8) ** 2, 2))
        blocks += [Skip(nn.LayerNorm(d), across), Skip(nn.LayerNorm(d), _mlp(d, 2))]
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
            block = InvertedResidual(
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


def cnn(width: int = 16) -> nn.Module:
    """Digits [N, 1, 28, 28] to a class, as the first example of every framework has it."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class Experts(nn.Module):
    """A mixture of experts over tokens [N, T, d]: all are computed, and weighted by a gate."""

    def __init__(self, d: int = 96, experts: int = 6, hidden: int = 192) -> None:
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.experts = nn.ModuleList(_mlp(d, hidden // d) for _ in range(experts))
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


class GruTagger(nn.Module):
    """Tokens [N, T] to a tag for each, [N, tags, T]: a GRU in both directions."""

    def __init__(self, vocabulary: int = 4000, d: int = 64, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.gru = nn.GRU(d, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(tokens))[0]).transpose(1, 2)


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
