"""Matrix products, reductions and normalizations."""

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Case, cases, ints, joined, normal, spread

EVERY = (12, 18, 24)
X = spread(2, 3, 4)
POSITIVE = spread(2, 3, 4, low=0.3)


def matmul(a: tuple[int, ...], b: tuple[int, ...], opsets: tuple[int, ...] = (17,), **options):  # type: ignore[no-untyped-def]
    label = "x".join("".join(map(str, shape)) for shape in (a, b))
    inputs = {"a": normal(*a, seed=1), "b": normal(*b, seed=2)}
    return cases("MatMul", inputs, torch.matmul, opsets, label=label, double=True, **options)


def gemm(trans_a: int, trans_b: int, c: tuple[int, ...] | None, **options):  # type: ignore[no-untyped-def]
    alpha, beta = options.get("alpha", 1.0), options.get("beta", 1.0)
    inputs = {
        "a": normal(*((4, 2) if trans_a else (2, 4)), seed=1),
        "b": normal(*((3, 4) if trans_b else (4, 3)), seed=2),
        "c": None if c is None else normal(*c, seed=3),
    }

    def function(a: torch.Tensor, b: torch.Tensor, *c: torch.Tensor) -> torch.Tensor:
        product = alpha * (a.T if trans_a else a) @ (b.T if trans_b else b)
        return product + beta * c[0] if c else product

    label = f"{trans_a}{trans_b}-c" + ("absent" if c is None else "x".join(map(str, c)))
    return cases(
        "Gemm", inputs, function, (12, 17), transA=trans_a, transB=trans_b, label=label, **options
    )


# operator, PyTorch function of (x, axes, keepdim), points, opset from which axes are an input
REDUCTIONS = [
    ("ReduceSum", torch.sum, X, 13),
    ("ReduceMean", torch.mean, X, 18),
    ("ReduceSumSquare", lambda x, a, k: (x * x).sum(a, k), X, 18),
    ("ReduceL1", lambda x, a, k: x.abs().sum(a, k), X, 18),
    ("ReduceL2", lambda x, a, k: (x * x).sum(a, k).sqrt(), X, 18),
    ("ReduceLogSum", lambda x, a, k: x.sum(a, k).log(), POSITIVE, 18),
    ("ReduceLogSumExp", torch.logsumexp, X, 18),
    ("ReduceMax", torch.amax, X, 18),
    ("ReduceMin", torch.amin, X, 18),
    ("ReduceProd", lambda x, a, k: torch.exp(x.log().sum(a, k)), POSITIVE, 18),
]


def reduction(op, function, x, since):  # type: ignore[no-untyped-def]
    """Axes absent, one and several of them, negative, kept or not, as attribute and input."""
    everything, attribute, tensor = (0, 1, 2), sorted({12, since - 1}), (since, 24)
    return [
        *cases(op, {"x": x}, lambda x: function(x, everything, True), EVERY, label="all"),
        *cases(op, {"x": x}, lambda x: function(x, everything, False), keepdims=0,
               label="to-scalar", double=op not in ("ReduceMin",)),
        *cases(op, {"x": x}, lambda x: function(x, (1,), True), attribute, axes=[1],
               batch=["x"], label="attribute"),
        *cases(op, {"x": x}, lambda x: function(x, (0, 2), False), attribute, axes=[0, -1],
               keepdims=0, label="two-attribute"),
        *cases(op, {"x": x, "axes": ints(1)}, lambda x, _: function(x, (1,), True), tensor,
               batch=["x"]),
        *cases(op, {"x": x, "axes": ints(0, -1)}, lambda x, _: function(x, (0, 2), False), tensor,
               keepdims=0, batch=["x"], label="two"),
        *cases(op, {"x": x, "axes": ints()}, lambda x, _: function(x, everything, True), tensor,
               label="empty"),
        *cases(op, {"x": POSITIVE, "axes": ints()},
               lambda x, _: function(x[..., None], (3,), False), tensor, noop_with_empty_axes=1,
               label="none"),
        *joined(cases(op, {"x": POSITIVE, "axes": ints(-1, 0)},
                      lambda x, _, keep=keep: function(x, (0, 2), bool(keep)), tensor,
                      keepdims=keep, runtime=["axes"], batch=["x"],
                      label=f"at-run-time-keepdims{keep}") for keep in (0, 1)),
    ]  # fmt: skip


