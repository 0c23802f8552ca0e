"""A transformer decoder of one layer, as small as a keyboard's."""

import torch
from torch import nn

WORDS, LENGTH, WIDTH, HEADS = 48, 9, 48, 4


class NextWord(nn.Module):
    """Scores of the word that follows each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.look = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.scores = nn.Linear(WIDTH, WORDS)
        self.register_buffer("later", torch.full((LENGTH, LENGTH), -1e4).triu(1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores, [batch, length, words], from the numbers of the words, [batch, length]."""
        x = self.words(words) + self.places
        shape = (-1, LENGTH, HEADS, WIDTH // HEADS)
        query, key, value = (
            part.reshape(shape).transpose(1, 2) for part in self.look(self.before(x)).chunk(3, -1)
        )
        seen = query @ key.transpose(2, 3) / (WIDTH // HEADS) ** 0.5 + self.later
        seen = (seen.softmax(-1) @ value).transpose(1, 2).reshape(-1, LENGTH, WIDTH)
        x = x + self.mix(seen)
        return self.scores(x + self.think(self.after(x)))


torch.manual_seed(0)
torch.onnx.export(
    NextWord(),
    (torch.zeros(2, LENGTH, dtype=torch.int64),),
    "model.onnx",
    input_names=["words"],
    output_names=["output"],
    dynamic_axes={"words": {0: "batch"}, "output": {0: "batch"}},
    opset_version=17,
    dynamo=False,
)
