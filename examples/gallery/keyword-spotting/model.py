"""A depthwise separable convolutional network over spectrograms."""

import torch
from torch import nn


def separable(channels: int) -> nn.Sequential:
    """A convolution of each channel by itself, then one across the channels."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class Keywords(nn.Module):
    """Scores of the words, from one second of sound."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.ReLU(), separable(32), separable(32)
        )
        self.words = nn.Linear(32 * 4 * 4, words)

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """Scores of the words, [batch, words]."""
        pooled = nn.functional.avg_pool2d(self.features(spectrogram), 4)
        return self.words(pooled.flatten(1))


torch.manual_seed(0)
torch.onnx.export(
    Keywords(8).eval(),  # as for inference: batch normalization keeps its statistics
    (torch.zeros(2, 1, 32, 32),),
    "model.onnx",
    input_names=["spectrogram"],
    output_names=["output"],
    dynamic_axes={"spectrogram": {0: "batch"}, "output": {0: "batch"}},
    opset_version=17,
    do_constant_folding=False,  # which would merge batch normalization into the convolutions
    dynamo=False,
)
