"""Contributed operators, each with the formula of its kernel in PyTorch."""

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Array, Case, cases, normal, spread

B, S, T, N, H = 2, 3, 5, 2, 4  # samples, queries, keys, heads, size of a head
D = N * H
X, SKIP = normal(B, S, D), normal(B, S, D, seed=1)
SCALE, BIAS, SHIFT = normal(D, seed=2), normal(D, seed=3), normal(D, seed=4)
EVERY = (12, 17, 23)


def contrib(op, inputs, function, opsets=(17,), **options):
    options = {"domain": "com.microsoft", "differences": "torch", "expanded": True} | options
    return cases(op, inputs, function, opsets, **options)


def int32(*values: Any) -> Array:
    return np.array(values, np.int32)


# Products


def fused_matmul(trans_a: int, trans_b: int, batch_a: int, batch_b: int) -> list[Case]:
    def rows_first(x: torch.Tensor, trans: int, batch: int) -> torch.Tensor:
        x = x.movedim(0, -2) if batch else x
        return x.transpose(-1, -2) if trans else x

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 0.5 * rows_first(a, trans_a, batch_a) @ rows_first(b, trans_b, batch_b)

    def shape(rows: int, columns: int, trans: int, batch: int) -> tuple[int, ...]:
        first = (columns, rows) if trans else (rows, columns)
        return (first[0], B, N, first[1]) if batch else (B, N, *first)

    inputs = {
        "a": normal(*shape(S, H, trans_a, batch_a)),
        "b": normal(*shape(H, T, trans_b, batch_b), seed=1),
    }
    return contrib("FusedMatMul", inputs, function, transA=trans_a, transB=trans_b,
                   transBatchA=batch_a, transBatchB=batch_b, alpha=0.5,
                   label=f"{trans_a}{trans_b}{batch_a}{batch_b}")  # fmt: skip


ACTIVATIONS = {
    "Relu": ((), torch.relu),
    "Sigmoid": ((), torch.sigmoid),
    "Tanh": ((), torch.tanh),
    "LeakyRelu": ((0.2,), lambda x: F.leaky_relu(x, 0.2)),
    "HardSigmoid": ((0.25, 0.5), lambda x: torch.clamp(0.25 * x + 0.5, 0, 1)),
}


def fused_gemm(name: str) -> list[Case]:
    parameters, function = ACTIVATIONS[name]
    given = dict(zip(("activation_alpha", "activation_beta"), parameters, strict=False))
    inputs = {"a": normal(S, H), "b": normal(T, H, seed=1), "c": normal(T, seed=2)}
    return contrib("FusedGemm", inputs, lambda a, b, c: function(0.5 * a @ b.T + 1.5 * c),
                   alpha=0.5, beta=1.5, transB=1, activation=name, label=name, **given)  # fmt: skip


def fused_conv(name: str, added: bool) -> list[Case]:
    parameters, function = (
        ((-0.5, 0.7), lambda x: x.clamp(-0.5, 0.7)) if name == "Clip" else ACTIVATIONS[name]
    )
    inputs = {"x": normal(B, 2, 5, 5), "w": normal(3, 2, 3, 3, seed=1), "b": normal(3, seed=2)}
    if added:
        inputs["z"] = normal(B, 3, 5, 5, seed=3)

    def result(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *z: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, b, padding=1)
        return function(y + z[0] if z else y)

    options = {"activation_params": parameters} if parameters else {}
    return contrib("FusedConv", inputs, result, pads=[1, 1, 1, 1], kernel_shape=[3, 3],
                   activation=name, label=f"{name}{'-added' * added}", **options)  # fmt: skip


# Normalizations


def layer_norm(x: torch.Tensor, scale: torch.Tensor, bias: Any = None) -> torch.Tensor:
    return F.layer_norm(x, (D,), scale, bias, 1e-3)


def rms(x: torch.Tensor, scale: torch.Tensor, axes: tuple[int, ...] = (-1,)) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(axes, True) + 1e-3) * scale


NORM: dict[str, Any] = {"epsilon": 1e-3, "batch": ["x", "skip"]}

# Embeddings

WORDS, SEGMENTS = int32([1, 0, 4], [2, 2, 3]), int32([0, 0, 1], [0, 1, 1])
PLACES, MASK = int32([2, 0, 1], [3, 1, 1]), int32([1, 1, 0], [1, 1, 1])
TABLES: dict[str, Array | None] = {
    "word": normal(5, D), "place": normal(4, D, seed=1), "segment": normal(2, D, seed=2),
    "gamma": SCALE, "beta": BIAS,
}  # fmt: skip


