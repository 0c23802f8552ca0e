"""Operators that move, cut, join or repeat elements."""

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Case, cases, ints, joined, normal

X = normal(2, 3, 4)
IMAGE = normal(2, 8, 2, 3)
FAR = 2**63 - 1
EVERY = (12, 18, 24)


def sliced(*bounds, x=X, steps=True):
    """Inputs of a Slice from (axis, start, end, step) tuples."""
    axes, starts, ends, strides = (ints(*column) for column in zip(*bounds, strict=True))
    inputs = {"x": x, "starts": starts, "ends": ends, "axes": axes}
    return inputs | ({"steps": strides} if steps else {})


def backwards(x: torch.Tensor, axis: int, index: range) -> torch.Tensor:
    return x.index_select(axis, torch.tensor(list(index)))


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
    *cases("Tile", {"x": X, "repeats": ints(1, 2, 1)}, lambda x, _: x.repeat(1, 2, 1), batch=["x"]),
    *cases("Tile", {"x": X, "repeats": ints(2, 1, 3)}, lambda x, _: x.repeat(2, 1, 3),
           symbols={"x": [0, 2]}, label="two-sizes-unknown"),
    *cases("Tile", {"x": X, "repeats": ints(1, 1, 1)}, lambda x, _: x * 1, label="once"),
    *cases("Tile", {"x": X, "repeats": ints(2, 3, 2)}, lambda x, _: x.repeat(2, 3, 2), EVERY,
           runtime=["repeats"], batch=["x"], label="at-run-time"),
    *cases("Trilu", {"x": X}, torch.triu, (14, 23), batch=["x"]),
    *joined(cases("Trilu", {"x": X, "k": np.array(k)},
                  lambda x, _, k=k, f=(torch.tril, torch.triu)[upper]: f(x, k), (14, 24),
                  upper=upper, runtime=["k"] * (k == 1), label=f"{('lower', 'upper')[upper]}{k}")
            for upper in (0, 1) for k in (-2, -1, 1, 5)),
    # Joining and splitting
    *cases("Concat", {"a": X, "b": X[:, :1] + 1, "c": X[:, :2]},
           lambda *x: torch.cat(x, 1), EVERY, axis=1),
    *cases("Concat", {"a": X, "b": X[..., :1]}, lambda *x: torch.cat(x, -1), axis=-1,
           batch=["a", "b"]),
    *cases("Concat", {"a": X, "b": X[:1]}, lambda *x: torch.cat(x, 0), EVERY, axis=0,
           batch=["a"], label="along-batch"),
    *cases("Concat", {"a": X, "b": X + 1}, lambda *x: torch.cat(x, 1), axis=1, wrt=["b"],
           label="one-wanted"),
    *cases("Split", {"x": X}, lambda x: x.split([1, 3], 2), (12,), axis=2, split=[1, 3], outputs=2),
    *cases("Split", {"x": X}, lambda x: x.split(2, 2), (12, 17), axis=-1, outputs=2, label="even"),
    *cases("Split", {"x": X, "split": ints(1, 3)}, lambda x, _: x.split([1, 3], 2), (13, 23),
           axis=2, outputs=2),
    *cases("Split", {"x": normal(7, 2)}, lambda x: x.split(3, 0), (18, 23), num_outputs=3,
           outputs=3, label="uneven"),
    *cases("Split", {"x": X, "sizes": ints(1, 3)}, lambda x, _: x[..., :1], (13, 18), axis=-1,
           outputs=2, used=[0], label="longer-part-unused"),
    *cases("Split", {"x": X}, lambda x: x.split(2, 2)[1:], (12, 17), axis=-1, outputs=2, used=[1],
           batch=["x"], label="one-unused"),
    # Slices
    *cases("Slice", sliced((1, 1, 3, 1), steps=False), lambda x, *_: x[:, 1:3], EVERY, batch=["x"]),
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
    *cases("Slice", sliced((0, 1, FAR, 1)), lambda x, *_: x[1:], batch=["x"], label="along-batch"),
    *cases("Slice", sliced((0, -1, FAR, 1), (1, 1, 3, 1), x=normal(5, 3)),
           lambda x, *_: x[-1:, 1:3], EVERY, batch=["x"], label="along-batch-from-the-end"),
    *cases("Slice", sliced((1, 1, 3, 1), (2, -2, 9, 1)), lambda x, *_: x[:, 1:3, -2:], EVERY,
           runtime=["starts", "ends"], label="at-run-time"),
    *cases("Slice", sliced((1, -9, 2, 1), (2, 9, 12, 1)), lambda x, *_: x[:, :2, 9:], EVERY,
           runtime=["starts", "ends"], label="beyond-at-run-time"),
    *cases("Slice", sliced((1, -9, 2, 1), (2, 1, 12, 1)), lambda x, *_: x[:, :2, 1:], EVERY,
           runtime=["starts", "ends"], label="before-at-run-time"),
    *cases("Slice", sliced((1, 0, 1, 1), steps=False), lambda x, *_: x[:, :1], EVERY,
           runtime=["axes"], label="axes-at-run-time"),
    *cases("Slice", sliced((-1, 3, 0, -2)), lambda x, *_: x[:, :, [3, 1]], EVERY,
           runtime=["starts", "ends", "axes", "steps"], batch=["x"], label="all-at-run-time"),
    *cases("Slice", sliced((0, 0, 9, 2)), lambda x, *_: x[::2], EVERY, batch=["x"],
           label="steps-along-batch"),
    # Pads
    *cases("Pad", {"x": X, "pads": ints(0, 1, 2, 0, 0, 1)},
           lambda x, _: F.pad(x, (2, 1, 1, 0)), EVERY, batch=["x"]),
    *cases("Pad", {"x": X, "pads": ints(0, 1, -1, 0, -1, 1)}, lambda x, _: F.pad(x, (-1, 1, 1, -1)),
           (12, 18), label="negative", differences="torch"),
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
    *joined(cases("Pad", {"x": normal(2, 1, 3, 4), "pads": ints(0, 0, 1, 0, 0, 0, 1, 2)},
                  lambda x, _, name=name: F.pad(x, (0, 2, 1, 1), name), opsets, mode=mode,
                  runtime=["pads"], batch=["x"], label=f"{mode}-at-run-time")
            for mode, name, opsets in (("edge", "replicate", (16, 17, 18, 24)),
                                       ("reflect", "reflect", (16, 17, 18, 24)),
                                       ("wrap", "circular", (19, 24)))),
    *cases("Pad", {"x": normal(3, 2, 4), "pads": ints(1, 0, 0, 0, 0, 2)},
           lambda x, _: torch.cat([x[:1], x])[:, :, [0, 1, 2, 3, 3, 3]], (17, 24), mode="edge",
           batch=["x"], label="edge-of-batch"),
    *cases("Pad", {"x": normal(3, 2, 4), "pads": ints(0, 0, -1, 0, 0, 2)},
           lambda x, _: x[:, :, [1, 2, 3, 3, 3]], (17, 24), mode="edge",
           label="edge-negative", differences="torch"),
    *cases("Pad", {"x": normal(3, 2, 4), "pads": ints(1, 0, -1, 0, 0, 2)},
           lambda x, _: torch.cat([x[:1], x])[:, :, [1, 2, 3, 3, 3]], (17, 24), mode="edge",
           batch=["x"], label="edge-negative", differences="torch"),
    *cases("Pad", {"x": normal(3, 2, 4), "pads": ints(1, 2), "value": np.float32(0.3),
                   "axes": ints(-1)},
           lambda x, _, v, __: torch.cat([v.expand(3, 2, 1), x, v.expand(3, 2, 2)], 2), (18, 24),
           batch=["x"], runtime=["pads", "axes"], label="axes-at-run-time"),
    *cases("DepthToSpace", {"x": IMAGE},
           lambda x: F.pixel_shuffle(x.reshape(2, 4, 2, 2, 3).transpose(1, 2).reshape(x.shape), 2),
           EVERY, blocksize=2, batch=["x"]),
    *cases("DepthToSpace", {"x": IMAGE}, lambda x: F.pixel_shuffle(x, 2), EVERY, blocksize=2,
           mode="CRD", batch=["x"], label="CRD"),
    *cases("SpaceToDepth", {"x": normal(2, 3, 4, 6)},
           lambda x: F.pixel_unshuffle(x, 2).reshape(2, 3, 4, 2, 3).transpose(1, 2)
           .reshape(2, 12, 2, 3), (13, 18), blocksize=2, batch=["x"]),
    *cases("SpaceToDepth", {"x": normal(2, 3, 4, 6)}, lambda x: F.pixel_unshuffle(x, 2), (28,),
           blocksize=2, mode="CRD", batch=["x"], label="CRD"),
]  # fmt: skip
