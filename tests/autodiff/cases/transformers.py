"""Operators of transformers, which the standard defines by bodies, with all their inputs."""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Case, cases, ints, joined, normal, spread

# Two heads of keys and values for four of queries; values are wider than keys.
Q, K, V = normal(2, 4, 3, 4), normal(2, 2, 3, 4, seed=1), normal(2, 2, 3, 6, seed=2)
PAST = {"pk": normal(2, 2, 2, 4, seed=3), "pv": normal(2, 2, 2, 6, seed=4)}
ALLOWED = (np.random.default_rng(0).random((3, 3)) > 0.3) | np.eye(3, dtype=bool)
FLAT = {"q": normal(2, 3, 16), "k": normal(2, 5, 8, seed=1), "v": normal(2, 5, 8, seed=2)}
QKV = {"q": Q, "k": K, "v": V}
EVERY = (23, 24, 25, 26)
LATER = (24, 25, 26)
X = spread(2, 4, 6)
PLACES = np.array([[0, 3, 1], [5, 2, 4]])
ANGLES, ANGLES_OF_EACH = normal(6, 2), normal(2, 3, 2)


def scores(q: Any, k: Any, scale: float | None = None) -> Any:
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q @ shared.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)


def attend(q, k, v, mask=None, pk=None, pv=None, causal=False, cap=0.0, scale=None):
    """The result, and all keys and values."""
    past = 0 if pk is None else pk.shape[2]
    k, v = (k, v) if pk is None else (torch.cat([pk, k], 2), torch.cat([pv, v], 2))
    s = scores(q, k, scale)
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if causal:
        seen = torch.ones(s.shape[-2:]).tril(past).bool()
        s = s.masked_fill(~seen, float("-inf"))
    s = cap * torch.tanh(s / cap) if cap else s
    return s.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), k, v


def heads(x: Any, count: int) -> Any:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def flat(q: Any, k: Any, v: Any) -> Any:
    return attend(heads(q, 4), heads(k, 2), heads(v, 2))[0].transpose(1, 2).flatten(2)


def attention(label, inputs, function, opsets=EVERY, **options):
    return cases("Attention", inputs, function, opsets, differences="torch", label=label, **options)


def rotate(x: Any, cos: Any, sin: Any, interleaved: int) -> Any:
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([joined, rest], -1)


def rotary(interleaved: int) -> list[Case]:
    """By heads, flat, in part, and with angles for each element of the batch."""

    def table(width: int) -> dict[str, Any]:
        return {"c": np.cos(ANGLES[:, :width]), "s": np.sin(ANGLES[:, :width]), "p": PLACES}

    def by_head(x: Any, c: Any, s: Any, p: Any) -> Any:
        return rotate(x, c[p][:, None], s[p][:, None], interleaved)

    def of_flat(x: Any, c: Any, s: Any, p: Any) -> Any:
        angles = c[p][:, :, None], s[p][:, :, None]
        return rotate(x.unflatten(-1, (2, 4)), *angles, interleaved).flatten(2)

    def of_each(x: Any, c: Any, s: Any) -> Any:
        return rotate(x, c[:, None], s[:, None], interleaved)

    each = {"c": np.cos(ANGLES_OF_EACH), "s": np.sin(ANGLES_OF_EACH)}
    x, op = normal(2, 2, 3, 4), "RotaryEmbedding"
    given: dict[str, Any] = {"interleaved": interleaved, "differences": "torch"}
    fed = given | {"runtime": ["p"]}
    kind = ("halves", "interleaved")[interleaved]
    return [
        *cases(op, {"x": x} | table(2), by_head, (23, 26), label=kind, **fed),
        *cases(op, {"x": normal(2, 3, 8)} | table(2), of_flat, (23, 26), num_heads=2,
               label=f"{kind}-flat", **fed),
        *cases(op, {"x": x} | table(1), by_head, (23, 26), rotary_embedding_dim=2,
               label=f"{kind}-in-part", **fed),
        *cases(op, {"x": x} | each, of_each, (23, 26), label=f"{kind}-of-each", **given),
    ]  # fmt: skip


def rms(x: Any, scale: Any, axes: tuple[int, ...]) -> Any:
    return x / torch.sqrt((x * x).mean(axes, True) + 1e-2) * scale


CASES: list[Case] = [
    *attention("grouped", QKV, lambda *x: attend(*x)[0]),
    *attention("scale", QKV, lambda *x: attend(*x, scale=0.3)[0], scale=0.3),
    *attention("softcap", QKV, lambda *x: attend(*x, cap=1.5)[0], softcap=1.5),
    *attention("bool-mask", QKV | {"m": ALLOWED}, lambda *x: attend(*x)[0]),
    *attention("mask-of-heads", QKV | {"m": normal(2, 4, 3, 3)}, lambda *x: attend(*x)[0]),
    *attention("mask-causal", QKV | {"m": normal(3, 3)}, lambda *x: attend(*x, causal=True)[0],
               is_causal=1),
    *attention("past", QKV | {"m": None} | PAST,
               lambda q, k, v, pk, pv: attend(q, k, v, None, pk, pv), outputs=3),
    *attention("past-mask", QKV | {"m": normal(3, 5)} | PAST, attend, outputs=3),
    *attention("past-causal", QKV | {"m": None} | PAST,
               lambda q, k, v, pk, pv: attend(q, k, v, None, pk, pv, causal=True),
               outputs=3, is_causal=1),
    # ONNX Runtime masks none of several new keys for one query behind a past.
    *attention("past-causal-one-query", QKV | {"q": Q[:, :, :1], "m": None} | PAST,
               lambda q, k, v, pk, pv: attend(q, k, v, None, pk, pv), outputs=3, is_causal=1),
    *attention("flat-grouped", FLAT, flat, q_num_heads=4, kv_num_heads=2, batch=["q", "k", "v"]),
    *attention("lengths", QKV | {"m": None, "pk": None, "pv": None, "n": ints(2, 3)},
               lambda q, k, v, n: attend(
                   q, k, v, (torch.arange(3) < n[:, None])[:, None, None])[0],
               LATER, runtime=["n"]),
    *attention("returned-scores", QKV, lambda q, k, v: (attend(q, k, v)[0], scores(q, k)),
               outputs=4, used=[0, 3], qk_matmul_output_mode=0),
    *rotary(0),
    *rotary(1),
    *joined(cases("RMSNormalization", {"x": X, "scale": normal(*X.shape[axis % 3 :])},
                  lambda x, s, axes=tuple(range(axis % 3, 3)): rms(x, s, axes), (23, 26), axis=axis,
                  epsilon=1e-2, differences="torch", label=f"axis{axis}-of-3")
            for axis in (-2, -1, 0, 1)),
    *joined(cases("GroupNormalization",
                  {"x": normal(2, 4, 3, 2), "s": normal(size), "b": normal(size, seed=1)},
                  lambda x, s, b, g=groups: F.group_norm(
                      x, g, *(p.repeat_interleave(4 // len(p)) for p in (s, b)), eps=1e-3),
                  opsets, num_groups=groups, epsilon=1e-3, differences="torch",
                  label=f"groups{groups}")
            for groups in (1, 2, 4)
            for size, opsets in ((4, (21, 26)), (groups, (18, 20)))),  # scales by channel, by group
    *cases("Swish", {"x": X}, F.silu, (24, 26), differences="torch", label="default"),
]  # fmt: skip
