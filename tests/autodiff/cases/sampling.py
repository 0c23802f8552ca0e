"""Operators that read planes at fractional positions: GridSample, AffineGrid."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Array, Case, cases, ints, joined, normal

TORCH_MODES = {"linear": "bilinear", "cubic": "bicubic"}
# What ONNX Runtime names them before opset 20.
OLD_MODES = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


def grid(size: Sequence[int], points: Sequence[int], *, corners: bool, wide: bool) -> Array:
    """Positions [2, points..., rank] away from kinks, at k + 0.27 or k + 0.73 elements.

    If ``wide`` they also lie outside of the plane, further than one reflection.
    """
    generator, columns = np.random.default_rng(5), []
    for length in reversed(size):
        low, high = (-2 * length, 3 * length) if wide else (0, length - 1)
        whole = generator.integers(low, high, (2, *points))
        at = whole + generator.choice([0.27, 0.73], whole.shape)
        span = length - 1 if corners else length
        columns.append((2 * at - (length - 1)) / span)
    return np.stack(columns, -1).astype(np.float32)


def grid_sample(mode, padding, corners, opset, rank, *, wide=True, symbolic=False):
    size, points = ((4, 5), (3, 4)) if rank == 2 else ((3, 4, 2), (2, 3, 2))

    def function(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, at, TORCH_MODES.get(mode, mode), padding, bool(corners))

    axes = {"x": tuple(range(2 + rank)), "g": (0, 1, 2)} if symbolic else {}
    inputs = {"x": normal(2, 3, *size, seed=1),
              "g": grid(size, points, corners=bool(corners), wide=wide)}  # fmt: skip
    return cases(
        "GridSample", inputs, function, (opset,), mode=mode if opset >= 20 else OLD_MODES[mode],
        padding_mode=padding, align_corners=corners, symbols=axes, double=opset == 20,
        label=f"{rank}d-{mode}-{padding}-{'corners' if corners else 'edges'}-{wide=}",
        differences="torch",  # the reference implementation takes minutes, and has other kinks
    )  # fmt: skip


def affine(rank: int, corners: int, symbolic: bool) -> list[Case]:
    size = (2, 3, 4, 5) if rank == 2 else (2, 1, 3, 2, 4)

    # The reference implementation computes in float32.
    def function(theta: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.affine_grid(theta, list(size), bool(corners))

    return cases("AffineGrid", {"t": normal(2, rank, rank + 1), "s": ints(*size)}, function,
                 (20, 23), align_corners=corners, runtime=["s"] if symbolic else [],
                 label=f"{rank}d-{corners}-{symbolic}",
                 differences="torch")  # fmt: skip


MODES, PADDINGS = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")

CASES: list[Case] = [
    *joined(grid_sample(*each, 2) for each in product(MODES, PADDINGS, (0, 1), (16, 20, 22))),
    *joined(grid_sample(*each, 23, 2, symbolic=True) for each in product(MODES, PADDINGS, (0, 1))),
    *joined(grid_sample(*each, opset, 3, symbolic=opset == 22)
            for *each, opset in product(MODES[:2], PADDINGS, (0, 1), (20, 22))),
    *joined(grid_sample(mode, "zeros", corners, 17, 2, wide=False)
            for mode, corners in product(MODES, (0, 1))),
    *joined(affine(*each) for each in product((2, 3), (0, 1), (False, True))),
]  # fmt: skip
