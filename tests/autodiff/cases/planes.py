"""Whole planes, unpooling, patches, blocks of pixels, and norms over neighbourhoods."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.cases.windows import MAX_POOLS, pad_all
from tests.autodiff.oracle import Case, cases, ints, normal, spread

EVERY = (12, 18, 21, 26)
# What is known of an input only when the model runs: nothing, space, everything.
UNKNOWN = ((), (2, 3), (0, 1, 2, 3))


def axes(rank: int, unknown: Sequence[int]) -> dict[str, Any]:
    known = [axis for axis in unknown if axis < rank]
    return {"symbols": {"x": known}} if known else {}


def whole_planes() -> Iterator[Case]:
    for shape, unknown in itertools.product(((2, 3, 5), (2, 3, 4, 3), (2, 2, 2, 3, 2)), UNKNOWN):
        over = tuple(range(2, len(shape)))
        open_ = axes(len(shape), unknown) | {"label": f"sweep{len(shape)}"}
        yield from cases("GlobalAveragePool", {"x": normal(*shape)},
                       lambda x, o=over: x.mean(o, True), (12, 22), **open_)  # fmt: skip
        yield from cases("GlobalMaxPool", {"x": spread(*shape)},
                       lambda x, o=over: x.amax(o, True), (12, 22), differences="torch",
                       **open_)  # fmt: skip
        for p in (1, 2, 3, 4):
            # ONNX Runtime has no kernel of opset 22.
            yield from cases(
                "GlobalLpPool", {"x": spread(*shape)},
                lambda x, o=over, p=p: (x.abs() ** p).sum(o, True) ** (1 / p),
                (12, 21), p=p, differences="torch", **open_ | {"label": f"{len(shape)}-{p}"},
            )  # fmt: skip


def positions(x, *, kernel, strides, pads, dilations, order):
    """Where the maxima stand in the whole tensor; with ``order`` columns come before rows."""
    rank, size = len(kernel), x.shape[2:]
    padded = pad_all(torch.tensor(x), pads, -torch.inf)
    _, flat = MAX_POOLS[rank](padded, kernel, strides, 0, dilations, return_indices=True)
    places = [p - before for p, before in zip(
        np.unravel_index(flat.numpy(), padded.shape[2:]), pads[:rank], strict=True)]  # fmt: skip
    inside = np.ravel_multi_index(tuple(places), size, order="F" if order else "C")
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * rank)
    return torch.tensor(inside + planes * int(np.prod(size)))


def maxima(x, *, given, order, fixed):
    """The maxima of x, and where those of ``given`` stand."""
    padded = pad_all(x, fixed["pads"], -torch.inf)
    pool = MAX_POOLS[len(fixed["kernel"])]
    peaks = pool(padded, fixed["kernel"], fixed["strides"], 0, fixed["dilations"])
    return [peaks, positions(given, **fixed, order=order)]


def maxima_with_positions() -> Iterator[Case]:
    for rank, order, kind, unknown in itertools.product(
        (1, 2, 3), (0, 1), ("tiled", "overlapping", "padded", "dilated"), UNKNOWN[:2]
    ):
        if rank == 1 and order:
            continue  # one axis has one order
        x = spread(2, 2, *[6, 6, 4][:rank])
        kernel = [2 if kind == "tiled" else 3] * rank
        strides = [2 if kind in ("tiled", "padded") else 1] * rank
        pads = [int(kind == "padded")] * 2 * rank
        dilations = [1 + (kind == "dilated" and axis < 2) for axis in range(rank)]
        if kind == "dilated":
            kernel = [2] * rank

        fixed = {"kernel": kernel, "strides": strides, "pads": pads, "dilations": dilations}
        function = functools.partial(maxima, given=x, order=order, fixed=fixed)
        yield from cases(
            "MaxPool", {"x": x}, function, (12, 22) if rank == 2 else (17,), outputs=2,
            kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations,
            storage_order=order, label=f"{rank}d-{kind}-order{order}", differences="torch",
            **axes(2 + rank, (*unknown, *([4] if unknown else []))),
        )  # fmt: skip


def unpooling() -> Iterator[Case]:
    for rank, strides, larger, unknown in itertools.product(
        (1, 2, 3), (2, 3), (False, True), (False, True)
    ):
        out = [2 * strides + larger, 3 * strides, strides][:rank]
        small = [2, 3, 1][:rank]
        places = np.random.default_rng(1).permutation(4 * int(np.prod(out)))
        index = places[: 4 * int(np.prod(small))].reshape(2, 2, *small).astype(np.int64)

        def function(x, at, *_, out=(2, 2, *out)):
            flat = torch.zeros(int(np.prod(out)), dtype=x.dtype)
            return flat.scatter(0, at.flatten(), x.flatten()).reshape(out)

        inputs = {"x": normal(2, 2, *small), "i": index}
        if larger:
            inputs["s"] = ints(2, 2, *out)
        open_ = {"symbols": {"x": range(2 + rank), "i": range(2 + rank)}} if unknown else {}
        yield from cases(
            "MaxUnpool", inputs, function, (12, 22), wrt=["x"], runtime=["i"],
            kernel_shape=[strides] * rank, strides=[strides] * rank,
            label=f"{rank}d-{strides}-{larger}", differences="torch", **open_,
        )  # fmt: skip


def patches() -> Iterator[Case]:
    """Col2Im; of PyTorch's fold where that has the attributes: padding equal at both ends."""
    for strides, dilations, pads, unknown in itertools.product(
        ([1, 1], [2, 1]), ([1, 1], [2, 2]), ([0, 0], [1, 2]), (False, True)
    ):
        size, block = (5, 6), (2, 3)
        count = int(np.prod([
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(size, pads, dilations, block, strides, strict=True)
        ]))  # fmt: skip

        def function(x: torch.Tensor, *_: torch.Tensor, fixed: dict[str, Any] = {  # noqa: B006
            "output_size": size, "kernel_size": block, "dilation": dilations, "padding": pads,
            "stride": strides,
        }) -> torch.Tensor:  # fmt: skip
            return F.fold(x, **fixed)

        inputs = {"x": normal(2, 3 * 6, count), "s": ints(*size), "b": ints(*block)}
        yield from cases(
            "Col2Im", inputs, function, (18, 26), strides=strides, dilations=dilations,
            pads=[*pads, *pads], label=f"{strides}-{dilations}-{pads}", differences="torch",
            **({"runtime": ["s"], "symbols": {"x": (0, 1, 2)}} if unknown else {}),
        )  # fmt: skip
    for rank in (1, 2, 3):  # patches side by side, with unequal padding
        size, block = [3, 5, 3][:rank], [2, 3, 2][:rank]
        pads = [*[1, 0, 1][:rank], *[0, 1, 0][:rank]]
        grid = [(n + 1) // k for n, k in zip(size, block, strict=True)]

        def tiles(x, *_, block=block, pads=pads, grid=grid):
            rank = len(block)
            parts = x.reshape(2, 2, *block, *grid)
            order = [0, 1, *(a for i in range(rank) for a in (2 + rank + i, 2 + i))]
            whole = [n * k for n, k in zip(grid, block, strict=True)]
            return pad_all(parts.permute(order).reshape(2, 2, *whole), [-p for p in pads])

        inputs = {"x": normal(2, 2 * int(np.prod(block)), int(np.prod(grid))),
                  "s": ints(*size), "b": ints(*block)}  # fmt: skip
        yield from cases("Col2Im", inputs, tiles, (18,), strides=block, pads=pads,
                       label=f"{rank}d-tiles", differences="torch")  # fmt: skip


def crd(x: torch.Tensor, size: int) -> torch.Tensor:
    return F.pixel_shuffle(x, size)


def dcr(x: torch.Tensor, size: int) -> torch.Tensor:
    samples, channels, height, width = x.shape
    blocks = x.reshape(samples, size, size, channels // size**2, height, width)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(samples, -1, height * size, width * size)


def to_depth(x: torch.Tensor, size: int) -> torch.Tensor:
    samples, channels, height, width = x.shape
    blocks = x.reshape(samples, channels, height // size, size, width // size, size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(samples, -1, height // size, width // size)


def blocks() -> Iterator[Case]:
    for size, unknown in itertools.product((2, 3), UNKNOWN):
        open_ = axes(4, [axis for axis in unknown if axis != 1])
        x = normal(2, 2 * size**2, 2, 3)
        for mode, function in (("CRD", crd), ("DCR", dcr)):
            yield from cases("DepthToSpace", {"x": x}, lambda x, f=function, s=size: f(x, s),
                           (12, 26), blocksize=size, mode=mode, label=f"{mode}-{size}",
                           **open_)  # fmt: skip
        yield from cases("SpaceToDepth", {"x": normal(2, 2, size * 2, size)},
                       lambda x, s=size: to_depth(x, s), (12, 26), blocksize=size,
                       label=f"{size}", **axes(4, unknown))  # fmt: skip


def neighbours(x: torch.Tensor, size: int, alpha: float, beta: float, bias: float) -> torch.Tensor:
    """LRN from its definition: squares of the channels around each."""
    squares = F.pad((x * x).transpose(1, -1), ((size - 1) // 2, size // 2))
    total = squares.unfold(-1, size, 1).sum(-1).transpose(1, -1)
    return x / (bias + alpha / size * total) ** beta


def norms() -> Iterator[Case]:
    for size, (alpha, beta, bias), unknown in itertools.product(
        (1, 3, 5), ((0.3, 0.75, 1.0), (0.5, 1.3, 2.0)), (False, True)
    ):
        # ONNX Runtime takes odd sizes and four axes only.
        yield from cases(
            "LRN", {"x": normal(2, 4, 3, 2) * 2},
            lambda x, s=size, a=alpha, b=beta, c=bias: neighbours(x, s, a, b, c), (12, 26),
            size=size, alpha=alpha, beta=beta, bias=bias, label=f"{size}-{beta}",
            differences="torch", **axes(4, (0, 2, 3) if unknown else ()),
        )  # fmt: skip
    for shape, epsilon, unknown in itertools.product(
        ((2, 3, 5), (2, 3, 4, 3), (2, 3, 2, 3, 2)), (1e-5, 0.3), (False, True)
    ):
        inputs = {"x": normal(*shape), "s": spread(3, seed=1), "b": normal(3, seed=2)}
        yield from cases(
            "InstanceNormalization", inputs,
            lambda x, s, b, e=epsilon: F.instance_norm(x, weight=s, bias=b, eps=e), (12, 22),
            epsilon=epsilon, label=f"{len(shape)}-{epsilon}",
            **axes(len(shape), (0, 2, 3, 4) if unknown else ()),
        )  # fmt: skip
    for axis, p, unknown in itertools.product((0, 1, 2, -1), (1, 2), (False, True)):
        yield from cases(
            "LpNormalization", {"x": spread(2, 3, 4)},
            lambda x, a=axis, p=p: x / (x.abs() ** p).sum(a, True) ** (1 / p), (12, 22),
            # Of p = 1 the reference implementation forgets the absolute value.
            differences="torch" if p == 1 else "onnx", axis=axis, p=p, label=f"{axis}-{p}",
            **axes(3, (0, 1, 2) if unknown else ()),
        )  # fmt: skip


CASES: list[Case] = [
    *whole_planes(), *maxima_with_positions(), *unpooling(), *patches(), *blocks(), *norms(),
]  # fmt: skip
