"""Networks of the sizes that phones train, in plain PyTorch.

Their blocks are those of the tests of exported models; here they are widened, deepened and
joined to whole networks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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


class Mobile(nn.Module):
    """Inverted residuals with squeeze-excite: MobileNetV3 or EfficientNet by its activations."""

    def __init__(self, activation: type[nn.Module], gate: type[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.stem = conv_norm(3, width, 3, activation, stride=2)
        plan = [(1, 3, 1), (2, 3, 2), (2, 3, 1), (4, 5, 2), (4, 5, 1), (6, 5, 2), (6, 3, 1)]
        blocks, fan_in = [], width
        for factor, size, stride in plan:
            fan_out = factor * width
            blocks.append(
                InvertedResidual(
                    fan_in, fan_out, size=size, stride=stride, activation=activation, gate=gate
                )
            )
            fan_in = fan_out
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(fan_in, 256), activation(), nn.Dropout(0.0), nn.Linear(256, 20)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class ConvNeXt(nn.Module):
    """Depthwise 7x7 convolutions, layer normalization over channels, GELU."""

    def __init__(self, width: int = 32, depths: tuple[int, ...] = (1, 2, 1)) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), ChannelNorm(width)]
        for level, depth in enumerate(depths):
            if level:
                stages += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2)]
                width *= 2
            stages += [ConvNeXtBlock(width) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(x).mean([-2, -1])))


class VisionTransformer(nn.Module):
    """Patches, a class token, blocks of nn.MultiheadAttention."""

    def __init__(
        self,
        size: int = 64,
        d: int = 128,
        depth: int = 4,
        *,
        patch: int = 8,
        heads: int = 4,
        ratio: int = 3,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, stride=patch)
        self.class_token = nn.Parameter(0.1 * torch.randn(1, 1, d))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, d))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth + 1))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(depth)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(d, ratio * d), nn.GELU(), nn.Linear(ratio * d, d))
            for _ in range(depth)
        )
        self.head = nn.Linear(d, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            y = self.norms[2 * index](x)
            x = x + attention(y, y, y, need_weights=False)[0]
            x = x + mlp(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x)[:, 0])


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
        self.shortcut = (
            nn.Identity() if same else conv_norm(fan_in, fan_out, 1, nn.Identity, stride=stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18, with a width of its own."""

    def __init__(self, width: int = 32, classes: int = 20) -> None:
        super().__init__()
        blocks, fan_in = [], width
        for level in range(4):
            fan_out = width << level
            for stride in (2 if level else 1, 1):
                body = nn.Sequential(
                    conv_norm(fan_in, fan_out, 3, nn.ReLU, stride=stride),
                    conv_norm(fan_out, fan_out, 3, nn.Identity),
                )
                blocks.append(Residual(body, fan_in, fan_out, stride))
                fan_in = fan_out
        self.backbone = nn.Sequential(
            conv_norm(3, width, 7, nn.ReLU, stride=2), nn.MaxPool2d(3, 2, 1), *blocks
        )
        self.head = nn.Linear(fan_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).mean([2, 3]))


class SignalNet(nn.Module):
    """A signal of twelve channels, [N, 12, T], to a class: 1-D convolutions with group norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        fan_in = 12
        for level in range(4):
            fan_out = width << level
            layers += [
                nn.Conv1d(fan_in, fan_out, 7, stride=2, padding=3),
                nn.GroupNorm(4, fan_out),
                nn.ReLU(),
            ]
            fan_in = fan_out
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(fan_in, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021) on patches of 8x8 pixels."""

    def __init__(self, size: int = 64, d: int = 128, depth: int = 4) -> None:
        super().__init__()
        tokens = (size // 8) ** 2
        self.patches = nn.Conv2d(3, d, 8, stride=8)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth + 1))
        self.across, self.within = (
            nn.ModuleList(
                nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))
                for _ in range(depth)
            )
            for n in (tokens, d)
        )
        self.head = nn.Linear(d, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for index, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            x = x + across(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + within(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x).mean(dim=1))


class Tabular(nn.Module):
    """Thirty measurements to a class: as small as packages get."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


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


def mlp(inputs: int = 256, hidden: int = 512) -> nn.Module:
    """Measurements to a class, through three wide layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip


class Experts(nn.Module):
    """A mixture of experts over tokens [N, T, d]: all are computed, and weighted by a gate."""

    def __init__(self, d: int = 96, experts: int = 6, hidden: int = 192) -> None:
        super().__init__()
        self.gate = nn.Linear(d, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d))
            for _ in range(experts)
        )
        self.head = nn.Linear(d, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), dim=-1)
        found = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.head((x + (found * weights.unsqueeze(-2)).sum(-1)).mean(dim=1))


class DenseNet(nn.Module):
    """Layers that read all before them (Huang et al., 2016)."""

    def __init__(self, growth: int = 12, blocks: int = 2, layers: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, stride=2, padding=1)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        channels = 2 * growth
        for _ in range(blocks):
            block = nn.ModuleList()
            for _ in range(layers):
                block.append(
                    nn.Sequential(
                        nn.BatchNorm2d(channels), nn.ReLU(),
                        nn.Conv2d(channels, growth, 3, padding=1, bias=False),
                    )
                )  # fmt: skip
                channels += growth
            self.blocks.append(block)
            self.transitions.append(
                nn.Sequential(
                    nn.BatchNorm2d(channels), nn.ReLU(),
                    nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2),
                )
            )  # fmt: skip
            channels //= 2
        self.head = nn.Linear(channels, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            for layer in block:
                x = torch.cat([x, layer(x)], dim=1)
            x = transition(x)
        return self.head(x.mean([2, 3]))


class GruTagger(nn.Module):
    """Tokens [N, T] to a tag for each, [N, tags, T]: a GRU in both directions."""

    def __init__(self, vocabulary: int = 4000, d: int = 64, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.gru = nn.GRU(d, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(tokens))[0]).transpose(1, 2)


class SpeechConv(nn.Module):
    """Frames [N, 40, T] to a keyword: 1-D convolutions by channel and across (depthwise)."""

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(40, width, 9, stride=2, padding=4), nn.BatchNorm1d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 9, padding=4, groups=width, bias=False),
                nn.Conv1d(width, width, 1, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(dim=2))


class TemporalConv(nn.Module):
    """A sequence [N, C, T]: causal convolutions that look back twice as far in every layer."""

    def __init__(self, inputs: int = 8, width: int = 48, depth: int = 5) -> None:
        super().__init__()
        widths = [inputs, *depth * [width]]
        self.convs = nn.ModuleList(
            nn.Conv1d(i, o, 3, dilation=2**level)
            for level, (i, o) in enumerate(itertools.pairwise(widths))
        )
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for level, conv in enumerate(self.convs):
            y = functional.leaky_relu(conv(functional.pad(x, (2 << level, 0))))
            x = x + y if level else y
        return self.head(x).squeeze(1)


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


class PointNet(nn.Module):
    """Points [N, 3, P] to a class: each by itself, then the most of all (Qi et al., 2016)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Conv1d(width, 2 * width, 1), nn.BatchNorm1d(2 * width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(dim=2))
