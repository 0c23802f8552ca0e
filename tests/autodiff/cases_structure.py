"""Operators that move, cut, join, repeat or pick elements."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Array, Case, cases, ints, normal, spread

X = normal(2, 3, 4)
IMAGE = normal(2, 8, 2, 3)
FAR = 2**63 - 1
EVERY = (12, 18, 24)


def sliced(
    *bounds: tuple[int, int, int, int], x: Array = X, steps: bool = True
) -> dict[str, Array | None]:
    """Inputs of a Slice from (axis, start, end, step) tuples."""
    axes, starts, ends, strides = (ints(*column) for column in zip(*bounds, strict=True))
    inputs = {"x": x, "starts": starts, "ends": ends, "axes": axes}
    return inputs | ({"steps": strides} if steps else {})


def backwards(x: torch.Tensor, axis: int, index: range) -> torch.Tensor:
    return x.index_select(axis, torch.tensor(list(index)))


def gathered_nd(x: torch.Tensor, indices: torch.Tensor, batch: int = 0) -> torch.Tensor:
    """GatherND by plain indexing."""
    wide = []
    for axis, size in enumerate(indices.shape[:batch]):
        wide.append(torch.arange(size).reshape(-1, *[1] * (indices.ndim - 2 - axis)))
    return x[(*wide, *indices.unbind(-1))]


CASES: list[Case] = [
    # Shapes
    *cases("Reshape", {"x": X, "shape": ints(4, -1)}, lambda x, _: x.reshape(4, 6), EVERY),
    *cases("Reshape", {"x": X, "shape": ints(0, -1)}, lambda x, _: x.reshape(2, 12), (12, 19),
           batch=["x"]),
    *cases("Reshape", {"x": X, "shape": ints(2, 3, 4)}, lambda x, _: x * 1, (14, 23), allowzero=1),
    *cases("Flatten", {"x": X}, lambda x: x.flatten(1), EVERY, batch=["x"]),
    *cases("Flatten", {"x": X}, lambda x: x.reshape(1, -1), axis=0, label="axis0"),
    *cases("Flatten", {"x": X}, lambda x: x.reshape(6, 4), axis=-1, label="axis-1"),
    *cases("Squeeze", {"x": X[:, :1]}, lambda x: x.squeeze(1), (12,), axes=[1]),
    *cases("Squeeze", {"x": X[:, :1], "axes": ints(-2)}, lambda x, _: x.squeeze(1), (13, 23),
           batch=["x"]),
    *cases("Squeeze", {"x": X[:1, :1]}, lambda x: x.squeeze(), (12, 17), label="all"),
    *cases("Unsqueeze", {"x": X}, lambda x: x[:, None, ..., None], (12,), axes=[1, -1]),
    *cases("Unsqueeze", {"x": X, "axes": ints(1, -1)}, lambda x, _: x[:, None, ..., None],
           (13, 23), batch=["x"]),
    *cases("Transpose", {"x": X}, lambda x: x.permute(2, 1, 0), EVERY, batch=["x"]),
    *cases("Transpose", {"x": X}, lambda x: x.permute(1, 2, 0), perm=[1, 2, 0], label="perm"),
    *cases("Expand", {"x": X[:, :1], "shape": ints(2, 3, 4)}, lambda x, _: x.expand(2, 3, 4),
           EVERY),
    *cases("Expand", {"x": X[0, 0], "shape": ints(2, 3, 1)}, lambda x, _: x.expand(2, 3, 4),
           label="more-axes"),
    *cases("Expand", {"x": X[:, :1], "shape": ints(2, 3, 4)}, lambda x, _: x.expand(2, 3, 4),
           runtime=["shape"], label="at-run-time"),
    *cases("Tile", {"x": X, "repeats": ints(2, 1, 3)}, lambda x, _: x.repeat(2, 1, 3), EVERY),
    *cases("Tile", {"x": X, "repeats": ints(1, 2, 1)}, lambda x, _: x.repeat(1, 2, 1),
           batch=["x"]),
    *cases("Tile", {"x": X, "repeats": ints(1, 1, 1)}, lambda x, _: x * 1, label="once"),
    *cases("Trilu", {"x": X}, torch.triu, (14, 23), batch=["x"]),
    *cases("Trilu", {"x": X, "k": np.array(-1)}, lambda x, _: x.tril(-1), upper=0, label="lower"),
    # Joining and splitting
    *cases("Concat", {"a": X, "b": X[:, :1] + 1, "c": X[:, :2]},
           lambda *x: torch.cat(x, 1), EVERY, axis=1),
    *cases("Concat", {"a": X, "b": X[..., :1]}, lambda *x: torch.cat(x, -1), axis=-1,
           batch=["a", "b"]),
    *cases("Concat", {"a": X, "b": X[:1]}, lambda *x: torch.cat(x, 0), axis=0, batch=["a"],
           label="along-batch"),
    *cases("Concat", {"a": X, "b": X + 1}, lambda *x: torch.cat(x, 1), axis=1, wrt=["b"],
           label="one-wanted"),
    *cases("Split", {"x": X}, lambda x: x.split([1, 3], 2), (12,), axis=2, split=[1, 3],
           outputs=2),
    *cases("Split", {"x": X}, lambda x: x.split(2, 2), (12, 17), axis=-1, outputs=2,
           label="even"),
    *cases("Split", {"x": X, "split": ints(1, 3)}, lambda x, _: x.split([1, 3], 2), (13, 23),
           axis=2, outputs=2),
    *cases("Split", {"x": normal(7, 2)}, lambda x: x.split(3, 0), (18, 23), num_outputs=3,
           outputs=3, label="uneven"),
    *cases("Split", {"x": X}, lambda x: x.split(2, 2)[1:], (12, 17), axis=-1, outputs=2, used=[1],
           batch=["x"], label="one-unused"),
    # Slices
    *cases("Slice", sliced((1, 1, 3, 1), steps=False), lambda x, *_: x[:, 1:3], EVERY,
           batch=["x"]),
    *cases("Slice", sliced((2, -3, -1, 1), (0, 1, FAR, 1)), lambda x, *_: x[1:, :, -3:-1],
           label="negative"),
    *cases("Slice", sliced((2, 0, FAR, 2), (1, 1, 99, 2)), lambda x, *_: x[:, 1::2, ::2], EVERY,
           batch=["x"], label="steps"),
    *cases("Slice", sliced((2, -1, -FAR - 1, -1)), lambda x, *_: x.flip(2), EVERY,
           batch=["x"], label="reversed"),
    *cases("Slice", sliced((0, 8, 0, -3), x=normal(10, 2)),
           lambda x, *_: backwards(x, 0, range(8, 0, -3)), label="negative-step"),
    *cases("Slice", sliced((-2, 5, 0, -2)), lambda x, *_: backwards(x, 1, range(2, 0, -2)),
           label="start-past-the-end"),
    *cases("Slice", {"x": X, "starts": ints(1, 0), "ends": ints(2, 2)},
           lambda x, *_: x[1:2, :2], (12, 17), label="no-axes"),
    *cases("Slice", sliced((1, 2, 1, 1)), lambda x, *_: x[:, 2:1], label="empty"),
    *cases("Slice", sliced((0, 1, FAR, 1)), lambda x, *_: x[1:], batch=["x"],
           label="along-batch"),
    *cases("Slice", sliced((0, -1, FAR, 1), (1, 1, 3, 1), x=normal(5, 3)),
           lambda x, *_: x[-1:, 1:3], EVERY, batch=["x"], label="along-batch-from-the-end"),
    *cases("Slice", sliced((1, 1, 3, 1), (2, -2, 9, 1)), lambda x, *_: x[:, 1:3, -2:], EVERY,
           runtime=["starts", "ends"], label="at-run-time"),
    # Pads
    *cases("Pad", {"x": X, "pads": ints(0, 1, 2, 0, 0, 1)},
           lambda x, _: F.pad(x, (2, 1, 1, 0)), EVERY, batch=["x"]),
    *cases("Pad", {"x": X, "pads": ints(0, 1, -1, 0, -1, 1)},
           lambda x, _: F.pad(x, (-1, 1, 1, -1)), (12, 18), label="negative",
           differences="torch"),
    *cases("Pad", {"x": X, "pads": ints(0, 1, 2, 0, 0, 1), "value": np.float32(0.5)},
           lambda x, _, v: F.pad(x, (2, 1, 1, 0)) + v * (1 - F.pad(x * 0 + 1, (2, 1, 1, 0))),
           (12, 18), label="value"),
    *cases("Pad", {"x": X, "pads": ints(2, 1), "value": None, "axes": ints(-1)},
           lambda x, *_: F.pad(x, (2, 1)), (18, 23), batch=["x"], label="axes"),
    *cases("Pad", {"x": X, "pads": ints(0, 1, 2, 0, 0, 1)},
           lambda x, _: F.pad(x, (2, 1, 1, 0)), runtime=["pads"], label="at-run-time"),
    *cases("Pad", {"x": X, "pads": ints(0, 1, 2, 0, 0, 1)},
           lambda x, _: F.pad(x[:, None], (2, 1, 1, 0), "reflect")[:, 0], EVERY, mode="reflect",
           batch=["x"], label="reflect"),
    *cases("Pad", {"x": X, "pads": ints(0, 3, 2, 0, 0, 5)},
           lambda x, _: F.pad(x[:, None], (2, 5, 3, 0), "replicate")[:, 0], (12, 18), mode="edge",
           label="edge"),
    *cases("Pad", {"x": X, "pads": ints(2, 1), "value": None, "axes": ints(1)},
           lambda x, *_: F.pad(x.transpose(1, 2), (2, 1), "circular").transpose(1, 2), (19, 23),
           mode="wrap", label="wrap"),
    *cases("DepthToSpace", {"x": IMAGE},
           lambda x: F.pixel_shuffle(x.reshape(2, 4, 2, 2, 3).transpose(1, 2).reshape(x.shape), 2),
           EVERY, blocksize=2, batch=["x"]),
    *cases("DepthToSpace", {"x": IMAGE}, lambda x: F.pixel_shuffle(x, 2), EVERY, blocksize=2,
           mode="CRD", batch=["x"], label="CRD"),
    *cases("SpaceToDepth", {"x": normal(2, 3, 4, 6)},
           lambda x: F.pixel_unshuffle(x, 2).reshape(2, 3, 4, 2, 3).transpose(1, 2)
           .reshape(2, 12, 2, 3), (13, 18), blocksize=2, batch=["x"]),
    # Picking by index
    *cases("Gather", {"x": X[0], "i": ints(2, 0, 2)}, lambda x, i: x[i], EVERY, runtime=["i"]),
    *cases("Gather", {"x": X[0], "i": np.array([[2, -1], [0, -3]])},
           lambda x, i: x[i], (12, 15, 16, 18), runtime=["i"], batch=["i"], label="negative"),
    *cases("Gather", {"x": X, "i": np.array([[2, 0, 1, 1], [0, 2, 2, 0]])},
           lambda x, i: x[:, i], (12, 17), axis=1, runtime=["i"], label="middle"),
    *cases("Gather", {"x": X, "i": np.array([[2, 0], [0, 2]])},
           lambda x, i: x[:, :, i], (12, 17), axis=-1, runtime=["i"], batch=["x"], label="last"),
    *cases("Gather", {"x": X, "i": np.array([[2, 0], [0, 2]])},
           lambda x, i: x[:, i], (12, 17), axis=1, batch=["x"], label="middle"),
    *cases("Gather", {"x": X, "i": np.array(-1)}, lambda x, i: x[:, i], EVERY, axis=1,
           batch=["x"], label="scalar"),
    *cases("Gather", {"x": X, "i": np.array(1)}, lambda x, i: x[:, :, i], (12, 17), axis=2,
           runtime=["i"], batch=["x"], label="scalar-at-run-time"),
    *cases("Gather", {"x": X, "i": np.array([-1])}, lambda x, i: x[i], axis=0, batch=["x"],
           label="last-of-batch"),
    *cases("Gather", {"x": X, "i": np.array([0, 1, 0], np.int32)}, lambda x, i: x[i.long()],
           label="int32"),
    *cases("GatherElements", {"x": X[0], "i": np.array([[0, 2, 1, -1], [2, 2, 0, 0]])},
           lambda x, i: x.gather(0, i % 3), (16, 18, 24), runtime=["i"]),
    *cases("GatherElements", {"x": X[0], "i": np.array([[0, 3], [-1, 2], [1, 1]])},
           lambda x, i: x.gather(1, i % 4), (12, 13, 17), axis=1, runtime=["i"], label="axis1"),
    *cases("GatherElements", {"x": X[0], "i": np.array([[0, 3], [-1, 2], [1, 1]])},
           lambda x, i: x.gather(1, i % 4), (12, 17), axis=-1, runtime=["i"],
           batch=["x", "i"], label="axis-1", differences="torch"),
    *cases("GatherND", {"x": X, "i": np.array([[0, 1], [1, -1], [0, 1]])}, gathered_nd,
           (16, 18, 24), runtime=["i"], batch=["x"]),
    *cases("GatherND", {"x": X, "i": np.array([[[0, 1, 3]], [[-1, 2, 0]]])}, gathered_nd,
           label="elements"),
    *cases("GatherND", {"x": X, "i": np.array([[1], [0], [1]])}, gathered_nd, label="rows",
           batch=["x"]),
    *cases("GatherND", {"x": X, "i": np.array([[[1], [1]], [[0], [2]]])},
           lambda x, i: gathered_nd(x, i, 1), batch_dims=1, batch=["x", "i"], runtime=["i"],
           label="batch-dims"),
    *cases("GatherND", {"x": X, "i": np.array([[[1], [1], [2]], [[0], [2], [3]]])},
           lambda x, i: gathered_nd(x, i, 2), batch_dims=2, label="two-batch-dims"),
    # Writing by index
    *cases("ScatterElements", {"x": X[0], "i": np.array([[0, 2, 1, -1]]),
                               "u": normal(1, 4, seed=1)},
           lambda x, i, u: x.scatter(0, i % 3, u), EVERY, runtime=["i"]),
    *cases("ScatterElements", {"x": X[0], "i": np.array([[0, 2], [1, -1], [1, 0]]),
                               "u": normal(3, 2, seed=1)},
           lambda x, i, u: x.scatter(1, i % 4, u), axis=-1, batch=["x", "i", "u"], label="axis-1"),
    *cases("ScatterElements", {"x": X[0], "i": np.array([[0, 0], [1, -1], [1, 1]]),
                               "u": normal(3, 2, seed=1)},
           lambda x, i, u: x.scatter_add(1, i % 4, u), (16, 18), axis=1, reduction="add",
           label="add"),
    *cases("ScatterND", {"x": X, "i": np.array([[0, 1], [1, -1]]), "u": normal(2, 4, seed=1)},
           lambda x, i, u: x.index_put(tuple(i.unbind(-1)), u), EVERY, batch=["x"],
           runtime=["i"]),
    *cases("ScatterND", {"x": X, "i": np.array([[1], [0], [1]]), "u": normal(3, 3, 4, seed=1)},
           lambda x, i, u: x.index_put(tuple(i.unbind(-1)), u, accumulate=True), (16, 18),
           reduction="add", label="add"),
    *cases("TopK", {"x": spread(3, 5), "k": ints(2)}, lambda x, _: x.topk(2)[0], EVERY, outputs=2,
           used=[0], batch=["x"]),
    *cases("TopK", {"x": spread(3, 5), "k": ints(2)},
           lambda x, _: x.topk(2, 0, largest=False)[0], axis=0, largest=0, outputs=2, used=[0],
           label="smallest"),
    *cases("ReverseSequence", {"x": normal(4, 2, 3), "n": ints(3, 2)},
           lambda x, _: torch.stack([x[[2, 1, 0, 3], 0], x[[1, 0, 2, 3], 1]], 1), EVERY),
    *cases("ReverseSequence", {"x": normal(2, 4, 3), "n": ints(3, 2)},
           lambda x, _: torch.stack([x[0, [2, 1, 0, 3]], x[1, [1, 0, 2, 3]]]), batch_axis=0,
           time_axis=1, batch=["x"], label="batch-first"),
]  # fmt: skip
