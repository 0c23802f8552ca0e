"""MobileNetV2 (Sandler et al. 2018), layer for layer as torchvision builds it."""

from __future__ import annotations

from typing import Literal, get_args

import onnx

from tests.zoo.graph_writer import GraphWriter, require, require_positive

BatchNorm = Literal["fold", "train", "eval"]

_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip
"""Expansion, channels, blocks and stride of the first block: table 2 of the paper."""

# Without batch normalization the scales must hold by themselves.
_RESIDUAL_GAIN = 0.5
"""Factor on the last convolution of a residual branch, of which ten are added up.

At full size each would double the variance, and ``Relu6`` would saturate.
"""
_LAST_GAIN = 0.5
"""Factor on the last convolution, whose 1280 features would make plain SGD overshoot."""
_BIAS_STD = 0.05
"""Deviation of the biases.

They are not zero, because a patch of zeros would then meet the bound of ``Relu6`` exactly, where
the derivative is a matter of convention.
"""
_CLASSIFIER_STD = 0.01
"""Deviation of the classifier's weight, as in torchvision."""


def mobilenet_v2(
    size: int = 96, classes: int = 10, width_mult: float = 1.0, batch_norm: BatchNorm = "fold", *,
    stages: int = len(_STAGES), opset: int = 17, seed: int = 0,
) -> onnx.ModelProto:  # fmt: skip
    """Builds MobileNetV2 with torchvision's parameter names, ``features.0.0.weight`` and so on.

    ``Relu6`` is a ``Clip`` to 0 and 6, and dropout is left out. ``stages`` lie between the first
    and the last convolution. ``batch_norm`` is that of inference, ``"eval"``, of training in
    opset 14 or later, or ``"fold"``, which gives every convolution a bias instead.
    """
    require_positive("mobilenet_v2", size=size, classes=classes, stages=stages)
    known = batch_norm in get_args(BatchNorm)
    for fine, sentence in (
        (width_mult > 0, f"width_mult must be positive, not {width_mult}"),
        (known, f"batch_norm must be fold, train or eval, not {batch_norm!r}"),
        (batch_norm != "train" or opset >= 14,
         f"batch_norm='train' needs the training_mode of opset 14, not opset {opset}"),
    ):  # fmt: skip
        require(fine, "mobilenet_v2", sentence)
    arguments = {
        "size": size, "classes": classes, "width_mult": width_mult, "batch_norm": batch_norm,
        **({} if stages == len(_STAGES) else {"stages": stages}),
    }  # fmt: skip
    writer = _ConvWriter("mobilenet_v2", arguments, opset=opset, seed=seed)
    writer.batch_norm = batch_norm
    x = writer.input(["batch", 3, size, size])
    channels = _divisible(32 * width_mult)
    x = writer.conv_norm(x, 3, channels, "features.0", kernel=3, stride=2)
    index = 1
    for expansion, wanted, blocks, first_stride in _STAGES[:stages]:
        fan_out = _divisible(wanted * width_mult)
        for block in range(blocks):
            x = _inverted_residual(
                writer, x, channels, fan_out, f"features.{index}", expansion=expansion,
                stride=1 if block else first_stride,
            )  # fmt: skip
            channels = fan_out
            index += 1
    last = _divisible(1280 * max(1.0, width_mult))
    x = writer.conv_norm(x, channels, last, f"features.{index}", gain=_LAST_GAIN)
    x = writer.op("GlobalAveragePool", x, at="pool")
    x = writer.op("Flatten", x, at="flatten", axis=1)
    x = writer.linear(x, last, classes, at="classifier.1", std=_CLASSIFIER_STD)
    return writer.finish(x, ["batch", classes])


def _divisible(channels: float, by: int = 8) -> int:
    """Nearest multiple of ``by``, at least ``by``, and not less than 90 % of ``channels``."""
    rounded = max(by, int(channels + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * channels else rounded


def _inverted_residual(writer, x, fan_in, fan_out, at, *, expansion, stride):
    hidden = fan_in * expansion
    branch, place = x, 0
    if expansion != 1:
        branch = writer.conv_norm(branch, fan_in, hidden, f"{at}.conv.{place}")
        place += 1
    branch = writer.conv_norm(
        branch, hidden, hidden, f"{at}.conv.{place}", kernel=3, stride=stride, group=hidden,
        follows_relu=True,
    )  # fmt: skip
    place += 1
    residual = stride == 1 and fan_in == fan_out
    branch = writer.conv(
        branch, hidden, fan_out, f"{at}.conv.{place}",
        gain=_RESIDUAL_GAIN if residual else 1.0, follows_relu=True,
    )  # fmt: skip
    branch = writer.norm(branch, fan_out, f"{at}.conv.{place + 1}")
    return writer.op("Add", x, branch, at=at) if residual else branch


class _ConvWriter(GraphWriter):
    """A graph writer that knows which form of batch normalization follows a convolution."""

    batch_norm: BatchNorm = "fold"

    def conv_norm(
        self, x: str, fan_in: int, fan_out: int, at: str, *, kernel: int = 1, stride: int = 1,
        group: int = 1, gain: float = 1.0, follows_relu: bool = False,
    ) -> str:  # fmt: skip
        """Convolution ``{at}.0``, batch normalization ``{at}.1``, ``Relu6`` ``{at}.2``."""
        x = self.conv(
            x, fan_in, fan_out, f"{at}.0", kernel=kernel, stride=stride, group=group,
            gain=gain, follows_relu=follows_relu,
        )  # fmt: skip
        x = self.norm(x, fan_out, f"{at}.1")
        return self.op("Clip", x, self.constant(0.0), self.constant(6.0), at=f"{at}.2")

    def conv(
        self, x: str, fan_in: int, fan_out: int, at: str, *, kernel: int = 1, stride: int = 1,
        group: int = 1, gain: float = 1.0, follows_relu: bool = False,
    ) -> str:  # fmt: skip
        """Convolution that keeps the variance of a centred input, or of one a ``Relu`` halved."""
        taps = fan_in // group * kernel * kernel
        std = gain * ((2 if follows_relu else 1) / taps) ** 0.5
        shape = (fan_out, fan_in // group, kernel, kernel)
        inputs = [x, self.uniform(f"{at}.weight", shape, std=std)]
        if self.batch_norm == "fold":
            inputs.append(self.uniform(f"{at}.bias", (fan_out,), std=_BIAS_STD))
        pad = (kernel - 1) // 2
        return self.op(
            "Conv", *inputs, at=at, kernel_shape=[kernel, kernel], pads=[pad] * 4,
            strides=[stride, stride], group=group,
        )  # fmt: skip

    def norm(self, x: str, channels: int, at: str) -> str:
        """Batch normalization, or nothing where it is folded."""
        if self.batch_norm == "fold":
            return x
        shape = (channels,)
        names = [
            self.fill(f"{at}.weight", shape, 1.0),
            self.uniform(f"{at}.bias", shape, std=_BIAS_STD),
            self.fill(f"{at}.running_mean", shape, 0.0),
            self.fill(f"{at}.running_var", shape, 1.0),
        ]
        training = self.batch_norm == "train"
        outputs = ["", *(f"{name}.next" for name in names[2:])] if training else [""]
        mode = {"training_mode": 1} if training else {}
        return self.node(
            "BatchNormalization", [x, *names], outputs, at=at, epsilon=1e-5, momentum=0.9, **mode
        )[0]
