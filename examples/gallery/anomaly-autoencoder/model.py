"""An autoencoder of dense layers: eight numbers must suffice to write a window again."""

import torch
from torch import nn


class Autoencoder(nn.Module):
    """The window again, through a narrow middle."""

    def __init__(self, size: int, middle: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 64), nn.GELU(), nn.Linear(64, middle))
        self.decoder = nn.Sequential(nn.Linear(middle, 64), nn.GELU(), nn.Linear(64, size))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """The window again, [batch, size]."""
        return self.decoder(self.encoder(window))


torch.manual_seed(0)
torch.onnx.export(
    Autoencoder(64, 8),
    (torch.zeros(2, 64),),
    "model.onnx",
    input_names=["window"],
    output_names=["output"],
    dynamic_axes={"window": {0: "batch"}, "output": {0: "batch"}},
    opset_version=17,
    dynamo=False,
)
