"""A convolution that shortens the window, and a recurrent network that reads it."""

import torch
from torch import nn


class Activity(nn.Module):
    """Scores of the activities, from a window of the six sensors."""

    def __init__(self, activities: int) -> None:
        super().__init__()
        self.shorten = nn.Conv1d(6, 24, 8, stride=4)
        self.read = nn.GRU(24, 32, batch_first=True)
        self.activities = nn.Linear(32, activities)

    def forward(self, motion: torch.Tensor) -> torch.Tensor:
        """Scores of the activities, [batch, activities], from [batch, time, sensors]."""
        short = torch.relu(self.shorten(motion.transpose(1, 2)))
        states, _ = self.read(short.transpose(1, 2))
        return self.activities(states[:, -1])


torch.manual_seed(0)
torch.onnx.export(
    Activity(4),
    (torch.zeros(1, 100, 6),),
    "model.onnx",
    input_names=["motion"],
    output_names=["output"],
    dynamic_axes={"motion": {0: "batch"}, "output": {0: "batch"}},
    opset_version=17,
    dynamo=False,
)
