"""A language model of Llama's shape, small: RMSNorm, rotary embeddings, shared keys, SwiGLU."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tests.exported.export import Exporter, export

VOCABULARY, WIDTH, INNER, HEADS, SHARED, LENGTH = 29, 16, 24, 4, 2, 10
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int = WIDTH
    inner: int = INNER
    heads: int = HEADS
    shared: int = SHARED
    tied: bool = True

    @property
    def size(self) -> int:
        return self.width // self.heads

    def angles(self) -> Tensor:
        """[LENGTH, half a head]."""
        return torch.outer(torch.arange(LENGTH), 100.0 ** -torch.arange(0, 1, 2 / self.size))


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(shape.width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """More heads of queries than of keys and values, biases as in Qwen2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.size = shape, shape.size
        self.q_proj = nn.Linear(shape.width, shape.width)
        self.k_proj = nn.Linear(shape.width, shape.shared * self.size)
        self.v_proj = nn.Linear(shape.width, shape.shared * self.size)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        angles = shape.angles()
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin(), persistent=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.reshape(x.shape[0], LENGTH, count, self.size).transpose(1, 2)

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        heads, shared = self.shape.heads, self.shape.shared
        q = self.turned(self.heads(self.q_proj(x), heads))
        k = self.turned(self.heads(self.k_proj(x), shared)).repeat_interleave(heads // shared, 1)
        v = self.heads(self.v_proj(x), shared).repeat_interleave(heads // shared, 1)
        shares = (q @ k.transpose(2, 3) * self.size**-0.5 + self.mask).softmax(-1)
        return self.o_proj((shares @ v).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(shape), Norm(shape)
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token numbers [batch, LENGTH] to logits [batch, LENGTH, VOCABULARY]."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(2))
        self.norm = Norm(shape)
        self.lm_head = nn.Linear(shape.width, VOCABULARY, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def llama(seed: int = 0, shape: Shape = Shape()) -> Llama:
    torch.manual_seed(seed)
    return Llama(shape)


def exported(module: nn.Module, path: Path, exporter: Exporter = "torchscript") -> Path:
    """The model as a file, for batches of any size."""
    ids = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}
    return export(
        module.eval(), ids, path, exporter,
        dynamic={"input_ids": {0: "batch"}}, output="logits", opset=17,
    )  # fmt: skip


def batch(count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the same as labels with a prompt and an end that do not count."""
    ids = np.random.default_rng(4).integers(0, VOCABULARY, (count, LENGTH))
    places = np.arange(LENGTH)
    counts = (places >= 3) & (places < [[LENGTH], [LENGTH - 2], [LENGTH - 1]][:count])
    return ids, np.where(counts, ids, -100)
