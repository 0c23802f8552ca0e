"""MobileNetV2 with starting values for which ten steps are a matter of arithmetic.

Relu6 has a kink at 0 and at 6. Of eight million activations a few always lie within a rounding
error of one, where float32 and float64 take different sides, and the runs part; as a tolerance that
would hide errors. So the activations are settled between the kinks: every batch normalization in
front of a Relu6 hands it a mean of 3 and a deviation of 0.85. There are batches for which none lies
near a kink in ten steps: the run in float64 tells, on every machine (:class:`KinkMargin`).
"""

import math
import re

import numpy as np
import onnx
import torch
from torch import nn

from tests import zoo
from tests.torch_twins import OnnxBatchNorm2d, twin

# The norms before a Relu6, except the last: it feeds the classifier, whose gradient would grow.
_BEFORE_RELU6 = re.compile(r"features\.(0\.1|\d+\.conv\.[01]\.1)\.(bias|weight)")
_SETTLED = {"bias": 3.0, "weight": 0.85}


def mobilenet(batch_norm, x, **arguments):
    """MobileNetV2, settled for the batch ``x``, whose statistics it keeps or has in its weights."""
    model = zoo.mobilenet_v2(batch_norm="train", **arguments)
    for tensor in model.graph.initializer:
        found = _BEFORE_RELU6.fullmatch(tensor.name)
        if found:
            _set(tensor, np.full(tensor.dims, _SETTLED[found[2]]))
    if batch_norm == "train":
        return model
    values = _with_statistics(model, x)
    if batch_norm == "fold":
        values = _folded(values)
    settled = zoo.mobilenet_v2(batch_norm=batch_norm, **arguments)
    for tensor in settled.graph.initializer:
        _set(tensor, values[tensor.name])
    return settled


class KinkMargin:
    """Least distance of what the Relu6 layers of a module read from 0 and 6, over all calls."""

    def __init__(self, module: nn.Module) -> None:
        self.value = math.inf
        for layer in module.modules():
            if isinstance(layer, nn.ReLU6):
                layer.register_forward_pre_hook(self._look)

    def _look(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # |x - 3| is 3 on either kink.
        distance = (inputs[0].detach() - 3).abs_().sub_(3).abs_().min()
        self.value = min(self.value, distance.item())


def _set(tensor: onnx.TensorProto, values: np.ndarray) -> None:
    tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))


def _with_statistics(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    """Values by name, the running statistics being those of the batch."""
    module = twin(model, running_var="unbiased").double()
    for layer in module.modules():
        if isinstance(layer, OnnxBatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        module(torch.from_numpy(x).double())
    return {name: value.numpy() for name, value in module.state_dict().items()}


def _folded(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norm k of a block folded into convolution k - 1."""
    folded = dict(values)
    for name, mean in values.items():
        if not name.endswith(".running_mean"):
            continue
        norm = name.removesuffix(".running_mean")
        block, place = norm.rsplit(".", 1)
        conv = f"{block}.{int(place) - 1}"
        gain = values[f"{norm}.weight"] / np.sqrt(values[f"{norm}.running_var"] + 1e-5)
        folded[f"{conv}.weight"] = values[f"{conv}.weight"] * gain[:, None, None, None]
        folded[f"{conv}.bias"] = values[f"{norm}.bias"] - mean * gain
    return folded
