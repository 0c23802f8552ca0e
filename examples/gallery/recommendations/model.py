"""Two towers over the vectors of the items: those of the user's history, and that of one item."""

import torch
from torch import nn

ITEMS, TOPICS, WIDTH = 300, 12, 16


class Towers(nn.Module):
    """How likely the user opens an item, as a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.user = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 32))
        self.item = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 32))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Logits [batch], from items opened lately [batch, 8] and an item [batch]."""
        user = self.user(self.items(history).mean(1))
        return (user * self.item(self.items(item))).sum(1) + self.bias


torch.manual_seed(0)
model = Towers()
# The shop's vectors: items of one topic lie near each other.
topics = torch.randn(TOPICS, WIDTH)
model.items.weight.data = topics[torch.arange(ITEMS) % TOPICS] + 0.3 * torch.randn(ITEMS, WIDTH)
torch.onnx.export(
    model,
    (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
    "model.onnx",
    input_names=["history", "item"],
    output_names=["output"],
    dynamic_axes={name: {0: "batch"} for name in ("history", "item", "output")},
    opset_version=17,
    dynamo=False,
)
