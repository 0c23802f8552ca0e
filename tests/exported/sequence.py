"""Models of text, sound and behaviour in plain PyTorch, small, as people write them."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeywordSpotter(nn.Module):
    """Frames [N, T, features] to a keyword: a convolution over time, a GRU, its last state."""

    def __init__(self, classes=5, features=6, width=8, size=3, stride=1, hidden=10):
        super().__init__()
        self.conv = nn.Conv1d(features, width, size, stride, padding=size // 2)
        self.activation = nn.SiLU()
        self.gru = nn.GRU(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y, _ = self.gru(x)
        return self.head(y[:, -1])


class LstmClassifier(nn.Module):
    """Tokens [N, T] to a class: a bidirectional LSTM, its mean over time."""

    def __init__(self, vocabulary: int = 20, classes: int = 4, d: int = 8, hidden: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.lstm = nn.LSTM(d, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.lstm(self.embedding(tokens))
        return self.head(y.mean(dim=1))


class Translator(nn.Module):
    """Source [N, S] and target tokens [N, T] to logits [N, V, T]: a decoder attends to a GRU."""

    def __init__(self, vocabulary: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.encoder = nn.GRU(8, 10, batch_first=True)
        self.decoder = nn.LSTM(8, 10, batch_first=True)
        self.query = nn.Linear(10, 10)
        self.head = nn.Linear(20, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.encoder(self.embedding(source))
        y, _ = self.decoder(self.embedding(target))
        found = torch.softmax(self.query(y) @ memory.transpose(1, 2) / 3, dim=-1) @ memory
        return self.head(torch.cat([found, y], dim=-1)).transpose(1, 2)


class Bert(nn.Module):
    """Tokens, segments and a mask of what is not padding, all [N, T], to a class."""

    def __init__(self, vocabulary: int = 30, d: int = 16, depth: int = 2, length: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, d, padding_idx=0)
        self.positions = nn.Embedding(length, d)
        self.segments = nn.Embedding(2, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(d, 4) for _ in range(depth))
        self.pooler = nn.Linear(d, d)
        self.head = nn.Linear(d, 3)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places) + self.segments(segments)
        x = self.norm(x)
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class BertLayer(nn.Module):
    """Attention written out, as the first implementations had it, normalized after."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))
        self.output = nn.Linear(d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
        self.intermediate, self.narrow = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + bias
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous()
        x = self.norm1(x + self.output(mixed.view(x.size())))
        return self.norm2(x + self.narrow(F.gelu(self.intermediate(x))))


class MaskedEncoder(nn.Module):
    """nn.MultiheadAttention with a key padding mask: its scores are -inf where it is set."""

    def __init__(self, vocabulary: int = 30, d: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, d)
        self.attention = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.words(tokens)
        y, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        kept = (~padding).unsqueeze(-1).to(x.dtype)
        x = self.norm(x + y) * kept
        return self.head(x.sum(dim=1) / kept.sum(dim=1))


class CausalLanguageModel(nn.Module):
    """Logits [N, V, T] of the next token; the embedding is also the output projection.

    Attention is ``"fused"``, is_causal, or ``"masked"``: -inf above the diagonal, written out.
    """

    def __init__(self, vocabulary=24, d=16, depth=2, length=10, attention="fused"):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d)
        self.positions = nn.Parameter(0.1 * torch.randn(length, d))
        self.blocks = nn.ModuleList(CausalBlock(d, 4, attention) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.projection = nn.Linear(d, vocabulary, bias=False)
        self.embedding.weight.data.mul_(0.3)
        self.projection.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.projection(self.norm(x)).transpose(1, 2)


class CausalBlock(nn.Module):
    def __init__(self, d: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads, self.fused = heads, attention == "fused"
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.output = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.widen, self.narrow = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            length = x.shape[1]
            later = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
            mixed = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Recommender(nn.Module):
    """Whether a user [N] will like an item [N] with tags [N, K]; wide and deep."""

    def __init__(self, users: int = 12, items: int = 15, tags: int = 9) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 6), nn.Embedding(items, 6)
        self.tags = nn.Embedding(tags, 6)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.deep = nn.Sequential(nn.Linear(18, 12), nn.SiLU(), nn.Linear(12, 1))

    def forward(self, user: Tensor, item: Tensor, tags: Tensor) -> Tensor:
        u, i, t = self.users(user), self.items(item), self.tags(tags).mean(dim=1)
        wide = (u * i).sum(dim=1, keepdim=True) + self.user_bias(user) + self.item_bias(item)
        return (wide + self.deep(torch.cat([u, i, t], dim=1))).squeeze(1)


def pretrained(name: str, **settings: int | str) -> nn.Module:
    """An encoder and decoder of Hugging Face's transformers, which returns logits [N, word, T]."""
    import transformers

    own = getattr(transformers, f"{name}ForConditionalGeneration")

    class Whole(own):  # type: ignore[misc, valid-type]
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            named = {"decoder_input_ids": target, "decoder_attention_mask": torch.ones_like(target)}
            return super().forward(source, **named, use_cache=False).logits.transpose(1, 2)

    config = getattr(transformers, f"{name}Config")(
        vocab_size=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        attn_implementation="eager", **settings,
    )  # fmt: skip
    return Whole(config).requires_grad_()