def scaled_rows(x: torch.Tensor) -> torch.Tensor:
    squares = (x * x).sum(-1, keepdim=True)
    return x / torch.where(squares == 0, 1, squares).sqrt()


def layer_norm(axis: int, *shape: int):  # type: ignore[no-untyped-def]
    def function(x: torch.Tensor, scale: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, shape, scale, *bias, eps=1e-3)

    inputs = {"x": X, "scale": normal(*shape, seed=2), "bias": normal(*shape, seed=3)}
    options = {"axis": axis, "epsilon": 1e-3, "batch": ["x"], "label": f"axis{axis}"}
    return [
        *cases("LayerNormalization", inputs, function, (17, 23), **options),
        *cases("LayerNormalization", {"x": X, "scale": inputs["scale"]}, function,
               **{**options, "label": f"axis{axis}-no-bias"}),
    ]  # fmt: skip


def layer_norm_default() -> list[Case]:
    """Without the attribute, on numbers so small that its default counts."""
    inputs = {"x": X * np.float32(0.01), "scale": normal(4, seed=2)}
    return cases("LayerNormalization", inputs, lambda x, scale: F.layer_norm(x, (4,), scale),
                 (17, 23), label="usual-epsilon")  # fmt: skip


def layer_norm_statistics(*used: int):  # type: ignore[no-untyped-def]
    """The loss depends on the mean and the inverse deviation of each row, too."""

    def function(x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        mean = x.mean((-2, -1), keepdim=True)
        inv_std = 1 / (x.var((-2, -1), keepdim=True, unbiased=False) + 1e-3).sqrt()
        outputs = [(x - mean) * inv_std * scale, mean, inv_std]
        return [outputs[i] for i in used]

    return cases(
        "LayerNormalization", {"x": X, "scale": normal(3, 4, seed=2)}, function, (17, 23),
        axis=1, epsilon=1e-3, batch=["x"], outputs=3, used=used, double=True,
        wrt=["x", "scale"] if 0 in used else ["x"],
        label=f"outputs{''.join(map(str, used))}",
    )  # fmt: skip


def batch_norm(*shape: int, usual: bool = False, **options):  # type: ignore[no-untyped-def]
    """With ``usual`` without the attribute epsilon, on variances so small that it counts."""
    channels, epsilon = shape[1], 1e-5 if usual else 1e-3
    inputs = {
        "x": normal(*shape, seed=1) + 0.5, "scale": normal(channels, seed=2),
        "bias": normal(channels, seed=3), "mean": normal(channels, seed=4),
        "var": spread(channels, low=0.5, high=2) * np.float32(1e-2 if usual else 1),
    }  # fmt: skip

    def function(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        scale, bias, mean, var = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in rest)
        return (x - mean) / torch.sqrt(var + epsilon) * scale + bias

    options |= {"label": f"{len(shape)}d{'-usual-epsilon' * usual}"}
    options |= {} if usual else {"epsilon": epsilon}
    return [
        *cases("BatchNormalization", inputs, function, (14, 15, 23), **options),
        # The reference implementation of the older version normalizes by the batch.
        *cases("BatchNormalization", inputs, function, (12,), differences="torch", **options),
    ]


def near_norm(x: torch.Tensor, size: int) -> torch.Tensor:
    """LRN by its definition, channel by channel."""
    sums = [
        (x[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1] ** 2).sum(1)
        for c in range(x.shape[1])
    ]
    return x / (1.5 + 0.3 / size * torch.stack(sums, 1)) ** 0.6


CASES: list[Case] = [
    # Matrix products of every pair of ranks
    *matmul((4,), (4,), EVERY),
    *matmul((4,), (4, 3), EVERY),
    *matmul((4,), (2, 4, 3)),
    *matmul((3, 4), (4,), EVERY),
    *matmul((2, 3, 4), (4,), batch=["a"]),
    *matmul((3, 4), (4, 5), EVERY, batch=["a"]),
    *matmul((2, 3, 4), (4, 5), EVERY, batch=["a"]),
    *matmul((2, 2, 3, 4), (4, 5), batch=["a"]),
    *matmul((3, 4), (2, 4, 5)),
    *matmul((2, 3, 4), (2, 4, 5), EVERY, batch=["a", "b"]),
    *matmul((2, 3, 4), (1, 4, 5)),
    *matmul((2, 1, 3, 4), (3, 4, 5), batch=["a"]),
    *matmul((1, 3, 4), (2, 2, 4, 5)),
    *matmul((3, 4), (4, 5), wrt=["a"]),
    *matmul((2, 3, 4), (4, 5), wrt=["b"]),
    *joined(gemm(a, b, (3,), alpha=0.5, beta=1.5) for a in (0, 1) for b in (0, 1)),
    *gemm(0, 1, (3,), double=True, batch=["a"]),
    *gemm(0, 0, None),
    *gemm(0, 1, (2, 3)),
    *gemm(0, 1, (2, 1), beta=2.0),
    *gemm(0, 1, (1,)),
    *gemm(0, 1, (), beta=0.5),
    # Reductions
    *joined(reduction(*row) for row in REDUCTIONS),
    *cases("ReduceMean", {"x": X, "axes": ints(0, 2)}, lambda x, _: x.mean((0, 2)), (18, 23),
           keepdims=0, batch=["x"], label="over-batch"),
    *cases("ReduceL2", {"x": np.zeros((2, 3), np.float32)}, lambda x: x.norm(), keepdims=0,
           differences="none", label="zero"),
    *cases("ReduceMax", {"x": np.float32([[1, 3, 3], [2, 0, 2]])}, lambda x: x.amax(1), (12,),
           axes=[1], keepdims=0, differences="none", label="ties"),
    *cases("ReduceProd", {"x": np.float32([[2, 0, 3], [0, 5, 0], [1, 4, 2]])},
           lambda x: x.prod(1), (12, 17), axes=[1], keepdims=0, label="zeros"),
    # Normalizations
    *layer_norm(-1, 4),
    *layer_norm_default(),
    *layer_norm(2, 4),
    *layer_norm(1, 3, 4),
    *layer_norm_statistics(0, 1, 2),
    *layer_norm_statistics(0, 1),
    *layer_norm_statistics(2),
    *batch_norm(4, 3),
    *batch_norm(4, 3, usual=True),
    *batch_norm(2, 3, 2, 2, batch=["x"]),
    *batch_norm(2, 3, 4),
    *batch_norm(2, 3, 2, 2, 2),
    *batch_norm(2, 3, 2, 2, wrt=["x"], const=["scale", "bias", "mean", "var"]),
    *joined(cases("InstanceNormalization",
                  {"x": normal(*shape), "scale": normal(3, seed=1), "bias": normal(3, seed=2)},
                  lambda x, s, b: F.instance_norm(x, weight=s, bias=b, eps=1e-3), (12, 18, 23),
                  epsilon=1e-3, batch=["x"], label=f"{len(shape)}d")
            for shape in ((2, 3, 4), (2, 3, 2, 4))),
    # A row of zeros has no direction: the cotangent passes, and nothing is divided by zero.
    *cases("LpNormalization", {"x": X * np.float32([[0], [1], [2]])}, scaled_rows,
           differences="none", label="zero-row"),
    *cases("LpNormalization", {"x": X}, lambda x: F.normalize(x, dim=-1), EVERY, double=True,
           batch=["x"]),
    *cases("LpNormalization", {"x": X}, lambda x: F.normalize(x, p=1, dim=1), p=1, axis=1,
           label="manhattan", differences="torch"),
    *joined(cases("LRN", {"x": normal(2, 6, 2, 3) * 3}, lambda x, size=size: near_norm(x, size),
                  (13,) if size != 3 else (12, 17, 23), size=size, alpha=0.3, beta=0.6, bias=1.5,
                  batch=["x"], label=f"size{size}", differences="torch") for size in (1, 3, 5, 9)),
]  # fmt: skip
