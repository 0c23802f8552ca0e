"""Image models in plain PyTorch, small, as people write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_norm(fan_in, fan_out, size, activation, **arguments):
    """Convolution that keeps the size at stride 1, batch normalization, activation."""
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, size, padding=size // 2, bias=False, **arguments),
        nn.BatchNorm2d(fan_out),
        activation(),
    )


class UNet(nn.Module):
    """Two levels; one goes up by transposed convolution, the other by interpolation."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.down1 = conv_norm(2, 6, 3, nn.ReLU)
        self.down2 = conv_norm(6, 8, 3, nn.ReLU)
        self.bottom = conv_norm(8, 8, 3, nn.ReLU)
        self.pool = nn.AvgPool2d(2)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.join2 = conv_norm(16, 6, 3, nn.ReLU)
        self.up1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.join1 = conv_norm(12, 6, 3, nn.ReLU)
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.up2(self.bottom(self.pool(second)))
        y = self.join2(torch.cat([second, y], dim=1))
        return self.head(self.join1(torch.cat([first, self.up1(y)], dim=1)))


class SqueezeExcite(nn.Module):
    """Scales channels by a gate that their means compute."""

    def __init__(self, channels, squeezed, activation, gate):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.activation = activation()
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.activation(self.reduce(self.pool(x)))))


class InvertedResidual(nn.Module):
    """Widen, filter each channel, gate, narrow; what has nothing to do is left out."""

    def __init__(self, fan_in, fan_out, *, size, stride, activation, gate, hidden=None, squeezed=4):
        super().__init__()
        hidden = hidden or 3 * fan_in
        none = nn.Identity()
        self.expand = none if hidden == fan_in else conv_norm(fan_in, hidden, 1, activation)
        self.depthwise = conv_norm(hidden, hidden, size, activation, stride=stride, groups=hidden)
        inner = nn.ReLU if gate is nn.Hardsigmoid else activation
        self.excite = SqueezeExcite(hidden, squeezed, inner, gate) if squeezed else none
        self.project = conv_norm(hidden, fan_out, 1, nn.Identity)
        self.residual = stride == 1 and fan_in == fan_out

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.excite(self.depthwise(self.expand(x))))
        return x + y if self.residual else y


class MobileNetV3(nn.Module):
    """Hardswish and squeeze-excite with a hard sigmoid."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        kinds = {"activation": nn.Hardswish, "gate": nn.Hardsigmoid}
        self.stem = conv_norm(3, 6, 3, nn.Hardswish, stride=2)
        self.blocks = nn.Sequential(
            InvertedResidual(6, 6, size=3, stride=1, **kinds),
            InvertedResidual(6, 8, size=5, stride=2, **kinds),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(8, 16), nn.Hardswish(), nn.Dropout(0.0), nn.Linear(16, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class EfficientNet(nn.Module):
    """SiLU, squeeze-excite with a sigmoid, strided depthwise convolutions."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        kinds = {"activation": nn.SiLU, "gate": nn.Sigmoid}
        self.stem = conv_norm(3, 6, 3, nn.SiLU, stride=2)
        self.blocks = nn.Sequential(
            InvertedResidual(6, 6, size=3, stride=1, **kinds),
            InvertedResidual(6, 8, size=5, stride=2, **kinds),
        )
        self.classifier = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean([2, 3]))


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of [N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen = nn.Linear(channels, 4 * channels)
        self.activation = nn.GELU()
        self.narrow = nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.layer_scale * self.narrow(self.activation(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 2, stride=2), ChannelNorm(6))
        self.stage1 = ConvNeXtBlock(6)
        self.down = nn.Sequential(ChannelNorm(6), nn.Conv2d(6, 8, 2, stride=2))
        self.stage2 = ConvNeXtBlock(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


def feed_forward(d: int, ratio: int) -> nn.Sequential:
    """Widen, GELU, narrow."""
    return nn.Sequential(nn.Linear(d, ratio * d), nn.GELU(), nn.Linear(ratio * d, d))


class VisionTransformer(nn.Module):
    """Patch embedding, class token, blocks of nn.MultiheadAttention."""

    def __init__(self, classes=5, d=16, depth=2, *, size=8, patch=4, heads=4, ratio=2):
        super().__init__()
        self.patches = nn.Conv2d(3, d, patch, stride=patch)
        self.class_token = nn.Parameter(0.1 * torch.randn(1, 1, d))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, d))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm1": nn.LayerNorm(d),
                "attention": nn.MultiheadAttention(d, heads, batch_first=True),
                "norm2": nn.LayerNorm(d), "mlp": feed_forward(d, ratio),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            y = block["norm1"](x)
            x = x + block["attention"](y, y, y, need_weights=False)[0]
            x = x + block["mlp"](block["norm2"](x))
        return self.head(self.norm(x)[:, 0])


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up; the target is the input."""

    def __init__(self, widths: tuple[int, int] = (6, 8), side: int = 4, code: int = 12) -> None:
        super().__init__()
        first, last = widths
        inner = (last, side, side)
        self.encoder = nn.Sequential(
            nn.Conv2d(1, first, 3, stride=2, padding=1), nn.LeakyReLU(0.1),
            nn.Conv2d(first, last, 3, stride=2, padding=1), nn.Tanh(),
            nn.Flatten(), nn.Linear(last * side * side, code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, last * side * side), nn.Unflatten(1, inner), nn.ELU(),
            nn.ConvTranspose2d(last, first, 3, stride=2, padding=1, output_padding=1),
            nn.Softplus(),
            nn.ConvTranspose2d(first, 1, 4, stride=2, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Siamese(nn.Module):
    """One tower, two images; the contrastive loss is part of the model (Hadsell et al., 2006)."""

    def __init__(self, margin: float = 1.5, tower: nn.Module | None = None) -> None:
        super().__init__()
        self.margin = margin
        self.tower = tower or nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.SiLU(), nn.Conv2d(4, 6, 3), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 8),
        )  # fmt: skip

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        distance = F.pairwise_distance(self.tower(left), self.tower(right))
        apart = torch.clamp(self.margin - distance, min=0.0)
        return torch.mean(same * distance**2 + (1 - same) * apart**2)


class WindowTransformer(nn.Module):
    """Attention within windows of an image; every other layer shifts them by half a window."""

    def __init__(self, d: int = 12, window: int = 2, depth: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.window = window
        self.patches = nn.Conv2d(3, d, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), *feed_forward(d, 2)) for _ in range(depth)
        )
        self.head = nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        size, d, w = x.shape[1], x.shape[3], self.window
        half = w // 2
        for i, (norm, qkv, mlp) in enumerate(zip(self.norms, self.qkv, self.mlps, strict=True)):
            y = torch.roll(norm(x), (-half, -half), (1, 2)) if i % 2 else norm(x)
            y = y.reshape(-1, size // w, w, size // w, w, d).transpose(2, 3)
            q, k, v = qkv(y.reshape(-1, w * w, d)).chunk(3, dim=-1)
            y = torch.softmax(q @ k.transpose(1, 2) * d**-0.5, dim=-1) @ v
            y = y.reshape(-1, size // w, size // w, w, w, d).transpose(2, 3)
            y = y.reshape(-1, size, size, d)
            x = x + (torch.roll(y, (half, half), (1, 2)) if i % 2 else y)
            x = x + mlp(x)
        return self.head(x.mean((1, 2)))
