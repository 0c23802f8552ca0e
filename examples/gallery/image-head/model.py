"""A network that learns the digits 0 to 4 here, and gets a new head for five others."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class Classifier(nn.Module):
    """Features that stay as they are on the device, and a head that learns there."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
        )
        self.head = nn.Linear(128, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, [batch, classes]."""
        return self.head(self.features(image))


torch.manual_seed(0)
pixels, digits = load_digits(return_X_y=True)
known = digits < 5
images = torch.tensor(pixels[known] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
labels = torch.tensor(digits[known])

model = Classifier(5)
optimizer = torch.optim.AdamW(model.parameters(), 0.003)
for _ in range(8):
    for rows in torch.randperm(len(images)).split(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()

model.head = nn.Linear(128, 5)
torch.onnx.export(
    model.eval(),
    (images[:2],),
    "model.onnx",
    input_names=["image"],
    output_names=["output"],
    dynamic_axes={"image": {0: "batch"}, "output": {0: "batch"}},
    opset_version=17,
    dynamo=False,
)
