"""PyTorch implementations of the reference models, the oracle of forward and gradient tests.

``twin(model)`` rebuilds a zoo model from PyTorch's own layers and loads the initializers of the
ONNX model into it. The module tree gives every parameter the name it has in the ONNX graph, so
``dict(twin(model).named_parameters())`` is keyed by ONNX names and has the ONNX shapes.
"""

import json
from collections.abc import Callable
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from tests import zoo


def losses_of(
    optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int
) -> list[float]:
    """Make steps of PyTorch; return the loss of each, before its update."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return losses


def twin(
    name_or_model: str | onnx.ModelProto, *, running_var: str = "biased", **arguments: Any
) -> nn.Module:
    """Returns the PyTorch twin of a zoo model, with the parameters of the ONNX model.

    Args:
        name_or_model: Key of ``zoo.MODELS``, built with ``arguments``, or a model of the zoo.
        running_var: ``"biased"`` updates the running variance as the ONNX operator does, with
            the variance over the batch; ``"unbiased"`` as PyTorch does, with n / (n - 1) of it.
        **arguments: For the factory, where a name is given.

    A model with batch normalization in training mode comes back in ``train()`` mode, every other
    one in ``eval()`` mode. Running statistics are buffers: ``dict(module.named_buffers())``.
    """
    if isinstance(name_or_model, str):
        model = zoo.MODELS[name_or_model](**arguments)
    else:
        model = name_or_model
    config = json.loads({entry.key: entry.value for entry in model.metadata_props}["tests.zoo"])
    module = _TWINS[config.pop("model")](**config)
    slots = dict(module.named_parameters()) | dict(module.named_buffers())
    for tensor in model.graph.initializer:
        slot = slots.pop(tensor.name)
        assert slot.shape == tuple(tensor.dims), tensor.name
        slot.data.copy_(torch.from_numpy(numpy_helper.to_array(tensor).copy()))
    assert not slots, f"the ONNX model has no {sorted(slots)}"
    for layer in module.modules():
        if isinstance(layer, OnnxBatchNorm2d):
            layer.running_var_is_biased = {"biased": True, "unbiased": False}[running_var]
    return module.train(config.get("batch_norm") == "train")


class Mlp(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.depth = len(sizes) - 1
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(sizes[i], sizes[i + 1]))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(1, self.depth):
            x = torch.relu(self.get_submodule(f"fc{i}")(x))
        return self.get_submodule(f"fc{self.depth}")(x)


class Cnn(nn.Module):
    def __init__(
        self, *, channels: int, size: int, classes: int, width: list[int], hidden: int | None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width[0], 3, padding=1)
        self.conv2 = nn.Conv2d(width[0], width[1], 3, padding="same")
        features = width[1] * (size // 2 // 2) ** 2
        self.hidden = hidden is not None
        if self.hidden:
            self.fc1, self.fc2 = nn.Linear(features, hidden), nn.Linear(hidden, classes)
        else:
            self.fc = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return self.fc2(F.relu(self.fc1(x))) if self.hidden else self.fc(x)


class OnnxBatchNorm2d(nn.BatchNorm2d):
    """Batch normalization, whose running variance may follow the ONNX text.

    ONNX counts momentum the other way round: its 0.9 is PyTorch's 0.1.
    """

    running_var_is_biased = True

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-5, momentum=0.1)
        self.num_batches_tracked = None  # not a part of the ONNX model

    def forward(self, x: Tensor) -> Tensor:
        before = self.running_var.clone()
        y = super().forward(x)
        if self.training and self.running_var_is_biased:
            n = x.numel() // x.shape[1]
            kept = before * (1 - self.momentum)
            # Through .data: the backward pass keeps the buffer, though it does not read it here.
            self.running_var.data.copy_(kept + (self.running_var - kept) * (n - 1) / n)
        return y


def _conv(fan_in: int, fan_out: int, batch_norm: str, **arguments: int) -> list[nn.Module]:
    if batch_norm == "fold":
        return [nn.Conv2d(fan_in, fan_out, **arguments)]
    return [nn.Conv2d(fan_in, fan_out, bias=False, **arguments), OnnxBatchNorm2d(fan_out)]


def _conv_relu(*channels_and_norm: Any, **arguments: int) -> nn.Module:
    return nn.Sequential(*_conv(*channels_and_norm, **arguments), nn.ReLU6())


class InvertedResidual(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, stride: int, expand: int, norm: str) -> None:
        super().__init__()
        hidden = fan_in * expand
        layers = [_conv_relu(fan_in, hidden, norm, kernel_size=1)] if expand > 1 else []
        depthwise = {"kernel_size": 3, "stride": stride, "padding": 1, "groups": hidden}
        layers.append(_conv_relu(hidden, hidden, norm, **depthwise))
        layers += _conv(hidden, fan_out, norm, kernel_size=1)
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and fan_in == fan_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(
        self, size: int, classes: int, width_mult: float, batch_norm: str, stages: int = 7
    ) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            nearest = max(8, int(channels * width_mult + 4) // 8 * 8)
            return nearest if nearest >= 0.9 * channels * width_mult else nearest + 8

        fan_in = scaled(32)
        blocks = [_conv_relu(3, fan_in, batch_norm, kernel_size=3, stride=2, padding=1)]
        expands = [1] + [6] * 16
        channels = [16] + [24] * 2 + [32] * 3 + [64] * 4 + [96] * 3 + [160] * 3 + [320]
        strides = [1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1]
        count = sum((1, 2, 3, 4, 3, 3, 1)[:stages])
        for expand, wanted, stride in list(zip(expands, channels, strides, strict=True))[:count]:
            fan_out = scaled(wanted)
            blocks.append(InvertedResidual(fan_in, fan_out, stride, expand, batch_norm))
            fan_in = fan_out
        last = scaled(1280) if width_mult > 1 else 1280
        blocks.append(_conv_relu(fan_in, last, batch_norm, kernel_size=1))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.Identity(), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class Projection(nn.Module):
    """``x @ weight + bias`` with the weight [in, out] of ``MatMul``."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_in, fan_out))
        self.bias = nn.Parameter(torch.empty(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (Projection(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.output(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d: int, heads: int, ff: int) -> None:
        super().__init__()
        self.attention = Attention(d, heads)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.linear1, self.linear2 = Projection(d, ff), Projection(ff, d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.linear2(F.gelu(self.linear1(x))))


class TransformerEncoder(nn.Module):
    def __init__(
        self, *, vocab: int, d: int, layers: int, heads: int, T: int, ff: int, classes: int
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, d)
        self.position_embedding = nn.Embedding(T, d)
        self.layers = nn.Sequential(*(EncoderLayer(d, heads, ff) for _ in range(layers)))
        self.classifier = nn.Linear(d, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight
        return self.classifier(self.layers(x).mean(dim=1))


_TWINS: dict[str, type[nn.Module]] = {
    "mlp": Mlp, "cnn": Cnn, "mobilenet_v2": MobileNetV2, "transformer_encoder": TransformerEncoder,
}  # fmt: skip