def embedded(words, segments, w, p, s, gamma, beta, places=None):
    where = torch.arange(S).expand(B, S) if places is None else places.long()
    total = w[words.long()] + p[where] + s[segments.long()]
    return layer_norm(total, gamma, beta), total


def turned(x: Any, cos: Any, sin: Any, half: int, interleaved: int) -> torch.Tensor:
    turn, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turn[..., ::2], turn[..., 1::2]) if interleaved else turn.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turn = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turn, rest], -1)


def rotary(interleaved: int, half: int, rank: int, first: int | None) -> list[Case]:
    places = np.array([[0, 2, 1], [4, 3, 7]]) if first is None else np.array([first])
    angles = normal(8, half, seed=5)

    def function(x: torch.Tensor, p: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        y = x if rank == 4 else x.reshape(B, S, N, H).transpose(1, 2)
        where = (torch.arange(S) + p).expand(B, S) if first is not None else p
        y = turned(y, cos[where][:, None], sin[where][:, None], half, interleaved)
        return y if rank == 4 else y.transpose(1, 2).reshape(B, S, D)

    x = normal(B, N, S, H) if rank == 4 else X
    options = {"num_heads": N, "rotary_embedding_dim": 2 * half} if 2 * half < H else {}
    inputs = {"x": x, "p": places, "cos": np.cos(angles), "sin": np.sin(angles)}
    return contrib("RotaryEmbedding", inputs, function, interleaved=interleaved, runtime=["p"],
                   wrt=["x", "cos", "sin"],
                   label=f"{interleaved}-{half}-{rank}d-{first}", **options)  # fmt: skip


# Matrices of few bits


def stored(rows: int, columns: int, block: int, bits: int, points: str) -> dict[str, Any]:
    """Codes, scales and zero points as a quantizer stores them, and the matrix they stand for."""
    generator = np.random.default_rng(columns + bits)
    blocks = -(-columns // block)
    codes = generator.integers(0, 1 << bits, (rows, blocks * block), np.uint8)
    scales = np.float32(generator.uniform(0.05, 0.15, (rows, blocks)))
    zeros = np.full((rows, blocks), 1 << bits - 1, np.float32)
    if points == "whole":
        zeros = np.float32(generator.integers(0, 1 << bits, (rows, blocks)))
    if points == "float":
        zeros = np.float32(generator.uniform(3, 9, (rows, blocks)))
    matrix = (codes - zeros.repeat(block, 1)) * scales.repeat(block, 1)
    kept = {"whole": packed(np.uint8(zeros), bits), "float": zeros}.get(points)
    return {
        "codes": packed(codes, bits), "scales": scales, "zeros": kept,
        "matrix": torch.tensor(matrix[:, :columns], dtype=torch.float64),
    }  # fmt: skip


def packed(codes: Array, bits: int) -> Array:
    """Rows of codes as bytes."""
    if bits == 8:
        return codes
    codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def matmul_nbits(columns: int, block: int, bits: int, points: str, bias: bool) -> list[Case]:
    kept = stored(7, columns, block, bits, points)
    blocks, matrix = -(-columns // block), kept["matrix"]
    inputs = {
        "a": normal(B, S, columns), "w": kept["codes"].reshape(7, blocks, -1), "s": kept["scales"],
        "z": kept["zeros"],
    }  # fmt: skip
    if bias:
        inputs |= {"g": None, "b": normal(7, seed=4)}

    def function(a: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        y = a @ matrix.T
        return y + more[-1] if bias else y

    label = f"{columns}-{block}-{bits}-{points}{'-bias' * bias}"
    return contrib("MatMulNBits", inputs, function, (21, 23), K=columns, N=7, bits=bits,
                   block_size=block, const=["w", "s", "z"], batch=["a"], label=label)  # fmt: skip


NBITS: list[Case] = [
    *matmul_nbits(64, 32, 4, "middle", False),
    *matmul_nbits(64, 16, 4, "whole", True),
    *matmul_nbits(48, 16, 4, "whole", False),
    *matmul_nbits(24, 16, 4, "middle", False),
    *matmul_nbits(33, 16, 4, "whole", False),
    *matmul_nbits(16, 32, 4, "middle", False),
    *matmul_nbits(64, 32, 4, "float", True),
    *matmul_nbits(64, 32, 8, "middle", True),
    *matmul_nbits(64, 16, 8, "whole", False),
    *matmul_nbits(40, 16, 8, "middle", False),
]

# Attention


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (N, -1)).transpose(1, 2)


def attend(q, k, v, blocked=None, bias=None, causal=False, scale=None):
    """From heads first to heads last, flat; ``blocked`` keys are lowered by 10000."""
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores if bias is None else scores + bias
    scores = scores if blocked is None else scores - 10000.0 * blocked.double()
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns).tril(columns - rows).bool()
        scores = scores.masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def projected(x: Any, w: Any, b: Any = None, sizes: tuple[int, int, int] = (D, D, D)) -> Any:
    y = x @ w if b is None else x @ w + b
    return [heads(part) for part in y.split(sizes, -1)]


QKV: dict[str, Array | None] = {"x": X, "w": normal(D, 3 * D, seed=1), "b": normal(3 * D, seed=2)}
MASK2, MASK3 = int32([1, 1, 0], [1, 1, 1]), np.int32(spread(B, S, S) > -0.7)
MASK3[..., 0] = 1
Q, K, V = X, normal(B, T, D, seed=1), normal(B, T, D, seed=2)
KEYS = int32([1, 1, 0, 1, 1], [1, 1, 1, 1, 0])
PAST = normal(2, B, N, 2, H, seed=6)
SCORES = normal(1, N, S, T, seed=7)

ATTENTION: list[Case] = [
    *contrib("Attention", QKV, lambda *x: attend(*projected(*x)), EVERY, num_heads=N, batch=["x"]),
    *contrib("Attention", QKV, lambda *x: attend(*projected(*x), causal=True, scale=0.3),
             num_heads=N, unidirectional=1, scale=0.3, label="causal"),
    *contrib("Attention", QKV | {"m": MASK2},
             lambda x, w, b, m: attend(*projected(x, w, b), (m == 0)[:, None, None]),
             num_heads=N, batch=["x", "m"], label="mask-of-keys"),
    *contrib("Attention", QKV | {"m": MASK3},
             lambda x, w, b, m: attend(*projected(x, w, b), (m == 0)[:, None]), num_heads=N,
             label="mask-of-pairs"),
    *contrib("Attention", QKV | {"m": int32(2, 3)},
             lambda x, w, b, m: attend(
                 *projected(x, w, b), (torch.arange(S) >= m[:, None])[:, None, None]),
             num_heads=N, label="key-counts"),
    *contrib("Attention", QKV | {"m": None, "past": PAST},
             lambda x, w, b, p: _with_past(*projected(x, w, b), p), num_heads=N, outputs=2,
             unidirectional=1, label="past"),
    *contrib("Attention", QKV | {"m": None, "past": None, "bias": normal(B, N, S, S, seed=7)},
             lambda x, w, b, s: attend(*projected(x, w, b), bias=s), num_heads=N, label="bias"),
    *contrib("Attention", {"x": X, "w": normal(D, 2 * D + 6, seed=1), "b": normal(2 * D + 6)},
             lambda *x: attend(*projected(*x, sizes=(D, D, 6))), num_heads=N,
             qkv_hidden_sizes=[D, D, 6], label="wide-values"),
    *contrib("MultiHeadAttention", {"q": Q, "k": K, "v": V},
             lambda *x: attend(*map(heads, x)), EVERY, num_heads=N, batch=["q", "k", "v"]),
    *contrib("MultiHeadAttention", {"q": Q, "k": K, "v": V, "b": normal(3 * D, seed=3)},
             lambda q, k, v, b: attend(*(heads(x + s) for x, s in zip((q, k, v), b.split(D),
                                                                      strict=True)), scale=0.4),
             num_heads=N, scale=0.4, label="bias"),
    *contrib("MultiHeadAttention", {"q": Q, "k": K, "v": V, "b": None, "m": KEYS},
             lambda *x: attend(*map(heads, x[:3]), (x[3] == 0)[:, None, None]), num_heads=N,
             batch=["q", "k", "v", "m"], label="mask"),
    *contrib("MultiHeadAttention", {"q": Q, "k": K, "v": V, "b": None, "m": None, "s": SCORES},
             lambda *x: attend(*map(heads, x[:3]), bias=x[3]), num_heads=N, label="scores"),
    *contrib("MultiHeadAttention", {"q": Q, "k": K[:, :S], "v": V[:, :S]},
             lambda *x: attend(*map(heads, x), causal=True), num_heads=N, unidirectional=1,
             label="causal"),
    *contrib("MultiHeadAttention", {"q": Q, "k": normal(B, N, T, H), "v": normal(B, N, T, H)},
             lambda q, k, v: attend(heads(q), k, v), num_heads=N, label="keys-by-head"),
    *contrib("MultiHeadAttention",
             {"q": Q, "k": K, "v": V, "b": None, "m": None, "s": None, "pk": normal(B, N, 2, H),
              "pv": normal(B, N, 2, H, seed=9)},
             lambda q, k, v, pk, pv: _joined(heads(q), torch.cat([pk, heads(k)], 2),
                                             torch.cat([pv, heads(v)], 2)),
             num_heads=N, outputs=3, label="past"),
]  # fmt: skip


def _joined(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v), k, v


def _with_past(q: Any, k: Any, v: Any, past: Any) -> Any:
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return attend(q, k, v, causal=True), torch.stack([k, v])


def grouped(label, *, m=2, g=2, size=8, half=0, packed=False, **more):
    """Grouped-query attention of g heads of queries for each of m heads of keys."""
    inputs: dict[str, Array | None]
    if packed:
        inputs = {"q": normal(B, T, (g * m + 2 * m) * size), "k": None, "v": None}
    else:
        widths = {"q": g * m * size, "k": m * size, "v": m * size}
        inputs = {n: normal(B, T, w, seed=i) for i, (n, w) in enumerate(widths.items())}
    inputs |= {"pk": None, "pv": None, "lengths": int32(T - 1, T - 1), "total": np.int32([T])[0:1]}
    if half:
        angles = normal(9, half, seed=5)
        inputs |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    first = more.pop("first", None)
    if first is not None:
        inputs["p"] = np.arange(first, first + T)[None].repeat(B, 0)
    bias = more.pop("bias", None)
    if bias is not None:
        inputs |= {n: inputs.get(n) for n in ("cos", "sin", "p")} | {"bias": bias}
    norms = more.pop("norms", None)
    if norms is not None:
        between = ("cos", "sin", "p", "bias", "sink", "ks", "vs")
        inputs |= {n: inputs.get(n) for n in between}
        inputs |= {n: 1 + normal(size, seed=i) / 4 for i, n in enumerate(("qn", "kn"), 8)}
        more |= {f"{n}_epsilon": each for n, each in norms.items()}
    window, softcap = more.get("local_window_size", -1), more.get("softcap", 0.0)
    interleaved = more.get("rotary_interleaved", 0)

    def function(*given: torch.Tensor) -> Any:
        named = dict(zip([n for n, a in inputs.items() if a is not None], given, strict=True))
        q = named["q"]
        widths = [g * m * size, m * size, m * size]
        parts = q.split(widths, -1) if packed else (q, named["k"], named["v"])
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        if norms is not None:
            usual = norms.get("qk_norm", 1e-6)
            q, k = (
                x * torch.rsqrt(x.square().mean(-1, True) + norms.get(n, usual)) * named[weight]
                for x, n, weight in ((q, "q_norm", "qn"), (k, "k_norm", "kn"))
            )
        if half:
            c, s = (named[n][(first or 0) :][:T] for n in ("cos", "sin"))
            q, k = (turned(each, c, s, half, interleaved) for each in (q, k))
        keys, values = (each.repeat_interleave(g, 1) for each in (k, v))
        scores = q @ keys.mT * (more.get("scale") or size**-0.5)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores + named["bias"] if bias is not None else scores
        apart = torch.arange(T)[:, None] - torch.arange(T)
        seen = (apart >= 0) & ((apart < window) | torch.tensor(window < 0))
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (shares @ values).transpose(1, 2).flatten(2), k, v

    return contrib("GroupQueryAttention", inputs, function, num_heads=g * m, kv_num_heads=m,
                   outputs=3, do_rotary=int(half > 0), const=["cos", "sin"], runtime=["p"],
                   label=label, **more)  # fmt: skip


# ONNX Runtime has kernels of these for CUDA and WebGPU alone.
NORMALIZED: list[Case] = [
    *grouped("norms", norms={}),
    *grouped("norms-rotary-packed", half=8, size=16, packed=True, norms={"qk_norm": 0.01}),
    *grouped("norms-of-their-own", norms={"q_norm": 0.1, "k_norm": 0.2}, bias=normal(1, 1, T, T)),
]
GROUPED: list[Case] = [
    *NORMALIZED,
    *grouped("plain"),
    *grouped("one-group", m=2, g=1),
    *grouped("one-key", m=1, g=3, scale=0.3),
    *grouped("packed", packed=True),
    *grouped("rotary", half=8, size=16),
    *grouped("rotary-packed", half=8, size=16, packed=True),
    *grouped("rotary-part", half=8, size=32),
    *grouped("rotary-pairs", half=8, size=16, rotary_interleaved=1),
    *grouped("rotary-from-two", half=8, size=16, first=2),
    *grouped("softcap", softcap=2.0),
    *grouped("window", local_window_size=2),
    *grouped("bias-of-heads", bias=normal(B, 4, T, T, seed=7)),
    *grouped("bias", half=8, size=16, bias=normal(1, 1, T, T, seed=7), softcap=3.0),
]


CASES: list[Case] = [
    *(
        case
        for bits in range(16)
        for case in fused_matmul(bits & 1, bits >> 1 & 1, bits >> 2 & 1, bits >> 3)
    ),
    *contrib("FusedMatMul", {"a": normal(B, S, H), "b": normal(H, T)}, torch.matmul, EVERY,
             batch=["a"], double=True),
    *contrib("TransposeMatMul", {"a": normal(B, H, S), "b": normal(T, H)},
             lambda a, b: a.mT @ b.T, transA=1, transB=1),
    *(case for name in ACTIVATIONS for case in fused_gemm(name)),
    *(case for name in (*ACTIVATIONS, "Clip") for case in fused_conv(name, False)),
    *fused_conv("Relu", True),
    *contrib("Gelu", {"x": X}, F.gelu, EVERY, batch=["x"]),
    *contrib("BiasGelu", {"x": X, "b": BIAS}, lambda x, b: F.gelu(x + b), EVERY, batch=["x"]),
    *contrib("FastGelu", {"x": X}, lambda x: F.gelu(x, approximate="tanh"), EVERY),
    *contrib("FastGelu", {"x": X, "b": BIAS}, lambda x, b: F.gelu(x + b, approximate="tanh"), EVERY,
             label="bias"),
    *contrib("QuickGelu", {"x": X}, lambda x: x * torch.sigmoid(1.702 * x), EVERY, double=True),
    *contrib("QuickGelu", {"x": X}, F.silu, alpha=1.0, label="silu"),
    *contrib("SkipLayerNormalization", {"x": X, "skip": SKIP, "g": SCALE, "b": BIAS, "s": SHIFT},
             lambda x, k, g, b, s: (layer_norm(x + k + s, g, b), x + k + s), EVERY, outputs=4,
             used=[0, 3], **NORM),
    *contrib("SkipLayerNormalization", {"x": X, "skip": SKIP, "g": SCALE, "b": None},
             lambda x, k, g: layer_norm(x + k, g), EVERY, label="no-bias", **NORM),
    *contrib("SkipLayerNormalization", {"x": X, "skip": SKIP[:1], "g": SCALE, "b": BIAS},
             lambda x, k, g, b: layer_norm(x + k, g, b), epsilon=1e-3, label="broadcast"),
    *contrib("SkipSimplifiedLayerNormalization", {"x": X, "skip": SKIP, "g": SCALE, "s": SHIFT},
             lambda x, k, g, s: (rms(x + k + s, g), x + k + s), EVERY, outputs=4, used=[0, 3],
             **NORM),
    *contrib("SkipSimplifiedLayerNormalization", {"x": X, "skip": SKIP, "g": SCALE},
             lambda x, k, g: rms(x + k, g), label="no-bias", **NORM),
    *contrib("EmbedLayerNormalization",
             {"i": WORDS, "j": SEGMENTS} | TABLES, embedded, EVERY, outputs=3, used=[0, 2],
             epsilon=1e-3, batch=["i", "j"]),
    *contrib("EmbedLayerNormalization",
             {"i": WORDS, "j": SEGMENTS} | TABLES | {"mask": None, "p": PLACES}, embedded,
             outputs=3, used=[0, 2], epsilon=1e-3, label="positions"),
    *(
        case
        for interleaved in (0, 1)
        for half in (1, 2)
        for rank in (3, 4)
        for first in (None, 2)
        for case in rotary(interleaved, half, rank, first)
    ),
    *NBITS,
    *GROUPED,
    *ATTENTION,
]  # fmt: skip
