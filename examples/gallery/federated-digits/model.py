"""A convolutional network for digits, small enough to be sent over a phone's network every day."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
torch.onnx.export(
    model,
    (torch.zeros(2, 1, 8, 8),),
    "model.onnx",
    input_names=["image"],
    output_names=["output"],
    dynamic_axes={"image": {0: "batch"}, "output": {0: "batch"}},
    opset_version=17,
    dynamo=False,
)
