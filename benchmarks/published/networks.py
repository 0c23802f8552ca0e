"""The networks of the published trainings, as the engine's own sources build them.

UbiquitousLearning/Benchmark-On-Device-Training@752659f, ``tools/train/source/models``: they differ
from the papers of the same names. Their dropouts are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.fidelity.architectures import inverted
from benchmarks.fidelity.models import Case
from odtpack.optimizers import SGD
from tests.exported.vision import conv_norm


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, size, stride, padding)


def lenet() -> nn.Module:
    """``Lenet.cpp``: maxima, and one rectifier."""
    return nn.Sequential(
        _conv(1, 20, 5), nn.MaxPool2d(2), _conv(20, 50, 5), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 400), nn.ReLU(), nn.Linear(400, 10),
    )  # fmt: skip


def alexnet() -> nn.Module:
    """``Alexnet.cpp``: one wide layer instead of two."""
    return nn.Sequential(
        _conv(3, 96, 11, 4), nn.ReLU(), nn.MaxPool2d(3, 2),
        _conv(96, 256, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        _conv(256, 384, 3, 1, 1), nn.ReLU(), _conv(384, 384, 3, 1, 1), nn.ReLU(),
        _conv(384, 256, 3, 1, 1), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(6400, 4096), nn.ReLU(), nn.Linear(4096, 10),
    )  # fmt: skip


class Beside(nn.ModuleList):
    """Branches side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def fire(fan_in: int, squeeze: int, expand: int) -> nn.Module:
    """Squeeze, and expand in two sizes."""
    both = Beside([_conv(squeeze, expand, 1), _conv(squeeze, expand, 3, 1, 1)])
    return nn.Sequential(_conv(fan_in, squeeze, 1), both)


def squeezenet() -> nn.Module:
    """``SqueezeNet.cpp``: no rectifiers."""
    return nn.Sequential(
        _conv(3, 96, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True), fire(96, 16, 64),
        fire(128, 16, 64), fire(128, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(256, 32, 128), fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256),
        nn.MaxPool2d(3, 2, ceil_mode=True), fire(512, 64, 256), _conv(512, 10, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def inception(
    fan_in: int, one: int, less: int, three: int, least: int, five: int, pooled: int
) -> nn.Module:
    """Four branches side by side."""
    return Beside([
        _conv(fan_in, one, 1),
        nn.Sequential(_conv(fan_in, less, 1), _conv(less, three, 3, 1, 1)),
        nn.Sequential(_conv(fan_in, least, 1), _conv(least, five, 5, 1, 2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(fan_in, pooled, 1)),
    ])  # fmt: skip


def googlenet() -> nn.Module:
    """``GoogLeNet.cpp``: no rectifiers and no auxiliary classifiers."""
    return nn.Sequential(
        _conv(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(64, 192, 3, 1, 1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        inception(192, 64, 96, 128, 16, 32, 32), inception(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True), inception(480, 192, 96, 208, 16, 48, 64),
        inception(512, 160, 112, 224, 24, 64, 64), inception(512, 128, 128, 256, 24, 64, 64),
        inception(512, 112, 144, 288, 32, 64, 64), inception(528, 256, 160, 320, 32, 128, 128),
        nn.MaxPool2d(3, 2, ceil_mode=True), inception(832, 256, 160, 320, 32, 128, 128),
        inception(832, 384, 192, 384, 48, 128, 128), nn.AdaptiveAvgPool2d(1),
        _conv(1024, 10, 1), nn.Flatten(),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    """``MobilenetV2.cpp``, as in arXiv 1801.04381, table 2."""
    plan = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1)]  # fmt: skip
    return nn.Sequential(
        conv_norm(3, 32, 3, nn.ReLU6, stride=2), *inverted(plan, 32),
        conv_norm(320, 1280, 1, nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(1280, 1001),
    )  # fmt: skip


_IMAGE = {"x": (3, 224, 224)}
_BATCHES = (1, 2, 4, 8, 16)
_ALL = (
    ("Lenet", lenet, {"x": (1, 28, 28)}, False),
    ("Squeezenet", squeezenet, _IMAGE, False),
    ("GoogLenet", googlenet, _IMAGE, False),
    ("Alexnet", alexnet, _IMAGE, False),
    ("Mobilenet", mobilenet, _IMAGE, True),
)
NETWORKS = {
    name: Case(
        f"published-{name.lower()}", name, module, inputs, _BATCHES,
        optimizer=SGD(momentum=0.9), norms=norms,
    )
    for name, module, inputs, norms in _ALL
}  # fmt: skip
"""By their names in ``training.csv``."""
